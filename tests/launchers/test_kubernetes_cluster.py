"""Launching on a cluster: an API server that answers as its script says, on loopback."""

from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
from conftest import eventually
from kubernetes_api import cluster, metric, refused, stamped

from workshop_utils.launchers.kubernetes import Kubernetes
from workshop_utils.launchers.kubernetes.cluster import TRIES, KubernetesError, connect
from workshop_utils.runs import RunFailed, RunState

ROOT = Path(__file__).parents[2]


@pytest.fixture
def server(tmp_path, monkeypatch):
    with cluster(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def job(make_job):
    return make_job("import torch\n", name="ddp", strategy="torch_ddp", workers=2)


def pod(role, phase="Running"):
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": f"ddp-{role}-0", "namespace": "default"},
        "spec": {"containers": [{"name": "pytorch"}]},
        "status": {"phase": phase},
    }


def condition(kind, message=""):
    return {"conditions": [{"type": kind, "status": "True", "message": message}]}


def test_a_job_is_made_followed_and_deleted(server, job):
    server.pods = [pod("master"), pod("worker")]
    server.logs = {"ddp-master-0": stamped("hello", metric(0)), "ddp-worker-0": stamped("here too")}
    server.job_status = condition("Succeeded", "all is well")
    server.job_status["conditions"][:0] = [{"type": "Failed"}, {"status": "True"}]  # which say nothing
    with Kubernetes().launch(job) as started:
        assert started.workers == ("worker-0", "worker-1")
        assert server.made() == ["ConfigMap ddp", "ConfigMap ddp-data", "PyTorchJob ddp"]
        objects = list(server.objects.values())
        uid = next(each["metadata"]["uid"] for each in objects if each["kind"] == "PyTorchJob")
        owners = [each["metadata"]["ownerReferences"] for each in objects if each["kind"] == "ConfigMap"]
        owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "ddp", "uid": uid}
        assert owners == [[owner], [owner]]
        started.wait(timeout_seconds=20)
        assert {str(line) for line in started.logs()} == {"[worker-0] hello", "[worker-1] here too"}
        assert started.metrics["loss"].tolist() == [0.5]
        assert started.pods().to_dict("list") == {
            "pod": ["ddp-master-0", "ddp-worker-0"],
            "worker": ["worker-0", "worker-1"],
            "phase": ["Running", "Running"],
        }
        assert "  Succeeded: all is well" in started.describe()
        assert "Failed" not in started.describe()
    assert server.made() == []
    assert any("fieldValidation=Strict" in path for _, path in server.requests)


def test_a_failed_job_says_why_and_each_line_comes_once_when_it_has_ended_or_the_pod_has(server, job):
    one, two, three = stamped("one", "two", "ValueError: no")
    server.pods = [pod("master")]
    server.script["GET", "log"] = [refused(500, "the node is busy")]
    server.logs["ddp-master-0"], server.unfinished["ddp-master-0"] = [one], two[:-1]
    with Kubernetes().launch(job) as started:
        assert eventually(lambda: sum("sinceTime" in path for _, path in server.requests) > 2)
        assert [line.text for line in started.logs()] == ["one"]
        server.logs["ddp-master-0"], server.unfinished["ddp-master-0"] = [one, two], three
        server.pods = [pod("master", "Failed")]
        server.job_status = condition("Failed", "1 Master replica(s) failed.")
        said = r"(?s)1 Master replica.*\[worker-0\] one.*\[worker-0\] ValueError: no"
        with pytest.raises(RunFailed, match=said):
            started.wait(timeout_seconds=20)
    assert [line.text for line in started.logs(worker="worker-0")] == ["one", "two", "ValueError: no"]
    assert server.made() == []
    since = [parse_qs(urlparse(path).query).get("sinceTime") for _, path in server.requests if "/log" in path]
    assert since[0] is None
    assert since[-1] == [one.split()[0]]


def test_a_log_that_cannot_be_read_does_not_delay_the_others_or_the_end(server, job, monkeypatch):
    monkeypatch.setattr("workshop_utils.launchers.kubernetes.cluster.FIRST_PAUSE_SECONDS", 10)
    server.pods = [pod("master"), pod("worker")]
    server.logs["ddp-worker-0"] = stamped("hello")
    server.script["GET", "log"] = [refused(500, "the node does not answer")] * 2
    with Kubernetes().launch(job) as started:
        assert eventually(lambda: [str(line) for line in started.logs()] == ["[worker-1] hello"])
        server.job_status = condition("Succeeded")
        started.wait(timeout_seconds=5)


def test_a_pod_that_cannot_be_scheduled_says_so_once(server, job):
    server.pods = [pod("master", "Pending")]
    server.warnings = [{"reason": "FailedScheduling", "message": "2 Insufficient cpu."}]
    with Kubernetes().launch(job) as started:
        assert str(next(started.logs(follow=True))) == "[ddp-master-0] FailedScheduling: 2 Insufficient cpu."
        assert started.describe().endswith(
            "pod ddp-master-0: Pending\n  FailedScheduling: 2 Insufficient cpu."
        )
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=0.5)
        assert len(list(started.logs())) == 1
        assert started.waits_for == "pod ddp-master-0 to start (FailedScheduling: 2 Insufficient cpu.)"


def test_logs_are_followed_where_events_may_not_be_read(server, job):
    server.pods = [pod("master"), pod("worker", "Pending")]
    server.logs = {"ddp-master-0": stamped("hello")}
    server.script["GET", "events"] = [refused(403, "no events")] * 1000
    with Kubernetes().launch(job) as started:
        lines = started.logs(follow=True)
        while (line := str(next(lines))) != "[worker-0] hello":
            assert "no events" in line


def test_a_job_that_somebody_else_deletes_has_failed(server, job):
    with Kubernetes().launch(job) as started:
        server.objects.clear()
        with pytest.raises(RunFailed, match="ddp is gone or cannot be seen any more"):
            started.wait(timeout_seconds=20)


@pytest.mark.parametrize(
    ("what", "status", "message", "said"),
    [
        ("pytorchjobs", 409, "it is there", "creating PyTorchJob ddp: something of that name exists already"),
        ("pytorchjobs", 500, "etcd is down", "creating PyTorchJob ddp: the cluster still fails"),
        ("configmaps", 403, "no config maps", "creating ConfigMap ddp: you may not do that"),
    ],
)
def test_a_refusal_says_what_to_do_and_leaves_nothing(server, job, what, status, message, said):
    server.script["POST", what] = [refused(status, message)]
    with pytest.raises(KubernetesError, match=f"^{said}.* Kubernetes says: {message}$"):
        Kubernetes().launch(job)
    assert server.made() == []
    assert sum(method == "POST" and "pytorchjobs" in path for method, path in server.requests) == 1


def test_a_cluster_that_fails_for_a_moment_is_asked_again(server, job):
    server.script["POST", "pytorchjobs"] = [refused(429, "slow down")] * 2
    server.script["GET", "ddp"] = [refused(500, "leader changed"), (502, b"<html>")]
    server.script["DELETE", "ddp"] = [refused(503, "busy")]
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        started.wait(timeout_seconds=20)
    assert server.made() == []
    server.script["POST", "configmaps"] = [refused(429, "slow down")] * TRIES
    with pytest.raises(KubernetesError, match=f"asks to slow down after {TRIES} tries"):
        Kubernetes().launch(job)


def test_a_job_that_cannot_be_deleted_is_not_kept_secret(server, job):
    started = Kubernetes().launch(job)
    assert started.state is RunState.RUNNING
    server.script["DELETE", "ddp"] = [refused(403, "no")]
    with pytest.raises(KubernetesError, match="ddp could not be deleted and may still run"):
        started.stop()
    started.stop()
    assert started.state is RunState.STOPPED
    assert server.made() == []


def test_a_job_counts_as_deleted_once_its_pods_are_gone(server, job, monkeypatch):
    monkeypatch.setattr("workshop_utils.launchers.kubernetes.cluster.GONE_SECONDS", 0.1)
    server.pods = [pod("master")]
    started = Kubernetes().launch(job)
    for name, times in (("ddp", 2), ("ddp-data", 1)):  # it agrees to delete each object, and the pods stay
        server.script["DELETE", name] = [(200, {"kind": "Status", "status": "Success"})] * times
    with pytest.raises(KubernetesError, match=r"ddp could not be deleted.*its pods are still there"):
        started.stop()
    server.pods = []
    started.stop()
    assert started.state is RunState.STOPPED


def test_without_a_cluster_the_way_to_do_without_is_named(server, tmp_path, monkeypatch):
    with pytest.raises(KubernetesError, match=r"there is no cluster to talk to.*other"):
        connect(context="other")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(KubernetesError, match="kubernetes-local runs the same pods on this machine"):
        connect()


def test_the_ranks_of_an_mpi_job_are_told_apart_and_sshd_is_not_heard(server, make_job):
    job = make_job("import mpi4py\n", name="ddp", strategy="mpi", workers=2)
    launcher, worker = pod("launcher"), pod("worker")
    launcher["metadata"]["name"] = "ddp-launcher-x7k2p"  # a Job makes it, and gives it letters of its own
    worker["spec"]["containers"][0]["command"] = ["/usr/sbin/sshd", "-De", "-o", "StrictModes=no"]
    server.pods = [launcher, worker]
    server.logs["ddp-launcher-x7k2p"] = stamped("[1,0]<stdout>:one", "[1,1]<stdout>:two")
    server.logs["ddp-worker-0"] = stamped("Server listening on 0.0.0.0 port 22.")
    server.job_status = condition("Succeeded")
    with Kubernetes().launch(job) as started:
        assert started.workers == ("worker-0", "worker-1")
        started.wait(timeout_seconds=20)
        assert {str(line) for line in started.logs()} == {"[worker-0] one", "[worker-1] two"}


# The runtime of a TrainJob


NO_RUNTIME = "spec.runtimeRef: specified trainingRuntime must be created before the TrainJob is created"


def test_a_runtime_goes_with_its_trainjob_which_is_sent_again_while_the_trainer_does_not_know_it(server, job):
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * 2
    with Kubernetes(kind="TrainJob").launch(job):
        objects = {each["kind"]: each for each in server.objects.values()}
        owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "ddp"}
        owner["uid"] = objects["TrainJob"]["metadata"]["uid"]
        assert objects["TrainingRuntime"]["metadata"]["ownerReferences"] == [owner]
    assert server.made() == []
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * (1 + TRIES)
    answered = str(Kubernetes(kind="TrainJob").dry_run(job))
    assert "# TrainingRuntime ddp: would be made" in answered
    assert "# TrainJob ddp: fits its schema; a dry run makes no runtime, which the trainer's own" in answered
    with pytest.raises(KubernetesError, match="must be created before the TrainJob"):
        Kubernetes(kind="TrainJob").launch(job)
    assert server.made() == []


# A dry run on the server


def test_a_dry_run_asks_for_every_object_and_makes_none(server, job):
    answered = Kubernetes().dry_run(job)
    assert server.made() == []
    posts = [parse_qs(urlparse(path).query) for method, path in server.requests if method == "POST"]
    assert [(query["dryRun"], query["fieldValidation"]) for query in posts] == [(["All"], ["Strict"])] * 3
    assert answered.comment.splitlines() == [
        f"# {each}: would be made" for each in ("PyTorchJob ddp", "ConfigMap ddp", "ConfigMap ddp-data")
    ]
    assert answered.resource["metadata"]["uid"] == "none-yet"  # it is the server's answer, not ours
    assert answered.resource["spec"] == Kubernetes().render(job).resource["spec"]
    assert "managedFields" not in str(answered)


def test_a_dry_run_passes_on_all_that_the_server_complains_of(server, job):
    server.script["POST", "pytorchjobs"] = [refused(422, "ddp is invalid: spec.a: Required value")]
    server.script["POST", "configmaps"] = [refused(400, 'strict decoding error: unknown field "datta"')]
    with pytest.raises(KubernetesError) as raised:
        Kubernetes().dry_run(job)
    assert str(raised.value).splitlines() == [
        "trying PyTorchJob ddp: the cluster, or an operator, does not accept the object. Kubernetes says: "
        "ddp is invalid: spec.a: Required value",
        "trying ConfigMap ddp: the cluster cannot read the object as one of its kind. Kubernetes says: "
        'strict decoding error: unknown field "datta"',
    ]


# A cluster that goes and comes, and how it is found


def test_an_api_server_that_restarts_does_not_end_a_run_and_begins_none(server, job):
    server.pods = [pod("master")]
    server.logs["ddp-master-0"] = stamped("hello")
    with Kubernetes().launch(job) as started:
        assert eventually(lambda: list(started.logs()))
        port = server.http.server_port
        server.close()
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=0.5)
        with pytest.raises(KubernetesError, match="creating PyTorchJob ddp: the cluster does not answer"):
            Kubernetes().launch(job)
        asked = len(server.requests)
        server.job_status = condition("Succeeded")
        server.open(port)
        started.wait(timeout_seconds=30)
        assert len(server.requests) > asked
        assert [line.text for line in started.logs(worker="worker-0")] == ["hello"]
    assert server.made() == []
