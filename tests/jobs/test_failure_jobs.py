"""A job whose worker is killed goes on from its last whole checkpoint, and ends with the same bits."""

import numpy as np
import pytest
from launching import job_of, launched

from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunFailed
from workshop_utils.training import checkpoints

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]


KILLED = {"kill_rank": 1, "kill_step": 37}


def killed(saved, **arguments):
    """The run of the job whose worker 1 kills itself; its checkpoints are in the folder `saved`."""
    job = job_of("digits_resumable", workers=2, checkpoints=str(saved), arguments={**KILLED, **arguments})
    with Local(warm=True).launch(job) as run:
        with pytest.raises(RunFailed, match=r"worker-1 \(rank 1\) was killed by SIGKILL"):
            run.wait(100)
        return run


def resumed(saved, output, **arguments):
    """The run of the job that goes on from what is in `saved`, and ends well."""
    return launched("digits_resumable", output, workers=2, checkpoints=str(saved), arguments=arguments)


def weights(folder):
    with np.load(folder / "model.npz") as model:
        return model["weights"].tobytes()


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The weights that two workers come to without an interruption."""
    folder = tmp_path_factory.mktemp("whole")
    launched("digits_resumable", folder, workers=2)
    return weights(folder)


def test_an_interrupted_run_ends_with_the_same_bits_as_an_uninterrupted_one(whole, tmp_path):
    runs = killed(tmp_path / "saved"), resumed(tmp_path / "saved", tmp_path)
    before, after = (run.metrics.dropna(subset=["loss"]).query("rank == 0")["step"].tolist() for run in runs)
    # Rank 0 may be stopped before it reports the step in which the other one was killed.
    assert before in ([*range(1, last + 1)] for last in (36, 37))
    assert after == [*range(31, 61)]
    assert weights(tmp_path) == whole


@pytest.mark.parametrize("forgotten", ["velocity", "step"])
def test_whatever_a_checkpoint_forgets_is_seen_in_the_weights(forgotten, whole, tmp_path):
    killed(tmp_path / "saved", forget=forgotten)
    resumed(tmp_path / "saved", tmp_path, forget=forgotten)
    assert weights(tmp_path) != whole


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path):
    saved = tmp_path / "saved"
    killed(saved)
    newest = checkpoints.paths(saved)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    run = resumed(saved, tmp_path / "again")
    said = [line.text for line in run.logs(worker="worker-0")]
    assert said[0].startswith("step-00000030.checkpoint holds ")
    assert said[1] == "resumed after step 20"
    assert weights(tmp_path / "again") == whole
