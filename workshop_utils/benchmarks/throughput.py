"""Does training go slower for being launched? One worker inside a launched job, beside the bare script."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from workshop_utils.benchmarks.bare import running
from workshop_utils.benchmarks.comparison import Bar, Comparison, Results, Spread, rounds
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local

SCRIPT = Path(__file__).with_name("taking_turns.py")

LEAST_PAIRS, MOST_PAIRS = 5, 12
SECONDS = 80  # after which no further pair begins
TURNS = 65
SETTLING_TURNS = 5  # the first, while caches fill and the other process still starts
BATCH = 32
STEPS_A_TURN = 30
THE_SAME = Bar.around(1.0, 0.02)

Say = Callable[[str], None]
# Samples a second, the upper quartile of the turns: by the clock, and less the time for which something else ran.
Speeds = tuple[float, float]


def measure(say: Say) -> Results:
    """Samples a second of the same script, both processes alive at once and training in turn on one core."""
    launched: list[Speeds] = []
    bare: list[Speeds] = []
    for pair in rounds(LEAST_PAIRS, MOST_PAIRS, SECONDS):
        say(f"throughput: pair {pair + 1}")
        with tempfile.TemporaryDirectory(prefix="workshop-bench-") as folder:
            ours, theirs = speeds_of_pair(Path(folder), launched_first=pair % 2 == 0)
        launched.append(ours)
        bare.append(theirs)
    by_clock, less_waiting = (
        (tuple(speeds[which] for speeds in launched), tuple(speeds[which] for speeds in bare))
        for which in (0, 1)
    )
    return Results(
        "Training throughput inside a launched job",
        (
            Comparison("single, beside the bare script", *less_waiting, "samples/s", THE_SAME),
            Comparison("the same by the clock, other work on the core included", *by_clock, "samples/s"),
        ),
        f"A perceptron of 784, 256 and 10 units in PyTorch. The processes of a pair share a core and train in turn, "
        f"{STEPS_A_TURN} steps each, {TURNS - SETTLING_TURNS} times; of a process the upper quartile counts, "
        f"the turns that other work disturbed least. Medians of {len(bare)} pairs. The bar is held against the speed "
        "less the time for which the core did something else.",
    )


def speeds_of_pair(folder: Path, launched_first: bool) -> tuple[Speeds, Speeds]:
    """The speeds of the launched process, and of the bare one. `folder` is for their pipes and their notes."""
    pipes = {name: folder / f"{name}.pipe" for name in ("launched", "bare")}
    for pipe in pipes.values():
        os.mkfifo(pipe)
    jobs = {
        name: TrainingJob(
            name=f"turns-{name}",
            folder=SCRIPT.parent,
            script=SCRIPT.name,
            arguments={
                "own-pipe": str(pipes[name]),
                "other-pipe": str(pipes[other]),
                "times": str(folder / name),
                "turns": TURNS,
                "steps": STEPS_A_TURN,
                "batch": BATCH,
                "core": max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
            },
        )
        for name, other in (("launched", "bare"), ("bare", "launched"))
    }
    place = Local()
    request = place.render(jobs["bare"]).processes[
        0
    ]  # the very command and variables that a launch would have
    with ExitStack() as stack:
        # Held open here too, so that a token is not lost while nobody waits for it.
        ends = {name: os.open(pipe, os.O_RDWR) for name, pipe in pipes.items()}
        for end in ends.values():
            stack.callback(os.close, end)
        os.write(ends["launched" if launched_first else "bare"], b".")
        run = stack.enter_context(place.launch(jobs["launched"]))
        with running(request.argv, request.environment):
            run.wait()
    return speeds_in(folder / "launched"), speeds_in(folder / "bare")


def speeds_in(file: Path) -> Speeds:
    """The two speeds that the times in `file` give."""
    settled = json.loads(file.read_text())[SETTLING_TURNS:]
    by_clock, less_waiting = (
        STEPS_A_TURN * BATCH / Spread.of(times).lower_quartile for times in zip(*settled, strict=True)
    )
    return by_clock, less_waiting
