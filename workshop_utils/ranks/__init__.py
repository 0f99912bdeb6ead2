"""A function from a notebook on real processes, fresh for every call.

    def program(communicator, elements):
        array = np.full(elements, float(communicator.rank))
        ring_all_reduce(communicator, array)
        return array[0]

    results = on_ranks(4, program, {"elements": 1000}, network="100Mbit")
    results.values              # [6.0, 6.0, 6.0, 6.0]
    results[0].bytes_sent

In a notebook, after `%load_ext workshop_utils`, `%%ranks 4` at the top of a cell runs the cell itself on every rank
(`cell`). `rank_group(4)` has ranks that stay from call to call, as `%%ranks 4 --keep` does.
"""

from __future__ import annotations

import contextlib
import functools
import math
import pickle
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.jobs.function import FRAMEWORKS, GROUPS, TWINS, check_call, check_framework
from workshop_utils.launchers.local import Local, warm
from workshop_utils.launchers.local.environment import await_packages
from workshop_utils.launchers.local.launcher import MOST_PROCESSES, start
from workshop_utils.network import Network
from workshop_utils.network.devices import EmulatedDevice
from workshop_utils.ranks import packing
from workshop_utils.ranks.held import Held
from workshop_utils.ranks.results import RankResult, Results
from workshop_utils.ranks.run import DISPLAY, RanksRun
from workshop_utils.runs import STACK, RunFailed, RunState, interrupts_deferred

PROGRAM = Path(__file__).with_name("rank.py")
IDLE_SECONDS = 3600.0  # without a call, after which ranks that stay are ended
GONE = "The ranks have ended, and what was in them is gone: run again what made it."


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
    emulated_device: str | EmulatedDevice | None = None,
    may_die: Collection[int] = (),
) -> Results:
    """Call `program(group, **arguments)` on each of `ranks` processes of this machine, and return what each returned.

    The processes are new. They are forked from one that has imported NumPy, or the framework, already (see
    `launchers.local.warm`): a notebook's first call waits for that import. The function travels with the variables that
    it uses, as copies: a random generator of the notebook's gives every rank the same numbers, one that a rank makes
    without a seed its own. Settings of the notebook's PyTorch, Keras, NumPy, pandas, Matplotlib, logging and warnings
    hold there (`training.settings`), and so do functions that the notebook has put into a module; nothing else does
    that was changed in an installed package. What it loads with `place.load` are the digits. A rank ends when its
    program returns, with the threads that it has started.

    Args:
        ranks: how many processes.
        program: its first parameter is the object through which a rank communicates: the workshop's `Communicator`, or
            for another `framework` what `comm.process_group` yields.
        arguments: its other parameters, by name; anything that can be pickled.
        network: of the links between the ranks, such as "100Mbit" or "100Mbit,latency=1ms" (`network.Network.parse`).
        framework: None, "torch", "horovod" or "tensorflow".
        timeout: after which the ranks are ended, such as "60s".
        emulated_device: what each rank computes on, such as "400ms" for one forward and backward pass
            (`network.devices`). PyTorch's modules feel it; other code computes `with computing():`
            (of `training.emulated_device`).
        may_die: ranks whose death by SIGKILL is part of the experiment: the call goes on, `Communicator.may_die` says
            what the others feel of it, and the value of a dead rank is None.

    Raises:
        JobError: if a value is wrong, or something cannot be sent to the ranks; nothing has been started then.
        RanksFailed: if a rank raised an error, was killed, or did not end in time.
        KeyboardInterrupt: if it is interrupted; no rank is left then, and none of them has come to a `finally`.
    """
    with rank_group(ranks, network, framework, emulated_device) as group:
        return group.launch(program, arguments or {}, timeout, stays=False, may_die=may_die)


@contextlib.contextmanager
def rank_group(
    ranks: int,
    network: str | Network | None = None,
    framework: str | None = None,
    emulated_device: str | EmulatedDevice | None = None,
) -> Iterator[RankGroup]:
    """Ranks that stay until the block ends: what one program leaves in global variables, the next finds there.

        with rank_group(4) as group:
            group.run(build)
            results = group.run(train, {"steps": 10})

    Such variables are those of the notebook or script itself; one is sent again once its value is another object. The
    arguments, and what is raised, are those of `on_ranks`.
    """
    group = RankGroup(ranks, network, framework, emulated_device)
    try:
        yield group
    finally:
        group.stop()
        group.is_over = True


class RankGroup:
    """Processes of this machine that are called once, or stay from call to call: see `rank_group`.

    They start with the first call. An error, a rank that dies, a time-out or an interrupt ends them all, and what was
    in them is gone; the next call starts others. So does an hour without a call.
    """

    def __init__(
        self,
        ranks: int,
        network: str | Network | None,
        framework: str | None,
        emulated_device: str | EmulatedDevice | None,
    ) -> None:
        check_framework(framework)
        if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_PROCESSES:
            raise JobError(f"ranks is {ranks!r}; it must be a whole number from 1 to {MOST_PROCESSES:,}")
        link = Network.parse(network) if isinstance(network, str) else network
        if not isinstance(link, Network | None):
            raise JobError(f"network is {network!r}; it must be a rate such as '100Mbit', a Network, or None")
        self.is_over = False
        self.options = (ranks, network, framework, emulated_device)
        self._local = Local(network=link, emulated_device=emulated_device)
        self._run: RanksRun | None = None
        self._held = Held()
        self._calling = threading.Lock()

    def run(
        self, program: Callable[..., Any], arguments: Mapping[str, Any] | None = None, timeout: str = "60s"
    ) -> Results:
        """Call `program(group, **arguments)` on each rank, as `on_ranks` does; the ranks stay."""
        return self.launch(program, arguments or {}, timeout, stays=True)

    @property
    def has_ranks(self) -> bool:
        """Whether ranks stay from the last call, or have ended since, which the next call reports."""
        return self._run is not None

    def stop(self) -> None:
        """End the ranks."""
        if self._run is not None:
            self._run.stop()
        self._run, self._held = None, Held()

    def launch(
        self,
        program: Callable[..., Any] | None,
        arguments: Mapping[str, Any],
        timeout: str,
        stays: bool,
        cell: packing.Cell | None = None,
        names: Collection[str] = (),
        rebound: Collection[str] = (),
        may_die: Collection[int] = (),
    ) -> Results:
        """Call a program, or execute a cell that uses `names`, and whose lines are shown as they come.

        `rebound` are names that the notebook has assigned since the last cell, perhaps to the value that they had.
        Those that stay must all live, so with `stays` nobody `may_die`.
        """
        if not self._calling.acquire(blocking=False):
            raise JobError(
                "these ranks are being called by another thread: wait for it, or begin a group for each"
            )
        try:
            return self._launch(program, arguments, timeout, stays, cell, names, rebound, may_die)
        finally:
            self._calling.release()

    def _launch(
        self,
        program: Callable[..., Any] | None,
        arguments: Mapping[str, Any],
        timeout: str,
        stays: bool,
        cell: packing.Cell | None,
        names: Collection[str],
        rebound: Collection[str],
        may_die: Collection[int],
    ) -> Results:
        began, (ranks, _, framework, _) = time.perf_counter(), self.options
        if self.is_over:
            raise JobError("the block of rank_group has ended, and its ranks with it: call them in the block")
        if program is not None:
            check_call(program, arguments, framework)
        _check_may_die(may_die, ranks, framework)
        if self._run is not None and self._run.state is not RunState.RUNNING:  # since the last call
            reason = self._run.reason or "the ranks have ended by themselves"
            self.stop()
            raise RanksFailed(f"{reason}\n{GONE}")
        job = TrainingJob(
            name="ranks",
            folder=PROGRAM.parent,
            script=PROGRAM.name,
            strategy=FRAMEWORKS[framework][0] if framework else "ring",
            workers=ranks,
            timeout=timeout,
        )
        own = {*TWINS, GROUPS[framework], "rank", "size"} if cell else ()
        was_sent = False
        try:
            cargo = packing.gathered(program, arguments, names, own)
            variables, modules, remarks = self._held.missing(cargo, names, rebound)
            named = self._held.named(variables) if cell and variables else {}
            call = packing.packed(program, arguments, variables, named)
            texts = packing.texts_in(call)
            request = packing.request(call, texts, modules, framework, cell, may_die)
            notes = set[str]().union(*(cargo.notes.get(each, ()) for each in ("", *variables)))
            for line in [*remarks, *sorted(notes)]:
                print(line)
            was_sent, run = True, self._run
            if run is None:
                run = self._start(job, texts, request, stays, may_die)
            else:
                run.prompt(request, job.timeout_seconds)
            if stays:
                self._held.note_sent(variables, modules)
            asked: dict[str, Any] = {"links": self._local.network}
            if program is not None:
                asked |= {"program": getattr(program, "__name__", ""), "arguments": dict(arguments)}
            results, bound = _results(run, began, cell is not None, asked)
            self._held.note_bound(bound)
        except KeyboardInterrupt as error:
            reason, gone = "interrupted before anything was sent to the ranks", ""
            if was_sent:
                ended = self._run  # an interrupt may come before `run` is known
                self.stop()
                reason = ended.reason if ended else "interrupted before the ranks had begun"
                gone = GONE if stays else ""
            text = f"KeyboardInterrupt: {reason}\n{gone}".strip()
            error._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]  # what a notebook shows of it
            raise
        except JobError:  # before anything began
            raise
        except BaseException:
            if was_sent:
                self.stop()
            raise
        if not stays:
            self.stop()
        return results

    def _start(
        self, job: TrainingJob, texts: Collection[str], request: str, stays: bool, may_die: Collection[int]
    ) -> RanksRun:
        _, _, framework, _ = self.options
        server = packing.server_for(texts, framework)
        if stays and server is not None and "torch" in sys.modules:  # a later cell may use it
            server = "torch"
        await_packages(job)
        local = self._local.reserve(job, framework or server)
        warm.starter(server)  # may import a framework for seconds, so an interrupt is not deferred yet
        with interrupts_deferred():
            make = functools.partial(RanksRun, IDLE_SECONDS if stays else 0.0, may_die, local.scratch)
            self._run = run = start(local, make, {"request": request}, server)
        return run


def _check_may_die(may_die: Collection[int], ranks: int, framework: str | None) -> None:
    """Raise JobError unless `may_die` are ranks of the workshop's own communicator, of which one is to live."""
    given = f"may_die is {may_die!r}"
    if isinstance(may_die, str) or not isinstance(may_die, Collection):
        raise JobError(f"{given}; it must be a list of ranks, such as [1]")
    others = [each for each in may_die if isinstance(each, bool | float) or each not in range(ranks)]
    if others:
        raise JobError(f"{given}; {others[0]!r} is no rank: give some of 0 to {ranks - 1}")
    if may_die and framework is not None:
        raise JobError(
            f"{given}; with framework={framework!r} a rank that dies ends all: leave one of them out"
        )
    if len({*may_die}) == ranks:
        raise JobError(f"{given}, so all ranks; at least one must live, to return something")


def _results(
    run: RanksRun, began: float, is_cell: bool, asked: Mapping[str, Any]
) -> tuple[Results, set[str]]:
    """What the ranks return, once all have, and the names that they have bound. Raises RanksFailed."""
    run.lines_are_shown = is_cell
    printed: dict[str, list[str]] = {worker: [] for worker in run.workers}
    for line in run.answer():
        if line.worker in printed and line.stream != STACK:
            printed[line.worker].append(line.text)
            if line.stream.startswith(DISPLAY) and packing.notebook():
                run.show(line)
            elif is_cell:
                print(f"[{run.workers.index(line.worker)}] {line.text}")
    reason = run.reason
    living = [worker for worker in run.workers if worker not in run.died]
    if not reason and any(f"{worker}.value" not in run.files for worker in living):
        run.stop()  # it is ending, if it has not ended
        reason = run.reason or "the ranks were stopped"
    results, bound = [], set[str]()
    for rank, worker in enumerate(run.workers):
        result: tuple[Any, ...] = (None, None, math.nan, math.nan, (), ())
        try:
            result = packing.loaded(run.files.get(f"{worker}.value") or pickle.dumps(result))
        except Exception as error:
            reason = (
                reason or f"what rank {rank} returned cannot be read here: {type(error).__name__}: {error}"
            )
        *values, names = result
        bound.update(names)
        results.append(RankResult(rank, tuple(printed[worker]), *values))
    seconds = time.perf_counter() - began
    died = tuple(run.workers.index(worker) for worker in run.died)
    whole = Results(
        tuple(results), run.network, run.warm, seconds, is_cell, run.device, run.doubt, died, **asked
    )
    if reason:
        failure = RanksFailed(f"{reason}\n{GONE}" if run.idle_seconds else reason)
        failure.results = whole
        raise failure
    return whole, bound
