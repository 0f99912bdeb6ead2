"""A job whose worker is killed goes on from its last whole checkpoint, and ends with the same bits."""

import numpy as np
import pytest
from launching import job_of, launched

from workshop_utils.launchers.local import Local
from workshop_utils.launchers.restarting import Restarting
from workshop_utils.runs import RunFailed
from workshop_utils.training import checkpoints

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]


KILLED = {"kill_rank": 1, "kill_step": 37}


def restarted(job, restarts=1, **options):
    """The run of a job that ends well with so many restarts."""
    with Restarting(Local(warm=True, **options), restarts).launch(job) as run:
        return run.wait(100)


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
    run = restarted(job_of("digits_resumable", workers=2, arguments=KILLED), output=tmp_path)
    assert "worker-1 (rank 1) was killed by SIGKILL" in run.attempts[0].reason
    steps = run.metrics.dropna(subset=["loss"])
    steps = steps[steps["rank"] == 0]
    # Rank 0 may be stopped before it reports the step in which the other one was killed.
    assert steps["step"].tolist() in ([*range(1, last + 1), *range(31, 61)] for last in (36, 37))
    assert weights(tmp_path) == whole


@pytest.mark.parametrize("forgotten", ["velocity", "step"])
def test_whatever_a_checkpoint_forgets_is_seen_in_the_weights(forgotten, whole, tmp_path):
    job = job_of("digits_resumable", workers=2, arguments={**KILLED, "forget": forgotten})
    restarted(job, output=tmp_path)
    assert weights(tmp_path) != whole


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path):
    saved = tmp_path / "saved"
    job = job_of("digits_resumable", workers=2, checkpoints=str(saved))
    with pytest.raises(RunFailed):
        restarted(job.replace(arguments={"kill-rank": 1, "kill-step": 37}), 0)
    newest = checkpoints.paths(saved)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    run = restarted(job, 0, output=tmp_path / "again")
    said = [line.text for line in run.logs(worker="worker-0")]
    assert said[0].startswith("step-00000030.checkpoint holds ")
    assert said[1] == "resumed after step 20"
    assert weights(tmp_path / "again") == whole
