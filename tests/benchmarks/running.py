"""Jobs of the lessons beside theory and PyTorch: slow links, recovery from a failure."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import bare
from comparison import AS_THEORY, Bar, BenchmarkError, Row, rounds

from workshop_utils.comm.parameter_server import server_bytes_received
from workshop_utils.comm.ring import ring_seconds
from workshop_utils.jobs import Argument, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.restarting import Restarting
from workshop_utils.network import Network
from workshop_utils.strategies import TORCHRUN_RESTARTS

SERVERS = Path(__file__).parent / "measure_parameter_server"
NETWORK = Network(bandwidth="100Mbit")
REPEATS = 4  # of which the first is left out: connections are still opening up

WORKERS, STEPS, CHECKPOINT_STEPS, KILL_STEP = 4, 60, 10, 37
KILL: dict[str, Argument] = {
    "steps": STEPS,
    "checkpoint-steps": CHECKPOINT_STEPS,
    "kill-rank": WORKERS - 1,
    "kill-step": KILL_STEP,
}


def records_of(job: str | Path, workers: int, place: Any, **arguments: Argument) -> list[Mapping[str, Any]]:
    """What the workers of a job report, of `jobs/` or in a folder of its own."""
    described = TrainingJob.load(bare.JOBS / job).replace(workers=workers, arguments=arguments)
    with place.launch(described) as run:
        return list(run.wait().records)


def network(quick: bool) -> Iterator[Row]:
    """Of the slowest rank. Theory: what the bytes need at the rate that is left for payload."""
    place, bandwidth, nbytes = Local(network=NETWORK, warm=True), NETWORK.goodput, 4_000_000
    for workers in (2,) if quick else (2, 3, 4, 8):
        records = records_of("measure_all_reduce", workers, place, nbytes=nbytes, repeats=REPEATS)
        theory = ring_seconds(workers, nbytes, 0.0, bandwidth)
        pairs = [(seconds, theory) for seconds in slowest(records, "all_reduce_seconds")]
        yield Row(f"ring over 100 Mbit/s, {workers} workers, beside theory", pairs, "s", AS_THEORY)
        records = records_of(SERVERS, workers, place, nbytes=nbytes // 2, steps=REPEATS)
        theory = 2 * server_bytes_received(workers, nbytes // 2) / bandwidth  # all in, and only then all out
        pairs = [(seconds, theory) for seconds in slowest(records, "step_seconds")]
        subject = f"parameter server over 100 Mbit/s, {workers} workers, beside theory"
        yield Row(subject, pairs, "s", AS_THEORY)


def slowest(records: Iterable[Mapping[str, Any]], name: str) -> list[float]:
    """Seconds of each repeat but the first, of its slowest rank."""
    seconds: dict[int, float] = {}
    for record in records:
        if record.get(name) is not None:
            seconds[record["step"]] = max(record[name], seconds.get(record["step"], 0.0))
    return [seconds[step] for step in sorted(seconds)[1:]]


def recovery(quick: bool) -> Iterator[Row]:
    """One of four workers kills itself; until the first step after the restart that any rank reports.

    Ours starts all ranks from a warm server, torchrun --max-restarts=1 from the beginning; the script is the same.
    """
    place = Restarting(Local(warm=True), restarts=1)
    cost_of(records_of("digits_resumable", WORKERS, place, **KILL))  # starts the server
    costs = []
    for _ in rounds(1 if quick else 5, seconds=100):
        ours = cost_of(records_of("digits_resumable", WORKERS, place, **KILL))
        costs.append((ours, cost_of(records_of_torchrun())))
    seconds = [(ours[0], theirs[0]) for ours, theirs in costs]
    yield Row("killed worker to next good step, beside torchrun", seconds, "s", Bar(high=1.0))
    lost = [(float(ours[1]), float(CHECKPOINT_STEPS)) for ours, _ in costs]
    yield Row("steps lost, beside the steps between checkpoints", lost, "", Bar(high=1.0))


def records_of_torchrun() -> list[Mapping[str, Any]]:
    """What the same job reports under `torchrun --max-restarts`."""
    with tempfile.TemporaryDirectory(prefix="workshop-bench-") as name:
        folder = Path(name)
        command = [bare.program("torchrun"), "--standalone", "--nproc-per-node", str(WORKERS)]
        command += ["--max-restarts", "1", "--redirects", "3", "--log-dir", str(folder / "logs")]
        command += [str(bare.JOBS / "digits_resumable" / "train.py")]
        command += [word for name, value in KILL.items() for word in (f"--{name}", str(value))]
        bare.run(command, {**bare.environment(folder), **TORCHRUN_RESTARTS})
        texts = [file.read_text() for file in (folder / "logs").rglob("stdout.log")]
    lines = [line for text in texts for line in text.splitlines()]
    return [json.loads(line) for line in lines if line.startswith('{"workshop": "metric"')]


def cost_of(records: Iterable[Mapping[str, Any]]) -> tuple[float, int]:
    """What the failure in the records of a job's two lives cost: seconds, and steps made again.

    The second life begins where a rank reports a step that is no later than one that it had reported. The seconds are
    those from the last step of the rank that was killed to the first of the second life.

    Raises:
        BenchmarkError: if no such step is there, or the job did not reach its end.
    """
    steps = sorted((record for record in records if "loss" in record), key=lambda record: record["time"])
    reached: dict[int, int] = {}
    last_of_victim = steps[0]
    for number, record in enumerate(steps):
        if record["step"] <= reached.get(record["rank"], 0):
            if max(later["step"] for later in steps[number:]) != STEPS:
                raise BenchmarkError(f"the job did not reach step {STEPS} after its restart")
            return record["time"] - last_of_victim["time"], last_of_victim["step"] - record["step"] + 1
        reached[record["rank"]] = record["step"]
        if record["rank"] == WORKERS - 1:
            last_of_victim = record
    raise BenchmarkError("no step was made again, so nothing has failed")
