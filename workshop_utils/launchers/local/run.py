"""A run of processes on this machine, under a supervisor of its own (`supervisor.py`).

An emulator of another target subclasses `ProcessRun` to tell, in that target's words, how a run failed.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import psutil

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.local import hang
from workshop_utils.launchers.local.environment import locked
from workshop_utils.network.devices import host_remark
from workshop_utils.network.ports import PortReservation
from workshop_utils.network.wiring import Cable, Switch
from workshop_utils.runs import STACK, Run, RunState, interrupts_deferred
from workshop_utils.setup.machine import cores
from workshop_utils.strategies import without_proxy

SUPERVISOR = Path(__file__).with_name("supervisor.py")
AT_START = Path(__file__).with_name("at_start")
REMOVING_SECONDS = 10.0  # at most, for the folder of a run whose supervisor was killed

Event = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """One process to start: its command, its whole environment, its working folder, a name for its host.

    The group has succeeded when every `required` process has ended with 0; it has failed when any has not. Those that
    are not required are then ended.
    """

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    required: bool = True
    network: Cable | None = None
    host: str = ""


class ProcessGroup:
    """Processes under one supervisor. `on_event` is called, on a thread of its own, with what they do.

    `scratch` is a folder that the supervisor makes, fills with `files` (text by relative path) and with what is in
    `archives` (each a `.tar.gz`, by the relative folder for its files), and removes at the end. The events are those
    of `supervisor`; the last is always `ended`, and once it has come no process, and no folder, is left. With `is_read`
    the folder stays until `on_event` has returned from `read`. With `idle_seconds` each process's standard input is a
    socket, on which it answers each prompt (`order`) with one byte; the event `done` follows, and they may wait so long
    for the next prompt. With `start_warm`, a warm server's `start`, ranks are forked instead of executed. The
    supervisor keeps the descriptors `locks` until all has ended. If one of the processes `may_die` is killed by
    SIGKILL, the run goes on.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        on_event: Callable[[Event], None],
        timeout_seconds: float,
        scratch: Path,
        files: dict[str, str],
        start_warm: Callable[..., None] | None = None,
        network: Switch | None = None,
        is_read: bool = False,
        archives: Mapping[str, bytes] | None = None,
        locks: Collection[int] = (),
        idle_seconds: float = 0.0,
        may_die: Collection[str] = (),
    ) -> None:
        self._on_event = on_event
        self._scratch = scratch
        self._sending = threading.Lock()
        self._started: set[int] = set()  # the processes, each of which leads a session
        control_reader, control_writer = os.pipe()
        events_reader, events_writer = os.pipe()
        self._supervisor: subprocess.Popen[bytes] | None = None
        try:
            if start_warm is not None:
                start_warm(control_reader, events_writer, *locks)
            else:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-E", "-s", "-S", str(SUPERVISOR), *map(str, locks)],
                    pass_fds=locks,
                    stdin=control_reader,
                    stdout=events_writer,
                    start_new_session=True,  # so that a terminal's Ctrl-C reaches us, and we decide
                )
        finally:
            os.close(control_reader)
            os.close(events_writer)
        self._control: BinaryIO = os.fdopen(control_writer, "wb", buffering=0)
        hosts = [process.network.address for process in processes if process.network]
        specification = {
            "owner": os.getpid(),
            "processes": [_prepared(asdict(process), scratch, hosts) for process in processes],
            "timeout_seconds": timeout_seconds,
            "scratch": str(scratch),
            "files": files,
            "archives": {name: base64.b64encode(each).decode() for name, each in (archives or {}).items()},
            "network": asdict(network) if network else None,
            "is_read": is_read,
            "idle_seconds": idle_seconds,
            "may_die": [*may_die],
        }
        self._listener = threading.Thread(
            target=self._listen, args=(os.fdopen(events_reader, "rb"),), name="workshop-run", daemon=True
        )
        self._listener.start()
        self._send((json.dumps(specification) + "\n").encode())

    def stop(self) -> None:
        """Ask for the end of everything; the event `ended` follows."""
        self._send(b"stop\n")

    def order(self, timeout_seconds: float, prompt: str = "") -> None:
        """Begin a new time limit, and write `prompt`, a line, to the input of each process."""
        self._send((json.dumps({"timeout_seconds": timeout_seconds, "prompt": prompt}) + "\n").encode())

    def _send(self, data: bytes) -> None:
        with self._sending, contextlib.suppress(BrokenPipeError):  # it has ended; the listener reports how
            while data and not self._control.closed:
                data = data[self._control.write(data) :]

    def _listen(self, events: BinaryIO) -> None:
        last: Event = {}
        raised: Exception | None = None
        with events:
            for line in events:
                if not line.endswith(b"\n"):
                    break  # the supervisor was killed in the middle of a word
                last = json.loads(line)
                if last["event"] == "started":
                    self._started.add(last["pid"])
                if last["event"] != "ended":
                    try:
                        self._on_event(last)
                    except Exception as error:  # the run must still learn of its end
                        raised = raised or error
                    if last["event"] == "read":
                        self._send(b"read\n")
        with self._sending:
            self._control.close()
        if self._supervisor is not None:
            self._supervisor.wait()
        if last.get("event") != "ended":
            self._end_what_was_abandoned()
            last = {"event": "ended", "outcome": "failed", "name": "supervisor", "code": None}
        self._on_event(last)
        if raised is not None:
            raise raised

    def _end_what_was_abandoned(self) -> None:
        """Do what the supervisor would have done, had it not been killed.

        Linux has ended its children by now. They, and what they had started, are known by the scratch folder's name,
        which is in the environment that they inherited, and forks of forked ones, which show the warm server's, by
        their session.
        """
        while abandoned := [each for each in psutil.process_iter() if self._is_abandoned(each)]:
            for process in abandoned:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.02)
        deadline = time.monotonic() + REMOVING_SECONDS
        # Until none of them, which die now, makes a file in it any more.
        while self._scratch.exists() and time.monotonic() < deadline:
            shutil.rmtree(self._scratch, ignore_errors=True)

    def _is_abandoned(self, process: psutil.Process) -> bool:
        with contextlib.suppress(psutil.Error, OSError):  # it has ended, or belongs to another user
            if process.status() != psutil.STATUS_ZOMBIE:
                is_below = os.getsid(process.pid) in self._started
                return is_below or str(self._scratch) in " ".join(process.environ().values())
        return False


class ProcessRun(Run):
    """A run whose processes stand under one supervisor on this machine. It holds `reservation` until it has ended.

    Attributes:
        process_ids: of its processes, by name.
        network: what network is emulated, and how; None where there is none.
        warning: what may not go as it is meant, known before the start; "" if nothing is.
        warm: whether its ranks were forked from a warm server.
    """

    network: str | None = None
    warning: str = ""
    is_read = False  # whether a subclass reads the run's folder at the event `read`
    may_die: Collection[str] = ()  # the processes that may be killed without failing it
    idle_seconds = 0.0  # that processes, if a subclass prompts them, may wait for the next prompt

    def __init__(
        self, name: str, workers: tuple[str, ...], reservation: PortReservation, outputs: str | None = None
    ) -> None:
        super().__init__(name, workers, outputs)
        self.process_ids: dict[str, int] = {}
        self.warm = False
        self._reservation = reservation
        self._timeout_seconds = 0.0
        self._failed = set[str]()  # the processes that have ended by themselves, and not well
        self._hang = hang.Hang()

    def _start(
        self,
        processes: Sequence[Process],
        timeout_seconds: float,
        scratch: Path,
        files: dict[str, str],
        job: TrainingJob,
        network: Switch | None = None,
        start_warm: Callable[..., None] | None = None,
        archives: Mapping[str, bytes] | None = None,
    ) -> None:
        """Start everything; from now on `_on_event` is called, on a thread of its own. Raises as `locked` does."""
        self.warm, self._timeout_seconds = start_warm is not None, timeout_seconds
        with locked(job) as locks:
            marks = dict.fromkeys(locks.values(), f"{self.name} (process {os.getpid()})")
            self._group = ProcessGroup(
                *(processes, self._on_event, timeout_seconds, scratch, {**files, **marks}),
                *(start_warm, network, self.is_read, archives),
                locks=[*locks],
                idle_seconds=self.idle_seconds,
                may_die=self.may_die,
            )

    def stop(self) -> None:
        """End the run now, within seconds, so interrupts wait until nothing of it is left."""
        with interrupts_deferred():
            super().stop()

    def _request_stop(self) -> None:
        self._group.stop()

    def _on_event(self, event: Event) -> None:
        if event["event"] == "started":
            self.process_ids[event["name"]] = event["pid"]
        elif event["event"] == "lines":
            self._receive_lines(event["name"], event["texts"], event["stream"])
        elif event["event"] == "silent":
            ask = threading.Thread(
                target=self._hang.ask, args=(self, event["supervisor"]), name="workshop-run"
            )
            ask.start()
        elif event["event"] == "exited" and event["code"] and not event["ours"]:
            self._failed.add(event["name"])
        elif event["event"] == "ended":
            self._reservation.release()
            if self.device is not None:
                self.remark = host_remark(self.devices, self.workers, cores())
            state, reason = (
                RunState.FAILED,
                f"{self.name} has ended ({event['outcome']}), and why is not known",
            )
            try:
                state, reason = self._verdict(event)
                if reason and self.network and self.warning:
                    reason += f"\nBefore the start there was a warning: {self.warning}"
            finally:  # or who waits for the run would wait for ever
                self._finish(state, reason)

    def _stream_of(self, process: str, worker: str, text: str, stream: str) -> str:
        return STACK if self._hang.take(process, worker, text) else stream

    def _verdict(self, event: Event) -> tuple[RunState, str]:
        if event["outcome"] in ("succeeded", "stopped"):
            return RunState(event["outcome"]), ""
        if event["outcome"] == "timeout":
            return RunState.FAILED, self._timed_out()
        if event.get("reason") is not None:
            explained = "\n".join(output.hints(event["reason"]))
            if self.process_ids:
                explained = output.explained(self, [event["name"], *self.workers])
            return RunState.FAILED, f"{self.name} {event['reason']}. {explained}".removesuffix(". ")
        if event["code"] is None:
            watch = "the process that watches over it was killed; its workers were ended with it"
            return RunState.FAILED, f"{self.name} failed: {watch}"
        return RunState.FAILED, self._blame(event["name"], event["code"])

    def _timed_out(self) -> str:
        """The message of a run that met its time limit."""
        late = f"{self.name} did not end within its timeout of {self._timeout_seconds:g} s"
        return f"{late}. {self._hang.explained(self)}"

    def _blame(self, name: str, code: int) -> str:
        """The message of a run that failed: the process `name` ended with `code` before any other had failed."""
        if name not in self.workers:  # mpirun ends with the code of the rank that failed, and says which
            worker, killed = output.culprit(line.text for line in self.logs(worker=name))
            name, code = worker or name, killed or code
        raising = (line.worker for line in self.logs() if output.TRACEBACK.search(line.text))
        raised = next((worker for worker in raising if worker in self._failed), name)
        if code == -signal.SIGABRT and raised in self.workers and raised != name:
            # PyTorch aborts a rank that ends while a peer has gone.
            ended = f"{raised} raised an exception, and {name} {output.how(code)}"
            return f"{self.name} failed: {ended}. {output.explained(self, [raised])}"
        others = "; the others were stopped" if len(self.workers) > 1 else ""
        rank = next((start["rank"] for start in self.starts if start["worker"] == name), None)
        who = f"{name} (rank {rank})" if rank is not None else name
        return f"{self.name} failed: {who} {output.how(code)}{others}. {output.explained(self, [name], code)}"


def _prepared(process: dict[str, Any], scratch: Path, hosts: Sequence[str]) -> dict[str, Any]:
    """`process` with variables by which Python answers where it stands, no proxy is asked, and MPI leaves no files."""
    given, name = process["environment"], "OMPI_MCA_btl_sm_backing_directory"
    paths = filter(None, [str(AT_START), given.get("PYTHONPATH")])
    variables = {"PYTHONPATH": os.pathsep.join(paths), **without_proxy(given, hosts)}
    if Path(process["argv"][0]).name != "mpirun":  # which removes its ranks' segments; those without it stay
        variables[name] = given.get(name, str(scratch))
    return {**process, "environment": {**given, **variables}}
