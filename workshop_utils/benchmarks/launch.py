"""How long until the first step: `workshop launch` beside the launchers that it stands in for."""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from workshop_utils import data
from workshop_utils.benchmarks.bare import program, running
from workshop_utils.benchmarks.comparison import Bar, BenchmarkError, Comparison, NotMeasured, Results, rounds
from workshop_utils.jobs import StrategyName, TrainingJob
from workshop_utils.launchers.local import Local

JOBS = Path(__file__).parents[2] / "jobs"
FIRST_STEP = Path(__file__).with_name("first_step.py")
GLOO_READY = Path(__file__).with_name("gloo_ready.py")

WORKERS = 4
LEAST_ROUNDS, MOST_ROUNDS = 3, 7
COLD_SECONDS, WARM_SECONDS = 150, 40  # after which no further round begins
AT_MOST = Bar(high=1.05)
TIMES_FASTER = Bar(low=30)

Say = Callable[[str], None]
Start = Callable[[Path], None]  # given the folder in which ranks note their moments; returns at the run's end

AS_ROOT = ("--allow-run-as-root",) if hasattr(os, "geteuid") and os.geteuid() == 0 else ()
# The tools with what their manuals say to start WORKERS processes on this machine.
TOOLS: dict[StrategyName, tuple[str, tuple[str, ...]]] = {
    "torch_ddp": ("torchrun", ("--standalone", "--nproc-per-node", str(WORKERS))),
    "horovod": ("horovodrun", ("--gloo", "-np", str(WORKERS), sys.executable)),
    "mpi": ("mpirun", (*AS_ROOT, "--oversubscribe", "-n", str(WORKERS), sys.executable)),
}


@dataclass
class Stopwatch:
    """Times launches up to the moment at which the last rank notes, in a file of its own, that it is there."""

    folder: Path
    _launches: int = field(default=0, init=False)

    def seconds(self, start: Start) -> float:
        """Seconds from the call of `start`, which is given the folder for the notes, to the last of them.

        Raises:
            BenchmarkError: if not every rank has noted a moment by the time `start` returns.
        """
        self._launches += 1
        moments = self.folder / f"launch-{self._launches}"
        moments.mkdir()
        started = time.monotonic()
        start(moments)
        noted = [float(file.read_text()) for file in moments.iterdir()]
        if len(noted) != WORKERS:
            raise BenchmarkError(f"{len(noted)} of {WORKERS} ranks reached their first step")
        return max(noted) - started


def cold(say: Say) -> Results:
    """From the command line to the last rank's first step, for the same script and arguments."""
    rows: list[Comparison | NotMeasured] = []
    with tempfile.TemporaryDirectory(prefix="workshop-bench-") as folder:
        stopwatch = Stopwatch(Path(folder))
        contests = [_Contest(strategy, stopwatch.folder) for strategy in TOOLS]
        for turn in rounds(LEAST_ROUNDS, MOST_ROUNDS, COLD_SECONDS):
            for contest in contests:
                say(f"launch: round {turn + 1}, {contest.strategy}")
                contest.take_a_round(stopwatch, turn)
        for contest in contests:
            rows += contest.rows()
    return Results(
        f"Cold launch to first step, {WORKERS} workers",
        tuple(rows),
        "Until the last rank's first report. Ours is `workshop launch` of jobs/mnist_..., theirs the tool with the "
        f"same script, arguments and environment. Medians of {turn + 1} rounds, ratios within a round.",
    )


class _Contest:
    """One strategy's job, started by `workshop launch` and in other ways, again and again."""

    def __init__(self, strategy: StrategyName, folder: Path) -> None:
        self.strategy = strategy
        script = JOBS / f"mnist_{strategy}" / "train.py"
        tool, words = TOOLS[strategy]
        self._ours, self._bare = "ours", f"bare {tool}"
        self._ways: dict[str, Start] = {
            self._ours: _with_workshop(strategy, script, folder),
            self._bare: _with_tool(tool, words, script, folder),
        }
        if strategy == "mpi":  # how much of the difference is owed to what the launcher tells mpirun
            self._ways["mpirun as the launcher calls it"] = _with_own_command(strategy, script, folder)
        self._seconds: dict[str, list[float]] = {way: [] for way in self._ways}
        self._broken = ""

    def take_a_round(self, stopwatch: Stopwatch, turn: int) -> None:
        """Start the job once in every way, in another order in every second turn."""
        for way in self._ways if turn % 2 == 0 else reversed(self._ways):
            if not self._broken:
                try:
                    self._seconds[way].append(stopwatch.seconds(self._ways[way]))
                except BenchmarkError as error:
                    self._broken = str(error)

    def rows(self) -> list[Comparison | NotMeasured]:
        """Ours beside each of the others; the bar is for the bare tool."""
        others = [way for way in self._ways if way != self._ours]
        if self._broken:
            return [NotMeasured(f"{self.strategy}, beside {self._bare}", self._broken)]
        return [
            Comparison(
                f"{self.strategy}, beside {way}",
                tuple(self._seconds[self._ours]),
                tuple(self._seconds[way]),
                "s",
                AT_MOST if way == self._bare else None,
            )
            for way in others
        ]


def warm(say: Say) -> Results:
    """Until a gloo process group is ready, launched from a warm server as in a notebook, and by torchrun."""
    ours: list[float] = []
    theirs: list[float] = []
    with tempfile.TemporaryDirectory(prefix="workshop-bench-") as folder:
        stopwatch = Stopwatch(Path(folder))
        place = Local(warm=True)

        def launch(moments: Path) -> None:
            job = TrainingJob(
                name="gloo-ready",
                folder=GLOO_READY.parent,
                script=GLOO_READY.name,
                strategy="torch_ddp",
                workers=WORKERS,
                arguments={"moments": str(moments)},
            )
            with place.launch(job) as run:
                run.wait()

        def torchrun(moments: Path) -> None:
            tool, words = TOOLS["torch_ddp"]
            command = [program(tool), *words, str(GLOO_READY), "--moments", str(moments)]
            with running(command, _environment(stopwatch.folder)):
                pass

        say("warm: starting the server")
        first = stopwatch.seconds(launch)
        for turn in rounds(LEAST_ROUNDS, MOST_ROUNDS, WARM_SECONDS):
            say(f"warm: round {turn + 1}")
            ours.append(stopwatch.seconds(launch))
            theirs.append(stopwatch.seconds(torchrun))
    subject = f"torch_ddp, {WORKERS} ranks ready, beside bare torchrun"
    return Results(
        "Warm launch: how many times faster",
        (Comparison(subject, tuple(ours), tuple(theirs), "s", TIMES_FASTER, times_faster=True),),
        f"Until {WORKERS} ranks have left a gloo barrier. Ours forks from a server that has imported PyTorch; the "
        f"first launch, which starts it, took {first:.1f} s. Medians of {len(ours)} rounds.",
    )


def _job(strategy: StrategyName, script: Path, **arguments: str) -> TrainingJob:
    """The job that runs `script` so that first steps are noted."""
    return TrainingJob(
        name="first-step",
        script=str(FIRST_STEP),
        strategy=strategy,
        workers=WORKERS,
        arguments={"epochs": 1, "script": str(script), **arguments},
    )


def _with_workshop(strategy: StrategyName, script: Path, folder: Path) -> Start:
    _job(strategy, script).save(folder / strategy)

    def start(moments: Path) -> None:
        words = ["launch", str(folder / strategy), "--argument", f"moments={moments}"]
        with running([program("workshop"), *words], _environment(folder)):
            pass

    return start


def _with_tool(tool: str, words: Sequence[str], script: Path, folder: Path) -> Start:
    def start(moments: Path) -> None:
        arguments = ["--epochs", "1", "--moments", str(moments), "--script", str(script)]
        with running([program(tool), *words, str(FIRST_STEP), *arguments], _environment(folder)):
            pass

    return start


def _with_own_command(strategy: StrategyName, script: Path, folder: Path) -> Start:
    def start(moments: Path) -> None:
        (process,) = Local().render(_job(strategy, script, moments=str(moments))).processes
        with running(process.argv, _environment(folder)):
            pass

    return start


def _environment(folder: Path) -> dict[str, str]:
    """What a launched job finds too, as far as it changes how fast a script starts."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "WORKSHOP_DATA": str(data.prepare("digits")),
        "WORKSHOP_MODEL": str(folder / "model"),
    }
