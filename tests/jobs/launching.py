"""Runs a job of `jobs/` on this machine, as the tests of jobs do."""

import os
import signal
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from conftest import eventually
from one_process import MLP

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local, ProcessRun
from workshop_utils.runs import RunFailed, RunState
from workshop_utils.strategies import MPI_ON_ONE_MACHINE, mpi_options
from workshop_utils.training import data

JOBS = Path(__file__).parents[2] / "jobs"
MPI = ("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *mpi_options(MPI_ON_ONE_MACHINE))


def job_of(name: str, **changes: object) -> TrainingJob:
    """The job called `name`, with these fields changed; its arguments may be written with underscores."""
    arguments = {key.replace("_", "-"): value for key, value in changes.pop("arguments", {}).items()}
    return TrainingJob.load(JOBS / name).replace(**{"timeout": "3min", "arguments": arguments, **changes})


def launched(name: str, folder: Path | None = None, warm: bool = True, **changes: object) -> ProcessRun:
    """The run of the job called `name`, once it has succeeded; its model is kept in `folder`."""
    outputs = {} if folder is None else {"outputs": str(folder)}
    with Local(warm=warm).launch(job_of(name, **outputs, **changes)) as run:
        return run.wait(200)


def killed(job: TrainingJob, worker: str, is_time: Callable[[ProcessRun], bool]) -> None:
    """Launch `job`, and kill `worker` once `is_time(run)`."""
    with Local(warm=True).launch(job) as run:
        assert eventually(lambda: is_time(run) or run.state is not RunState.RUNNING), "it is too slow"
        assert run.state is RunState.RUNNING, run.reason
        (pid,) = [start["pid"] for start in run.starts if start["worker"] == worker]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match=rf"{worker} \(rank \d\) was killed by SIGKILL"):
            run.wait(100)


def trained_by_one_process(
    width: int, batches: Iterable[list[int]], rate: Callable[[int], float]
) -> tuple[list[float], MLP]:
    """Each step's loss, and the network after it has taken `batches`, rows of the digits, at the rate of each step."""
    digits = data.arrays(data.prepare("digits"))
    images, labels = digits.train_images.astype(np.float64), digits.train_labels
    mlp, losses = MLP.initialise(images.shape[1], width, 10), []
    for step, rows in enumerate(batches):
        loss, gradients = mlp.gradients(images[rows], labels[rows])
        mlp = mlp.step(gradients, rate(step))
        losses.append(loss)
    return losses, mlp
