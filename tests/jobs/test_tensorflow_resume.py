"""TensorFlow's jobs go on after a failure: mirrored workers to the same bits, parameter servers from the same step."""

from pathlib import Path

import numpy as np
import pytest
from launching import job_of, killed

from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunFailed
from workshop_utils.training import checkpoints

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

PATIENCE_SECONDS = 100


def kill_after(step, job, worker):
    """Launch `job`, and kill `worker` once there is a checkpoint of `step` or a later one."""
    folder = Path(job.checkpoints)
    killed(
        job,
        worker,
        lambda run: any(path >= checkpoints.path_of(folder, step) for path in checkpoints.paths(folder)),
    )


def trained(job, folder):
    """The run of `job` to its end, the step after which it resumed (0: it did not), and the model that it wrote."""
    with Local(warm=True, output=folder).launch(job) as run:
        run.wait(PATIENCE_SECONDS)
    words = [line.text.split() for line in run.logs() if line.text.startswith("resumed after step ")]
    with np.load(folder / "model.npz") as arrays:
        return run, int(words[0][-1]) if words else 0, {name: arrays[name].tobytes() for name in arrays.files}


def test_mirrored_workers_that_were_killed_end_with_the_bits_of_an_uninterrupted_run(tmp_path):
    workers, epochs = 4, 24  # of two workers' gradients the sum is the same in either order
    arguments = {"epochs": epochs, "batch_size": 32, "hidden": 33, "checkpoint_steps": 15}
    job = job_of("mnist_multi_worker_mirrored", workers=workers, arguments=arguments)
    _, begin, expected = trained(job, tmp_path / "whole")
    assert begin == 0

    job = job.replace(checkpoints=str(tmp_path / "checkpoints"))
    kill_after(30, job, f"worker-{workers - 1}")
    run, begin, weights = trained(job, tmp_path / "resumed")
    last = int(run.metrics["step"].max())
    assert 30 <= begin < last
    assert begin % 15 == 0
    assert weights == expected
    # The others have no checkpoint of their own, and take the next step with rank 0.
    assert set(run.metrics.dropna(subset=["loss"]).groupby("rank")["step"].min()) == {begin + 1}
    assert set(run.metrics["device"].dropna()) == {"cpu"}

    run, begin, weights = trained(job, tmp_path / "again")
    assert begin == last
    assert run.metrics["loss"].isna().all(), "nothing is left to train"
    assert weights == expected
    with pytest.raises(RunFailed, match=rf"is of step {last}, and this run would end at step "):
        trained(job.replace(arguments={"epochs": epochs - 1}), tmp_path)


def test_a_coordinator_goes_on_from_the_end_of_an_epoch_when_a_worker_was_killed(tmp_path):
    arguments = {"epochs": 12, "checkpoint_steps": 1}
    job = job_of("mnist_parameter_server", workers=2, arguments=arguments)
    job = job.replace(checkpoints=str(tmp_path / "checkpoints"))
    kill_after(46, job, "worker-1")  # the first epoch has so many steps
    run, begin, _ = trained(job, tmp_path)
    assert begin in range(46, 12 * 46, 46)
    tested = run.metrics.dropna(subset=["accuracy"])
    assert tested["step"].tolist() == list(range(begin + 46, 12 * 46 + 1, 46))
    assert tested["accuracy"].iloc[-1] > 0.9
    # The weights were there from the start: no worse than after the epoch that was saved.
    assert run.metrics["test_loss"].dropna().iloc[0] < 0.5
    assert run.metrics.dropna(subset=["device"]).set_index("worker")["device"].to_dict() == {
        "worker-0": "cpu",
        "worker-1": "cpu",
    }
    with pytest.raises(
        RunFailed, match=r"is of step 552, and this run would end at step 506: ask for more epochs"
    ):
        trained(job.replace(arguments={"epochs": 11}), tmp_path)
