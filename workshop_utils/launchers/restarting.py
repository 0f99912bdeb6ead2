"""Restart a job that failed, from its last checkpoint: what `torchrun --max-restarts` does, on any target.

    launcher = Restarting(Local(warm=True), restarts=2)
    with launcher.launch(job) as run:
        run.wait()
    run.attempts        # one Run for each start

All ranks are restarted, not only the one that failed: the others' collectives are broken, and they have taken steps
that a new rank would not know of. Horovod's elastic mode (`horovod_elastic`) keeps the survivors instead.

The script finds what it needs through `place`: `checkpoint_folder()`, which lasts from one start to the next, and
`restart_count()`, under the name that torchrun has for it. Platforms restart by themselves: SageMaker has a
RetryStrategy, a PyTorchJob a backoffLimit.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.targets import Launcher
from workshop_utils.runs import Run, RunState


@dataclass(frozen=True)
class Restarting:
    """Launches jobs with `launcher`, and again whenever they fail, at most `restarts` times.

    A hang counts as a failure once the job's timeout has ended it. A job without `checkpoints` has some that are gone
    when the run ends.

    Raises:
        JobError: if `restarts` is less than 0.
    """

    launcher: Launcher
    restarts: int

    def __post_init__(self) -> None:
        if self.restarts < 0:
            raise JobError(f"restarts is {self.restarts}; it must be at least 0")

    def render(self, job: TrainingJob) -> Any:
        """The request of the first start. Starts nothing. Raises as the launcher does."""
        folder = self.folder_for(job) or Path(tempfile.gettempdir()) / "workshop-checkpoints-..."
        return self.launcher.render(attempt_of(job, 0, folder))

    def folder_for(self, job: TrainingJob) -> Path | None:
        """Where checkpoints of `job` stay; None for a folder that goes with the run."""
        folder = job.storage("checkpoints", "folder")
        return Path(folder).absolute() if folder else None

    def launch(self, job: TrainingJob) -> RestartedRun:
        """Start the job. Raises as the launcher does; nothing has been started then."""
        return RestartedRun(job, self)


def attempt_of(job: TrainingJob, restarts: int, checkpoints: Path) -> TrainingJob:
    """`job` as it is started after so many restarts."""
    count = {"TORCHELASTIC_RESTART_COUNT": str(restarts)}
    return job.replace(checkpoints=str(checkpoints), environment=count)


class RestartedRun(Run):
    """A job from its first start to its last. `attempts` are the runs so far, one a start.

    Records and metrics carry the number of their `attempt`, from 0.
    """

    def __init__(self, job: TrainingJob, launcher: Restarting) -> None:
        self._job, self._launcher = job, launcher
        folder = launcher.folder_for(job)
        self._own_folder = folder is None
        self._folder = folder or Path(tempfile.mkdtemp(prefix="workshop-checkpoints-"))
        self._stopping = False
        self._starting = threading.Lock()  # between a new start and a stop
        self.attempts: list[Run] = []
        try:
            first = self._start()
        except BaseException:
            self._clean_up()
            raise
        super().__init__(job.name, first.workers)
        self.network: str | None = getattr(first, "network", None)
        threading.Thread(target=self._see_through, name="workshop-run", daemon=True).start()

    def _records_of(self, kind: str) -> list[dict[str, Any]]:
        attempts = enumerate(self.attempts)
        return [{**each, "attempt": n} for n, run in attempts for each in run._records_of(kind)]

    def _request_stop(self) -> None:
        with self._starting:
            self._stopping = True
            self.attempts[-1].stop()

    def _start(self) -> Run:
        run = self._launcher.launcher.launch(attempt_of(self._job, len(self.attempts), self._folder))
        self.attempts.append(run)
        return run

    def _see_through(self) -> None:
        """Follow one attempt after the other; on a thread of its own."""
        state, reason = RunState.FAILED, f"{self.name} could not be followed"
        try:
            state, reason = self._until_decided()
        except (OSError, ValueError) as error:  # of a later start, since the first one's goes to the caller
            reason = f"{self.name} could not be started again: {error}"
        finally:
            self._clean_up()
            self._finish(state, reason)

    def _until_decided(self) -> tuple[RunState, str]:
        while True:
            run = self.attempts[-1]
            for line in run.logs(follow=True):
                with self._changed:
                    seconds = line.seconds + run.launched_at - self.launched_at
                    self._lines.append(replace(line, seconds=seconds))
                    self._changed.notify_all()
            if run.state is not RunState.FAILED:
                return run.state, ""
            with self._starting:
                if self._stopping:
                    return RunState.STOPPED, ""
                if not self._should_restart(run):
                    count = len(self.attempts)
                    times = "once" if count == 2 else f"{count - 1} times"
                    before = f"\n{self.name} had been restarted {times} before." if count > 1 else ""
                    return RunState.FAILED, run.reason + before
                self._start()

    def _should_restart(self, run: Run) -> bool:
        """Whether the job is started again after `run`, which has failed."""
        return len(self.attempts) <= self._launcher.restarts

    def _clean_up(self) -> None:
        if self._own_folder:
            shutil.rmtree(self._folder, ignore_errors=True)
