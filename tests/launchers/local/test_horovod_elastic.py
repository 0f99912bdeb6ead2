"""Elastic Horovod: workers die and come, the job goes on, and nothing of it is left."""

import io
import os
import pickle
import re
import signal
from pathlib import Path

import psutil
import pytest
from conftest import eventually, failure_of

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunState

pytestmark = pytest.mark.processes

JOB = Path(__file__).parents[3] / "jobs" / "digits_horovod_elastic"
PATIENCE_SECONDS = 120.0


# What comes through a socket


@pytest.mark.horovod
def test_an_address_is_read_and_code_in_its_place_is_not_run(tmp_path):
    from workshop_utils.launchers.local.horovod_elastic import PlainUnpickler

    address = ({"lo": [("127.0.0.1", 1234)]}, b"secret")
    assert PlainUnpickler(io.BytesIO(pickle.dumps(address))).load() == address

    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "sprung",)

    with pytest.raises(pickle.UnpicklingError, match="has no place in an address"):
        PlainUnpickler(io.BytesIO(pickle.dumps(Trap()))).load()
    assert not (tmp_path / "sprung").exists()


# Real runs


def until(run, condition):
    come = eventually(lambda: run.state is not RunState.RUNNING or condition(), PATIENCE_SECONDS)
    assert come, [str(line) for line in run.logs()]
    assert condition(), run.reason


def steps_of(run, size):
    """The steps that were reported by a group of `size`, in the order in which they came."""
    return [record["step"] for record in run.records if record["world_size"] == size]


def pids_of(run, worker):
    return [start["pid"] for start in run.starts if start["worker"] == worker]


def listening_addresses(watch):
    found = set()
    for pid in watch.marked_processes():
        try:
            connections = psutil.Process(pid).net_connections("tcp")
        except psutil.Error:
            continue
        found |= {c.laddr.ip for c in connections if c.status == psutil.CONN_LISTEN and c.laddr}
    return found


@pytest.mark.horovod
@pytest.mark.usefixtures("nothing_is_left")
def test_a_worker_is_killed_the_others_train_on_and_another_joins(watch, tmp_path):
    arguments = {"steps": 1000, "step-seconds": 0.02}
    job = TrainingJob.load(JOB).replace(workers=3, timeout="4min", arguments=arguments, outputs=str(tmp_path))
    with Local(warm=True).launch(job) as run:
        assert run.workers == ("worker-0", "worker-1", "worker-2")
        until(run, lambda: max(steps_of(run, 3), default=0) >= 20)
        assert listening_addresses(watch) == {"127.0.0.1"}
        (killed,) = pids_of(run, "worker-1")
        os.kill(killed, signal.SIGKILL)
        until(run, lambda: len(set(steps_of(run, 2))) >= 3)
        before, after = max(steps_of(run, 3)), min(steps_of(run, 2))
        # From the last commit on, which is at most five steps back; nothing is lost, nothing begins anew.
        assert before - 5 <= after <= before + 5
        until(run, lambda: len(pids_of(run, "worker-1")) == 2)
        alone = max(steps_of(run, 2))
        until(run, lambda: max(steps_of(run, 3)) > alone + 10)
        joined = [each for each in run.records if each["worker"] == "worker-1" and each["step"] > before + 5]
        assert min(record["step"] for record in joined) > alone  # it got the state of those who had gone on
        assert {record["rank"] for record in joined} == {2}
        losses = run.metrics.dropna(subset=["loss"])
        assert losses["loss"].iloc[-20:].mean() < losses["loss"].iloc[:20].mean()
        run.stop()
    assert run.state is RunState.STOPPED


@pytest.mark.horovod
@pytest.mark.usefixtures("nothing_is_left", "dead_proxy")
def test_the_killed_worker_may_be_rank_0_and_the_run_ends_well(tmp_path):
    arguments = {"steps": 80, "step-seconds": 0.02}
    job = TrainingJob.load(JOB).replace(timeout="4min", arguments=arguments, outputs=str(tmp_path))
    with Local().launch(job) as run:
        until(run, lambda: max(steps_of(run, 2), default=0) >= 10)
        os.kill(pids_of(run, "worker-0")[0], signal.SIGKILL)
        run.wait(PATIENCE_SECONDS)
    taken_over = [each for each in run.records if (each["worker"], each["world_size"]) == ("worker-1", 1)]
    assert {record["rank"] for record in taken_over} == {0}
    assert max(record["step"] for record in run.records) == 80
    assert run.metrics["accuracy"].dropna().iloc[-1] > 0.6
    assert (tmp_path / "model.pt").is_file()


@pytest.mark.horovod
@pytest.mark.usefixtures("nothing_is_left")
def test_when_every_worker_fails_the_run_does_and_shows_the_scripts_own_mistake(make_job):
    job = make_job("""
        from workshop_utils import place
        place.here()
        import horovod.torch as hvd
        hvd.init()
        raise RuntimeError("the learner's mistake")
        """, strategy="horovod_elastic", workers=2, timeout="2min")  # fmt: skip
    said = failure_of(Local().launch(job), PATIENCE_SECONDS)
    assert re.match(r"job-1 failed: worker-[01] \(rank [01]\) ended with exit code 1; ", said)
    assert "RuntimeError: the learner's mistake\nThe whole log is in" in said
    assert "runpy" not in said
