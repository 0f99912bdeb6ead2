"""A function from a notebook on real processes, fresh for every call.

    def program(communicator, elements):
        array = np.full(elements, float(communicator.rank))
        ring_all_reduce(communicator, array)
        return array[0]

    results = on_ranks(4, program, {"elements": 1000}, network="100Mbit")
    results.values              # [6.0, 6.0, 6.0, 6.0]
    results[0].bytes_sent

In a notebook, `%%ranks 4` at the top of a cell runs the cell itself on every rank (`cell`).
"""

from __future__ import annotations

import contextlib
import json
import pickle
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.jobs.function import FRAMEWORKS, check_call
from workshop_utils.launchers import output
from workshop_utils.launchers.local import Local, hang, warm
from workshop_utils.launchers.local.environment import scratch_folder
from workshop_utils.launchers.local.launcher import MOST_PROCESSES
from workshop_utils.launchers.local.run import ProcessRun
from workshop_utils.network import Network
from workshop_utils.ranks import packing
from workshop_utils.ranks.results import RankResult, Results
from workshop_utils.runs import RunFailed, RunState

PROGRAM = Path(__file__).with_name("rank.py")
_WAITS = re.compile(r"rank \d+ waits for rank \d+, in .+")
# By framework: what a cell calls that through which its ranks speak.
GROUPS = {None: "communicator", "torch": "dist", "horovod": "hvd", "tensorflow": "strategy"}


class RanksFailed(RunFailed):
    """A rank failed; the message names it, and has its traceback. `results` has what every rank had printed."""

    results: Results


def on_ranks(
    ranks: int,
    program: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    network: str | Network | None = None,
    framework: str | None = None,
    timeout: str = "60s",
) -> Results:
    """Call `program(group, **arguments)` on each of `ranks` processes of this machine, and return what each returned.

    The processes are new. They are forked from one that has imported NumPy, or the framework, already (see
    `launchers.local.warm`): a notebook's first call waits for that import. The function travels with the variables that
    it uses, as copies.

    Args:
        ranks: how many processes.
        program: its first parameter is what a rank speaks through: the workshop's `Communicator`; for another
            `framework` what `comm.process_group` yields.
        arguments: its other parameters, by name; anything that can be pickled.
        network: of the links between the ranks, such as "100Mbit" or "100Mbit,latency=1ms" (`network.Network.parse`).
        framework: None, "torch", "horovod" or "tensorflow".
        timeout: after which the ranks are ended, such as "60s".

    Raises:
        JobError: if a value is wrong, or something cannot be sent to the ranks; nothing has been started then.
        RanksFailed: if a rank raised an error, was killed, or did not end in time.
        KeyboardInterrupt: if it is interrupted; no rank is left then.
    """
    arguments = {} if arguments is None else arguments
    check_call(program, arguments, framework)
    return launch(ranks, packing.packed(program, arguments), network, framework, timeout)


def launch(
    ranks: int,
    packed: packing.Packed,
    network: str | Network | None,
    framework: str | None,
    timeout: str,
    on_line: Callable[[int, str], None] | None = None,
) -> Results:
    """Start ranks with what was packed, and wait; `on_line` is called with the rank and text of each line at once."""
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_PROCESSES:
        raise JobError(f"ranks is {ranks!r}; it must be a whole number from 1 to {MOST_PROCESSES:,}")
    link = Network.parse(network) if isinstance(network, str) else network
    job = TrainingJob(
        name="ranks",
        folder=PROGRAM.parent,
        script=PROGRAM.name,
        strategy=FRAMEWORKS[framework][0] if framework else "ring",
        workers=ranks,
        timeout=timeout,
    )
    launcher = Local(network=link)
    launcher.render(job)  # refuses what cannot be, before anything starts
    server = packed.server(framework)
    if server is not None:
        warm.starter(server)
    began = time.perf_counter()
    with contextlib.ExitStack() as cleanup:
        with _interrupts_deferred():
            scratch = scratch_folder()
            scratch.mkdir(mode=0o700)
            try:
                packed.write(scratch / "request", framework, GROUPS[framework])
                # Open from now on, so that they can be read when the supervisor has removed the folder.
                outcomes = [
                    cleanup.enter_context((scratch / f"outcome-{rank}").open("x+b")) for rank in range(ranks)
                ]
                run = launcher.start(job, _RanksRun, scratch, {}, server)
            except BaseException:
                shutil.rmtree(scratch, ignore_errors=True)
                raise
            run.outcomes = outcomes
            cleanup.callback(run.stop)
        number = {name: rank for rank, name in enumerate(run.workers)}
        for line in run.logs(follow=True):
            if on_line is not None:
                on_line(number[line.worker], line.text)
        return _results(run, began, is_shown=on_line is not None)


def _results(run: _RanksRun, began: float, is_shown: bool) -> Results:
    """What the ranks of an ended run have returned. Raises RanksFailed."""
    run.stop()
    seconds = time.perf_counter() - began
    results = []
    reason = run.reason
    for rank, (worker, file) in enumerate(zip(run.workers, run.outcomes, strict=True)):
        lines = tuple(line.text for line in run.logs(worker=worker))
        value: Any = None
        messages, sent, own_seconds, trace = None, 0, 0.0, []
        content = _content(file)
        if content[:1] == b"V":
            try:
                value, messages, sent, own_seconds, trace = pickle.loads(content[1:])
            except Exception as error:
                reason = (
                    reason
                    or f"what rank {rank} returned cannot be read here: {type(error).__name__}: {error}"
                )
        elif run.state is RunState.SUCCEEDED:
            reason = reason or f"rank {rank} ended without returning from the program, as os._exit does"
        results.append(RankResult(rank, value, lines, messages, sent, own_seconds, tuple(trace)))
    whole = Results(tuple(results), run.network, run.warm, seconds, is_shown)
    if reason:
        failure = RanksFailed(reason)
        failure.results = whole
        raise failure
    return whole


def _content(file: BinaryIO) -> bytes:
    file.seek(0)
    return file.read()


class _RanksRun(ProcessRun):
    """A run of `rank.py`, whose failures speak of ranks and of the notebook's cells."""

    outcomes: Sequence[BinaryIO] = ()

    def _blame(self, name: str, code: int) -> str:
        errors = [] if code < 0 else list(self._errors())
        others = "; the others were stopped" if len(self.workers) > 1 else ""
        if not errors:
            lines = output.last_lines([line.text for line in self.logs(worker=name)])
            return f"{self._named(name)} {output.how(code)}{others}. {lines}"
        # The first to raise is at fault; the others may have raised because it had.
        error, rank = min(errors, key=lambda each: each[0]["time"])
        trace = packing.with_cells(error["traceback"]).rstrip()
        return f"{self._named(self.workers[rank])} raised {error['summary']}{others}.\n{trace}"

    def _named(self, worker: str) -> str:
        return (
            f"rank {self.workers.index(worker)} of {len(self.workers)}" if worker in self.workers else worker
        )

    def _errors(self) -> Iterator[tuple[dict[str, Any], int]]:
        for rank, file in enumerate(self.outcomes):
            content = _content(file)
            if content[:1] == b"E":
                with contextlib.suppress(ValueError):  # it was ended in the middle of it
                    yield json.loads(content[1:]), rank

    def _timed_out(self) -> str:
        waits = sorted(line.text for line in self.logs() if _WAITS.fullmatch(line.text))
        text = hang.diagnosis(self, self._process_states) + hang.shown_stacks(self)
        text = re.sub(r"\bworker-(\d+)", r"rank \1", text)
        text = f"the program did not end within {self._timeout_seconds:g} s. {text}"
        return packing.with_cells("\n".join([text, *waits]))


@contextlib.contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """An interrupt during the block is raised at its end: what has been started is then known, and can be ended."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            signal.raise_signal(signal.SIGINT)


def _register_magic() -> None:
    """In a notebook: bring %%ranks."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    if shell is not None:
        from workshop_utils.ranks import cell  # which needs this module

        cell.register(shell)


_register_magic()
