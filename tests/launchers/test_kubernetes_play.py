"""Manifests played without a cluster: real processes, with the variables that an operator would set."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from conftest import MakeJob, eventually
from kubernetes_api import changed

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import Kubernetes, StandIn, play
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.settings import Elastic
from workshop_utils.runs import RunFailed, RunState

pytestmark = pytest.mark.usefixtures("nothing_is_left")

TELL = """
import json, os, sys
from workshop_utils import place
here = place.here()
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TF_CONFIG", "JOB_COMPLETION_INDEX", "PET_NNODES")
print("told " + json.dumps({name: os.environ[name] for name in names if name in os.environ}))
place.report(step=place.load("train").count, words=len(sys.argv))
"""


@pytest.fixture
def told(make_job: MakeJob) -> Callable[..., dict[str, Any]]:
    """What the workers of a job are told, by name, when it is played."""

    def carry_out(place: StandIn | None = None, **fields: Any) -> dict[str, Any]:
        job = make_job(TELL, arguments={"epochs": 3}, **fields)
        with (place or StandIn()).launch(job) as run:
            run.wait(timeout_seconds=100)
            # The three images of the data, and `--epochs 3`.
            assert {(record["step"], record["words"]) for record in run.records} == {(3, 3.0)}
            lines = [line for line in run.logs() if line.text.startswith("told ")]
        return {line.worker: json.loads(line.text.removeprefix("told ")) for line in lines}

    return carry_out


def broken(job: TrainingJob, path: str, value: Any) -> Manifest:
    """The manifest of `job`, a single one, with a field of its pod's spec changed."""
    return Manifest(changed(Kubernetes().render(job).resource, f"spec.template.spec.{path}", value))


def test_a_pytorchjob_is_played_with_rank_and_master(told: Callable[..., dict[str, Any]]) -> None:
    found = told(strategy="torch_ddp", workers=3)
    assert [found[f"worker-{rank}"]["RANK"] for rank in range(3)] == ["0", "1", "2"]
    assert {each["WORLD_SIZE"] for each in found.values()} == {"3"}
    assert {each["MASTER_ADDR"] for each in found.values()} == {"127.0.0.1"}


def test_a_tfjob_is_played_with_a_cluster_on_loopback(told: Callable[..., dict[str, Any]]) -> None:
    found = told(strategy="multi_worker_mirrored", workers=2)
    clusters = [json.loads(each["TF_CONFIG"])["cluster"]["worker"] for each in found.values()]
    assert clusters[0] == clusters[1]
    assert len(set(clusters[0])) == 2
    assert all(address.startswith("127.0.0.1:") for address in clusters[0])


def test_a_plain_job_is_played_with_its_index(told: Callable[..., dict[str, Any]]) -> None:
    assert told() == {"worker-0": {"JOB_COMPLETION_INDEX": "0"}}


@pytest.mark.slow
def test_an_mpijob_is_played_by_mpirun_and_its_ranks_are_told_apart(make_job: MakeJob) -> None:
    job = make_job(
        TELL, "from mpi4py import MPI\nassert MPI.COMM_WORLD.size == 2\n", strategy="mpi", workers=2
    )
    with play(job) as run:
        run.wait(timeout_seconds=100)
        assert run.workers == ("worker-0", "worker-1")
        assert {record["worker"] for record in run.records} == {"worker-0", "worker-1"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "place", [StandIn(kind="TrainJob"), StandIn(elastic=Elastic(min_workers=2, max_workers=2))]
)
def test_what_torchrun_starts_gets_its_ranks_from_torchrun(
    told: Callable[..., dict[str, Any]], place: StandIn
) -> None:
    found = told(place, strategy="torch_ddp", workers=2)
    assert sorted(each["RANK"] for each in found.values()) == ["0", "1"]


# A mistake in the manifest


def test_a_mistaken_script_path_fails_as_it_would_in_a_pod(make_job: MakeJob) -> None:
    job = make_job(TELL)
    misspelled = broken(job, "containers.0.command.1", "/workshop/job/trian.py")
    said = r"(?s)pod job-1-0 ended with exit code 2.*python: can't open file '/workshop/job/trian\.py'"
    with play(job, misspelled) as run, pytest.raises(RunFailed, match=said):
        run.wait(timeout_seconds=100)
    assert run.pods().to_dict("list") == {"pod": ["job-1-0"], "worker": ["worker-0"], "phase": ["Failed"]}
    assert run.describe().splitlines()[:2] == ["Job job-1: failed", "pod job-1-0: Failed"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("volumes.1.name", "other", "volumeMounts has 'data', and there is no volume of that name"),
        ("volumes.0.configMap.name", "other", "volume 'job' is of 'other'; there is 'job-1' and 'job-1-data'"),
        ("volumes.0.configMap.items.0.key", "trian.py", "ConfigMap job-1 has no key 'trian.py'"),
        ("containers.0.command", [], "its container has no command"),
        ("containers.0.command", ["bash"], "its command is 'bash'; played can be python, python3, torchrun, mpirun"),
    ],
)  # fmt: skip
def test_what_no_pod_could_start_with_is_refused_before_anything_starts(
    make_job: MakeJob, path: str, value: Any, message: str
) -> None:
    job = make_job(TELL)
    with pytest.raises(JobError) as refused:
        play(job, broken(job, path, value))
    assert message in str(refused.value)


def test_the_deadline_of_the_manifest_ends_a_job_that_hangs(make_job: MakeJob) -> None:
    job = make_job("import time\ntime.sleep(600)\n", timeout="1s")
    with play(job) as run, pytest.raises(RunFailed, match="was active longer than its activeDeadlineSeconds"):
        run.wait(timeout_seconds=60)


def test_leaving_the_block_ends_every_pod(make_job: MakeJob) -> None:
    job = make_job("import time\ntime.sleep(600)\n", strategy="torch_ddp", workers=2)
    with play(job) as run:
        assert run.state is RunState.RUNNING
        assert eventually(lambda: set(run.pods()["phase"]) == {"Running"})
    assert run.state is RunState.STOPPED
