"""Processes that live and die together, watched over by a supervisor of their own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

from workshop_utils.network.wiring import Cable, Switch

SUPERVISOR = Path(__file__).with_name("supervisor.py")

Event = dict[str, Any]


@dataclass(frozen=True)
class Process:
    """One process to start: its command, its whole environment, its working folder.

    The group has succeeded when every `awaited` process has ended with 0; it has failed when any has not.
    One that is not awaited then gets time to end if it `leaves` by itself; any other is ended.
    """

    name: str
    argv: tuple[str, ...]
    environment: dict[str, str]
    folder: str
    awaited: bool = True
    network: Cable | None = None
    leaves: bool = True


class ProcessGroup:
    """Processes under one supervisor. `on_event` is called, on a thread of its own, with what they do.

    `scratch` is a folder that the supervisor makes, fills with `files` (text by relative path) and removes at
    the end. The events are those of `supervisor`; the last is always `ended`, and once it has come no process,
    and no folder, is left. With `start_warm`, a warm server's `start`, ranks are forked instead of executed.
    """

    def __init__(
        self,
        processes: Sequence[Process],
        on_event: Callable[[Event], None],
        timeout_seconds: float,
        scratch: Path | None = None,
        files: dict[str, str] | None = None,
        start_warm: Callable[[int, int], None] | None = None,
        network: Switch | None = None,
    ) -> None:
        self._on_event = on_event
        self._scratch = scratch
        self._sending = threading.Lock()
        control_reader, control_writer = os.pipe()
        events_reader, events_writer = os.pipe()
        self._supervisor: subprocess.Popen[bytes] | None = None
        try:
            if start_warm is not None:
                start_warm(control_reader, events_writer)
            else:
                self._supervisor = subprocess.Popen(
                    [sys.executable, "-E", "-s", "-S", str(SUPERVISOR)],
                    stdin=control_reader,
                    stdout=events_writer,
                    start_new_session=True,  # so that a terminal's Ctrl-C reaches us, and we decide
                )
        finally:
            os.close(control_reader)
            os.close(events_writer)
        self._control: BinaryIO = os.fdopen(control_writer, "wb", buffering=0)
        specification = {
            "owner": os.getpid(),
            "processes": [asdict(process) for process in processes],
            "timeout_seconds": timeout_seconds,
            "scratch": str(scratch) if scratch else None,
            "files": files or {},
            "network": asdict(network) if network else None,
        }
        self._listener = threading.Thread(
            target=self._listen, args=(os.fdopen(events_reader, "rb"),), name="workshop-run", daemon=True
        )
        self._listener.start()
        self._send((json.dumps(specification) + "\n").encode())

    def stop(self) -> None:
        """Ask for the end of everything; the event `ended` follows."""
        self._send(b"stop\n")

    def _send(self, data: bytes) -> None:
        with self._sending:
            try:
                while data and not self._control.closed:
                    data = data[self._control.write(data) :]
            except BrokenPipeError:
                return  # the supervisor has ended; the listener reports how

    def _listen(self, events: BinaryIO) -> None:
        last: Event = {}
        raised: Exception | None = None
        with events:
            for line in events:
                if not line.endswith(b"\n"):
                    break  # the supervisor was killed in the middle of a word
                last = json.loads(line)
                if last["event"] != "ended":
                    try:
                        self._on_event(last)
                    except Exception as error:  # the run must still learn of its end
                        raised = raised or error
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

        The kernel has ended its children by now. What those had started is known by the scratch folder's name,
        which is in the environment that it inherited.
        """
        if self._scratch is None:
            return
        mark = os.fsencode(self._scratch)
        while abandoned := [pid for pid in _process_ids() if mark in _environment_of(pid)]:
            for pid in abandoned:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        shutil.rmtree(self._scratch, ignore_errors=True)


def _process_ids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").glob("[0-9]*")]


def _environment_of(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return b""  # it has ended, or belongs to another user
