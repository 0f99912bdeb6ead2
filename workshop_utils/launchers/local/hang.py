"""Who hangs? What the processes of a run that met its timeout are asked, and the message that their answers make."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from workshop_utils import logs
from workshop_utils.launchers.output import (
    FRAME,
    HEADING,
    Frames,
    called,
    frames_of,
    is_the_users,
    position_of,
)
from workshop_utils.place import RANK_VARIABLES
from workshop_utils.runs import STACK

if TYPE_CHECKING:
    from workshop_utils.launchers.local.run import ProcessRun

ASKING_SECONDS = 5.0  # in all
ANSWERING_SECONDS = 2.0  # for processes that are asked at the same time; a busy machine needs more than one
QUIET_SECONDS = 0.05  # after which stacks have come whole
MOST_SHOWN = 8  # processes
LAST_LINES = 3  # of each
STOPPED = (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP)  # and so cannot answer


class Hang:
    """What the processes of a run have answered, once they have been asked.

    Attributes:
        left_out: the workers of which nothing is said.
    """

    def __init__(self) -> None:
        self.has_begun, self._seconds = False, 0.0  # since the launch
        self.left_out: Collection[str] = ()
        self._states: dict[int, str] = {}  # psutil's words, such as "sleeping", by process
        self._ranks: dict[int, str] = {}  # as its launcher has told a process, "" where it has not
        self._outputs: dict[int, str] = {}  # the name of the output that a process shares
        self._is_asked: dict[int, bool] = {}  # of those that can answer
        self._asked: dict[str, int] = {}  # the process that was asked last, by the name of the output
        self._lines: dict[tuple[str, int], list[str]] = {}  # of stacks, by worker and process

    def ask(self, run: ProcessRun, supervisor: int) -> None:
        """Have each Python process below `supervisor` print its stack, then tell the supervisor.

        Those that share an output are asked one after the other, or their lines would mix.
        """
        self.has_begun, self._seconds = True, run.seconds
        sharing = self._look(run, supervisor)
        end = time.monotonic() + ASKING_SECONDS
        try:
            for pids in itertools.zip_longest(*sharing.values()):
                if time.monotonic() >= end:
                    break
                asked = {name: pid for name, pid in zip(sharing, pids, strict=True) if pid is not None}
                self._asked.update(asked)
                for pid in asked.values():
                    self._is_asked[pid] = True
                    _send(pid, signal.SIGUSR1)
                self._await_answers(asked.values(), min(end, time.monotonic() + ANSWERING_SECONDS))
        finally:
            _send(supervisor, signal.SIGUSR2)

    def _look(self, run: ProcessRun, supervisor: int) -> dict[str, list[int]]:
        """Look at every process below `supervisor`; those that can answer, by output, are returned to be asked.

        Ranks come first, and what has started others last.
        """
        names = {pid: name for name, pid in run.process_ids.items()}
        started = {start["pid"] for start in run.starts}
        able: dict[str, list[int]] = defaultdict(list)
        parents: dict[int, int] = {}
        with contextlib.suppress(psutil.NoSuchProcess):
            for top in psutil.Process(supervisor).children():
                for process in (top, *top.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        pid, state, parents[process.pid] = process.pid, process.status(), process.ppid()
                        self._states[pid], self._ranks[pid] = state, _rank(process)
                        if top.pid in names:
                            self._outputs[pid] = names[top.pid]
                            if state not in STOPPED and _answers(process, started):
                                able[names[top.pid]].append(pid)

        def order(pid: int) -> tuple[bool, bool]:  # what a rank starts inherits its number
            is_rank = self._ranks[pid] and self._ranks[pid] != self._ranks.get(parents[pid])
            return not is_rank, pid in parents.values()

        sharing = {name: sorted(pids, key=order) for name, pids in able.items()}
        self._is_asked |= {pid: False for pids in sharing.values() for pid in pids}
        return sharing

    def _await_answers(self, pids: Collection[int], end: float) -> None:
        count, since = -1, time.monotonic()
        while (now := time.monotonic()) < end:
            answered = {pid for _, pid in list(self._lines)}
            if count != (count := sum(map(len, list(self._lines.values())))):
                since = now
            if answered.issuperset(pids) and now - since > QUIET_SECONDS:
                return
            time.sleep(QUIET_SECONDS / 5)

    def take(self, process: str, worker: str, text: str) -> bool:
        """Take in a line of a stack, which `process` has printed, perhaps for `worker`; whether it is one."""
        if not (self._asked and (HEADING.match(text) or FRAME.match(text))):
            return False
        self._lines.setdefault((worker, self._asked.get(process, 0)), []).append(text)
        return True

    def _silent(self) -> list[int]:
        """The processes that have printed no stack, though they were asked, or because they are stopped."""
        heard = {pid for _, pid in list(self._lines)}
        known = [pid for pid in self._told(self._outputs) if pid not in heard]
        return [pid for pid in known if self._is_asked.get(pid) or self._states[pid] in STOPPED]

    def _told(self, pids: Collection[int]) -> list[int]:
        """Those of `pids` whose worker is not left out."""
        return [pid for pid in list(pids) if self._outputs[pid] not in self.left_out]

    def _name(self, run: ProcessRun, pid: int, worker: str = "") -> str:
        """What a process is called; `worker` is the one that its lines name, if they do."""
        worker = worker or self._outputs[pid]
        if pid == run.process_ids.get(worker):
            return worker
        rank = f" (rank {self._ranks[pid]})" if self._ranks.get(pid) else ""
        started = {start["pid"]: start["worker"] for start in run.starts}
        return started.get(pid, f"process {pid}{rank} of {worker}")

    def _stacks(self, run: ProcessRun) -> dict[str, dict[str, Frames]]:
        """The stacks of each worker's processes by what they are called, helpers and launchers left out."""
        stacks: dict[str, dict[str, Frames]] = defaultdict(dict)
        several = {self._outputs[pid] for pid in self._silent()}
        # torchrun does not tell which of its workers has printed a line.
        workers = dict.fromkeys([*run.workers, *(name for name, _ in self._lines)])
        for worker in (each for each in workers if each not in self.left_out):
            frames = {pid: frames_of(lines) for (name, pid), lines in self._lines.items() if name == worker}
            frames = {pid: each for pid, each in frames.items() if each}
            users = {pid: each for pid, each in frames.items() if any(map(is_the_users, each))}
            for pid, each in (users or frames).items():
                is_it = len(users or frames) == 1 and worker not in several
                stacks[worker][worker if is_it else self._name(run, pid, worker)] = each
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
        """Name the processes that did not answer, or that stand elsewhere than the others, and where those wait.

        Where one stands is the innermost line of the training script.
        """
        steps: dict[str, int] = {}
        for record in run.records:
            steps[record["worker"]] = record["step"]
        standing: dict[str, list[str]] = defaultdict(list)
        stacks = self._stacks(run)
        for each in stacks.values():
            for name, frames in each.items():
                standing[position_of(frames)].append(name)
        sentences, ended = self._silences(run, stacks, steps)
        for position, names in sorted(standing.items(), key=lambda item: len(item[1])):
            verb = "waits" if len(names) == 1 else "wait"
            reached = {steps[name] for name in names if name in steps}
            last = f" after step {max(reached)}" if reached else ""
            sentences.append(f"{', '.join(names)} {verb} at {position}{last}.")
        if left := [self._name(run, pid) for pid in self._told(self._is_asked) if not self._is_asked[pid]]:
            verb = "was" if len(left) == 1 else "were"
            sentences.append(f"{', '.join(left)} {verb} not asked: {ASKING_SECONDS:g} s had passed.")
        if ended:
            sentences.append(f"{', '.join(ended)} had ended before.")
        return " ".join(sentences)

    def _silences(
        self, run: ProcessRun, stacks: Mapping[str, Mapping[str, Frames]], steps: Mapping[str, int]
    ) -> tuple[list[str], list[str]]:
        """Sentences on those that gave no stack, workers first; and the names of workers that had ended."""
        pids = run.process_ids | {start["worker"]: start["pid"] for start in run.starts}
        placed = {*itertools.chain(*stacks.values())}
        answered = {*stacks, *placed}
        named = {self._name(run, pid): pid for pid in self._silent()}
        spoken_for = {self._outputs.get(pid) for _, pid in list(self._lines)}  # by ranks below, as mpirun is
        unheard = [name for name in run.workers if name not in {*answered, *spoken_for, *self.left_out}]
        silent = {name: pids.get(name) for name in unheard}
        silent |= {name: pid for name, pid in named.items() if name not in placed}
        sentences, ended = [], []
        for name, pid in silent.items():
            state = self._states.get(pid or 0, "zombie")
            if pid is None:
                if answered.issubset(run.workers):
                    sentences.append(f"{name} neither answered nor reported a start (`place.here()`).")
            elif state == "zombie":  # gone, or about to be
                ended.append(name)
            elif self._is_asked.get(pid, True):  # those that were not are named apart
                last = f"; its last report was of step {steps[name]}" if name in steps else ""
                it, why = "it", "it may handle SIGUSR1 itself, or print elsewhere"
                if name in run.workers:
                    it, why = "its process", "its script may handle SIGUSR1 itself"
                is_able = pid in self._is_asked and state in ("running", "sleeping")
                handles = f", and {why}" if is_able else ""
                sentences.append(f"{name} did not answer: {it} is {state}{handles}{last}.")
        return sentences, ended

    def shown_stacks(self, run: ProcessRun) -> str:
        """The stacks, in lines; empty if no process answered.

        A call is named as `all_reduce (torch/distributed/distributed_c10d.py, line 3252)`. Processes that stand at the
        same place are shown together.
        """
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for stacks in self._stacks(run).values():
            for name, frames in stacks.items():
                alike[tuple(map(called, frames))].append(name)
        return "".join(
            f"\nThe stack of {', '.join(names)}, the innermost call first:\n  " + "\n  ".join(calls)
            for calls, names in sorted(alike.items(), key=lambda item: len(item[1]))[:MOST_SHOWN]
        )


def _send(pid: int, number: int) -> None:
    with contextlib.suppress(OSError):
        os.kill(pid, number)


def _rank(process: psutil.Process) -> str:
    """The rank of a process, as its launcher has told it in a variable; "" where there is none."""
    variables = process.environ()
    return next((variables[name] for name, *_ in RANK_VARIABLES if name in variables), "")


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
