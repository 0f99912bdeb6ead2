"""Runs a job of `jobs/` on this machine, as the tests of jobs do."""

from pathlib import Path

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local, ProcessRun

JOBS = Path(__file__).parents[2] / "jobs"


def job_of(name: str, **changes: object) -> TrainingJob:
    """The job called `name`, with these fields changed; its arguments may be written with underscores."""
    arguments = {key.replace("_", "-"): value for key, value in changes.pop("arguments", {}).items()}
    return TrainingJob.load(JOBS / name).replace(**{"timeout": "3min", "arguments": arguments, **changes})


def launched(name: str, folder: Path | None = None, warm: bool = True, **changes: object) -> ProcessRun:
    """The run of the job called `name`, once it has succeeded; its model is kept in `folder`."""
    with Local(warm=warm, output=folder).launch(job_of(name, **changes)) as run:
        return run.wait(200)
