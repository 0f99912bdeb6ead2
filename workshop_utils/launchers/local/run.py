"""A run of processes on this machine.

An emulator of another target subclasses `ProcessRun` to tell, in that target's words, how a run failed. It reserves the
ports on which its processes listen, and starts them as the last step of its constructor:

    with reserve(2) as reservation:
        super().__init__(name, workers, reservation)
        ...
        self._start(processes, timeout_seconds, scratch_folder(), files)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from workshop_utils.launchers import output
from workshop_utils.launchers.local import hang
from workshop_utils.launchers.local.group import Event, Process, ProcessGroup
from workshop_utils.network.ports import PortReservation
from workshop_utils.network.wiring import Switch
from workshop_utils.runs import Run, RunState


class ProcessRun(Run):
    """A run whose processes stand under one supervisor on this machine. It holds `reservation` until it has ended.

    Attributes:
        process_ids: of its processes, by name.
        network: what network is emulated, and how; None where there is none.
        emulation: only how.
        warm: whether its ranks were forked from a warm server.
    """

    network: str | None = None
    emulation: str | None = None

    def __init__(self, name: str, workers: tuple[str, ...], reservation: PortReservation) -> None:
        super().__init__(name, workers)
        self.process_ids: dict[str, int] = {}
        self.warm = False
        self._reservation = reservation
        self._timeout_seconds = 0.0
        self._process_states: dict[int, str] = {}  # at the time limit, by process id

    def _start(
        self,
        processes: Sequence[Process],
        timeout_seconds: float,
        scratch: Path,
        files: dict[str, str],
        network: Switch | None = None,
        start_warm: Callable[[int, int], None] | None = None,
    ) -> None:
        """Start everything; from now on `_on_event` is called, on a thread of its own."""
        self.warm, self._timeout_seconds = start_warm is not None, timeout_seconds
        self._group = ProcessGroup(
            processes,
            self._on_event,
            timeout_seconds,
            scratch=scratch,
            files=files,
            start_warm=start_warm,
            network=network,
        )

    def _request_stop(self) -> None:
        self._group.stop()

    def _on_event(self, event: Event) -> None:
        if event["event"] == "started":
            self.process_ids[event["name"]] = event["pid"]
        elif event["event"] == "line":
            self._take_line(event["name"], event["text"], event["stream"])
        elif event["event"] == "silent":
            self._process_states = {int(pid): state for pid, state in event["processes"].items()}
        elif event["event"] == "ended":
            self._reservation.release()
            self._finish(*self._verdict(event))

    def _take_line(self, name: str, text: str, stream: str) -> None:
        for line in output.attributed(name, text, stream):
            self._receive_line(*line)

    def _verdict(self, event: Event) -> tuple[RunState, str]:
        if event["outcome"] in ("succeeded", "stopped"):
            return RunState(event["outcome"]), ""
        if event["outcome"] == "timeout":
            return RunState.FAILED, self._timed_out()
        if event.get("reason") is not None:
            return RunState.FAILED, output.not_started(self.name, event["reason"])
        if event["code"] is None:
            return RunState.FAILED, output.unwatched(self.name)
        return RunState.FAILED, self._blame(event["name"], event["code"])

    def _timed_out(self) -> str:
        """The message of a run that met its time limit."""
        return hang.timed_out(self, self._timeout_seconds, self._process_states)

    def _blame(self, name: str, code: int) -> str:
        """The message of a run that failed: the process `name` ended with `code` before any other had failed."""
        if name not in self.workers:  # mpirun ends with the code of the rank that failed, and says which
            worker, killed = output.culprit(line.text for line in self.logs(worker=name))
            name, code = worker or name, killed or code
        texts = [line.text for line in self.logs(worker=name)]
        others = "; the others were stopped" if len(self.workers) > 1 else ""
        rank = next((start["rank"] for start in self.starts if start["worker"] == name), None)
        who = f"{name} (rank {rank})" if rank is not None else name
        return f"{self.name} failed: {who} {output.how(code)}{others}. {output.last_lines(texts)}"
