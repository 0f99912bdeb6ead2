"""Every failure of lesson 10 happens, is named, and is mended, between real processes."""

import re

import numpy as np
import pytest
from launching import job_of, launched

from workshop_utils.launchers.local import Local
from workshop_utils.launchers.restarting import Restarting
from workshop_utils.network import Network, availability
from workshop_utils.runs import RunFailed
from workshop_utils.training import checkpoints

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


KILLED = {"kill_rank": 1, "kill_step": 37}


def failure_of(job):
    """The run of a job that must fail."""
    with Local(warm=True).launch(job) as run, pytest.raises(RunFailed):
        run.wait(100)
    return run


def restarted(job, restarts=1, saved=None, **options):
    """The run of a job that ends well with so many restarts."""
    with Restarting(Local(warm=True, **options), restarts, saved).launch(job) as run:
        return run.wait(100)


def weights(folder):
    with np.load(folder / "model.npz") as model:
        return model["weights"].tobytes()


# Ranks that disagree


def test_a_barrier_for_one_rank_alone_hangs_and_the_report_has_both_stacks():
    run = failure_of(job_of("digits_mismatched", workers=3, timeout="3s"))
    said, *stacks = run.reason.split("\nThe stack of ")
    assert "worker-0 waits at train.py, line " in said
    assert "(in barrier) after step 5. " in said
    assert "worker-1, worker-2 wait at train.py, line " in said
    assert "(in all_reduce) after step 5." in said
    (rank_0,) = [stack for stack in stacks if stack.startswith("worker-0,")]
    (rest,) = [stack for stack in stacks if stack.startswith("worker-1, worker-2,")]
    assert "\n  barrier (torch/distributed/distributed_c10d.py, line " in rank_0
    assert "\n  average (train.py, line " in rest
    assert rest.rpartition("\n")[2].startswith("  <module> (train.py, line ")


def test_pytorch_names_the_sizes_that_differ_when_it_is_asked_to_look():
    run = failure_of(job_of("digits_mismatched", workers=3, arguments={"mistake": "size", "check": 1}))
    assert "Detected mismatch between collectives on ranks" in run.reason
    assert "TensorShape=[639]" in run.reason


# Uneven batches


def test_a_rank_with_one_batch_more_waits_in_it_for_the_others():
    run = failure_of(job_of("digits_uneven", workers=3, timeout="3s"))
    assert "worker-0 waits at train.py, line " in run.reason
    assert "(in backward)" in run.reason
    assert "worker-1, worker-2 wait at train.py, line " in run.reason


@pytest.mark.parametrize(
    ("workers", "remedy", "first", "others", "more"),
    [(3, "join", 6, 5, 1), (2, "drop", 5, 5, 0), (4, "pad", 6, 6, 4)],
)
def test_each_remedy_lets_all_end_and_uses_the_images_that_it_says(workers, remedy, first, others, more):
    run = launched("digits_uneven", workers=workers, arguments={"remedy": remedy})
    for _, epoch in run.metrics.groupby("epoch"):
        ranks = epoch.set_index("rank").sort_index()
        assert ranks["step"].tolist() == [first] + [others] * (workers - 1)
        assert ranks["images"].sum() == 5 * 16 * workers + more


# A killed worker, and restarts


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


def test_the_same_batch_is_taken_whatever_the_number_of_workers(whole, tmp_path):
    launched("digits_resumable", tmp_path, workers=3)
    both = (np.frombuffer(each, np.float32) for each in (whole, weights(tmp_path)))
    np.testing.assert_allclose(*both, rtol=0, atol=1e-5)  # float32, another order of adding


@pytest.mark.parametrize("forgotten", ["velocity", "step"])
def test_whatever_a_checkpoint_forgets_is_seen_in_the_weights(forgotten, whole, tmp_path):
    job = job_of("digits_resumable", workers=2, arguments={**KILLED, "forget": forgotten})
    restarted(job, output=tmp_path)
    assert weights(tmp_path) != whole


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(whole, tmp_path):
    saved = tmp_path / "saved"
    with pytest.raises(RunFailed):
        restarted(job_of("digits_resumable", workers=2, arguments=KILLED), 0, saved)
    newest = checkpoints.paths(saved)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    run = restarted(job_of("digits_resumable", workers=2), 0, saved, output=tmp_path / "again")
    said = [line.text for line in run.logs(worker="worker-0")]
    assert said[0].startswith("step-00000030.checkpoint holds ")
    assert said[1] == "resumed after step 20"
    assert weights(tmp_path / "again") == whole


# A lost link

NAMESPACES = pytest.param(
    Network(bandwidth="100Mbit"),
    marks=pytest.mark.skipif(availability() == "none", reason="no network namespaces here"),
    id="a card switched off",
)


@pytest.mark.parametrize("network", [pytest.param(None, id="silence"), NAMESPACES])
def test_a_lost_link_is_found_by_time_out_and_a_restart_mends_it(network):
    run = restarted(job_of("digits_lost_link", workers=3, arguments={"patience": 1}), network=network)
    assert bool(run.network) is (network is not None)
    assert "PeerSilent after " in run.attempts[0].reason
    told = [line.text for line in run.attempts[0].logs(worker="worker-2")]
    assert ("my card is switched off" in told) is (network is not None)
    waited = run.metrics["detected_seconds"].dropna()
    assert waited.min() >= 1.0
    assert run.metrics.groupby("attempt")["step"].max().tolist() == [6, 20]


def test_a_killed_rank_of_the_ring_is_known_long_before_the_time_out():
    run = failure_of(job_of("digits_lost_link", workers=3, arguments={"failure": "kill", "patience": 60}))
    assert re.search(r"killed by SIGKILL|PeerDied after .* rank 2 has died", run.reason), run.reason
    assert run.seconds < 50
