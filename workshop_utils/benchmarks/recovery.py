"""From a killed worker to the next good step: ours beside `torchrun --max-restarts`, with the same script."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop_utils import data
from workshop_utils.benchmarks.bare import program, running
from workshop_utils.benchmarks.comparison import Bar, BenchmarkError, Comparison, Results, rounds
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.restarting import Restarting
from workshop_utils.strategies import TORCHRUN_RESTARTS

JOB = Path(__file__).parents[2] / "jobs" / "digits_resumable"

WORKERS = 4
STEPS, CHECKPOINT_STEPS, KILL_STEP = 60, 10, 37
ARGUMENTS = {
    "steps": STEPS,
    "checkpoint-steps": CHECKPOINT_STEPS,
    "kill-rank": WORKERS - 1,
    "kill-step": KILL_STEP,
}
LEAST_ROUNDS, MOST_ROUNDS = 3, 5
SECONDS = 100  # after which no further round begins
AT_MOST_AS_LONG = Bar(high=1.0)
AT_MOST_AN_INTERVAL = Bar(high=1.0)

Say = Callable[[str], None]


@dataclass(frozen=True)
class Recovery:
    """What a failure cost: seconds from the worker's last step to the next that is kept, and steps made again."""

    seconds: float
    steps_lost: int


def measure(say: Say) -> Results:
    """Kill one of four workers, and time how long it takes until the next step, by turns of ours and torchrun."""
    ours: list[Recovery] = []
    theirs: list[Recovery] = []
    with tempfile.TemporaryDirectory(prefix="workshop-bench-") as folder:
        say("recovery: starting the server")
        with_workshop()  # the first launch starts the server from which the others fork
        for turn in rounds(LEAST_ROUNDS, MOST_ROUNDS, SECONDS):
            say(f"recovery: round {turn + 1}")
            ours.append(with_workshop())
            theirs.append(with_torchrun(Path(folder) / str(turn)))
    return Results("From a killed worker to the next good step", rows(ours, theirs), notes(len(ours)))


def notes(count: int) -> str:
    """What was measured, and how."""
    return (
        f"{WORKERS} workers, of which one kills itself after step {KILL_STEP}; a checkpoint every {CHECKPOINT_STEPS} "
        "steps. Until the first step after the restart that any rank reports. Ours starts all ranks from a warm "
        "server, torchrun --max-restarts=1 starts all from the beginning; the script is the same. Steps lost are those "
        f"since the last checkpoint. Medians of {count} rounds, ratios within a round."
    )


def rows(ours: Sequence[Recovery], theirs: Sequence[Recovery]) -> tuple[Comparison, ...]:
    """The table: seconds, and steps lost."""
    interval = (float(CHECKPOINT_STEPS),) * len(ours)
    return (
        Comparison(
            "killed worker to next good step, beside torchrun",
            tuple(found.seconds for found in ours),
            tuple(found.seconds for found in theirs),
            "s",
            AT_MOST_AS_LONG,
        ),
        Comparison(
            "steps lost, beside torchrun",
            tuple(float(found.steps_lost) for found in ours),
            tuple(float(found.steps_lost) for found in theirs),
            "steps",
        ),
        Comparison(
            "steps lost, beside the steps between checkpoints",
            tuple(float(found.steps_lost) for found in ours),
            interval,
            "steps",
            AT_MOST_AN_INTERVAL,
        ),
    )


def recovery_of(records: Sequence[Mapping[str, Any]]) -> Recovery:
    """What the failure cost that is in the records of both lives of a job.

    The second life begins where a rank reports a step that is no later than one that it had reported.

    Raises:
        BenchmarkError: if no such step is there, or the job did not reach its end.
    """
    steps = sorted((record for record in records if "loss" in record), key=lambda record: record["time"])
    reached: dict[Any, int] = {}
    before: list[Mapping[str, Any]] = []
    for record in steps:
        if record["step"] <= reached.get(record["rank"], 0):
            break
        reached[record["rank"]] = record["step"]
        before.append(record)
    after = steps[len(before) :]
    if not after:
        raise BenchmarkError("no step was made again, so nothing has failed")
    if max(record["step"] for record in after) != STEPS:
        raise BenchmarkError(f"the job did not reach step {STEPS} after its restart")
    victim = [record for record in before if record["rank"] == WORKERS - 1]
    first = after[0]
    return Recovery(first["time"] - victim[-1]["time"], victim[-1]["step"] - (first["step"] - 1))


def with_workshop() -> Recovery:
    """Raises RunFailed if the job fails for good."""
    job = TrainingJob.load(JOB).replace(workers=WORKERS, arguments=ARGUMENTS)
    with Restarting(Local(warm=True), restarts=1).launch(job) as run:
        return recovery_of(run.wait().records)


def with_torchrun(folder: Path) -> Recovery:
    """Raises BenchmarkError if torchrun fails."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = folder / "logs"
    words = ["--standalone", "--nproc-per-node", str(WORKERS), "--max-restarts", "1"]
    words += ["--redirects", "3", "--log-dir", str(logs), str(JOB / "train.py")]
    words += [word for name, value in ARGUMENTS.items() for word in (f"--{name}", str(value))]
    environment = {
        **os.environ,
        "TMPDIR": str(folder),  # torchrun leaves a folder of logs there
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        **TORCHRUN_RESTARTS,
        "PYTHONPATH": os.pathsep.join(filter(None, [str(JOB.parents[1]), os.environ.get("PYTHONPATH")])),
        "PYTHONUNBUFFERED": "1",
        "WORKSHOP_DATA": str(data.prepare("digits")),
        "WORKSHOP_MODEL": str(folder / "model"),
        "WORKSHOP_CHECKPOINTS": str(folder / "checkpoints"),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]),
    }
    with running([program("torchrun"), *words], environment):
        pass
    lines = [line for file in logs.rglob("stdout.log") for line in file.read_text().splitlines()]
    return recovery_of([json.loads(line) for line in lines if line.startswith('{"workshop": "metric"')])
