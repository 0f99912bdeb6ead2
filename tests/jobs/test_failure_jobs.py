"""Every failure of lesson 10 happens, is named, and is mended, between real processes."""

import re
from pathlib import Path

import numpy as np
import pytest

from workshop_utils import checkpoints
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local, LocalRun
from workshop_utils.launchers.restarting import Restarting
from workshop_utils.network import Network, availability
from workshop_utils.runs import Run, RunFailed, RunState

JOBS = Path(__file__).parents[2] / "jobs"

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


def job_of(name: str, workers: int, **changes) -> TrainingJob:
    return TrainingJob.load(JOBS / name).replace(**{"workers": workers, "timeout": "2min", **changes})


def failure_of(job: TrainingJob, network: Network | None = None) -> LocalRun:
    """The run of a job that must fail."""
    with Local(warm=True, network=network).launch(job) as run, pytest.raises(RunFailed):
        run.wait(100)
    return run


def ended_well(job: TrainingJob, **options) -> LocalRun:
    with Local(warm=True, **options).launch(job) as run:
        return run.wait(100)


def weights(folder: Path) -> bytes:
    with np.load(folder / "model.npz") as model:
        return model["weights"].tobytes()


# Ranks that disagree


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_barrier_for_one_rank_alone_hangs_and_the_report_has_both_stacks(workers: int) -> None:
    run = failure_of(job_of("digits_mismatched", workers, timeout="3s"))
    said, *stacks = run.reason.split("\nThe stack of ")
    others = ", ".join(f"worker-{rank}" for rank in range(1, workers))
    assert "worker-0 waits at train.py, line " in said
    assert "(in barrier) after step 5. " in said
    assert f"{others} wait{'s' if workers == 2 else ''} at train.py, line " in said
    assert "(in all_reduce) after step 5." in said
    (rank_0,) = [stack for stack in stacks if stack.startswith("worker-0,")]
    (rest,) = [stack for stack in stacks if stack.startswith(f"{others},")]
    assert "\n  barrier (torch/distributed/distributed_c10d.py, line " in rank_0
    assert "\n  average (train.py, line " in rest
    assert rest.rpartition("\n")[2].startswith("  <module> (train.py, line ")


def test_pytorch_names_the_sizes_that_differ_when_it_is_asked_to_look() -> None:
    run = failure_of(job_of("digits_mismatched", 3, arguments={"mistake": "size", "check": 1}))
    assert "Detected mismatch between collectives on ranks" in run.reason
    assert "TensorShape=[639]" in run.reason


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_without_the_mistake_all_ranks_come_to_the_end(workers: int) -> None:
    run = ended_well(job_of("digits_mismatched", workers, arguments={"mistake": "none"}))
    assert run.metrics.groupby("rank")["step"].max().tolist() == [20] * workers


# Uneven batches


def test_a_rank_with_one_batch_more_waits_in_it_for_the_others() -> None:
    run = failure_of(job_of("digits_uneven", 3, timeout="3s"))
    assert "worker-0 waits at train.py, line " in run.reason
    assert "(in _engine_run_backward)" in run.reason
    assert "worker-1, worker-2 wait at train.py, line " in run.reason


@pytest.mark.parametrize(
    ("workers", "remedy", "first", "others", "more"),
    [
        (2, "join", 6, 5, 1),
        (3, "join", 6, 5, 1),
        (4, "join", 6, 5, 1),
        (2, "drop", 5, 5, 0),
        (4, "pad", 6, 6, 4),
    ],
)
def test_each_remedy_lets_all_end_and_uses_the_images_that_it_says(
    workers: int, remedy: str, first: int, others: int, more: int
) -> None:
    run = ended_well(job_of("digits_uneven", workers, arguments={"remedy": remedy}))
    for _, epoch in run.metrics.groupby("epoch"):
        ranks = epoch.set_index("rank").sort_index()
        assert ranks["step"].tolist() == [first] + [others] * (workers - 1)
        assert ranks["images"].sum() == 5 * 16 * workers + more


# A killed worker, and restarts


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_an_interrupted_run_ends_with_the_same_bits_as_an_uninterrupted_one(
    workers: int, tmp_path: Path
) -> None:
    ended_well(job_of("digits_resumable", workers), output=tmp_path / "whole")
    job = job_of("digits_resumable", workers, arguments={"kill-rank": workers - 1, "kill-step": 37})
    with Restarting(Local(warm=True, output=tmp_path / "killed"), restarts=1).launch(job) as run:
        run.wait(100)
    assert f"worker-{workers - 1} (rank {workers - 1}) was killed by SIGKILL" in run.attempts[0].reason
    steps = run.metrics.dropna(subset=["loss"])
    steps = steps[steps["rank"] == 0]
    # Rank 0 may be stopped before it reports the step in which the other one was killed.
    assert steps["step"].tolist() in ([*range(1, last + 1), *range(31, 61)] for last in (36, 37))
    assert weights(tmp_path / "killed") == weights(tmp_path / "whole")


def test_the_same_batch_is_taken_whatever_the_number_of_workers(tmp_path: Path) -> None:
    found = []
    for workers in (1, 3):
        ended_well(job_of("digits_resumable", workers), output=tmp_path / str(workers))
        found.append(np.frombuffer(weights(tmp_path / str(workers)), np.float32))
    np.testing.assert_allclose(*found, rtol=0, atol=1e-5)  # float32, another order of adding


@pytest.mark.parametrize("forgotten", ["velocity", "step"])
def test_whatever_a_checkpoint_forgets_is_seen_in_the_weights(forgotten: str, tmp_path: Path) -> None:
    ended_well(job_of("digits_resumable", 2), output=tmp_path / "whole")
    arguments = {"kill-rank": 1, "kill-step": 37, "forget": forgotten}
    with Restarting(Local(warm=True, output=tmp_path / "killed"), 1).launch(
        job_of("digits_resumable", 2, arguments=arguments)
    ) as run:
        run.wait(100)
    assert weights(tmp_path / "killed") != weights(tmp_path / "whole")


def test_a_damaged_checkpoint_costs_the_steps_since_the_one_before(tmp_path: Path) -> None:
    ended_well(job_of("digits_resumable", 2), output=tmp_path / "whole")
    saved = tmp_path / "saved"
    killed = job_of("digits_resumable", 2, arguments={"kill-rank": 1, "kill-step": 37})
    with Restarting(Local(warm=True), 0, saved).launch(killed) as run, pytest.raises(RunFailed):
        run.wait(100)
    newest = checkpoints.paths(saved)[-1]
    newest.write_bytes(newest.read_bytes()[:-100])
    with Restarting(Local(warm=True, output=tmp_path / "again"), 0, saved).launch(
        job_of("digits_resumable", 2)
    ) as run:
        run.wait(100)
    said = [line.text for line in run.logs(worker="worker-0")]
    assert said[0].startswith("step-00000030.checkpoint holds ")
    assert said[1] == "resumed after step 20"
    assert weights(tmp_path / "again") == weights(tmp_path / "whole")


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path) -> None:
    saved = tmp_path / "saved"
    short = job_of("digits_resumable", 2, arguments={"steps": 10})
    for job in (short, short.replace(arguments={"seed": 1})):
        with Restarting(Local(warm=True), 0, saved).launch(job) as run:
            _let_it_end(run)
    assert run.state is RunState.FAILED
    assert "are of another run: seed, batch-size, hidden and learning-rate are [1.0, " in run.reason


def _let_it_end(run: Run) -> None:
    try:
        run.wait(100)
    except RunFailed:
        assert run.reason


# A lost link

NAMESPACES = pytest.param(
    Network(bandwidth="100Mbit"),
    marks=pytest.mark.skipif(availability() == "none", reason="no network namespaces here"),
    id="a card switched off",
)


@pytest.mark.parametrize("network", [pytest.param(None, id="silence"), NAMESPACES])
def test_a_lost_link_is_found_by_time_out_and_a_restart_mends_it(network: Network | None) -> None:
    job = job_of("digits_lost_link", 3, arguments={"patience": 1})
    with Restarting(Local(warm=True, network=network), restarts=1).launch(job) as run:
        run.wait(100)
    assert bool(run.network) is (network is not None)
    assert "PeerSilent after " in run.attempts[0].reason
    told = [line.text for line in run.attempts[0].logs(worker="worker-2")]
    assert ("my card is switched off" in told) is (network is not None)
    waited = run.metrics["detected_seconds"].dropna()
    assert waited.min() >= 1.0
    assert run.metrics.groupby("attempt")["step"].max().tolist() == [6, 20]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_killed_rank_of_the_ring_is_known_long_before_the_time_out(workers: int) -> None:
    run = failure_of(job_of("digits_lost_link", workers, arguments={"failure": "kill", "patience": 60}))
    assert re.search(rf"killed by SIGKILL|PeerDied after .* rank {workers - 1} has died", run.reason), (
        run.reason
    )
    assert run.seconds < 50


# A slow worker


def test_the_slow_rank_is_the_one_that_waits_least(tmp_path: Path) -> None:
    arguments = {"steps": 9, "slow-rank": 2, "slow-seconds": 0.1, "checkpoint-steps": 0}
    run = ended_well(job_of("digits_resumable", 3, arguments=arguments))
    medians = run.metrics.groupby("rank")[["compute_seconds", "all_reduce_seconds"]].median()
    assert medians["all_reduce_seconds"].idxmin() == 2
    assert medians["compute_seconds"].idxmax() == 2
    assert medians["compute_seconds"][2] >= 0.1
