"""Launching on a cluster: an API server that answers as its script says, on loopback."""

import _thread
import signal
import ssl
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


def warning(name, reason, message, at="2026-01-02T00:00:00Z"):
    about = {"involvedObject": {"name": name}, "metadata": {"creationTimestamp": at}}
    return {"reason": reason, "message": message, **about}


def test_a_job_is_made_followed_and_deleted(server, job):
    server.pods = [pod("master"), pod("worker")]
    server.logs = {"ddp-master-0": stamped("hello", metric(0)), "ddp-worker-0": stamped("here too")}
    server.job_status = condition("Succeeded", "all is well")
    server.job_status["conditions"][:0] = [{"type": "Failed"}, {"status": "True"}]  # which say nothing
    with PLACE.launch(job) as started:
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
    with PLACE.launch(job) as started:
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
    with PLACE.launch(job) as started:
        assert eventually(lambda: [str(line) for line in started.logs()] == ["[worker-1] hello"])
        server.job_status = condition("Succeeded")
        started.wait(timeout_seconds=5)


def test_a_pod_that_cannot_be_scheduled_says_so_once(server, job):
    server.pods = [pod("master", "Pending")]
    server.warnings = [warning("ddp-master-0", "FailedScheduling", "2 Insufficient cpu.")]
    server.script["GET", "events"] = [(200, {"items": [], "metadata": {"continue": "more"}})]
    with PLACE.launch(job) as started:
        assert str(next(started.logs(follow=True))) == "[ddp-master-0] FailedScheduling: 2 Insufficient cpu."
        assert started.describe().endswith(
            "pod ddp-master-0: Pending\n  FailedScheduling: 2 Insufficient cpu."
        )
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=0.5)
        assert len(list(started.logs())) == 1
        assert started.notices == ["[ddp-master-0] FailedScheduling: 2 Insufficient cpu."]
        assert started.waits_for == "pod ddp-master-0 to start (FailedScheduling: 2 Insufficient cpu.)"
    assert sum("continue=more" in path for _, path in server.requests) == 1


def test_warnings_about_the_job_itself_are_told_but_not_those_about_the_job_before(server, make_job):
    job = make_job("import mpi4py", name="ddp", strategy="mpi", workers=2)
    server.created_at = "2026-01-02T00:00:00Z"
    server.warnings = [
        warning("ddp", "FailedCreate", "violates PodSecurity"),
        warning("ddp-launcher", "FailedCreate", "exceeded quota"),  # of the Job that the operator makes
        warning("ddp", "FailedCreate", "of an older job", at="2026-01-01T23:59:59Z"),
        warning("ddp-2", "FailedCreate", "of another job"),
    ]
    with PLACE.launch(job) as started:
        told = ["[ddp] FailedCreate: violates PodSecurity", "[ddp-launcher] FailedCreate: exceeded quota"]
        assert eventually(lambda: started.notices == told)
        assert [str(line) for line in started.logs()] == told
        waits_for = "its first pod (ddp-launcher: FailedCreate: exceeded quota)"
        assert eventually(lambda: started.waits_for == waits_for)
        assert "violates PodSecurity" in started.describe()
        assert "older" not in started.describe()


def test_a_job_of_which_nobody_makes_pods_asks_for_its_operator_and_ends_at_its_timeout(
    server, job, monkeypatch
):
    monkeypatch.setattr(launcher, "PATIENCE_SECONDS", 0.1)
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.1)
    with PLACE.launch(job.replace(timeout="1s")) as started:
        assert eventually(lambda: "is the operator running" in started.waits_for)
        with pytest.raises(RunFailed, match="ddp ran longer than its timeout of 1 s, and no operator"):
            started.wait(timeout_seconds=20)
        assert server.made() == []
    with PLACE.launch(job.replace(timeout="1s")) as started:  # but one that waits in a queue has time
        server.job_status = condition("Suspended")
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=2)
    # A TrainJob's status never says when it started.
    server.job_status = {"conditions": [{"type": "Suspended", "status": "False"}], "jobsStatus": []}
    started = Kubernetes(kind="TrainJob", registry=REGISTRY).launch(job.replace(timeout="1s"))
    with started, pytest.raises(RunFailed, match="ran longer than its timeout"):
        started.wait(timeout_seconds=20)
    server.job_status = {}
    with Kubernetes(gang="volcano", registry=REGISTRY).launch(job) as started:
        assert eventually(lambda: "its turn in the queue default" in started.waits_for)


def test_an_mpi_job_has_time_until_its_launcher_is_there_and_the_last_lines_of_one_that_is_overdue_arrive(
    server, make_job, monkeypatch
):
    monkeypatch.setattr(launcher, "GRACE_SECONDS", 0.1)
    job = make_job("import mpi4py\n", name="ddp", strategy="mpi", workers=2)
    # As the MPI operator has it while the workers wait in Volcano's queue: it notes a start at once.
    server.job_status = {"startTime": "2026-01-01T00:00:00Z", **condition("Created")}
    server.job_status["replicaStatuses"] = {"Worker": {}}
    server.pods = [pod("worker", "Pending")]
    with Kubernetes(gang="volcano", registry=REGISTRY).launch(job.replace(timeout="1s")) as started:
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=2)
        server.job_status["replicaStatuses"] = {"Worker": {"active": 2}, "Launcher": {}}
        server.pods = [pod("launcher")]

        def end(method, last):
            if method == "DELETE":
                server.logs.clear()

        server.before = end
        server.logs["ddp-launcher-0"] = stamped("[1,0]<stdout>:hello")
        with pytest.raises(RunFailed, match="ddp ran longer than its timeout"):
            started.wait(timeout_seconds=20)
        assert [line.text for line in started.logs(worker="worker-0")] == ["hello"]
        assert server.made() == []


def test_a_webhook_that_is_not_up_yet_is_asked_again_and_has_made_nothing(server, job):
    down = refused(
        500, 'Internal error occurred: failed calling webhook "v.pytorchjob": no endpoints available'
    )
    server.script["POST", "pytorchjobs"] = [down] * 2
    with PLACE.launch(job):
        assert len(server.made()) == 3
    server.script["POST", "pytorchjobs"] = [down] * TRIES
    with pytest.raises(KubernetesError) as refusal:
        PLACE.launch(job)
    assert str(refusal.value) == (
        "creating PyTorchJob ddp: an operator that checks such objects does not answer; see whether its pods run. "
        f"Kubernetes says: {down[1]['message']}"
    )


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        (
            'admission webhook "v.pytorchjob" denied the request: spec.a: Required',
            "the cluster, or an operator, does not accept",
        ),
        (
            "pytorchjobs ddp is forbidden: exceeded quota: workshop, used: 1",
            "the namespace's quota is used up",
        ),
    ],
)
def test_a_webhook_s_refusal_and_a_quota_are_no_matter_of_rights(server, job, reason, said):
    for ask in (PLACE.launch, PLACE.dry_run):
        server.script["POST", "pytorchjobs"] = [refused(403, reason)]
        with pytest.raises(KubernetesError, match=f"PyTorchJob ddp: {said}.* Kubernetes says: {reason}$"):
            ask(job)


def test_logs_are_followed_where_events_may_not_be_read(server, job):
    server.pods = [pod("master"), pod("worker", "Pending")]
    server.logs = {"ddp-master-0": stamped("hello")}
    server.script["GET", "events"] = [refused(403, "no events")] * 1000
    with PLACE.launch(job) as started:
        lines = started.logs(follow=True)
        while (line := str(next(lines))) != "[worker-0] hello":
            assert "no events" in line


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


@pytest.mark.parametrize("status", [401, 403])
def test_an_expired_login_does_not_lose_a_job_but_one_that_stays_gives_it_up(
    server, job, monkeypatch, status
):
    started = PLACE.launch(job)
    server.script["GET", "ddp"] = [refused(status, "log in")] * 3
    assert eventually(lambda: not server.script["GET", "ddp"])
    assert started.state is RunState.RUNNING
    monkeypatch.setattr("workshop_utils.launchers.followed.BLIND_SECONDS", 0.1)
    server.script["GET", "ddp"] = [refused(status, "log in")] * 1000
    with pytest.raises(RunFailed, match="ddp does not answer, and may still be running"):
        started.wait(timeout_seconds=20)
    assert len(server.made()) == 3
    server.script.clear()
    started.stop()
    assert server.made() == []


@pytest.mark.parametrize(
    ("what", "status", "message", "said"),
    [
        ("pytorchjobs", 409, "it is there", "creating PyTorchJob ddp: something of that name exists already"),
        ("pytorchjobs", 500, "etcd is down", "creating PyTorchJob ddp: the cluster failed; its logs"),
        ("configmaps", 403, "no config maps", "creating ConfigMap ddp: you may not do that"),
    ],
)
def test_a_refusal_says_what_to_do_and_leaves_nothing(server, job, what, status, message, said):
    server.script["POST", what] = [refused(status, message)]
    in_doubt = r"\. The job may still exist .* may still come\)" if status == 500 else ""
    with pytest.raises(KubernetesError, match=f"^{said}.* Kubernetes says: {message}{in_doubt}$"):
        PLACE.launch(job)
    assert server.made() == []
    assert sum(method == "POST" and "pytorchjobs" in path for method, path in server.requests) == 1


@pytest.mark.parametrize(
    ("is_made", "late_seconds"), [(True, 0), (False, 0), (True, 0.3)], ids=["ours", "another's", "later"]
)
def test_a_creation_whose_answer_is_lost_is_looked_for_and_undone_unless_it_is_somebody_else_s(
    server, job, is_made, late_seconds
):
    server.late["POST", "pytorchjobs"] = refused(504, "the request timed out")
    server.late_seconds = late_seconds
    if not is_made:
        server.managers = ["kubectl-create"]
    with pytest.raises(KubernetesError, match=r"creating PyTorchJob ddp: .* timed out$"):
        PLACE.launch(job)
    time.sleep(late_seconds)
    assert server.made() == ([] if is_made else ["PyTorchJob ddp"])


def test_a_creation_that_was_answered_with_busy_and_took_place_is_the_job_s(server, job):
    server.late["POST", "pytorchjobs"] = refused(503, "the server is shutting down")
    with PLACE.launch(job) as started:
        assert started.state is RunState.RUNNING
        assert len(server.made()) == 3
    assert server.made() == []


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
    left = (
        r"^launching the job was interrupted\. The job may still .* delete pytorchjob\.kubeflow\.org/ddp \("
    )
    with pytest.raises(KubernetesError, match=left):
        PLACE.launch(job)


def test_where_the_roll_back_fails_too_the_cause_comes_first_and_what_is_left_is_named(
    server, job, monkeypatch
):
    server.script["POST", "configmaps"] = [refused(403, "no config maps")]
    server.script["DELETE", "ddp"] = [refused(403, "no deleting")]
    way = r"kubectl --namespace default delete pytorchjob\.kubeflow\.org/ddp"
    said = (
        rf"^creating ConfigMap ddp: .* no config maps\. The job may still exist .* {way} \(.*no deleting\)$"
    )
    with pytest.raises(KubernetesError, match=said):
        PLACE.launch(job)
    server.objects.clear()
    monkeypatch.setattr(launcher, "KubernetesRun", lambda *_: 1 / 0)
    server.script["DELETE", "ddp"] = [refused(403, "no deleting")]
    with pytest.raises(KubernetesError, match=rf"^division by zero\. .* {way} \("):
        PLACE.launch(job)
    server.late["POST", "pytorchjobs"] = refused(504, "timed out")
    server.script["GET", "ddp"] = [refused(403, "no looking")]
    server.objects.clear()
    with pytest.raises(
        KubernetesError, match=rf"timed out\. The job may still exist .* {way} \(.*no looking\)$"
    ):
        PLACE.launch(job)


def test_how_a_job_ended_is_said_even_if_what_is_left_of_it_cannot_be_deleted(server, job, monkeypatch):
    server.job_status = condition("Succeeded")
    started = PLACE.launch(job).wait(timeout_seconds=20)
    server.script["DELETE", "ddp"] = [refused(403, "no")]
    with pytest.raises(KubernetesError, match=r"^ddp succeeded\. It could not be deleted\..*you may not"):
        started.stop()
    started.stop()
    monkeypatch.setattr("workshop_utils.launchers.followed.BLIND_SECONDS", 0.1)
    server.job_status = {}
    started = PLACE.launch(job)
    server.close()
    with pytest.raises(RunFailed, match="ddp does not answer, and may still be running"):
        started.wait(timeout_seconds=60)
    with pytest.raises(KubernetesError, match=r"^ddp may still run: it could not be deleted\. "):
        started.stop()
    server.open(server.port)


def test_an_expired_login_and_an_interrupt_leave_it_open_whether_the_job_is_gone(server, job):
    started = PLACE.launch(job)

    def expire(method, last):
        if method == "DELETE":
            server.script["GET", "pods"] = [refused(401, "Unauthorized")] * 1000

    server.before = expire
    with pytest.raises(KubernetesError, match=r"ddp may still run: .* your login has expired"):
        started.stop()
    server.script.clear()
    server.before = lambda method, last: (_thread.interrupt_main(), time.sleep(0.5))[0]
    interrupted = (
        r"interrupted\. To delete it: kubectl --namespace default delete pytorchjob\.kubeflow\.org/ddp "
    )
    with pytest.raises(KubernetesError, match=f"ddp may still run: .* {interrupted}"):
        started.stop()
    server.before = lambda method, last: None
    started.stop()
    assert server.made() == []


def test_who_may_not_see_pods_may_delete_a_job_all_the_same(server, job):
    started = PLACE.launch(job)
    server.script["GET", "pods"] = [refused(403, "no pods")] * 1000
    started.stop()
    assert started.state is RunState.STOPPED
    assert server.made() == []


def test_a_cluster_that_fails_for_a_moment_is_asked_again(server, job):
    server.script["POST", "pytorchjobs"] = [refused(429, "slow down")] * 2
    server.script["GET", "ddp"] = [refused(500, "leader changed"), (502, b"<html>")]
    server.script["DELETE", "ddp"] = [refused(503, "busy")]
    server.job_status = condition("Succeeded")
    with PLACE.launch(job) as started:
        started.wait(timeout_seconds=20)
    assert server.made() == []
    server.script["POST", "configmaps"] = [refused(429, "slow down")] * TRIES
    with pytest.raises(KubernetesError, match=f"asks to slow down after {TRIES} tries"):
        PLACE.launch(job)


def test_a_job_that_cannot_be_deleted_is_not_kept_secret(server, job):
    started = PLACE.launch(job)
    assert started.state is RunState.RUNNING
    server.script["DELETE", "ddp"] = [refused(403, "no")]
    with pytest.raises(KubernetesError, match="ddp may still run: it could not be deleted"):
        started.stop()
    started.stop()
    assert started.state is RunState.STOPPED
    assert server.made() == []


def test_a_job_counts_as_deleted_once_its_pods_are_gone(server, job, monkeypatch):
    monkeypatch.setattr("workshop_utils.launchers.kubernetes.cluster.GONE_SECONDS", 0.1)
    server.pods = [pod("master")]
    started = PLACE.launch(job)
    for name, times in (("ddp", 2), ("ddp-data", 1)):  # it agrees to delete each object, and they stay
        server.script["DELETE", name] = [(200, {"kind": "Status", "status": "Success"})] * times
    stays = r"still there after a minute: PyTorchJob ddp, .*, its pods; kubectl"
    with pytest.raises(KubernetesError, match=rf"ddp may still run: it could not be deleted.*{stays}"):
        started.stop()
    started.stop()
    assert started.state is RunState.STOPPED


def test_without_a_cluster_the_way_to_do_without_is_named(server, tmp_path, monkeypatch):
    with pytest.raises(KubernetesError, match=r"there is no cluster to talk to.*other"):
        connect(context="other")
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(
        KubernetesError, match=r"there is no file .*/none\).*kubernetes-local runs the same pods on this"
    ):
        connect()


@pytest.mark.parametrize(
    "text", ["a: [", "hello", "[1, 2]", "clusters: 3", "\0", "current-context: x\ncontexts: [3]"]
)
def test_a_file_that_is_no_kubeconfig_is_refused_in_a_sentence(tmp_path, monkeypatch, text):
    (tmp_path / "kubeconfig").write_text(text)
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "kubeconfig"))
    with pytest.raises(KubernetesError, match=r"^there is no cluster to talk to \(.*kubeconfig"):
        connect()


def test_a_program_for_logging_in_that_is_missing_is_named(server, tmp_path, monkeypatch, capfd):
    file = tmp_path / "kubeconfig"
    login = {"apiVersion": "client.authentication.k8s.io/v1beta1", "command": "no-such-aws", "args": []}
    file.write_text(
        yaml.safe_dump(
            {**yaml.safe_load(file.read_text()), "users": [{"name": "me", "user": {"exec": login}}]}
        )
    )
    with pytest.raises(KubernetesError, match=r"no-such-aws.*install the program by which it logs in"):
        connect()
    assert capfd.readouterr().err == ""


def test_a_certificate_that_is_not_trusted_is_named(server, job, tmp_path):
    file = tmp_path / "kubeconfig"
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "1",
         "-subj", "/CN=localhost", "-keyout", tmp_path / "key", "-out", tmp_path / "certificate"],
        check=True, capture_output=True,
    )  # fmt: skip
    context.load_cert_chain(tmp_path / "certificate", tmp_path / "key")
    server.http.socket = context.wrap_socket(server.http.socket, server_side=True)
    file.write_text(file.read_text().replace("http://", "https://"))
    with pytest.raises(KubernetesError, match="its certificate is not one that the kubeconfig trusts"):
        PLACE.launch(job)


def test_a_namespace_that_is_being_deleted_is_no_matter_of_rights(server, job):
    message = "unable to create new content in namespace default because it is being terminated"
    server.script["POST", "pytorchjobs"] = [refused(403, message)]
    with pytest.raises(KubernetesError, match="its namespace is being deleted; wait until it is gone"):
        PLACE.launch(job)


def test_without_a_registry_nothing_is_sent_and_without_a_claim_the_loss_is_told(server, job):
    with pytest.raises(JobError, match="registry is missing; no cluster can pull workshop-pytorch:cpu"):
        Kubernetes().launch(job)
    assert server.requests == []
    with PLACE.launch(job) as started:
        assert "The model goes with its pod" in started.warning
    with PLACE.launch(job.replace(outputs="claim:mine")) as started:
        assert started.warning == ""


PROGRAM = [sys.executable, "-c", "from workshop_utils.cli import main; main()", "launch"]


def command_line(job, folder):
    """The words of a command line that launches `job` on the server of KUBECONFIG."""
    (folder / "place.yaml").write_text(f"registry: {REGISTRY}\n")
    (job.folder / "job.yaml").write_text("name: ddp\nstrategy: torch_ddp\nworkers: 2\n")
    return [*PROGRAM, str(job.folder), "--on", "kubernetes", "--config", str(folder / "place.yaml")]


def test_the_command_line_shows_what_the_cluster_warns_of_once(server, job, tmp_path):
    server.warnings = [warning("ddp", "FailedCreate", "violates PodSecurity")]
    server.job_status = condition("Succeeded")
    shown = subprocess.run(command_line(job, tmp_path), capture_output=True, text=True, check=True).stdout
    assert shown.splitlines().count("[ddp] FailedCreate: violates PodSecurity") == 1
    assert shown.startswith("warning: The model goes with its pod.")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_closed_terminal_or_a_kill_ends_the_job_as_an_interrupt_does(server, job, tmp_path, number):
    process = subprocess.Popen(command_line(job, tmp_path), stderr=subprocess.PIPE, text=True)
    assert eventually(lambda: len(server.made()) == 3, 60)
    process.send_signal(number)
    assert "stopped, nothing is left running" in process.communicate(timeout=60)[1]
    assert process.returncode == 128 + number
    assert server.made() == []


def test_the_ranks_of_an_mpi_job_have_names_and_the_log_of_sshd_does_not_appear(server, make_job):
    job = make_job("import mpi4py\n", name="ddp", strategy="mpi", workers=2)
    first, worker = pod("launcher"), pod("worker")
    first["metadata"]["name"] = "ddp-launcher-x7k2p"  # a Job makes it, and gives it letters of its own
    worker["spec"]["containers"][0]["command"] = ["/usr/sbin/sshd", "-De", "-o", "StrictModes=no"]
    server.pods = [first, worker]
    server.logs["ddp-launcher-x7k2p"] = stamped("[1,0]<stdout>:one", "[1,1]<stdout>:two")
    server.logs["ddp-worker-0"] = stamped("Server listening on 0.0.0.0 port 22.")
    server.job_status = condition("Succeeded")
    with PLACE.launch(job) as started:
        assert started.workers == ("worker-0", "worker-1")
        started.wait(timeout_seconds=20)
        assert {str(line) for line in started.logs()} == {"[worker-0] one", "[worker-1] two"}


# The runtime of a TrainJob


NO_RUNTIME = "spec.runtimeRef: specified trainingRuntime must be created before the TrainJob is created"


def test_a_runtime_goes_with_its_trainjob_which_is_sent_again_while_the_trainer_does_not_know_it(server, job):
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * 2
    with Kubernetes(kind="TrainJob", registry=REGISTRY).launch(job):
        objects = {each["kind"]: each for each in server.objects.values()}
        owner = {"apiVersion": "trainer.kubeflow.org/v1alpha1", "kind": "TrainJob", "name": "ddp"}
        owner["uid"] = objects["TrainJob"]["metadata"]["uid"]
        assert objects["TrainingRuntime"]["metadata"]["ownerReferences"] == [owner]
    assert server.made() == []
    server.script["POST", "trainjobs"] = [refused(403, NO_RUNTIME)] * (1 + TRIES)
    answered = str(Kubernetes(kind="TrainJob", registry=REGISTRY).dry_run(job))
    assert "# TrainingRuntime ddp: would be made" in answered
    assert "# TrainJob ddp: fits its schema; a dry run makes no runtime, which the trainer's own" in answered
    with pytest.raises(KubernetesError, match="must be created before the TrainJob"):
        Kubernetes(kind="TrainJob", registry=REGISTRY).launch(job)
    assert server.made() == []


# A dry run on the server


def test_a_dry_run_asks_for_every_object_and_makes_none(server, job):
    answered = PLACE.dry_run(job)
    assert server.made() == []
    posts = [parse_qs(urlparse(path).query) for method, path in server.requests if method == "POST"]
    assert [(query["dryRun"], query["fieldValidation"]) for query in posts] == [(["All"], ["Strict"])] * 3
    assert answered.comment.splitlines() == [
        f"# {each}: would be made" for each in ("PyTorchJob ddp", "ConfigMap ddp", "ConfigMap ddp-data")
    ]
    assert answered.resource["metadata"]["uid"] == "none-yet"  # it is the server's answer, not ours
    assert answered.resource["spec"] == PLACE.render(job).resource["spec"]
    assert "managedFields" not in str(answered)


def test_a_dry_run_passes_on_all_that_the_server_complains_of(server, job):
    server.script["POST", "pytorchjobs"] = [refused(422, "ddp is invalid: spec.a: Required value")]
    server.script["POST", "configmaps"] = [refused(400, 'strict decoding error: unknown field "datta"')]
    with pytest.raises(KubernetesError) as raised:
        PLACE.dry_run(job)
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
    with PLACE.launch(job) as started:
        assert eventually(lambda: list(started.logs()))
        port = server.http.server_port
        server.close()
        with pytest.raises(TimeoutError):
            started.wait(timeout_seconds=0.5)
        with pytest.raises(KubernetesError, match="creating PyTorchJob ddp: the cluster does not answer"):
            PLACE.launch(job)
        asked = len(server.requests)
        server.job_status = condition("Succeeded")
        server.open(port)
        started.wait(timeout_seconds=30)
        assert len(server.requests) > asked
        assert [line.text for line in started.logs(worker="worker-0")] == ["hello"]
    assert server.made() == []
