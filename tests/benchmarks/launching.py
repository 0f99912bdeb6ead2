"""How long until the first step: `workshop launch` beside the launchers that it starts; how long `on_ranks` takes."""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import bare
import numpy as np
from comparison import Bar, BenchmarkError, Row, rounds

from workshop_utils import on_ranks, rank_group
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.jobs import StrategyName, TrainingJob
from workshop_utils.launchers.local import Local

FIRST_STEP = Path(__file__).with_name("first_step.py")
GLOO_READY = Path(__file__).with_name("gloo_ready.py")

WORKERS = 4
AS_ROOT = ("--allow-run-as-root",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
# The tools with what their manuals say to start WORKERS processes on this machine.
TOOLS: dict[StrategyName, tuple[str, ...]] = {
    "torch_ddp": ("torchrun", "--standalone", "--nproc-per-node", str(WORKERS)),
    "horovod": ("horovodrun", "--gloo", "-np", str(WORKERS), sys.executable),
    "mpi": ("mpirun", *AS_ROOT, "--oversubscribe", "-n", str(WORKERS), sys.executable),
}

# What a notebook's first cells do, the import of the package included.
FIRST_CALL = f"""
from workshop_utils import on_ranks
results = on_ranks({WORKERS}, lambda communicator: communicator.rank)
assert results.values == list(range({WORKERS}))
"""


def cold(quick: bool) -> Iterator[Row]:
    """From the command line to the last rank's first report, for the same script, arguments and environment."""
    with tempfile.TemporaryDirectory(prefix="workshop-bench-") as name:
        folder = Path(name)
        pairs: dict[StrategyName, list[tuple[float, float]]] = {strategy: [] for strategy in TOOLS}
        for turn in rounds(1 if quick else 7, seconds=150):
            for strategy in TOOLS:
                starts = {"ours": with_workshop, "theirs": with_tool}
                ways = {way: partial(start, strategy, folder) for way, start in starts.items()}
                order = ways if turn % 2 else reversed(ways)
                seconds = {way: seconds_until_all_are_there(ways[way], folder) for way in order}
                pairs[strategy].append((seconds["ours"], seconds["theirs"]))
        for strategy, words in TOOLS.items():
            subject = f"{strategy}, {WORKERS} workers, to the first step, beside {words[0]}"
            yield Row(subject, pairs[strategy], "s", Bar(high=1.05))


def warm(quick: bool) -> Iterator[Row]:
    """Until all ranks have left a gloo barrier, forked from a server that has imported PyTorch, as in a notebook."""
    place, arguments = Local(warm=True), [str(GLOO_READY), "--moments"]
    script: dict[str, Any] = {"folder": GLOO_READY.parent, "script": GLOO_READY.name}
    job = TrainingJob(name="gloo-ready", strategy="torch_ddp", workers=WORKERS, **script)

    def launch(moments: Path) -> None:
        with place.launch(job.replace(arguments={"moments": str(moments)})) as run:
            run.wait()

    with tempfile.TemporaryDirectory(prefix="workshop-bench-") as name:
        folder = Path(name)
        tool, *words = TOOLS["torch_ddp"]

        def torchrun(moments: Path) -> None:
            bare.run([bare.program(tool), *words, *arguments, str(moments)], bare.environment(folder))

        seconds_until_all_are_there(launch, folder)  # starts the server
        pairs = [
            (seconds_until_all_are_there(launch, folder), seconds_until_all_are_there(torchrun, folder))
            for _ in rounds(1 if quick else 7, seconds=60)
        ]
    subject = f"warm launch of {WORKERS} ranks, beside torchrun"
    yield Row(subject, pairs, "s", Bar(low=30), times_faster=True)


def ranks(quick: bool) -> Iterator[Row]:
    """From a call of `on_ranks` to its result, beside the seconds that it may take."""

    def check(values: list[float]) -> None:
        if values != [float(sum(range(WORKERS)))] * WORKERS:
            raise BenchmarkError(f"the ranks returned {values}")

    def warm_call() -> None:
        check(on_ranks(WORKERS, all_reduce_of_1_mb).values)

    def kept_call() -> None:
        check(kept.run(all_reduce_of_1_mb).values)

    def first_call() -> None:
        bare.run([sys.executable, "-c", FIRST_CALL], {**os.environ})

    with rank_group(WORKERS) as kept:
        warm_call()  # starts the server
        kept_call()  # starts the ranks
        for subject, call, limit in (
            (f"on_ranks: all-reduce of 1 MB on {WORKERS} warm ranks, of", warm_call, 0.2),
            (f"rank_group: the same on {WORKERS} ranks that stay, of", kept_call, 0.1),
            ("on_ranks: a new process's first call, of", first_call, 4.0),
        ):
            pairs = []
            for _ in rounds(1 if quick else 9, seconds=30):
                started = time.perf_counter()
                call()
                pairs.append((time.perf_counter() - started, limit))
            yield Row(subject, pairs, "s", Bar(high=1))


def all_reduce_of_1_mb(communicator: Communicator) -> float:
    """The sum of all ranks' numbers, with 125,000 elements of 8 bytes."""
    array = np.full(125_000, float(communicator.rank))
    ring_all_reduce(communicator, array)
    return float(array[0])


def seconds_until_all_are_there(start: Callable[[Path], None], folder: Path) -> float:
    """Seconds until the last rank writes its moment into the folder that `start` is given.

    Raises:
        BenchmarkError: if not every rank has done so by the time `start` returns.
    """
    moments = Path(tempfile.mkdtemp(dir=folder))
    started = time.monotonic()
    start(moments)
    written = [float(file.read_text()) for file in moments.iterdir()]
    if len(written) != WORKERS:
        raise BenchmarkError(f"{len(written)} of {WORKERS} ranks reached their first step")
    return max(written) - started


def with_workshop(strategy: StrategyName, folder: Path, moments: Path) -> None:
    """`workshop launch` of a job whose script notes its first step."""
    arguments = {"epochs": 1, "script": str(script_of(strategy)), "moments": str(moments)}
    script: dict[str, Any] = {"script": str(FIRST_STEP), "arguments": arguments}
    job = TrainingJob(name="first-step", strategy=strategy, workers=WORKERS, **script)
    (folder / strategy).mkdir(parents=True, exist_ok=True)
    (folder / strategy / "job.yaml").write_text(json.dumps(job.model_dump(mode="json")))  # JSON is YAML
    bare.run([bare.program("workshop"), "launch", str(folder / strategy)], bare.environment(folder))


def with_tool(strategy: StrategyName, folder: Path, moments: Path) -> None:
    """The tool itself with the same script."""
    tool, *words = TOOLS[strategy]
    own = (FIRST_STEP, "--epochs", 1, "--script", script_of(strategy), "--moments", moments)
    bare.run([bare.program(tool), *words, *map(str, own)], bare.environment(folder))


def script_of(strategy: StrategyName) -> Path:
    """The training script."""
    return bare.JOBS / f"mnist_{strategy}" / "train.py"
