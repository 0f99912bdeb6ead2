"""Clusters on EKS: their files fit each other, and what makes and deletes them runs against recording programs."""

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jmespath
import pytest
import typer
import yaml
from conftest import eventually
from typer.testing import CliRunner

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import Kubernetes, check
from workshop_utils.scaling import catalogue

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "jobs" / "clusters" / "eks"), str(ROOT / "tests" / "launchers")]

import eks  # type: ignore[import-not-found]  # noqa: E402  # a program beside the clusters
import kubernetes_api  # noqa: E402

pytestmark = pytest.mark.processes

FOLDER = eks.ROOT / eks.FOLDER


def objects(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


# The files


def test_names_agree_between_places_claim_plugin_queue_and_clusters():
    (claim,), (copier,), (queue,) = map(
        objects, ("storage/claim.yaml", "storage/data-pod.yaml", "queue.yaml")
    )
    for name, cluster in (("place.yaml", "cpu"), ("place-gpu.yaml", "gpu")):
        place = Kubernetes.load(FOLDER / name)
        assert place.context == eks.load(cluster)["metadata"]["name"]
        assert (place.gang, place.queue) == ("volcano", queue["metadata"]["name"])
        mounted = copier["spec"]["volumes"][0]["persistentVolumeClaim"]["claimName"]
        assert place.data_claim == claim["metadata"]["name"] == mounted
    assert claim["spec"]["resources"]["requests"]["storage"] == f"{eks.LUSTRE_GB}Gi"
    assert claim["spec"]["storageClassName"] == objects("storage/storage-class.yaml")[0]["metadata"]["name"]
    plugin = objects("devices/efa.yaml")[0]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = plugin["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    clusters = [eks.load(name) for name in ("cpu", "gpu", "trainium")]
    for group in (group for cluster in clusters for group in cluster["managedNodeGroups"]):
        listed = group["instanceType"] in term["matchExpressions"][0]["values"]
        assert listed == group.get("efaEnabled", False)


def test_what_is_fetched_has_a_fixed_version_and_files_that_are_named_exist():
    files = [*FOLDER.glob("*.sh"), *FOLDER.glob("operators/**/*.yaml")]
    text = "".join(path.read_text() for path in files)
    for address in re.findall(r"https://\S+", text):
        assert re.search(r"/v\d+\.\d+\.\d+/|\?ref=v\d+\.\d+\.\d+'?$", address), address
    named = re.findall(r"(?:\$folder|jobs/clusters/eks)/([\w/.-]+)", text)
    assert len(named) >= 7
    assert all((FOLDER / name).exists() for name in named)


def test_rules_and_schemas_are_those_of_the_operators_that_the_cluster_has():
    fetched = "".join(
        path.read_text() for path in [FOLDER / "create.sh", *FOLDER.glob("operators/**/*.yaml")]
    )
    owners = r"(?:kubeflow|volcano-sh)"
    pins = dict(re.findall(rf"{owners}/([\w-]+?)(?:\.git)?/[^\s']*?(v\d+\.\d+\.\d+)", fetched))
    assert set(pins) == {"training-operator", "mpi-operator", "trainer", "volcano"}
    package = Path(check.__file__).parents[1]
    files = [path for path in package.rglob("*") if path.suffix in (".py", ".yaml")]
    cited = [
        (path.name, *found)
        for path in files
        for found in re.findall(rf"({'|'.join(pins)}) (v[\d.]+\d)", path.read_text())
    ]
    assert {operator for _, operator, _ in cited} == set(pins)
    assert [each for each in cited if each[2] != pins[each[1]]] == []


# A learner's own namespace


def rights():
    """Group, resource and verb of all that a learner may do."""
    text = re.sub(r"\$\{(\w+)\}", "x", (FOLDER / "learner.yaml").read_text())
    (role,) = [each for each in yaml.safe_load_all(text) if each["kind"] == "Role"]
    of_rules = [
        itertools.product(*(rule[key] for key in ("apiGroups", "resources", "verbs")))
        for rule in role["rules"]
    ]
    return {right for rule in of_rules for right in rule}


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        *(("torch_ddp", kind) for kind in ("PyTorchJob", "TrainJob")),
        *(("multi_worker_mirrored", "TFJob"), ("mpi", "MPIJob"), ("single", "Job")),
    ],
)
def test_a_learner_may_do_in_their_own_namespace_what_the_launcher_asks_for(
    tmp_path, monkeypatch, make_job, strategy, kind
):
    verbs, asked = {"POST": "create", "DELETE": "delete", "PATCH": "patch"}, set()
    with kubernetes_api.cluster(tmp_path, monkeypatch) as server:
        place = {"namespace": "ada", "registry": "r.example.com"}
        launcher = Kubernetes(kind=kind, **place)
        spec, name = {"containers": [{"name": "node"}]}, "ddp-node-0-0"
        server.pods = [{"metadata": {"name": name}, "spec": spec, "status": {"phase": "Running"}}]
        server.logs = {name: kubernetes_api.stamped("hello")}
        workers = 1 if strategy == "single" else 2
        with launcher.launch(make_job("import torch", name="ddp", strategy=strategy, workers=workers)) as run:
            assert eventually(lambda: list(run.logs()))
        for method, path in server.requests:
            before, _, below = path.partition("?")[0].partition("/namespaces/ada/")
            group = before.split("/")[2] if before.startswith("/apis") else ""
            resource, *named = below.split("/")
            verb = verbs.get(method, "get" if named else "list")
            asked.add((group, "/".join([resource, *named[1:]]), verb))
    assert ("", "pods/log", "get") in asked
    assert asked <= rights()


def test_a_learner_may_carry_out_the_commands_that_copy_a_model_out():
    commands = re.findall(r"#     kube (\w+)", (FOLDER / "storage/data-pod.yaml").read_text())
    needed = {
        "apply": {("", "pods", "get"), ("", "pods", "create")},
        "wait": {("", "pods", verb) for verb in ("get", "list", "watch")},
        "cp": {("", "pods", "get"), ("", "pods/exec", "create"), ("", "pods/exec", "get")},
        "delete": {("", "pods", "delete")},
    }
    assert set(commands) == set(needed)
    assert set().union(*needed.values()) <= rights()


ARN = "arn:aws:iam::123456789012:user/ada"
SHARED = {
    "volumeName": "echo pv-1",
    "volumeHandle": "echo fs-1",
    "dnsname": "echo fs-1.aws",
    "mountname": "echo abc",
}
NO_ENTRY = {"describe-access-entry": "echo An error occurred: ResourceNotFoundException >&2; exit 254"}
ENTRY = {"describe-access-entry": "echo workshop:ada"}
NAMESPACE = {"get namespace ada": "echo ada/distributed-training-workshop"}


@pytest.fixture
def learner(programs, tmp_path):
    """`learner("add", answers)`: the exit code of learner.sh, the commands that it ran, and what it applied."""

    def carry_out(action, answers, name="ada"):
        (tmp_path / "given").unlink(missing_ok=True)
        programs({**SHARED, **answers})
        command = ["bash", str(FOLDER / "learner.sh"), action, "workshop-cpu", name, ARN]
        code = subprocess.run(command, cwd=ROOT, check=False, capture_output=True).returncode
        given = (tmp_path / "given").read_text() if (tmp_path / "given").exists() else ""
        return code, (tmp_path / "calls").read_text().splitlines(), list(yaml.safe_load_all(given))

    return carry_out


def test_a_learner_comes_with_a_claim_on_everybody_s_file_system_and_goes_alone(learner):
    code, lines, made = learner("add", NO_ENTRY)
    assert code == 0
    assert "create-access-entry --kubernetes-groups workshop:ada" in lines[-1]
    assert lines[-1].endswith(f"--principal-arn {ARN} --region us-west-2")
    assert [problem for described in made for problem in check.problems_of(described)] == []
    assert {each["metadata"].get("namespace", "ada") for each in made} == {"ada"}
    volume = next(each["spec"]["csi"] for each in made if each["kind"] == "PersistentVolume")
    assert volume["volumeHandle"] == "fs-1-ada"
    assert volume["volumeAttributes"] == {"dnsname": "fs-1.aws", "mountname": "abc"}
    code, lines, _ = learner("remove", NO_ENTRY)
    assert code == 0
    assert not any("namespace default" in line or "--all" in line for line in lines)
    assert "metadata.name=ada" in lines[2]  # and the entry was gone already
    code, lines, _ = learner("add", ENTRY | NAMESPACE)
    assert (code, [line for line in lines if "create-access-entry" in line]) == (0, [])
    assert "delete-access-entry" in learner("remove", ENTRY | NAMESPACE)[1][2]


@pytest.mark.parametrize(
    ("actions", "answers"),
    [
        # An administrator's entry, one with rights by policies, somebody's namespace, an operator's.
        *((("add", "remove"), NAMESPACE | {"describe-access-entry": answer})
          for answer in ("echo eks-admins", ":", "echo workshop:ada eks-admins")),
        *((("add", "remove"), ENTRY | {"get namespace ada": f"echo {found}"}) for found in ("ada/", "ada/kubeflow")),
        *((("add",), NO_ENTRY | {what: answer}) for what, answer in (("volumeName", ":"), ("dnsname", "exit 1"))),
        (("remove",), {"describe-access-entry": "exit 255"}),
    ],
)  # fmt: skip
def test_what_is_somebody_else_s_or_cannot_be_seen_is_left_alone(learner, actions, answers):
    for action in actions:
        code, lines, made = learner(action, answers)
        assert code != 0
        assert made == []
        assert not any(word in line for line in lines for word in ("create-access", "delete"))
    assert learner("add", answers, name="kube-system")[:2] == (2, [])


# The price


def test_a_price_is_that_of_the_parts_and_an_unknown_one_is_not_taken_for_nothing():
    config = eks.load("trainium")
    accelerator = catalogue.instance("trn1.32xlarge").dollars_an_hour
    assert accelerator is not None
    assert f"{2 * accelerator:9.3f}  2 × trn1.32xlarge (accelerators)" in eks.bill(config)
    assert re.search(r"\d  in all, \d+ a day", eks.bill(config))
    config["managedNodeGroups"][1]["instanceType"] = "z9.large"
    assert "not known  2 × z9.large" in eks.bill(config)
    assert "at least in all" in eks.bill(config)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("apiVersion", "- apiVersion", "not readable as YAML"),
        ("    instanceType: m5.xlarge\n", "", r"managedNodeGroups\[0\]\.instanceType is missing"),
        ("availabilityZones: [us-west-2a]", "availabilityZones: []", r"\[0\]\.availabilityZones is missing"),
        ("minSize: 0", "minSize: 99", r"\[0\]: minSize, desiredCapacity and maxSize must be in that order"),
    ],
)
def test_a_wrong_cluster_is_refused_with_what_would_be_right(tmp_path, monkeypatch, old, new, message):
    monkeypatch.setattr(eks, "ROOT", tmp_path)
    own = tmp_path / eks.FOLDER / "clusters" / "own.yaml"
    own.parent.mkdir(parents=True)
    own.write_text((FOLDER / "clusters" / "cpu.yaml").read_text().replace(old, new))
    with pytest.raises(JobError, match=message):
        eks.load("own")
    with pytest.raises(JobError, match=r"cluster is 'tpu'; .*/clusters has own"):
        eks.load("tpu")


# The commands: against programs that write down how they are called, and answer as they are told

PROGRAM = """#!/bin/sh
folder={folder} line="${{0##*/}} $*"
echo "$line" >> "$folder/calls"
case $line in
*"apply --server-side --force-conflicts -f -") cat > "$folder/given" ;;
{answers}
esac
"""
ANSWERS = {
    "describe-instance-type-offerings": "echo there",
    "describe-subnets": "echo subnet-1",
    "clusterSecurityGroupId": "echo sg-1",
    "list-clusters": "echo workshop",
}


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """`programs(answers)` puts programs on the path that write their calls down, and answer so."""
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("AWS_REGION", "us-west-2")

    def make(answers):
        (tmp_path / "calls").write_text("")
        cases = "\n".join(f"*{shlex.quote(part)}*) {answer} ;;" for part, answer in answers.items())
        for name in ("aws", "eksctl", "kubectl", "helm", "sleep"):
            (tmp_path / name).write_text(PROGRAM.format(folder=shlex.quote(str(tmp_path)), answers=cases))
            (tmp_path / name).chmod(0o755)

    return make


def command_line(*words, typed=""):
    app = typer.Typer()
    app.command()(eks.main)
    return CliRunner().invoke(app, words, input=typed)


@pytest.fixture
def run(programs, tmp_path):
    """`run("create", "cpu", "--yes", **answers)`: what the command line said, and the commands that it ran."""

    def carry_out(*words, answers=ANSWERS, typed=""):
        programs(answers)
        return command_line(*words, typed=typed), (tmp_path / "calls").read_text().splitlines()

    return carry_out


def test_a_cluster_is_made_by_its_own_context_as_a_cluster_could_read_it(run, tmp_path):
    said, lines = run("create", "trainium", "--yes", answers={**ANSWERS, "list-clusters": ":"})
    assert said.exit_code == 0, said.output
    for line in lines:
        assert not line.startswith("kubectl") or line.startswith("kubectl --context workshop-trainium ")
        assert not line.startswith("helm") or "--kube-context workshop-trainium" in line
    described = yaml.safe_load((tmp_path / "given").read_text())
    assert list(check.problems_of(described)) == []
    assert described["parameters"]["subnetId"] == "subnet-1"
    assert described["parameters"]["extraTags"].endswith("cluster=workshop-trainium")


def test_a_cluster_that_is_there_is_completed_unless_its_making_was_broken_off(run):
    lines = run("create", "gpu", "--yes")[1]
    assert not any("eksctl create cluster" in line for line in lines)
    assert any("nodegroup" in line for line in lines)
    said, lines = run("create", "gpu", "--yes", answers={**ANSWERS, "describe-addon": "exit 254"})
    assert said.exit_code != 0
    assert "describe-addon" in lines[-1]


@pytest.mark.parametrize("action", ["create", "delete-all"])
def test_nothing_is_run_before_somebody_has_said_yes_or_for_a_dry_run(run, action):
    said, lines = run(action, "cpu", typed="n\n")
    assert (said.exit_code, lines) == (1, [])
    assert "workshop-cpu in us-west-2" in said.output
    said, lines = run(action, "cpu", "--dry-run")
    assert (said.exit_code, lines) == (0, [])
    assert "eksctl" in said.output
    assert ("dollars an hour" in said.output) == (action == "create")


@pytest.mark.parametrize("action", ["create", "delete-all"])
def test_a_missing_program_is_named_before_anybody_is_asked(action, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    said = command_line(action, "cpu", typed="y\n")
    assert said.exit_code == 2
    assert said.output.strip().endswith("eksctl.io, kubernetes.io, helm.sh and git-scm.com say how.")
    assert "not installed: aws, eksctl, kubectl" in said.output


@pytest.mark.parametrize(
    ("action", "answer", "last"),
    [
        ("create", {"describe-instance-type-offerings": ":"}, "describe-instance-type-offerings"),
        ("delete-all", {"list-clusters": "echo ExpiredToken >&2; exit 254"}, "list-clusters"),
        ("delete-all", {"storage/claim.yaml": "exit 1"}, "storage/claim.yaml"),
    ],
)
def test_a_step_that_fails_is_the_last_and_says_what_stays(run, action, answer, last):
    others = {part: one for part, one in ANSWERS.items() if part not in answer}
    said, lines = run(action, "cpu", "--yes", answers={**answer, **others})
    assert said.exit_code != 0
    assert last in lines[-1]
    assert "What is there stays, and costs." in said.output


def test_delete_all_ends_with_the_cluster_once_the_file_system_is_gone(run):
    states = " ".join(
        f"{n}) echo fs-1 {state} ;;" for n, state in enumerate(("CREATING", "AVAILABLE", "DELETING"), 1)
    )
    left = f'echo >> "$folder/n"; case $(wc -l < "$folder/n") in {states} esac'
    said, lines = run("delete-all", "cpu", "--yes", answers={**ANSWERS, "describe-file-systems": left})
    assert said.exit_code == 0, said.output
    (deleted,) = (index for index, line in enumerate(lines) if "delete-file-system " in line)
    assert deleted < min(index for index, line in enumerate(lines) if line.startswith("eksctl"))
    assert sum("describe-file-systems" in line for line in lines[deleted:]) == 2


def test_delete_all_takes_no_file_system_that_was_not_made_here():
    text = (FOLDER / "delete-all.sh").read_text()
    (ours,), (query,) = re.findall(r'ours="(.*)"', text), re.findall(r'"(FileSystems\[.*)"', text)
    made = {"made-by": "distributed-training-workshop", "cluster": "workshop-cpu"}
    described = [
        {
            "FileSystemId": name,
            "Lifecycle": "AVAILABLE",
            "Tags": [{"Key": k, "Value": v} for k, v in tags.items()],
        }
        for name, tags in (("a", made), ("b", {"cluster": "workshop-cpu"}), ("c", {**made, "cluster": "x"}))
    ]
    query = query.replace("$ours", ours).replace("$cluster", "workshop-cpu")
    assert jmespath.search(query, {"FileSystems": described}) == [["a", "AVAILABLE"]]
    extra = objects("storage/storage-class.yaml")[0]["parameters"]["extraTags"]
    assert extra == "made-by=distributed-training-workshop,cluster=${cluster}"


def test_delete_all_can_be_run_again_and_then_deletes_what_eksctl_left(run):
    gone = {"list-clusters": ":"}
    lines = run("delete-all", "cpu", "--yes", answers=gone)[1]
    assert not any(line.startswith(("eksctl", "kubectl --context")) for line in lines)
    lines = run("delete-all", "cpu", "--yes", answers={**gone, "describe-stacks": "echo eksctl-stack"})[1]
    assert any("eksctl delete cluster --name workshop-cpu" in line for line in lines)
