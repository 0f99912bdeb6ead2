"""A run on another machine: its state and its log are polled until it has ended."""

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
STOP_SECONDS = 300.0  # how long a target may take to end a job that it has agreed to stop


class Unreachable(RuntimeError):
    """The target did not answer; it may the next time. An OSError counts as one."""


class RemoteJob(Protocol):
    """A submitted job, as its target shows it."""

    def poll(self) -> tuple[RunState, str]:
        """The job's state now, and why it failed, or what it waits for before it can start. Raises Unreachable."""

    def read(self, receive: Receive) -> None:
        """Pass on the lines that are new since the last call; after the job's end, all that are left.

        Raises Unreachable.
        """

    def stop(self) -> None:
        """End the job; returns once the target has agreed. Raises what the target says where it does not."""

    def close(self) -> None:
        """Remove what is left of the job on the target; by default nothing is. Called once, at the end."""
        return


class RemoteRun(Run):
    """A job on another machine. Leaving its `with` block stops it, even a job whose run was given up.

    A thread reads state and log every `poll_seconds`. If the target does not answer for two minutes, the run fails
    with a message that says that the job may still be running. The message of a job that failed ends with the cause
    in its log, and where this machine's copy of it is.
    """

    def __init__(
        self,
        name: str,
        workers: tuple[str, ...],
        job: RemoteJob,
        poll_seconds: float = 1,
        outputs: str | None = None,
    ) -> None:
        super().__init__(name, workers, outputs)
        self._remote, self._poll_seconds = job, poll_seconds
        self._wake = threading.Event()
        self._is_stopping = False  # the target was asked to stop the job, and has not refused
        self._stopped_at: float | None = None  # when it agreed
        self._has_ended = False  # the target said so
        threading.Thread(target=self._follow, name="workshop-run", daemon=True).start()

    def stop(self) -> None:
        """End the job; returns when the target reports its end. Raises what the target says where it refuses."""
        super().stop()
        if not self._has_ended and self._stopped_at is None:  # given up, but perhaps still running
            self._request_stop()

    def _request_stop(self) -> None:
        self._is_stopping = True  # before the target agrees: the job's end may be seen at once
        try:
            self._remote.stop()
        except BaseException:
            self._is_stopping = False
            raise
        self._stopped_at = time.monotonic()
        self._wake.set()

    def _follow(self) -> None:
        state, reason = RunState.FAILED, f"{self.name} could not be followed, and may still be running"
        try:
            state, reason = self._until_ended()
        except Exception as error:
            reason = f"{reason}. {type(error).__name__}: {error}"
            raise
        finally:
            try:
                self._remote.close()
            finally:
                self._finish(state, reason)

    def _until_ended(self) -> tuple[RunState, str]:
        answered = time.monotonic()
        while True:
            try:
                state, reason = self._remote.poll()
                answered = time.monotonic()
            except (Unreachable, OSError) as error:
                state, reason = RunState.RUNNING, ""
                if time.monotonic() - answered > BLIND_SECONDS:
                    lost = f"{self.name} does not answer, and may still be running. {error}"
                    return (RunState.STOPPED, "") if self._stopped_at else (RunState.FAILED, lost)
            self.waits_for = reason if state is RunState.RUNNING else ""
            self._read()
            if state is not RunState.RUNNING:
                self._has_ended = True
                return self._outcome(state, reason)
            if self._stopped_at is not None and time.monotonic() - self._stopped_at > STOP_SECONDS:
                return RunState.STOPPED, ""
            self._wake.wait(self._poll_seconds)
            self._wake.clear()

    def _read(self) -> None:
        """Take in what is new in the log; a log that cannot be read does not change how the job ends."""
        try:
            self._remote.read(self._receive_line)
            self._log.flush()
        except (Unreachable, OSError) as error:
            warning = f"the log cannot be read: {error}"
            if all(line.text != warning for line in self.logs(worker=self.name)):
                self._receive_line(self.name, warning, "stderr")

    def _outcome(self, state: RunState, reason: str) -> tuple[RunState, str]:
        """How the run ended, once the target has said how the job did."""
        if self._is_stopping and state is RunState.FAILED:
            return RunState.STOPPED, ""
        if not self._is_stopping and state is RunState.STOPPED:
            return RunState.FAILED, f"{self.name} was stopped, but not by this run"
        return state, self._explained(reason) if state is RunState.FAILED else reason

    def _explained(self, reason: str) -> str:
        """`reason`, and the cause in what the worker that it names has printed, or else all."""
        named = next((worker for worker in self.workers if re.search(rf"\b{worker}\b", reason)), None)
        printed = {line.worker for line in self.logs()}
        names = printed & {named} if named else printed
        return f"{reason.removesuffix('.')}. {output.explained(self, names)}" if names else reason
