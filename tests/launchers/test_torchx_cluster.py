"""A Volcano Job on a cluster: an API server that answers as its script says, on loopback."""

import pytest
from kubernetes_api import cluster, metric, stamped

from workshop_utils.launchers.kubernetes import check
from workshop_utils.launchers.torchx import TorchX
from workshop_utils.runs import RunFailed

TEAM = TorchX(scheduler="kubernetes", namespace="team", registry="registry.example.com")


@pytest.fixture
def server(tmp_path, monkeypatch):
    with cluster(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def job(make_job):
    return make_job("import torch", name="bert", strategy="torch_ddp", workers=2)


def see_pods(server, logs):
    """Let the cluster show a pod for each of `logs`; the name of the Volcano Job that was sent."""
    (job,) = [each["metadata"]["name"] for each in server.objects.values() if each["kind"] == "Job"]
    for node, texts in enumerate(logs):
        name = f"{job}-worker-{node}-0"
        server.logs[name] = stamped(*texts)
        spec, status = {"containers": [{"name": f"worker-{node}"}]}, {"phase": "Running"}
        server.pods.append({"metadata": {"name": name}, "spec": spec, "status": status})
    return str(job)


def test_the_job_is_sent_its_files_belong_to_it_and_its_log_comes_back(server, job):
    with TEAM.launch(job) as run:
        name = see_pods(server, [["[worker-0]: hello"], ["[worker-1]: hello", f"[worker-1]: {metric(1)}"]])
        assert run.handle == f"kubernetes://workshop/team:{name}"
        assert run.workers == ("worker-0", "worker-1")
        script, data = (each for each in server.objects.values() if each["kind"] == "ConfigMap")
        assert (script["metadata"]["name"], data["metadata"]["name"]) == (name, f"{name}-data")
        assert script["data"]["train.py"] == "import torch"
        server.job_status = {"state": {"phase": "Completed"}}
        run.wait(60)
    assert sorted(str(line) for line in run.logs()) == ["[worker-0] hello", "[worker-1] hello"]
    assert list(run.metrics["step"]) == [3]
    assert server.made() == []


def summary(rank, code):
    return ["  time      : 2026-11-01_10:00:00", f"  rank      : {rank} (0)", f"  exitcode  : {code} (7)"]


LOST = ["[worker-0]: RuntimeError: Connection closed by peer", *summary(0, 1)]
KILLED = r"worker-1 \(rank 1\) was killed by SIGKILL; the others were stopped.* Its last lines:\n  loading"


@pytest.mark.parametrize(
    ("workers", "logs", "said"),
    [
        (2, [LOST, ["[worker-1]: loading", *summary(1, -9)]], KILLED),
        (11, [summary(10, 1), summary(2, 1)], r"worker-2 \(rank 2\) ended with exit code 1"),
    ],
    ids=["killed", "in the same second"],
)
def test_a_job_that_fails_names_the_rank_that_failed_first_and_of_several_the_lowest(
    server, job, workers, logs, said
):
    run = TEAM.launch(job.replace(workers=workers))
    see_pods(server, logs)
    server.job_status = {"state": {"phase": "Terminated"}}
    with run, pytest.raises(RunFailed, match=said):
        run.wait(60)
    assert server.made() == []


@pytest.mark.parametrize("data", ["mine", None])
def test_a_claim_that_is_named_twice_is_one_volume_which_every_mount_finds(job, data):
    place = TEAM.model_copy(update={"data_claim": data, "volumes": {"/cache": "other", "/all": "mine"}})
    request = place.render(job.replace(outputs="claim:mine")).request
    pod = request["spec"]["tasks"][0]["template"]["spec"]
    claims = [
        each["persistentVolumeClaim"]["claimName"]
        for each in pod["volumes"]
        if "persistentVolumeClaim" in each
    ]
    assert sorted(claims) == ["mine", "other"]
    mounts = {each["mountPath"]: each["name"] for each in pod["containers"][0]["volumeMounts"]}
    assert set(mounts.values()) <= {each["name"] for each in pod["volumes"]}
    assert mounts["/workshop/model"] == mounts["/all"]
    assert check.problems_of(request) == []
    pod["volumes"] = [each for each in pod["volumes"] if each["name"] != mounts["/all"]]
    assert any(each.startswith("/workshop/model mounts volume") for each in check.problems_of(request))
