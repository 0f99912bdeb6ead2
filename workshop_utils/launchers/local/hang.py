"""Who hangs? The message of a run that met its timeout."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

from workshop_utils.runs import Run

# A stack as Python's faulthandler prints it: a heading, then the frames, the innermost first.
HEADING = re.compile(r"(Current thread .+|Thread .+|Stack) \(most recent call first\):")
FRAME = re.compile(r'  (?:File ")?(?P<file>[^"]+)"?, line (?P<line>\d+) in (?P<function>.+)')


def diagnosis(run: Run, process_states: Mapping[int, str]) -> str:
    """Name the workers that did not answer, or that stand elsewhere than the others, and where those wait.

    `process_states` are psutil's words by process id ("sleeping", "stopped"), taken just before each worker was asked
    for its stack. A worker that has called `place.here` prints it; where it stands is the
    innermost line of the training script.
    """
    pids = {start["worker"]: start["pid"] for start in run.starts}
    steps: dict[str, int] = {}
    for record in run.records:
        steps[record["worker"]] = record["step"]
    standing: dict[str, list[str]] = defaultdict(list)
    sentences, ended = [], []
    for worker in run.workers:
        position = _position(run, worker)
        if worker not in pids:
            sentences.append(f"{worker} never reported that it had started (`place.here()`).")
        elif position is not None:
            standing[position].append(worker)
        elif process_states.get(pids[worker], "zombie") == "zombie":  # gone, or about to be
            ended.append(worker)
        else:
            last = f"; its last report was of step {steps[worker]}" if worker in steps else ""
            sentences.append(f"{worker} did not answer: its process is {process_states[pids[worker]]}{last}.")
    for position, workers in sorted(standing.items(), key=lambda item: len(item[1])):
        verb = "waits" if len(workers) == 1 else "wait"
        reached = {steps[worker] for worker in workers if worker in steps}
        last = f" after step {max(reached)}" if reached else ""
        sentences.append(f"{', '.join(workers)} {verb} at {position}{last}.")
    if ended:
        sentences.append(f"{', '.join(ended)} had ended before.")
    return " ".join(sentences)


def shown_stacks(run: Run) -> str:
    """The last stacks that workers printed when asked for them, in lines; empty if none answered.

    A call is named as `all_reduce (torch/distributed/distributed_c10d.py, line 3252)`. Workers that stand at the same
    place are shown together.
    """
    alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for worker in run.workers:
        frames = _last_stack(run, worker)
        calls = (f"{frame['function']} ({_short(frame['file'])}, line {frame['line']})" for frame in frames)
        alike[tuple(calls)].append(worker)
    return "".join(
        f"\nThe stack of {', '.join(workers)}, the innermost call first:\n  " + "\n  ".join(calls)
        for calls, workers in sorted(alike.items(), key=lambda item: len(item[1]))
        if calls
    )


def _short(file: str) -> str:
    """A path without the folders that say more of the machine than of the program."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    library = re.search(r"/lib/python[\d.]+/(.+)", file)
    return library[1] if library else file.rpartition("/")[2]


def _last_stack(run: Run, worker: str) -> list[re.Match[str]]:
    """The frames of the last stack that `worker` printed, the innermost first."""
    frames: list[re.Match[str]] = []
    for line in run.logs(worker=worker):
        if HEADING.match(line.text):
            frames = []
        elif match := FRAME.match(line.text):
            frames.append(match)
    # What lies below the script is how it was started: by `job_script.py`; below a function, by `rank.py`.
    script = [place for place, frame in enumerate(frames) if frame["function"] == "<module>"]
    called = [
        place for place, frame in enumerate(frames) if frame["file"].endswith("workshop_utils/ranks/rank.py")
    ]
    return frames[: min([len(frames), *(place + 1 for place in script), *called])]


def _position(run: Run, worker: str) -> str | None:
    """The innermost line outside installed packages, and this one, in the last stack that `worker` printed.

    Where there is none, since a function has returned and its rank has yet to leave, it is the innermost line of all.
    """
    frames = _last_stack(run, worker)
    outside = (
        each for each in frames if not re.search("site-packages|/lib/python|/workshop_utils/", each["file"])
    )
    for frame in (*outside, *frames[:1]):
        inner = [each["function"] for each in frames[: frames.index(frame) + 1]]
        called = next((name for name in inner if not name.startswith("_")), inner[0])
        return f"{frame['file'].rpartition('/')[2]}, line {frame['line']} (in {called})"
    return None
