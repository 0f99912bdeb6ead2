"""Emulated pods: real processes, with the variables that an operator would set."""

import json
import os
import re

import pytest
from conftest import eventually, failure_of
from kubernetes_api import changed

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import EmulatedKubernetes, Kubernetes
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.operators import Pod, reconcile
from workshop_utils.launchers.kubernetes.settings import Elastic
from workshop_utils.runs import RunFailed, RunState

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

TELL = """
import json, os, sys, time
from workshop_utils import place
here = place.here()
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "TF_CONFIG", "JOB_COMPLETION_INDEX", "PET_NNODES", "WORKSHOP_CHECKPOINTS")
told = json.dumps({name: os.environ[name] for name in names if name in os.environ})
print(f"told {told}\\n", end="")  # in one piece, since the ranks of a pod share an output
place.report(step=place.load("train").count, words=len(sys.argv))
"""


@pytest.fixture
def told(make_job):
    """The variables of the workers of a job, by name, as the emulated pods print them."""

    def carry_out(target=None, then="", **fields):
        job = make_job(TELL, then, arguments={"epochs": 3}, **fields)
        with (target or EmulatedKubernetes()).launch(job) as run:
            run.wait(timeout_seconds=100)
            # The three images of the data, and `--epochs 3`.
            assert {(record["step"], record["words"]) for record in run.records} == {(3, 3.0)}
            lines = [line for line in run.logs() if line.text.startswith("told ")]
        return {line.worker: json.loads(line.text.removeprefix("told ")) for line in lines}

    return carry_out


def broken(job, path, value):
    """The manifest of `job`, a single one, with a field of its pod's spec changed."""
    return Manifest(changed(Kubernetes().render(job).resource, f"spec.template.spec.{path}", value))


MEET = """
folder = place.checkpoint_folder()
(folder / str(here.rank)).touch()
while len(list(folder.iterdir())) < 3:
    time.sleep(0.05)
"""


def test_a_pytorchjob_gets_rank_and_master_and_all_its_pods_share_an_emulated_claim(told):
    variables = told(then=MEET, strategy="torch_ddp", workers=3, checkpoints="claim:shared")
    assert [variables[f"worker-{rank}"]["RANK"] for rank in range(3)] == ["0", "1", "2"]
    assert {(each["WORLD_SIZE"], each["MASTER_ADDR"]) for each in variables.values()} == {("3", "127.0.0.1")}
    assert {each["WORKSHOP_CHECKPOINTS"] for each in variables.values()} == {"/workshop/checkpoints"}


def test_a_tfjob_gets_a_cluster_on_loopback(told):
    variables = told(strategy="multi_worker_mirrored", workers=2)
    first, second = (json.loads(each["TF_CONFIG"])["cluster"]["worker"] for each in variables.values())
    assert first == second
    assert len(set(first)) == 2
    assert all(address.startswith("127.0.0.1:") for address in first)


def test_a_plain_job_gets_its_index(told):
    assert told() == {"worker-0": {"JOB_COMPLETION_INDEX": "0"}}


def test_mpirun_starts_the_ranks_of_an_mpijob_which_are_told_apart(make_job):
    script = "from mpi4py import MPI\nassert MPI.COMM_WORLD.size == 2\n"
    job = make_job(TELL, script, strategy="mpi", workers=2)
    with EmulatedKubernetes().launch(job) as run:
        run.wait(timeout_seconds=100)
        assert run.workers == ("worker-0", "worker-1")
        assert {record["worker"] for record in run.records} == {"worker-0", "worker-1"}


@pytest.mark.parametrize(
    ("target", "processes"),
    [
        ({"kind": "TrainJob"}, 2),
        ({"elastic": Elastic(min_workers=2, max_workers=2)}, 1),
        ({"kind": "PyTorchJob"}, 2),
    ],
)
def test_what_torchrun_starts_gets_its_rank_from_torchrun(told, target, processes):
    variables = told(
        EmulatedKubernetes(**target), strategy="torch_ddp", nodes=2, processes_per_node=processes
    )
    # Which rank of a pod printed a line, torchrun does not say.
    name = "worker" if processes == 1 else "node"
    assert variables.keys() == {f"{name}-0", f"{name}-1"}
    assert {each["WORLD_SIZE"] for each in variables.values()} == {str(2 * processes)}
    assert len({each["RANK"] for each in variables.values()}) == 2


# A mistake in the manifest


def test_a_mistaken_script_path_fails_as_it_would_in_a_pod(make_job):
    job = make_job(TELL)
    misspelled = broken(job, "containers.0.command.1", "trian.py")
    said = r"(?s)pod job-1-0 ended with exit code 2.*python: can't open file '/workshop/job/trian\.py'"
    with EmulatedKubernetes().launch(job, misspelled) as run, pytest.raises(RunFailed, match=said):
        run.wait(timeout_seconds=100)
    assert run.pods().to_dict("list") == {"pod": ["job-1-0"], "worker": ["worker-0"], "phase": ["Failed"]}
    assert run.describe().splitlines()[:2] == ["Job job-1: failed", "pod job-1-0: Failed"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("volumes.2.name", "other", "/workshop/data mounts volume 'data', which the pod does not have"),
        ("volumes.2", {"name": "data", "configMap": {"name": "job-1"}}, "volume 'data' is neither an emptyDir"),
        ("volumes.0.projected.sources.1.configMap.name", "other", "none of job-1, other has that key"),
        ("volumes.0.projected.sources.1.configMap", {}, "of the job's ConfigMaps, none of job-1 has that key"),
        ("initContainers.0.volumeMounts.1.mountPath", "/else", "where it mounts a volume: /workshop/archives, /else"),
        ("initContainers.0.command.2", "pip install x", "'unpack' runs 'pip install x'; it must be tar -xzf"),
        ("containers.0.imagee", "x", "containers[0].imagee: unknown field; did you mean image?"),
        ("containers.0.command", [], "its container has no command"),
        ("containers.0.command", ["bash"], "its command is 'bash'; the emulator has python, python3, torchrun, mpirun"),
    ],
)  # fmt: skip
def test_what_no_pod_could_start_with_is_refused_before_anything_starts(make_job, path, value, message):
    job = make_job(TELL)
    with pytest.raises(JobError, match=re.escape(message)):
        EmulatedKubernetes().launch(job, broken(job, path, value))


def test_the_deadline_of_the_manifest_ends_a_job_that_hangs(make_job):
    job = make_job("import time\ntime.sleep(600)\n", timeout="1s")
    with EmulatedKubernetes().launch(job) as run:
        assert "was active longer than its activeDeadlineSeconds" in failure_of(run)


def test_a_pod_that_failed_beside_the_master_s_success_is_named(make_job):
    script = """
    import os, time
    rank, folder = int(os.environ["RANK"]), os.environ["WORKSHOP_CHECKPOINTS"]
    if rank:
        open(f"{folder}/failing", "w").close()
        raise RuntimeError("the evaluation")
    while not os.path.exists(f"{folder}/failing"):
        time.sleep(0.01)
    """
    job = make_job(script, strategy="torch_ddp", workers=2, checkpoints="claim:mine")
    with EmulatedKubernetes(kind="PyTorchJob").launch(job) as run:
        run.wait(100)
        (note,) = (line.text for line in run.logs(worker=job.name))
    assert (
        note
        == f"pod {job.name}-worker-0 failed; the job has succeeded all the same, as the operator counts it"
    )


def test_leaving_the_block_ends_every_pod(make_job):
    job = make_job("import time\ntime.sleep(600)\n", strategy="torch_ddp", workers=2)
    with EmulatedKubernetes().launch(job) as run:
        assert run.state is RunState.RUNNING
        assert eventually(lambda: set(run.pods()["phase"]) == {"Running"})
    assert run.state is RunState.STOPPED


# The operator's loop


def test_a_deleted_pod_is_made_again_and_finds_the_claim_as_it_was(make_job):
    script = "from workshop_utils import place\nmark = place.checkpoint_folder() / 'second'\n"
    script += "import time\nif not mark.exists():\n    mark.touch()\n    print('here')\n    time.sleep(600)\n"
    job = make_job(script, strategy="torch_ddp", workers=1, checkpoints="claim:shared")
    with EmulatedKubernetes().launch(job) as run:
        assert eventually(lambda: [line.text for line in run.logs()] == ["here"])
        run.delete_pod("job-1-master-0")
        run.wait(timeout_seconds=60)
    assert run.pods()["phase"].tolist() == ["Succeeded"]
    with pytest.raises(JobError, match="no pod 'job-1-master-0' runs; there are: none"):
        run.delete_pod("job-1-master-0")


def test_a_pod_that_failed_is_replaced_on_failure_up_to_the_limit_of_restarts(make_job):
    job = make_job("import sys\nprint('again', flush=True)\nsys.exit(3)\n", strategy="torch_ddp", workers=1)
    resource = Kubernetes().render(job).resource
    resource = changed(resource, "spec.pytorchReplicaSpecs.Master.restartPolicy", "OnFailure")
    resource = changed(resource, "spec.runPolicy.backoffLimit", 2)
    with EmulatedKubernetes().launch(job, Manifest(resource)) as run:
        assert "pod job-1-master-0 ended with exit code 3" in failure_of(run)
    assert [line.text for line in run.logs()] == ["again"] * 3


@pytest.mark.parametrize(
    ("actions", "message"),
    [
        ([("create", "other", {}, {})], "JobError: pod other is none of job-1-master-0"),
        ([("create", "job-1-master-0", {}, {})] * 2, "JobError: pod job-1-master-0 already exists"),
        ([("condition", "Failed")], "job-1 failed: the operator's loop said so"),
    ],
)
def test_another_loop_may_decide_and_its_mistakes_end_the_run(make_job, actions, message):
    job = make_job("import time\ntime.sleep(600)\n", strategy="torch_ddp", workers=1)
    with EmulatedKubernetes().launch(job, reconcile=lambda resource, pods: actions) as run:
        assert message in failure_of(run)


ONE = Pod("job-master-0", "worker-0")


@pytest.mark.parametrize(
    ("condition", "policy", "removed"),
    [("Succeeded", "Running", ["b", "c"]), ("Failed", "All", ["a", "b", "c"]), ("Failed", "None", [])],
)
def test_what_is_left_of_a_job_that_has_ended_goes_by_its_policy(condition, policy, removed):
    job = {"metadata": {"name": "job"}, "spec": {"runPolicy": {"cleanPodPolicy": policy}}}
    pods = {"a": "Succeeded", "b": "Running", "c": "Pending"}
    actions = reconcile({**job, "status": {"condition": condition}}, pods, [ONE])
    assert actions == [("delete", name) for name in removed]


def test_a_job_goes_on_where_a_pod_may_restart_and_has_succeeded_with_one_if_it_is_elastic():
    job = {"metadata": {"name": "job"}, "spec": {}, "status": {}}
    elastic = [Pod("a", "worker-0", restart_policy="OnFailure"), Pod("b", "worker-1")]
    pods = {"a": "Failed", "b": "Succeeded"}
    assert reconcile(job, pods, elastic) == [("delete", "a")]
    assert reconcile({**job, "spec": {"elasticPolicy": {}}}, pods, elastic) == [("condition", "Succeeded")]


def test_a_claim_that_is_called_like_the_job_s_config_map_is_no_config_map(make_job, tmp_path):
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "corpus.txt").write_bytes(os.urandom(2 << 20))  # more than a ConfigMap holds
    script = "import os; print(os.listdir(os.environ['WORKSHOP_DATA']))"
    job = make_job(script, name="training", data=str(tmp_path / "large"))
    with EmulatedKubernetes(data_claim="training-data").launch(job) as run:
        run.wait(timeout_seconds=60)
    assert [line.text for line in run.logs()] == ["['corpus.txt']"]


@pytest.mark.processes
def test_a_folder_that_an_image_holds_does_not_travel(make_job):
    job = make_job(
        "import os; print(os.getcwd(), open('big', 'rb').read(3).decode(), os.listdir('corpus'))\n"
        "from workshop_utils import place"
    )
    (job.folder / "big").write_bytes(b"big" + os.urandom(2 << 20))
    (job.folder / "corpus").mkdir()
    (job.folder / "corpus" / "text").write_text("text")
    job = job.replace(data=str(job.folder / "corpus"))
    with pytest.raises(
        JobError, match=r"folder is .*packed it has 2.1 MB \(big 2.1 MB\).*image and folder in place.yaml"
    ):
        EmulatedKubernetes().render(job)
    with pytest.raises(JobError, match="folder is '/app'; name the image"):
        EmulatedKubernetes(folder="/app").render(job)
    target = EmulatedKubernetes(folder="/app", image="mine:1")
    assert "workingDir: /app" in str(target.render(job))
    with target.launch(job) as run:
        run.wait()
    assert [line.text for line in run.logs()] == ["/app big ['text']"]
