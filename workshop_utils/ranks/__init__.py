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
import json
import math
import pickle
import re
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.jobs.function import FRAMEWORKS, GROUPS, TWINS, check_call, check_framework
from workshop_utils.launchers import output
from workshop_utils.launchers.local import Local, warm
from workshop_utils.launchers.local.environment import await_packages
from workshop_utils.launchers.local.launcher import MOST_PROCESSES, start
from workshop_utils.launchers.local.run import Event, ProcessRun
from workshop_utils.network import Network
from workshop_utils.network.devices import EmulatedDevice, host_remark
from workshop_utils.ranks import packing
from workshop_utils.ranks.results import RankResult, Results
from workshop_utils.runs import STACK, LogLine, RunFailed, RunState, interrupts_deferred
from workshop_utils.setup.machine import cores

PROGRAM = Path(__file__).with_name("rank.py")
IDLE_SECONDS = 3600.0  # without a call, after which ranks that stay are ended
HINTS = {
    "default process group twice": "Ranks have joined it already: leave init_process_group out.",
    r"\bin <module>\n +(\w+\.)*init_process_group\(": "Begin the cell with `--framework torch`, and leave this out.",
    r"Can't get attribute '\w+' on <module '__main__'": "A rank has what its cell names: name it there.",
}
DISPLAY = "display "  # and the file's name: the stream of what a rank displays
DISPLAYED = re.compile(r'(.*)\{"workshop": "display", "file": "(worker-\d+-\d+-\d+\.display)"\}')
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

    Raises:
        JobError: if a value is wrong, or something cannot be sent to the ranks; nothing has been started then.
        RanksFailed: if a rank raised an error, was killed, or did not end in time.
        KeyboardInterrupt: if it is interrupted; no rank is left then, and none of them has come to a `finally`.
    """
    with rank_group(ranks, network, framework, emulated_device) as group:
        return group.launch(program, arguments or {}, timeout, stays=False)


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
        self._run: _RanksRun | None = None
        self._held = _Held()

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
        self._run, self._held = None, _Held()

    def launch(
        self,
        program: Callable[..., Any] | None,
        arguments: Mapping[str, Any],
        timeout: str,
        stays: bool,
        cell: packing.Cell | None = None,
        names: Collection[str] = (),
        rebound: Collection[str] = (),
    ) -> Results:
        """Call a program, or execute a cell that uses `names`, and whose lines are shown as they come.

        `rebound` are names that the notebook has assigned since the last cell, perhaps to the value that they had.
        """
        began, (ranks, _, framework, _) = time.perf_counter(), self.options
        if self.is_over:
            raise JobError("the block of rank_group has ended, and its ranks with it: call them in the block")
        if program is not None:
            check_call(program, arguments, framework)
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
        cargo = packing.gathered(program, arguments, names, own)
        variables, modules = self._held.missing(cargo, rebound)
        for note in sorted(set().union(*(cargo.notes[each] for each in ("", *variables)))):
            print(note)
        call = packing.packed(program, arguments, variables)
        texts = packing.texts_in(call)
        request = packing.request(call, texts, modules, framework, cell)
        try:
            run = self._run
            if run is None:
                run = self._start(job, texts, request, stays)
            else:
                run.prompt(request, job.timeout_seconds)
            if stays:
                self._held.note_sent(variables, modules)
            results, bound = _results(run, began, cell is not None)
            self._held.note_bound(bound)
        except KeyboardInterrupt as error:
            ended = self._run  # an interrupt may come before `run` is known
            self.stop()
            reason = ended.reason if ended else "interrupted before the ranks had begun"
            text = f"KeyboardInterrupt: {reason}\n{GONE if stays else ''}".strip()
            error._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]  # what a notebook shows of it
            raise
        except JobError:  # before anything began
            raise
        except BaseException:
            self.stop()
            raise
        if not stays:
            self.stop()
        return results

    def _start(self, job: TrainingJob, texts: Collection[str], request: str, stays: bool) -> _RanksRun:
        _, _, framework, _ = self.options
        server = packing.server_for(texts, framework)
        if stays and server is not None and "torch" in sys.modules:  # a later cell may use it
            server = "torch"
        await_packages(job)
        local = self._local.reserve(job, framework or server)
        warm.starter(server)  # may import a framework for seconds, so an interrupt is not deferred yet
        with interrupts_deferred():
            make = functools.partial(_RanksRun, IDLE_SECONDS if stays else 0.0, local.scratch)
            self._run = run = start(local, make, {"request": request}, server)
        return run


def _results(run: _RanksRun, began: float, is_cell: bool) -> tuple[Results, set[str]]:
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
    if not reason and any(f"{worker}.value" not in run.files for worker in run.workers):
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
    whole = Results(
        tuple(results), run.network, run.warm, time.perf_counter() - began, is_cell, run.device, run.doubt
    )
    if reason:
        failure = RanksFailed(f"{reason}\n{GONE}" if run.idle_seconds else reason)
        failure.results = whole
        raise failure
    return whole, bound


class _Held:
    """What ranks that stay hold of the notebook's variables and modules."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}  # as the notebook had them when they were sent, or bound on a rank
        self._digests: dict[str, bytes] = {}
        self._bound: set[str] = set()  # those that a rank has bound since
        self._rebound: set[str] = set()  # those that the notebook has assigned since
        self._attributes: dict[str, dict[str, bytes]] = {}
        self._sources: dict[str, bytes] = {}

    def missing(
        self, cargo: packing.Cargo, rebound: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, tuple[bool, dict[str, bytes]]]]:
        """Variables, and attributes of modules, that are to be sent; a line names what the ranks had already."""
        self._rebound |= {*rebound}
        edited = {each for each, text in self._sources.items() if packing.source_of(each) != text}
        modules = {}
        for module in sorted(edited):
            print(
                f"{module} was edited: ranks import it anew; what they made of it before keeps its old code"
            )
        for module, pickles in packing.attributes_of(set[str]().union(*cargo.homes.values())).items():
            before = {} if module in edited else self._attributes.get(module, {})
            changed = {name: each for name, each in pickles.items() if before.get(name) != each}
            modules[module] = (module in edited, changed)
        variables, again, kept = {}, [], []
        for name, value in cargo.variables.items():
            is_new, is_module = name not in self._values, isinstance(value, ModuleType)
            is_code = isinstance(value, FunctionType | type) and cargo.homes[name] & edited
            if (
                is_new
                or self._values[name] is not value
                or is_code
                or (name in self._rebound and not is_module)
            ):
                variables[name] = value
                again += [] if is_new else [name]
            elif name not in self._bound:
                digests = {self._digests[name], packing.digest(value)}
                kept += [name] if len(digests) == 2 and b"" not in digests else []
        if again:
            print(f"Sent to the ranks again, as the notebook has it now: {', '.join(again)}")
        if kept:
            print(
                f"The ranks still have the old value, until the notebook assigns it again: {', '.join(kept)}"
            )
        return self._with_sharers(variables), modules

    def _with_sharers(self, variables: dict[str, Any]) -> dict[str, Any]:
        """`variables` with those held that share objects with them, as an optimizer does with its model."""
        main, waiting = vars(sys.modules["__main__"]), [*variables] if self._values else []
        objects_of = functools.cache(lambda name: packing.objects_in(self._values[name]))
        for name in waiting:  # which grows
            own = packing.objects_in(variables[name])
            for other, value in self._values.items():
                is_here = other not in variables and other in main and main[other] is value
                if own and is_here and own.keys() & objects_of(other).keys():
                    if other in self._bound:
                        print(f"On the ranks, {other} is a different object, and shares nothing with {name}")
                        continue
                    print(f"Sent to the ranks again, since {name} shares objects with it: {other}")
                    variables[other] = value
                    waiting.append(other)
        return variables

    def note_sent(
        self, variables: Mapping[str, Any], modules: Mapping[str, tuple[bool, dict[str, bytes]]]
    ) -> None:
        """Note what the ranks have got."""
        self._values |= variables
        self._digests |= {name: packing.digest(value) for name, value in variables.items()}
        self._bound -= variables.keys()
        self._rebound -= variables.keys()
        for module, (_, attributes) in modules.items():
            self._attributes.setdefault(module, {}).update(attributes)
            self._sources[module] = packing.source_of(module)

    def note_bound(self, bound: Collection[str]) -> None:
        """Note the names that ranks have bound: their values count until the notebook binds them."""
        main = vars(sys.modules["__main__"])
        self._values |= {name: main.get(name) for name in bound}
        self._bound.update(bound)


class _RanksRun(ProcessRun):
    """A run of `rank.py`, whose failures speak of ranks and of the notebook's cells.

    Attributes:
        files: what the ranks have left in the run's folder: `worker-0.value` and the like.
    """

    is_read, keeps_logs = True, False
    lines_are_shown = False  # they are printed while they come

    def __init__(self, idle_seconds: float, folder: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.files: dict[str, bytes] = {}
        self.idle_seconds = idle_seconds
        self._folder, self._request = folder, folder / "request"
        self._bundles: dict[str, Any] = {}  # what ranks have displayed, by file
        self._seen = 0  # of what has arrived
        self._is_called, self._was_idle, self._is_interrupted = True, False, False
        self._is_over = False  # so that its folder may go at any time
        self._codes: dict[str, int] = {}
        self._crashed = set[str]()  # those of whose fatal signal Python has told
        self._ended: list[str] = []  # those that have ended by themselves, in this order

    def prompt(self, request: str, timeout_seconds: float) -> None:
        """Have the ranks, which stay, carry out another request."""
        self._request = self._folder / f"request-{self._seen}"
        try:
            with self._changed:
                for name in [f"{worker}.value" for worker in self.workers]:
                    self.files.pop(name, None)  # or a rank that has ended would seem to have answered
                    (self._folder / name).unlink(missing_ok=True)
                if not self._is_over:
                    self._request.write_text(request)
        except FileNotFoundError:
            pass  # the run has ended, as `answer` will tell
        except OSError as error:
            raise JobError(f"the ranks cannot be sent the cell: {self._folder}: {error.strerror}") from None
        self._is_called, self._timeout_seconds = True, timeout_seconds
        self._group.order(timeout_seconds, self._request.name)

    def answer(self) -> Iterator[LogLine]:
        """The lines that come until the run has ended, or until each rank, if they stay, has answered."""
        waiting = set(self.workers)
        for each in self.arrivals(follow=True, start=self._seen):
            self._seen += 1
            if isinstance(each, LogLine):
                yield each
            elif each["workshop"] == "done":
                waiting.discard(each["worker"])
                if not waiting:
                    break
        if not waiting:
            self._read_files()
            self._request.unlink(missing_ok=True)
            self._is_called = False

    @property
    def doubt(self) -> str:
        """What is wrong with measurements on emulated devices, also while the ranks stay."""
        last = {each["worker"]: each for each in self.devices}
        return host_remark(list(last.values()), self.workers, cores()) if self.device else ""

    def _read_files(self) -> None:
        names = [f"{worker}.{kind}" for worker in self.workers for kind in ("value", "error", "waits")]
        with self._changed:
            for path in (self._folder / name for name in names if not self._is_over):
                with contextlib.suppress(FileNotFoundError):
                    self.files[path.name] = path.read_bytes()

    def _request_stop(self) -> None:
        if self._is_called and not self._is_interrupted:  # first ask where the ranks stand
            self._is_interrupted = True
            self._group.order(0.0)
        else:
            super()._request_stop()

    def _on_event(self, event: Event) -> None:
        if event["event"] == "exited":
            self._ended += [event["name"]] if not event["ours"] else []
            self._codes[event["name"]] = event["code"]
        elif event["event"] == "done":
            with self._changed:
                self._arrived.append({"workshop": "done", "worker": event["name"]})
                self._changed.notify_all()
        elif event["event"] == "silent":
            self._was_idle = event["is_idle"] and not self._is_interrupted
        elif event["event"] == "read":
            with self._changed:
                self._read_files()
                self._is_over = True
        super()._on_event(event)

    def _receive_line(self, worker: str, text: str, stream: str = "stdout") -> None:
        if self._hang.has_begun:  # they have been asked for their stacks
            text, stream = packing.with_cells(text), STACK
        elif (displayed := DISPLAYED.fullmatch(text)) and (file := self._folder / displayed[2]).is_file():
            bundle = self._bundles[file.name] = json.loads(file.read_bytes())
            file.unlink()
            stream = f"{DISPLAY}{file.name}"
            image = " (a notebook shows this image)" if "image/png" in bundle else ""
            text = f"{displayed[1]}{bundle.get('text/plain', '')}{image}"
        super()._receive_line(worker, text, stream)

    def show(self, line: LogLine) -> None:
        """Show below the notebook's cell what a rank has displayed."""
        from IPython.display import display

        print(f"[{self.workers.index(line.worker)}]")
        display(self._bundles.pop(line.stream.removeprefix(DISPLAY)), raw=True)

    def _stream_of(self, process: str, worker: str, text: str, stream: str) -> str:
        if text.startswith(output.FATAL):
            self._crashed.add(worker)
        is_crash = worker in self._crashed and output.CRASH.match(text)
        return STACK if is_crash else super()._stream_of(process, worker, text, stream)

    def _verdict(self, event: Event) -> tuple[RunState, str]:
        state, reason = super()._verdict(event)
        silent = state is not RunState.FAILED and self._silent()
        return (RunState.FAILED, self._blame(silent[0], 0)) if silent else (state, reason)

    def _blame(self, name: str, code: int) -> str:
        text = self._accusation(name, code)
        return "\n".join([text, *output.hints(text, {**output.OF_MACHINES, **HINTS})])

    def _accusation(self, name: str, code: int) -> str:
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
        if self._was_idle:
            return f"the ranks had nothing to do for {IDLE_SECONDS / 3600:.2g} h."
        late = f"the program did not end within {self._timeout_seconds:g} s"
        return f"{'interrupted' if self._is_interrupted else late}. {text}"
