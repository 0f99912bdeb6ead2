"""A function from a notebook on real processes, fresh for every call.

    def program(communicator, elements):
        array = np.full(elements, float(communicator.rank))
        ring_all_reduce(communicator, array)
        return array[0]

    results = on_ranks(4, program, {"elements": 1000}, network="100Mbit")
    results.values              # [6.0, 6.0, 6.0, 6.0]
    results[0].bytes_sent

In a notebook, after `%load_ext workshop_utils`, `%%ranks 4` at the top of a cell runs the cell itself on every rank
(`cell`).
"""

from __future__ import annotations

import contextlib
import json
import math
import pickle
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.jobs.function import FRAMEWORKS, check_call
from workshop_utils.launchers import output
from workshop_utils.launchers.local import Local, warm
from workshop_utils.launchers.local.environment import await_packages
from workshop_utils.launchers.local.launcher import MOST_PROCESSES, start
from workshop_utils.launchers.local.run import Event, ProcessRun
from workshop_utils.network import Network
from workshop_utils.network.devices import EmulatedDevice
from workshop_utils.ranks import packing
from workshop_utils.ranks.results import RankResult, Results
from workshop_utils.runs import STACK, RunFailed, RunState, interrupts_deferred

PROGRAM = Path(__file__).with_name("rank.py")


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
) -> Results:
    """Call `program(group, **arguments)` on each of `ranks` processes of this machine, and return what each returned.

    The processes are new. They are forked from one that has imported NumPy, or the framework, already (see
    `launchers.local.warm`): a notebook's first call waits for that import. The function travels with the variables that
    it uses, as copies: a random generator of the notebook's gives every rank the same numbers, one that a rank makes
    without a seed its own. What it loads with `place.load` are the digits. A rank ends when its program returns, with
    the threads that it has started.

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

    Raises:
        JobError: if a value is wrong, or something cannot be sent to the ranks; nothing has been started then.
        RanksFailed: if a rank raised an error, was killed, or did not end in time.
        KeyboardInterrupt: if it is interrupted; no rank is left then.
    """
    arguments = {} if arguments is None else arguments
    check_call(program, arguments, framework)
    return launch(program, arguments, ranks, network, framework, timeout, emulated_device=emulated_device)


def launch(
    program: Callable[..., Any] | None,
    arguments: Mapping[str, Any],
    ranks: int,
    network: str | Network | None,
    framework: str | None,
    timeout: str,
    cell: packing.Cell | None = None,
    emulated_device: str | EmulatedDevice | None = None,
) -> Results:
    """Call a program, or execute a cell whose variables are `arguments`, and whose lines are shown as they come."""
    began = time.perf_counter()
    if not isinstance(ranks, int) or isinstance(ranks, bool) or not 1 <= ranks <= MOST_PROCESSES:
        raise JobError(f"ranks is {ranks!r}; it must be a whole number from 1 to {MOST_PROCESSES:,}")
    link = Network.parse(network) if isinstance(network, str) else network
    if not isinstance(link, Network | None):
        raise JobError(f"network is {network!r}; it must be a rate such as '100Mbit', a Network, or None")
    call = packing.packed(program, arguments)
    job = TrainingJob(
        name="ranks",
        folder=PROGRAM.parent,
        script=PROGRAM.name,
        strategy=FRAMEWORKS[framework][0] if framework else "ring",
        workers=ranks,
        timeout=timeout,
    )
    server, files = packing.server_for(call, framework), {"request": packing.request(call, framework, cell)}
    local = Local(network=link, emulated_device=emulated_device)
    await_packages(job)
    request = local.reserve(job, framework or server)
    warm.starter(server)  # may import a framework for seconds, so an interrupt is not deferred yet
    with contextlib.ExitStack() as cleanup:
        with interrupts_deferred():
            run = cleanup.enter_context(start(request, _RanksRun, files, server))
            run.lines_are_shown = cell is not None
        for line in run.logs(follow=True):
            if cell and line.worker in run.workers and line.stream != STACK:
                print(f"[{run.workers.index(line.worker)}] {line.text}")
    results, reason = [], run.reason
    for rank, worker in enumerate(run.workers):
        result: tuple[Any, ...] = (None, None, math.nan, math.nan, ())
        try:
            result = pickle.loads(run.files.get(f"{worker}.value") or pickle.dumps(result))
        except Exception as error:
            reason = (
                reason or f"what rank {rank} returned cannot be read here: {type(error).__name__}: {error}"
            )
        lines = tuple(line.text for line in run.logs(worker=worker) if line.stream != STACK)
        results.append(RankResult(rank, lines, *result))
    whole = Results(
        tuple(results),
        run.network,
        run.warm,
        time.perf_counter() - began,
        cell is not None,
        run.device,
        run.remark,
    )
    if reason:
        failure = RanksFailed(reason)
        failure.results = whole
        raise failure
    return whole


class _RanksRun(ProcessRun):
    """A run of `rank.py`, whose failures speak of ranks and of the notebook's cells.

    Attributes:
        files: what the ranks have left in the run's folder: `worker-0.value` and the like.
    """

    is_read, keeps_logs = True, False
    lines_are_shown = False  # they are printed while they come

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.files: dict[str, bytes] = {}
        self._codes: dict[str, int] = {}
        self._crashed = set[str]()  # those of whose fatal signal Python has told
        self._ended: list[str] = []  # those that have ended by themselves, in this order

    def _on_event(self, event: Event) -> None:
        if event["event"] == "exited":
            self._ended += [event["name"]] if not event["ours"] else []
            self._codes[event["name"]] = event["code"]
        elif event["event"] == "read":
            names = [f"{worker}.{kind}" for worker in self.workers for kind in ("value", "error", "waits")]
            paths = [Path(event["folder"], name) for name in names]
            self.files = {path.name: path.read_bytes() for path in paths if path.is_file()}
        super()._on_event(event)

    def _receive_line(self, worker: str, text: str, stream: str = "stdout") -> None:
        if self._hang.has_begun:  # they have been asked for their stacks
            text, stream = packing.with_cells(text), STACK
        super()._receive_line(worker, text, stream)

    def _stream_of(self, process: str, worker: str, text: str, stream: str) -> str:
        if text.startswith(output.FATAL):
            self._crashed.add(worker)
        is_crash = worker in self._crashed and output.CRASH.match(text)
        return STACK if is_crash else super()._stream_of(process, worker, text, stream)

    def _verdict(self, event: Event) -> tuple[RunState, str]:
        state, reason = super()._verdict(event)
        silent = state is RunState.SUCCEEDED and self._silent()
        return (RunState.FAILED, self._blame(silent[0], 0)) if silent else (state, reason)

    def _blame(self, name: str, code: int) -> str:
        # A rank that left neither a value nor an error is to blame, or the first to raise: others may have raised
        # because it had gone.
        silent = [name] if code < 0 else self._silent()
        errors = [] if silent else sorted(self._errors(), key=lambda each: float(each[0]["time"]))
        died = re.match(r"PeerDied: rank (\d+) has died", errors[0][0]["summary"]) if errors else None
        if died and not self._has_left(self.workers[int(died[1])], "value", "error"):
            silent, errors = [self.workers[int(died[1])]], []
        if errors or silent:
            name = errors[0][1] if errors else silent[0]
        lines = [*self.logs(worker=name)]
        _, stack = output.split_crash(packing.with_cells(line.text) for line in lines if line.stream == STACK)
        printed = [line.text for line in lines if line.stream != STACK and not self.lines_are_shown]
        others = "; the others were stopped" if len(self.workers) > 1 else ""
        if errors:
            error = errors[0][0]
            alike = [each for each, _ in errors if each["summary"] == error["summary"]]
            whose = self._named([name])
            if len(alike) == len(self.workers) > 1:
                whose, others = f"all {len(alike)} ranks", ""
            what = f"{whose} raised {error['summary']}"
            if error["summary"].startswith("PeerLeft: "):  # the one that has left comes first
                what = f"{error['summary'].removeprefix('PeerLeft: ')}: {whose} raised PeerLeft"
            text = f"{what}{others}.\n{packing.with_cells(error['traceback'])}"
            if printed:
                shown = "\n  ".join(printed[-output.LAST_LINES :])
                text += f"Before, {self._named([name])} had printed:\n  {shown}\n"
            return f"{text}{stack}".rstrip()
        code = self._codes.get(name, code)
        ended = output.how(code) if code else "ended without returning from the program, as os._exit does"
        last = output.last_lines(printed) if printed else ""
        return f"{self._named([name])} {ended}{others}. {stack}{last}".rstrip()

    def _named(self, workers: Sequence[str]) -> str:
        ranks = sorted(self.workers.index(each) for each in workers if each in self.workers)
        numbers = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))} of {len(self.workers)}"
        return numbers if ranks else workers[0]

    def _silent(self) -> list[str]:
        """The ranks that ended by themselves and left neither a value nor an error, in the order of their ends."""
        ended = [each for each in self._ended if each in self.workers]
        return [each for each in ended if not self._has_left(each, "value", "error")]

    def _has_left(self, worker: str, *kinds: str) -> bool:
        return any(f"{worker}.{kind}" in self.files for kind in kinds)

    def _errors(self) -> Iterator[tuple[dict[str, Any], str]]:
        for worker in self.workers:
            with contextlib.suppress(ValueError):  # there is none, or it was ended in the middle of it
                yield json.loads(self.files.get(f"{worker}.error", b"")), worker

    def _timed_out(self) -> str:
        text = self._hang.diagnosis(self) + self._hang.shown_stacks(self)
        returned = [worker for worker in self.workers if self._has_left(worker, "value")]
        if returned:
            text = f"{self._named(returned)} had returned from the program. {text}"
        waits = [self.files.get(f"{worker}.waits", b"").decode() for worker in self.workers]
        text = "\n".join([text, *filter(None, waits)])
        text = re.sub(r"\bworker-(\d+)", r"rank \1", text)
        return f"the program did not end within {self._timeout_seconds:g} s. {text}"
