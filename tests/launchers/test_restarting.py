"""A job that fails is started again with its checkpoints, so many times and not more, and nothing of it is left."""

import pytest

from workshop_utils.launchers.local import Local
from workshop_utils.launchers.restarting import Restarting
from workshop_utils.runs import RunFailed, RunState

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

COUNT = """
    import os, signal, sys, time
    from workshop_utils import place
    here = place.here()
    folder = place.checkpoint_folder()
    lives = folder / f"lives-{here.rank}"
    folder.mkdir(parents=True, exist_ok=True)
    before = int(lives.read_text()) if lives.exists() else 0
    partial = folder / f".lives-{here.rank}"  # a rank may be killed while it writes
    partial.write_text(str(before + 1))
    partial.replace(lives)
    place.report(before, restarts=place.restart_count())
    print("life", before)
"""


def test_a_job_goes_on_with_what_it_had_saved(make_job):
    job = make_job(
        COUNT,
        "if here.rank == 1 and before < 2: os.kill(os.getpid(), signal.SIGKILL)",
        "time.sleep(0.3)",
        strategy="torch_ddp",
        workers=2,
    )
    with Restarting(Local(), restarts=3).launch(job) as run:
        run.wait(60)
    assert [attempt.state for attempt in run.attempts] == ["failed", "failed", "succeeded"]
    assert "worker-1 (rank 1) was killed by SIGKILL" in run.attempts[0].reason
    metrics = run.metrics
    killed = metrics[metrics["worker"] == "worker-1"]
    assert list(killed["step"]) == list(killed["restarts"]) == list(killed["attempt"]) == [0, 1, 2]
    assert killed["seconds"].is_monotonic_increasing  # on the clock of the whole run
    lines = [line for line in run.logs(worker="worker-1") if line.text.startswith("life")]
    assert [line.text for line in lines] == ["life 0", "life 1", "life 2"]
    assert lines[0].seconds < lines[2].seconds < run.seconds
    # Worker 0 may be stopped before it has said that it started, except in the life that succeeds.
    assert sum(start["worker"] == "worker-1" for start in run.starts) == 3
    assert 1 <= sum(start["worker"] == "worker-0" for start in run.starts) <= 3


def test_a_job_that_fails_every_time_is_given_up_and_leaves_the_folder_that_was_named(make_job, tmp_path):
    folder = tmp_path / "kept"
    job = make_job(COUNT, "sys.exit('no')", checkpoints=str(folder))
    message = rf"exit code 1(?s:.*)\n{job.name} had been restarted once before\.$"
    with Restarting(Local(), restarts=1).launch(job) as run, pytest.raises(RunFailed, match=message):
        run.wait(60)
    assert len(run.attempts) == 2
    assert (folder / "lives-0").read_text() == "2"


def test_a_hang_counts_as_a_failure_once_it_has_met_its_timeout(make_job):
    job = make_job(COUNT, "if not before: time.sleep(1000)", timeout="2s")
    with Restarting(Local(), restarts=1).launch(job) as run:
        run.wait(60)
    assert "did not end within its timeout of 2 s" in run.attempts[0].reason
    assert run.state is RunState.SUCCEEDED


def test_a_run_that_is_stopped_is_not_started_again(make_job, watch):
    with Restarting(Local(), restarts=5).launch(make_job(COUNT, "time.sleep(1000)")) as run:
        assert watch.eventually(lambda: run.starts)
    assert run.state is RunState.STOPPED
    assert len(run.attempts) == 1
