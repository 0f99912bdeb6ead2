"""A run whose processes are on this machine: what such runs have in common, whichever platform they emulate.

A subclass reserves the ports at which its processes listen, and starts them as the last thing that it does:

    with reserve(2) as reservation:
        super().__init__(name, workers, reservation)
        ...
        self._start(processes, timeout_seconds, scratch_folder(), files)
"""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import uuid
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import endings
from workshop_utils.launchers.local import mpirun
from workshop_utils.launchers.local.group import Event, Process, ProcessGroup
from workshop_utils.launchers.local.imports import imported, packages
from workshop_utils.network.ports import PortReservation
from workshop_utils.network.wiring import Switch
from workshop_utils.runs import Run, RunState

# A job must not believe that it is part of the run from which it was launched, nor plot into a notebook.
FOREIGN_VARIABLES = re.compile(
    r"(OMPI_|PMIX_|PMI_|PRTE_|HOROVOD_|SM_|TORCHELASTIC_|WORKSHOP_(DATA|MODEL|CHECKPOINTS|SERVERS|SECRET|LINK|INDEX)$"
    r"|(TF_CONFIG|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|MASTER_ADDR|MASTER_PORT|MPLBACKEND)$)"
)


@contextlib.contextmanager
def reserve(count: int) -> Iterator[PortReservation]:
    """`count` ports that stay reserved after the block, for the run that it starts; if it raises, none does."""
    reservation = PortReservation(count)
    try:
        yield reservation
    except BaseException:
        reservation.release()
        raise


def scratch_folder() -> Path:
    """Where a run's own files are to lie: a folder that its supervisor makes, and removes at the end."""
    return Path(tempfile.gettempdir()) / f"workshop-{uuid.uuid4().hex}"


def inherited_variables(*foreign: re.Pattern[str]) -> dict[str, str]:
    """This process's variables, but for those of the run from which it was launched, and those that match `foreign`."""
    left_out = (FOREIGN_VARIABLES, *foreign)
    return {
        name: value
        for name, value in os.environ.items()
        if not any(pattern.match(name) for pattern in left_out)
    }


def await_horovod(job: TrainingJob) -> None:
    """Where the job's script imports Horovod, wait while that still compiles. Raises JobError where it is missing."""
    if "horovod" in packages(imported(job.script_path)):
        from workshop_utils.setup import lab  # here, since few jobs need it

        lab.wait_for_horovod(job)


class ProcessRun(Run):
    """A run whose processes stand under one supervisor on this machine. It holds `reservation` until it has ended."""

    def __init__(self, name: str, workers: tuple[str, ...], reservation: PortReservation) -> None:
        super().__init__(name, workers)
        self._reservation = reservation
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
        if event["event"] == "line":
            self._take_line(event["name"], event["text"], event["stream"])
        elif event["event"] == "silent":
            self._process_states = {int(pid): state for pid, state in event["processes"].items()}
        elif event["event"] == "ended":
            self._reservation.release()
            self._finish(*self._verdict(event))

    def _take_line(self, name: str, text: str, stream: str) -> None:
        """Take in a line of the process `name`; mpirun's are those of its ranks."""
        for line in mpirun.lines(name, text, stream):
            self._receive_line(*line)

    def _verdict(self, event: Event) -> tuple[RunState, str]:
        if event["outcome"] in ("succeeded", "stopped"):
            return RunState(event["outcome"]), ""
        if event["outcome"] == "timeout":
            return RunState.FAILED, self._timed_out()
        return RunState.FAILED, self._blame(event["name"], event["code"], event.get("reason"))

    @abstractmethod
    def _timed_out(self) -> str:
        """The message of a run that met its time limit."""

    def _blame(self, name: str, code: int | None, reason: str | None) -> str:
        """Who failed, how, and what it printed last.

        `code` is None where nobody knows it; with a `reason`, something could not be started.
        """
        if reason is not None:
            return endings.not_started(self.name, reason)
        if code is None:
            return endings.unwatched(self.name)
        texts = [line.text for line in self.logs(worker=name)]
        return f"{self.name} failed: {name} {endings.how(code)}. {endings.last_lines(texts)}"
