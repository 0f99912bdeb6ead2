"""Launching on a cluster: an API server that answers as its script says, on loopback."""

import _thread
import signal
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import parse_qs, urlparse

import pytest
import yaml
from conftest import eventually
from kubernetes_api import cluster, metric, refused, stamped

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import Kubernetes, launcher
from workshop_utils.launchers.kubernetes.cluster import TRIES, KubernetesError, connect
from workshop_utils.runs import RunFailed, RunState

ROOT = Path(__file__).parents[2]
REGISTRY = "registry.example.com/team"
PLACE = Kubernetes(registry=REGISTRY)
WITH_RUNTIME = Kubernetes(kind="TrainJob", registry=REGISTRY)
CREATING = "creating PyTorchJob ddp:"
DELETE = "kubectl --namespace default delete pytorchjob.kubeflow.org/ddp"
REFUSED = refused(403, "no")


@pytest.fixture
def server(tmp_path, monkeypatch):
    with cluster(tmp_path, monkeypatch) as made:
        yield made


@pytest.fixture
def job(make_job):
    return make_job("import torch\n", name="ddp", strategy="torch_ddp", workers=2)


@pytest.fixture
def mpi_job(make_job):
    return make_job("import mpi4py\n", name="ddp", strategy="mpi", workers=2)


def pod(role, phase="Running", name="", **container):
    metadata = {"name": name or f"ddp-{role}-0", "namespace": "default"}
    spec = {"containers": [{"name": "pytorch", **container}]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": phase}}


def condition(kind, message=""):
    return {"conditions": [{"type": kind, "status": "True", "message": message}]}


def warning(name, reason, message, at="2026-01-02T00:00:00Z"):
    about = {"involvedObject": {"name": name}, "metadata": {"creationTimestamp": at}}
    return {"reason": reason, "message": message, **about}


def refusal(ask, *arguments):
    """The message with which a cluster's refusal comes."""
    with pytest.raises(KubernetesError) as raised:
        ask(*arguments)
    return str(raised.value)


def queries(server, part):
    """What was asked of paths that hold `part`."""
    return [parse_qs(urlparse(path).query) for _, path in server.requests if part in path]


def test_a_job_is_made_followed_and_deleted(server, job):
    server.pods = [pod("master"), pod("worker")]
    server.logs = {"ddp-master-0": stamped("hello", metric(0)), "ddp-worker-0": stamped("here too")}
    server.job_status = condition("Succeeded", "all is well")
    server.job_status["conditions"][:0] = [{"type": "Failed"}, {"status": "True"}]  # which say nothing
    with PLACE.launch(job) as started:
        assert started.workers == ("worker-0", "worker-1")
        assert server.made() == ["ConfigMap ddp", "ConfigMap ddp-data", "PyTorchJob ddp"]
        by_kind = {each["kind"]: each["metadata"] for each in server.objects.values()}
        owner = {"apiVersion": "kubeflow.org/v1", "kind": "PyTorchJob", "name": "ddp"}
        owner["uid"] = by_kind["PyTorchJob"]["uid"]
        assert by_kind["ConfigMap"]["ownerReferences"] == [owner]
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
    assert any(query.get("fieldValidation") == ["Strict"] for query in queries(server, "pytorchjobs"))


def test_a_failed_job_says_why_and_each_line_comes_once_when_it_has_ended_or_the_pod_has(server, job):
    one, two, three = stamped("one", "two", "ValueError: no")
    server.pods = [pod("master")]
    server.script["GET", "log"] = [refused(500, "the node is busy")]
    server.logs["ddp-master-0"], server.unfinished["ddp-master-0"] = [one], two[:-1]
    with PLACE.launch(job) as started:
        assert eventually(lambda: sum("sinceTime" in query for query in queries(server, "/log")) > 2)
        assert [line.text for line in started.logs()] == ["one"]
        server.logs["ddp-master-0"], server.unfinished["ddp-master-0"] = [one, two], three
        server.pods = [pod("master", "Failed")]
        server.job_status = condition("Failed", "1 Master replica(s) failed.")
        said = r"(?s)1 Master replica.*  one.*  ValueError: no\nThe whole log is in .*/worker-0\.log"
        with pytest.raises(RunFailed, match=said):
            started.wait(timeout_seconds=20)
    assert [line.text for line in started.logs(worker="worker-0")] == ["one", "two", "ValueError: no"]
    since = [query.get("sinceTime") for query in queries(server, "/log")]
    assert (since[0], since[-1]) == (None, [one.split()[0]])


def test_a_pod_whose_files_cannot_be_unpacked_says_why(server, job):
    failed = pod("master", "Failed")
    failed["status"]["initContainerStatuses"] = [
        {"name": "init-pytorch", "state": {"terminated": {"exitCode": 0}}},
        {"name": "unpack", "state": {"terminated": {"exitCode": 127}}},
    ]
    server.pods, server.logs = [failed], {"ddp-master-0": stamped("sh: tar: not found")}
    server.job_status = condition("Failed", "1 Master replica(s) failed.")
    with PLACE.launch(job) as started, pytest.raises(RunFailed, match="sh: tar: not found"):
        started.wait(timeout_seconds=20)
    assert {query["container"][0] for query in queries(server, "/log")} == {"unpack"}


def test_a_log_that_cannot_be_read_does_not_delay_the_others_or_the_end(server, job, monkeypatch):
    monkeypatch.setattr("workshop_utils.launchers.kubernetes.cluster.FIRST_PAUSE_SECONDS", 10)
    server.pods = [pod("master"), pod("worker")]
    server.logs["ddp-worker-0"] = stamped("hello")
    server.script["GET", "log"] = [refused(500, "the node does not answer")] * 2
    with PLACE.launch(job) as started:
        assert eventually(lambda: [str(line) for line in started.logs()] == ["[worker-1] hello"])
        server.job_status = condition("Succeeded")
        started.wait(timeout_seconds=5)


# What the cluster warns of


def test_what_keeps_a_pod_or_the_job_is_told_once_and_nothing_of_another_job(server, job, mpi_job):
    server.pods = [pod("master", "Pending")]
    server.warnings = [warning("ddp-master-0", "FailedScheduling", "2 Insufficient cpu.")]
    with PLACE.launch(job) as started:
        assert str(next(started.logs(follow=True))) == "[ddp-master-0] FailedScheduling: 2 Insufficient cpu."
        said = "pod ddp-master-0: Pending\n  FailedScheduling: 2 Insufficient cpu."
        assert started.describe().endswith(said)
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=0.5)
        assert len(list(started.logs())) == len(started.notices) == 1
        assert started.waits_for == "pod ddp-master-0 to start (FailedScheduling: 2 Insufficient cpu.)"
    server.created_at = "2026-01-02T00:00:00Z"
    server.warnings = [
        warning("ddp", "FailedCreate", "violates PodSecurity"),
        warning("ddp-launcher", "FailedCreate", "exceeded quota"),  # of the Job that the operator makes
        warning("ddp", "FailedCreate", "of an older job", at="2026-01-01T23:59:59Z"),
        warning("ddp-2", "FailedCreate", "of another job"),
    ]
    with PLACE.launch(mpi_job) as started:
        told = ["[ddp] FailedCreate: violates PodSecurity", "[ddp-launcher] FailedCreate: exceeded quota"]
        assert eventually(lambda: started.notices == told)
        assert [str(line) for line in started.logs()] == told
        waits_for = "its first pod (ddp-launcher: FailedCreate: exceeded quota)"
        assert eventually(lambda: started.waits_for == waits_for)
        assert "violates PodSecurity" in started.describe()


def test_a_job_at_which_no_operator_looks_asks_for_it_and_fails_after_its_timeout(server, job, monkeypatch):
    monkeypatch.setattr(launcher, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.1)
    with PLACE.launch(job.replace(timeout="1s")) as started:
        assert eventually(lambda: "the operator that makes pods of a PyTorchJob" in started.waits_for)
        with pytest.raises(RunFailed, match=r"its timeout of 1 s, and no operator has looked at it$"):
            started.wait(timeout_seconds=20)
    assert server.made() == []
    server.job_status = condition("Suspended")  # an operator has it, and counts by itself
    with PLACE.launch(job.replace(timeout="1s")) as started, pytest.raises(TimeoutError):
        started.wait(timeout_seconds=2)


def test_logs_are_followed_where_events_may_not_be_read(server, job):
    server.pods = [pod("master"), pod("worker", "Pending")]
    server.logs = {"ddp-master-0": stamped("hello")}
    server.script["GET", "events"] = [refused(403, "no events")] * 1000
    with PLACE.launch(job) as started:
        lines = started.logs(follow=True)
        while (line := str(next(lines))) != "[worker-0] hello":
            assert "no events" in line


def test_the_ranks_of_an_mpi_job_have_names_and_the_log_of_sshd_does_not_appear(server, mpi_job):
    # A Job makes it, and gives it letters of its own.
    first = pod("launcher", name="ddp-launcher-x7k2p")
    server.pods = [first, pod("worker", command=["/usr/sbin/sshd", "-De", "-o", "StrictModes=no"])]
    server.logs["ddp-launcher-x7k2p"] = stamped("[1,0]<stdout>:one", "[1,1]<stdout>:two")
    server.logs["ddp-worker-0"] = stamped("Server listening on 0.0.0.0 port 22.")
    server.job_status = condition("Succeeded")
    with PLACE.launch(mpi_job) as started:
        assert started.workers == ("worker-0", "worker-1")
        started.wait(timeout_seconds=20)
        assert {str(line) for line in started.logs()} == {"[worker-0] one", "[worker-1] two"}


# What the cluster refuses


@pytest.mark.parametrize(
    ("status", "message", "advice"),
    [
        (403, "exceeded quota: workshop, used: 1", "the cluster answered 403"),
        (404, "no such resource", "there is no such thing; look at the namespace, and whether the operator for this "
         "kind is installed"),
        (500, 'failed calling webhook "v": no endpoints', "the cluster answered 500"),
    ],
)  # fmt: skip
def test_a_refusal_says_what_to_do_and_leaves_nothing(server, job, status, message, advice):
    server.script["POST", "pytorchjobs"] = [refused(status, message)] * TRIES
    assert refusal(PLACE.launch, job) == f"{CREATING} {advice}. Kubernetes says: {message}"
    assert server.made() == []


def test_a_cluster_that_fails_for_a_moment_is_asked_again(server, job):
    server.script["POST", "pytorchjobs"] = [refused(429, "slow down"), refused(500, "failed calling webhook")]
    server.script["GET", "ddp"] = [refused(500, "leader changed"), (502, b"<html>")]
    server.script["DELETE", "ddp"] = [refused(503, "busy")]
    server.job_status = condition("Succeeded")
    with PLACE.launch(job) as started:
        started.wait(timeout_seconds=20)
    assert server.made() == []


def test_a_creation_whose_answer_was_lost_is_undone_or_the_job_s_own_and_not_somebody_else_s(server, job):
    lost = refused(503, "timed out")
    server.late["POST", "pytorchjobs"] = lost
    with PLACE.launch(job) as started:
        assert started.state is RunState.RUNNING
        assert len(server.made()) == 3
    assert server.made() == []
    server.script["POST", "pytorchjobs"] = [lost] * (TRIES - 1)
    server.late["POST", "pytorchjobs"], server.late_seconds = lost, 0.3
    assert refusal(PLACE.launch, job).endswith("Kubernetes says: timed out")
    time.sleep(0.5)
    assert server.made() == []
    server.late["POST", "pytorchjobs"], server.late_seconds = lost, 0
    server.managers = ["kubectl-create"]
    assert "Kubernetes says: it already exists" in refusal(PLACE.launch, job)
    assert server.made() == ["PyTorchJob ddp"]


def test_an_interrupt_while_the_job_is_being_made_leaves_nothing_and_a_second_one_names_what_is_left(
    server, job
):
    def interrupt(method, last):
        if (method, last) == ("POST", "pytorchjobs"):
            _thread.interrupt_main()
            time.sleep(0.5)  # it takes place after the launcher was interrupted

    server.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        PLACE.launch(job)
    time.sleep(0.5)
    assert server.made() == []

    def interrupt_twice(method, last):
        interrupt(method, last)
        if (method, last) == ("DELETE", "ddp"):
            interrupt("POST", "pytorchjobs")

    server.before = interrupt_twice
    left = f"The job may still exist and run. To delete it: {DELETE}"
    assert refusal(PLACE.launch, job).startswith(f"launching the job was interrupted. {left}")


def test_where_the_roll_back_fails_too_the_cause_comes_first_and_what_is_left_is_named(
    server, job, monkeypatch
):
    server.script["POST", "configmaps"] = [refused(403, "no config maps")]
    server.script["DELETE", "ddp"] = [REFUSED]
    said = refusal(PLACE.launch, job)
    left = f"The job may still exist and run. To delete it: {DELETE} (deleting PyTorchJob ddp: the cluster"
    assert said.startswith("creating ConfigMap ddp: ")
    assert f"no config maps. {left}" in said
    server.objects.clear()
    monkeypatch.setattr(launcher, "KubernetesRun", lambda *_: 1 / 0)
    server.script["DELETE", "ddp"] = [REFUSED]
    assert refusal(PLACE.launch, job).startswith(f"division by zero. {left}")


# The end


def test_a_job_that_somebody_else_deletes_has_failed(server, job):
    with PLACE.launch(job) as started:
        server.objects.clear()
        with pytest.raises(RunFailed, match="ddp is gone: somebody has deleted it"):
            started.wait(timeout_seconds=20)


def test_another_job_of_the_same_name_is_neither_followed_nor_deleted(server, job):
    started = PLACE.launch(job)
    path = next(path for path in server.objects if "pytorchjobs" in path)
    server.objects[path] = {"kind": "PyTorchJob", "metadata": {"name": "ddp", "uid": "another"}}
    server.logs = {"ddp-master-0": stamped("not ours")}

    def train(method, last):
        if (method, last) == ("GET", "ddp"):  # the launcher looks at it, and then at its pods
            server.pods = [pod("master")]

    server.before = train
    with pytest.raises(RunFailed, match=r"ddp is gone: .* is another one") as raised:
        started.wait(timeout_seconds=20)
    started.stop()
    assert server.objects[path]["metadata"]["uid"] == "another"
    assert server.made() == ["PyTorchJob ddp"]
    assert "not ours" not in str(raised.value)


def test_an_expired_login_does_not_lose_a_job_but_one_that_stays_gives_it_up(server, job, monkeypatch):
    started = PLACE.launch(job)
    server.script["GET", "ddp"] = [refused(401, "log in")] * 3
    assert eventually(lambda: not server.script["GET", "ddp"])
    assert started.state is RunState.RUNNING
    monkeypatch.setattr("workshop_utils.launchers.remote.BLIND_SECONDS", 0.1)
    server.script["GET", "ddp"] = [refused(401, "log in")] * 1000
    with pytest.raises(RunFailed, match="ddp does not answer, and may still be running"):
        started.wait(timeout_seconds=20)
    assert len(server.made()) == 3
    server.script.clear()
    started.stop()
    assert server.made() == []


def test_a_job_that_cannot_be_deleted_is_no_secret_and_how_it_had_ended_is_said(server, job, monkeypatch):
    server.job_status = condition("Succeeded")
    ended = PLACE.launch(job).wait(timeout_seconds=20)
    server.script["DELETE", "ddp"] = [REFUSED]
    assert refusal(ended.stop).startswith(
        f"ddp succeeded. It is still on the cluster. To delete it: {DELETE} (deleting PyTorchJob ddp: the clus"
    )
    ended.stop()
    server.job_status = {}
    started = PLACE.launch(job)
    server.script["DELETE", "ddp"] = [REFUSED]
    left = f"The job may still exist and run. To delete it: {DELETE} "
    assert refusal(started.stop).startswith(f"{left}(deleting PyTorchJob ddp: the cluster answered 403")

    def expire(method, last):
        if method == "DELETE":
            server.script["GET", "pods"] = [refused(401, "Unauthorized")] * 1000

    server.before = expire
    assert "your login has expired" in refusal(started.stop)
    server.script.clear()
    server.before = lambda method, last: (_thread.interrupt_main(), time.sleep(0.5))[0]
    assert refusal(started.stop).startswith(left)
    server.before = lambda method, last: None
    started.stop()
    assert (started.state, server.made()) == (RunState.STOPPED, [])


def test_a_job_counts_as_deleted_once_its_pods_are_gone_or_cannot_be_seen(server, job, monkeypatch):
    monkeypatch.setattr("workshop_utils.launchers.kubernetes.cluster.GONE_SECONDS", 0.1)
    server.pods = [pod("master")]
    started = PLACE.launch(job)
    for name, times in (("ddp", 2), ("ddp-data", 1)):  # it agrees to delete each object, and they stay
        server.script["DELETE", name] = [(200, {"kind": "Status", "status": "Success"})] * times
    said = refusal(started.stop)
    assert said.startswith(
        f"The job may still exist and run. To delete it: {DELETE} configmap/ddp configmap/ddp-data"
    )
    assert (
        "(after a minute there are still: PyTorchJob ddp, ConfigMap ddp, ConfigMap ddp-data, its pods)"
        in said
    )
    server.script["GET", "pods"] = [refused(403, "no pods")] * 1000
    started.stop()
    assert (started.state, server.made()) == (RunState.STOPPED, [])


def test_an_api_server_that_restarts_does_not_end_a_run(server, job):
    server.pods = [pod("master")]
    server.logs["ddp-master-0"] = stamped("hello")
    with PLACE.launch(job) as started:
        assert eventually(lambda: list(started.logs()))
        server.close()
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=0.5)
        assert refusal(PLACE.launch, job).startswith(f"{CREATING} the cluster does not answer; is it up? (")
        asked = len(server.requests)
        server.job_status = condition("Succeeded")
        server.open(server.port)
        started.wait(timeout_seconds=30)
        assert len(server.requests) > asked
        assert [line.text for line in started.logs(worker="worker-0")] == ["hello"]
    assert server.made() == []


# How a cluster is found


NOWHERE = "there is no cluster to talk to ("


@pytest.mark.parametrize(
    "text", ["a: [", "hello", "[1, 2]", "clusters: 3", "\0", "current-context: x\ncontexts: [3]", None]
)
def test_without_a_kubeconfig_the_way_to_do_without_is_named(tmp_path, monkeypatch, text):
    file = tmp_path / "kubeconfig"
    monkeypatch.setenv("KUBECONFIG", str(file))
    if text is not None:
        file.write_text(text)
    said = refusal(connect)
    assert said.startswith(NOWHERE + (f"{file}: " if text else f"there is no file {file})"))
    assert said.endswith("kubernetes-local runs the same pods on this machine")
    assert "\n" not in said


@pytest.mark.processes
def test_a_context_or_a_program_for_logging_in_that_is_missing_is_named(server, tmp_path, capfd):
    file = tmp_path / "kubeconfig"
    assert "other" in refusal(connect, "other")
    login = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "no-such-aws", "args": []}
    user = {"name": "me", "user": {"exec": login}}
    file.write_text(yaml.safe_dump({**yaml.safe_load(file.read_text()), "users": [user]}))
    said = refusal(connect)
    assert "no-such-aws" in said
    assert "install the program by which it logs in" in said
    assert capfd.readouterr().err == ""


def test_without_a_registry_nothing_is_sent_and_without_a_claim_the_loss_is_told(server, job):
    for place, fault in (
        (Kubernetes(), "missing"),
        (Kubernetes(registry="123456789012.x"), "that of the examples"),
    ):
        with pytest.raises(
            JobError, match=f"registry is {fault}; no cluster can pull .*workshop-pytorch:cpu"
        ):
            place.launch(job)
    assert server.requests == []
    with PLACE.launch(job) as started:
        assert "The model goes with its pod" in started.warning
    with PLACE.launch(job.replace(outputs="claim:mine")) as started:
        assert started.warning == ""


# The command line

PROGRAM = [sys.executable, "-c", "from workshop_utils.cli import main; main()", "launch"]


def command_line(job, folder):
    """The words of a command line that launches `job` on the server of KUBECONFIG."""
    (folder / "place.yaml").write_text(f"registry: {REGISTRY}\n")
    (job.folder / "job.yaml").write_text("name: ddp\nstrategy: torch_ddp\nworkers: 2\ndata: digits\n")
    return [*PROGRAM, str(job.folder), "--on", "kubernetes", "--config", str(folder / "place.yaml")]


@pytest.mark.processes
def test_the_command_line_shows_what_the_cluster_warns_of_once(server, job, tmp_path):
    server.warnings = [warning("ddp", "FailedCreate", "violates PodSecurity")]
    server.job_status = condition("Succeeded")
    shown = subprocess.run(command_line(job, tmp_path), capture_output=True, text=True, check=True).stdout
    assert shown.splitlines().count("[ddp] FailedCreate: violates PodSecurity") == 1
    assert shown.startswith("warning: The model goes with its pod.")


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_or_a_kill_ends_the_job_as_an_interrupt_does(server, job, tmp_path, number):
    process = subprocess.Popen(command_line(job, tmp_path), stderr=subprocess.PIPE, text=True)
    assert eventually(lambda: len(server.made()) == 3)
    process.send_signal(number)
    assert "stopped, nothing is left running" in process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert server.made() == []


# The runtime of a TrainJob


NO_RUNTIME = "spec.runtimeRef: specified trainingRuntime must be created before the TrainJob is created"


def test_a_runtime_goes_with_its_trainjob_which_is_sent_again_while_the_trainer_does_not_know_it(server, job):
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * 2
    with WITH_RUNTIME.launch(job):
        by_kind = {each["kind"]: each["metadata"] for each in server.objects.values()}
        (owner,) = by_kind["TrainingRuntime"]["ownerReferences"]
        assert (owner["kind"], owner["uid"]) == ("TrainJob", by_kind["TrainJob"]["uid"])
    assert server.made() == []
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * TRIES
    assert "must be created before the TrainJob" in refusal(WITH_RUNTIME.launch, job)
    assert server.made() == []
