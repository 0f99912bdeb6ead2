"""The processes of a call's ranks: those that stay are prompted, and all failures are told of ranks."""

from __future__ import annotations

import contextlib
import json
import re
import signal
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from workshop_utils.jobs import JobError
from workshop_utils.launchers import output
from workshop_utils.launchers.local.run import Event, ProcessRun
from workshop_utils.network.devices import host_remark
from workshop_utils.ranks import packing
from workshop_utils.runs import STACK, LogLine, RunState
from workshop_utils.setup.machine import cores

HINTS = {
    "default process group twice": "Ranks have joined it already: leave init_process_group out.",
    r"\bin <module>\n +(\w+\.)*init_process_group\(": "Begin the cell with `--framework torch`, and leave this out.",
    r"Can't get attribute '\w+' on <module '__main__'": "A rank has what its cell names: name it there.",
}
DISPLAY = "display "  # and the file's name: the stream of what a rank displays
DISPLAYED = re.compile(r'(.*)\{"workshop": "display", "file": "(worker-\d+-\d+-\d+\.display)"\}')


class RanksRun(ProcessRun):
    """A run of `rank.py`, whose failures speak of ranks and of the notebook's cells.

    Attributes:
        files: what the ranks have left in the run's folder: `worker-0.value` and the like.
        died: those that may die and were killed, in the order of their deaths.
    """

    is_read, keeps_logs = True, False
    lines_are_shown = False  # they are printed while they come

    def __init__(self, idle_seconds: float, may_die: Collection[int], folder: Path, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.may_die = [self.workers[rank] for rank in may_die]
        self.died: list[str] = []
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
            if event["name"] in self.may_die and event["code"] == -signal.SIGKILL and not event["ours"]:
                self.died.append(event["name"])
            elif not event["ours"]:
                self._ended.append(event["name"])
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
        dead = self.workers[int(died[1])] if died else ""
        if dead and dead not in self.died and not self._has_left(dead, "value", "error"):
            silent, errors = [dead], []
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
        returned = [worker for worker in self.workers if self._has_left(worker, "value")]
        # Where all have returned, their stacks show why they have not ended.
        told = [worker for worker in self.workers if worker not in {*returned, *self.died}] or self.workers
        self._hang.left_out = {*self.workers} - {*told}
        text = self._hang.diagnosis(self) + self._hang.shown_stacks(self)
        if returned:
            text = f"{self._named(returned)} had returned from the program. {text}"
        if self.died:
            text = f"{self._named(self.died)} had been killed, which `may_die` allows. {text}"
        waits = [self.files.get(f"{worker}.waits", b"").decode() for worker in told]
        text = "\n".join([text, *filter(None, waits)])
        text = re.sub(r"\bworker-(\d+)", r"rank \1", text)
        if self._was_idle:
            return f"the ranks had nothing to do for {self.idle_seconds / 3600:.2g} h."
        late = f"the program did not end within {self._timeout_seconds:g} s"
        return f"{'interrupted' if self._is_interrupted else late}. {text}"
