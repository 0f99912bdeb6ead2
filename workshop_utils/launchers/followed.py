"""A run that is followed from afar: its state and its log are read again and again until it has ended."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from typing import Protocol

from workshop_utils.launchers import output
from workshop_utils.runs import Run, RunState

Receive = Callable[[str, str, str], None]  # worker, text, stream

BLIND_SECONDS = 120.0  # how long a target may not answer before the run is given up


class Unreachable(RuntimeError):
    """The target did not answer; it may the next time."""


class Remote(Protocol):
    """A submitted job, as its target shows it."""

    def look(self) -> tuple[RunState, str]:
        """The job's state now, and why it failed, or what it waits for before it can start. Raises Unreachable."""

    def read(self, receive: Receive) -> None:
        """Pass on the lines that are new since the last call; after the job's end, all that are left.

        Raises Unreachable.
        """

    def stop(self) -> None:
        """End the job; returns once the target has agreed. Raises what the target says where it does not."""

    def close(self) -> None:
        """Remove what is left of the job on the target, and let go of connections. Called once, at the end."""


class FollowedRun(Run):
    """A job on another machine. Leaving its `with` block stops it.

    A thread reads state and log every `poll_seconds`. If the target does not answer for two minutes, the run fails
    with a message that says that the job may still be running. The message of a job that failed ends with the last
    lines of its log.
    """

    def __init__(
        self, name: str, workers: tuple[str, ...], remote: Remote, poll_seconds: float = 1.0
    ) -> None:
        super().__init__(name, workers)
        self._remote, self._poll_seconds = remote, poll_seconds
        self._wake = threading.Event()
        self._stopping = False
        threading.Thread(target=self._follow, name="workshop-run", daemon=True).start()

    def _request_stop(self) -> None:
        self._stopping = True
        try:
            self._remote.stop()
        except BaseException:
            self._stopping = False
            raise
        self._wake.set()

    def _follow(self) -> None:
        state, reason = RunState.FAILED, f"{self.name} could not be followed, and may still be running"
        try:
            state, reason = self._until_ended()
        except Exception as error:
            reason = f"{reason}. {type(error).__name__}: {error}"
            raise
        finally:
            self._remote.close()
            self._finish(state, reason)

    def _until_ended(self) -> tuple[RunState, str]:
        answered = time.monotonic()
        while True:
            try:
                state, reason = self._remote.look()
                self.waits_for = reason if state is RunState.RUNNING else ""
                self._remote.read(self._receive_line)
                answered = time.monotonic()
            except Unreachable as error:
                state = RunState.RUNNING
                if time.monotonic() - answered > BLIND_SECONDS:
                    return RunState.FAILED, f"{self.name} does not answer, and may still be running. {error}"
            if state is not RunState.RUNNING:
                # Its end may have come just before the stop.
                stopped = self._stopping and state is RunState.FAILED
                return (RunState.STOPPED, "") if stopped else (state, self._explained(state, reason))
            self._wake.wait(self._poll_seconds)
            self._wake.clear()

    def _explained(self, state: RunState, reason: str) -> str:
        """`reason`, and if the run failed the last lines of the worker that it names, or else of all."""
        if state is not RunState.FAILED:
            return reason
        named = next((worker for worker in self.workers if re.search(rf"\b{worker}\b", reason)), None)
        lines = [line.text if named else str(line) for line in self.logs(worker=named)]
        return f"{reason.removesuffix('.')}. {output.last_lines(lines)}" if lines else reason
