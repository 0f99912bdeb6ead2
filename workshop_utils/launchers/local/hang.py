"""Who hangs? What the processes of a run that met its timeout are asked, and the message that their answers make."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from workshop_utils import logs
from workshop_utils.runs import STACK, Run

if TYPE_CHECKING:
    from workshop_utils.launchers.local.run import ProcessRun

ASKING_SECONDS = 5.0  # in all
ANSWERING_SECONDS = 1.0  # for processes that are asked at the same time
QUIET_SECONDS = 0.05  # after which stacks have come whole
MOST_SHOWN = 8  # processes
LAST_LINES = 3  # of each

# A stack as Python's faulthandler prints it: a heading, then the frames, the innermost first.
HEADING = re.compile(r".*?(Current thread .+|Thread .+|Stack) \(most recent call first\):$")
FRAME = re.compile(r'(?: *File "|  )(?P<file>[^"]+)"?, line (?P<line>\d+) in (?P<function>.+)')
# What is not the user's: packages, this one, and what starts a script.
NOT_THE_USERS = re.compile(
    r"/(site|dist)-packages/|/lib/python|/workshop_utils/|/bin/torchrun$|/sm_drivers/|/emulated_instance\.py$|^<"
)
Frames = Sequence[re.Match[str]]


class Hang:
    """What the processes of a run have answered, once they have been asked."""

    def __init__(self) -> None:
        self.has_begun, self._seconds = False, 0.0  # since the launch
        self._states: dict[int, str] = {}  # psutil's words, such as "sleeping", by process
        self._ranks: dict[int, str] = {}  # as torchrun has told them, "" where it has not
        self._asked: dict[str, int] = {}  # the process that was asked last, by the name of the output
        self._lines: dict[tuple[str, int], list[str]] = {}  # of stacks, by worker and process

    def ask(self, run: ProcessRun, supervisor: int) -> None:
        """Have each Python process below `supervisor` print its stack, then tell the supervisor.

        Those that share an output are asked one after the other, or their lines would mix.
        """
        self.has_begun, self._seconds = True, run.seconds
        names = {pid: name for name, pid in run.process_ids.items()}
        started = {start["pid"] for start in run.starts}
        sharing: dict[str, list[int]] = defaultdict(list)
        with contextlib.suppress(psutil.NoSuchProcess):
            for top in psutil.Process(supervisor).children():
                for process in (top, *top.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        self._states[process.pid] = process.status()
                        if top.pid in names and _answers(process, started):
                            sharing[names[top.pid]].append(process.pid)
                            self._ranks[process.pid] = process.environ().get("RANK", "")
        end = time.monotonic() + ASKING_SECONDS
        try:
            for pids in itertools.zip_longest(*sharing.values()):
                asked = {name: pid for name, pid in zip(sharing, pids, strict=True) if pid is not None}
                self._asked.update(asked)
                for pid in asked.values():
                    _send(pid, signal.SIGUSR1)
                self._await_answers(asked.values(), min(end, time.monotonic() + ANSWERING_SECONDS))
        finally:
            _send(supervisor, signal.SIGUSR2)

    def _await_answers(self, pids: Collection[int], end: float) -> None:
        count, since = -1, time.monotonic()
        while (now := time.monotonic()) < end:
            answered = {pid for _, pid in list(self._lines)}
            if count != (count := sum(map(len, list(self._lines.values())))):
                since = now
            if answered.issuperset(pids) and now - since > QUIET_SECONDS:
                return
            time.sleep(QUIET_SECONDS / 5)

    def take(self, run: Run, worker: str, text: str) -> bool:
        """Take in a line of a stack that `worker` has printed; whether it is one."""
        if not (self._asked and (HEADING.match(text) or FRAME.match(text))):
            return False
        # What mpirun and its like print is their ranks', whom they name.
        starters = (pid for name, pid in self._asked.items() if name not in run.workers)
        pid = self._asked.get(worker) or next(starters, 0)
        self._lines.setdefault((worker, pid), []).append(text)
        return True

    def _stacks(self, run: ProcessRun) -> dict[str, dict[str, Frames]]:
        """The stacks of each worker's processes by what they are called, helpers and launchers left out."""
        started = {start["pid"]: start["worker"] for start in run.starts}
        stacks: dict[str, dict[str, Frames]] = defaultdict(dict)
        # torchrun does not tell which of its workers has printed a line.
        for worker in dict.fromkeys([*run.workers, *(name for name, _ in self._lines)]):
            frames = {pid: _frames(lines) for (name, pid), lines in self._lines.items() if name == worker}
            frames = {pid: each for pid, each in frames.items() if each}
            users = {pid: each for pid, each in frames.items() if any(map(_is_the_users, each))}
            for pid, each in (users or frames).items():
                is_it = len(users or frames) == 1 or pid == run.process_ids.get(worker)
                rank = f" (rank {self._ranks[pid]})" if self._ranks.get(pid) else ""
                name = worker if is_it else started.get(pid, f"process {pid}{rank} of {worker}")
                stacks[worker][name] = each
        return stacks

    def explained(self, run: ProcessRun) -> str:
        """Where each process stands, what it printed last, its stack, and where all that was printed is."""
        last: dict[str, list[str]] = {worker: [f"\n{worker} printed last:"] for worker in run.workers}
        for line in run.logs():
            if line.stream != STACK and line.seconds <= self._seconds:
                last.setdefault(line.worker, [f"\n{line.worker} printed last:"]).append(line.text)
        shown = ["\n  ".join([title, *lines[-LAST_LINES:]]) for title, *lines in last.values() if lines]
        where = f"\nThe whole logs are in {logs.shown(run.log_folder)}" if run.log_folder else ""
        return "".join([self.diagnosis(run), *shown[:MOST_SHOWN], self.shown_stacks(run), where])

    def diagnosis(self, run: ProcessRun) -> str:
        """Name the workers that did not answer, or that stand elsewhere than the others, and where those wait.

        Where one stands is the innermost line of the training script.
        """
        pids = run.process_ids | {start["worker"]: start["pid"] for start in run.starts}
        steps: dict[str, int] = {}
        for record in run.records:
            steps[record["worker"]] = record["step"]
        standing: dict[str, list[str]] = defaultdict(list)
        sentences, ended, stacks = [], [], self._stacks(run)
        for each in stacks.values():
            for name, frames in each.items():
                standing[_position(frames)].append(name)
        answered = {*stacks, *itertools.chain(*stacks.values())}
        for worker in run.workers:
            if worker in answered:
                continue
            state = self._states.get(pids.get(worker, 0), "zombie")
            if worker not in pids and answered.issubset(run.workers):
                sentences.append(f"{worker} neither answered nor reported a start (`place.here()`).")
            elif state != "zombie":
                last = f"; its last report was of step {steps[worker]}" if worker in steps else ""
                was_asked = pids.get(worker) in self._ranks and state in ("running", "sleeping")
                handles = ", and its script may handle SIGUSR1 itself" if was_asked else ""
                sentences.append(f"{worker} did not answer: its process is {state}{handles}{last}.")
            elif worker in pids:  # gone, or about to be
                ended.append(worker)
        for position, names in sorted(standing.items(), key=lambda item: len(item[1])):
            verb = "waits" if len(names) == 1 else "wait"
            reached = {steps[name] for name in names if name in steps}
            last = f" after step {max(reached)}" if reached else ""
            sentences.append(f"{', '.join(names)} {verb} at {position}{last}.")
        if ended:
            sentences.append(f"{', '.join(ended)} had ended before.")
        return " ".join(sentences)

    def shown_stacks(self, run: ProcessRun) -> str:
        """The stacks, in lines; empty if no process answered.

        A call is named as `all_reduce (torch/distributed/distributed_c10d.py, line 3252)`. Processes that stand at the
        same place are shown together.
        """
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for stacks in self._stacks(run).values():
            for name, frames in stacks.items():
                alike[tuple(map(_called, frames))].append(name)
        return "".join(
            f"\nThe stack of {', '.join(names)}, the innermost call first:\n  " + "\n  ".join(calls)
            for calls, names in sorted(alike.items(), key=lambda item: len(item[1]))[:MOST_SHOWN]
        )


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _answers(process: psutil.Process, started: Collection[int]) -> bool:
    """Whether `process` is Python, and catches SIGUSR1, as `at_start` has it do; one that does not would die of it.

    Where the system does not tell, one of those that reported their start (`started`) answers.
    """
    try:
        status = Path(f"/proc/{process.pid}/status").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return process.pid in started
    caught = re.search(r"^SigCgt:\s*(\w+)", status, re.MULTILINE)
    catches = bool(caught and int(caught[1], 16) >> (signal.SIGUSR1 - 1) & 1)
    return catches and "python" in Path(process.exe()).name  # mpirun would pass it on to all its ranks


def _frames(lines: Sequence[str]) -> Frames:
    """The frames of the last stack in `lines`, the innermost first, without how the script or function was started."""
    frames: list[re.Match[str]] = []
    for line in lines:
        if HEADING.match(line):
            frames = []
        elif (match := FRAME.match(line)) and "<frozen importlib" not in match["file"]:
            frames.append(match)
    users = [number + 1 for number, frame in enumerate(frames) if _is_the_users(frame)]
    return frames[: max(users, default=len(frames))]


def _is_the_users(frame: re.Match[str]) -> bool:
    return not NOT_THE_USERS.search(frame["file"])


def _called(frame: re.Match[str]) -> str:
    return f"{frame['function']} ({_short(frame['file'])}, line {frame['line']})"


def _short(file: str) -> str:
    """A path without the folders that say more of the machine than of the program."""
    for folder in ("/site-packages/", "/dist-packages/"):
        if folder in file:
            return file.rpartition(folder)[2]
    library = re.search(r"/lib/python[\d.]+/(.+)", file)
    return library[1] if library else file.rpartition("/")[2]


def _position(frames: Frames) -> str:
    """The innermost line that is the user's.

    Where there is none, since a function has returned and its rank has yet to leave, it is the innermost line of all.
    """
    number = next((each for each, frame in enumerate(frames) if _is_the_users(frame)), 0)
    inner = [frame["function"] for frame in frames[: number + 1]]
    called = next((name for name in inner if not name.startswith("_")), inner[0])
    frame = frames[number]
    return f"{frame['file'].rpartition('/')[2]}, line {frame['line']} (in {called})"
