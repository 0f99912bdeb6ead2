"""The clusters on EKS: their files, what they cost, and the commands that make them and take them away."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from resource_schemas import needs_schemas, places, replaced, schema_of, validator
from typer.testing import CliRunner

from workshop_utils.eks import __main__ as eks
from workshop_utils.eks import prices
from workshop_utils.eks.cluster import FOLDER, ROOT, load
from workshop_utils.eks.steps import steps
from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import Kubernetes, check, rules
from workshop_utils.launchers.kubernetes.manifest import yaml_of
from workshop_utils.scaling import catalogue

CLUSTERS = ("cpu", "gpu", "trainium")
NO_OBJECTS = ("operators/kustomization.yaml", "place.yaml")
FILES = sorted((ROOT / FOLDER).rglob("*.yaml"))


def objects() -> Iterator[Any]:
    for path in FILES:
        name = path.relative_to(ROOT / FOLDER).as_posix()
        if name not in NO_OBJECTS:
            for described in yaml.safe_load_all(path.read_text()):
                yield pytest.param(described, id=f"{name}-{described['kind']}")


# The files


@pytest.mark.parametrize("described", list(objects()))
def test_every_object_of_the_cluster_s_files_is_one_that_would_be_taken(described: dict[str, Any]) -> None:
    assert list(check.problems_of(described)) == []
    assert list(rules.problems_of(described)) == []
    # and would not with a field that there is not
    assert list(check.problems_of({**described, "spce": {}})) != []


def test_the_cluster_s_files_hold_one_of_each_kind_that_is_needed() -> None:
    kinds = {each.values[0]["kind"] for each in objects()}
    assert kinds == {
        "ClusterConfig", "DaemonSet", "Deployment", "PersistentVolumeClaim", "Queue", "Service", "StorageClass",
    }  # fmt: skip


@needs_schemas
@pytest.mark.parametrize("described", list(objects()))
def test_the_real_schemas_accept_the_cluster_s_files(described: dict[str, Any]) -> None:
    if schema_of(described) is not None:
        validator(described["apiVersion"], described["kind"]).validate(described)


FREE = ("tags", "attachPolicy")  # maps, in which any name may stand


@needs_schemas
@pytest.mark.parametrize("described", list(objects()))
def test_the_real_schemas_and_the_models_refuse_the_same_misspelling(described: dict[str, Any]) -> None:
    if schema_of(described) is None:
        return
    real = validator(described["apiVersion"], described["kind"])
    known = (
        described if described["kind"] == "ClusterConfig" else {"spec": described["spec"]}
    )  # metadata is core's
    misspelt = 0
    for path, value in places(known, ()):
        if isinstance(value, dict) and not set(FREE) & set(map(str, path)):
            wrong = replaced(described, path, {**value, "unknownField": 1})
            assert not real.is_valid(wrong), path
            assert "unknownField: unknown field; " in "".join(check.problems_of(wrong)), path
            misspelt += 1
    assert misspelt >= 1


@pytest.mark.parametrize("name", CLUSTERS)
def test_a_cluster_is_safe_to_leave_and_its_nodes_are_private_and_in_one_zone(name: str) -> None:
    config = load(name).config
    assert config["metadata"]["name"] == f"workshop-{name}"
    assert config["metadata"]["tags"] == {"made-by": "distributed-training-workshop"}
    assert config["upgradePolicy"] == {"supportType": "STANDARD"}
    assert config["iam"]["withOIDC"] is True
    zones = {zone for group in config["managedNodeGroups"] for zone in group["availabilityZones"]}
    assert len(zones) == 1
    for group in config["managedNodeGroups"]:
        assert group["privateNetworking"] is True
        assert group["minSize"] <= 1


@pytest.mark.parametrize(("name", "instance"), [("gpu", "p4d.24xlarge"), ("trainium", "trn1.32xlarge")])
def test_accelerators_are_two_and_stand_close_with_efa(name: str, instance: str) -> None:
    (group,) = (each for each in load(name).groups if each["name"] == "accelerators")
    assert (group["instanceType"], group["desiredCapacity"]) == (instance, 2)
    assert group["efaEnabled"] is True
    assert "placement" not in group  # so that eksctl makes a placement group of strategy cluster


def test_efa_s_plugin_runs_where_there_is_efa() -> None:
    (plugin,) = (each.values[0] for each in objects() if each.values[0]["kind"] == "DaemonSet")
    wanted = plugin["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = wanted["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    (expression,) = term["matchExpressions"]
    groups = [group for name in CLUSTERS for group in load(name).groups]
    assert {group["instanceType"] for group in groups if group.get("efaEnabled")} <= set(expression["values"])
    assert not {group["instanceType"] for group in groups if not group.get("efaEnabled")} & set(
        expression["values"]
    )


def test_the_driver_of_file_systems_may_do_what_it_must_and_no_more() -> None:
    for name in CLUSTERS:
        (account,) = load(name).config["iam"]["serviceAccounts"]
        assert account["metadata"] == {"name": "fsx-csi-controller-sa", "namespace": "kube-system"}
        assert "attachPolicyARNs" not in account
        first, second = account["attachPolicy"]["Statement"]
        assert all(action.startswith("fsx:") and "*" not in action for action in first["Action"])
        assert second["Condition"] == {"StringLike": {"iam:AWSServiceName": "fsx.amazonaws.com"}}


def test_the_training_operator_leaves_mpijob_to_the_mpi_operator() -> None:
    found = yaml.safe_load((ROOT / FOLDER / "operators" / "kustomization.yaml").read_text())
    assert [each.rpartition("?")[2] for each in found["resources"]] == ["ref=v1.9.3"]
    dropped, told = found["patches"]
    assert dropped["target"] == {"kind": "CustomResourceDefinition", "name": "mpijobs.kubeflow.org"}
    assert yaml.safe_load(dropped["patch"])["$patch"] == "delete"
    (change,) = yaml.safe_load(told["patch"])
    assert change["value"] == ["--enable-scheme=tfjob", "--enable-scheme=pytorchjob"]


def test_the_example_of_a_place_names_the_claim_and_the_context() -> None:
    place = Kubernetes.load(ROOT / FOLDER / "place.yaml")
    claim = yaml.safe_load((ROOT / FOLDER / "storage" / "claim.yaml").read_text())
    assert place.data_claim == claim["metadata"]["name"]
    assert place.context == load("cpu").name


def test_etcd_speaks_the_version_that_torchrun_s_agents_speak() -> None:
    service, deployment = yaml.safe_load_all((ROOT / FOLDER / "etcd.yaml").read_text())
    pod = deployment["spec"]["template"]
    assert service["metadata"]["name"] == "etcd-server"
    assert service["spec"]["selector"].items() <= pod["metadata"]["labels"].items()
    (container,) = pod["spec"]["containers"]
    assert "--enable-v2" in container["command"]
    assert [port["port"] for port in service["spec"]["ports"]] == [container["ports"][0]["containerPort"]]


# A cluster of one's own


def own(folder: Path, **changes: Any) -> str:
    config = {**load("cpu").config, **changes}
    file = folder / "own.yaml"
    file.write_text(yaml_of([config]))
    return str(file)


def test_a_cluster_of_one_s_own_is_checked_and_its_mistakes_are_named(tmp_path: Path) -> None:
    assert load(own(tmp_path)).name == "workshop-cpu"
    group = load("cpu").groups[0]
    misspelt = {"instanceTyp" if key == "instanceType" else key: value for key, value in group.items()}
    for changes, message in (
        (
            {"managedNodeGroups": [misspelt]},
            r"\[0\]\.instanceTyp: unknown field; did you mean instanceType\?",
        ),
        (
            {"managedNodeGroups": [{"name": "a"}]},
            r"managedNodeGroups\[0\]\.instanceType is missing; the price",
        ),
        ({"managedNodeGroups": []}, "managedNodeGroups is missing; jobs need nodes"),
        ({"iam": {**load("cpu").config["iam"], "withOIDC": False}}, "iam.withOIDC must be true"),
        ({"kind": "Cluster"}, "must hold a ClusterConfig"),
    ):
        with pytest.raises(JobError, match=message) as refused:
            load(own(tmp_path, **changes))
        assert "own.yaml" in str(refused.value)


def test_a_cluster_that_there_is_not_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cluster is 'tpu'; it must be one of cpu, gpu, trainium"):
        load("tpu")
    (tmp_path / "no.yaml").write_text("a: [")
    with pytest.raises(JobError, match="not readable as YAML"):
        load(str(tmp_path / "no.yaml"))


# What it costs


def test_a_cluster_s_price_is_that_of_its_parts() -> None:
    parts = dict(prices.prices(load("trainium")))
    accelerator = catalogue.instance("trn1.32xlarge").dollars_an_hour
    assert accelerator is not None
    assert parts["control plane"] == 0.10
    assert parts["2 × trn1.32xlarge (accelerators)"] == pytest.approx(2 * accelerator)
    assert parts["2 × 500 GB of disk (accelerators)"] == pytest.approx(2 * 500 * 0.08 / 730)
    assert parts["1200 GB of FSx for Lustre"] == pytest.approx(1200 * 0.29 / 730)
    total = sum(price for price in parts.values() if price is not None)
    said = prices.bill(load("trainium"))
    assert f"{total:9.3f}  in all, {24 * total:.0f} a day" in said
    assert "as known in 2025" in said
    assert "not checked since" in said


def test_a_price_that_is_not_known_is_not_taken_for_nothing(tmp_path: Path) -> None:
    group = {**load("cpu").groups[0], "instanceType": "z9.large"}
    said = prices.bill(load(own(tmp_path, managedNodeGroups=[group])))
    assert "not known  2 × z9.large (workers)" in said
    assert "at least in all" in said


# What is run: against programs that write down how they are called, and answer as they are told

PROGRAM = """#!/bin/sh
folder={folder} line="${{0##*/}} $*"
printf '%s\\0%s\\0%s\\0' "$line" "$(/bin/cat)" "$PWD" >> "$folder/calls"
case $line in
{answers}
esac
"""
# What to answer where this is part of the command: exit status, output and complaint; or what to run.
Answers = dict[str, tuple[int, str, str] | str]
NO_CLUSTER = (254, "", "An error occurred (ResourceNotFoundException): No cluster found for name: x.\n")
ANSWERS: Answers = {
    "describe-instance-type-offerings": (0, "there\n", ""),
    "describe-subnets": (0, "subnet-1\n", ""),
    "clusterSecurityGroupId": (0, "sg-1\n", ""),
    "cluster.status": (0, "ACTIVE\n", ""),
}
Programs = Callable[[Answers], "Recorded"]


class Recorded:
    """The programs' folder."""

    def __init__(self, folder: Path, answers: Answers) -> None:
        self.folder = folder
        cases = "\n".join(f"*{shlex.quote(part)}*) {shell(answer)} ;;" for part, answer in answers.items())
        for name in eks.PROGRAMS:
            (folder / name).write_text(PROGRAM.format(folder=shlex.quote(str(folder)), answers=cases))
            (folder / name).chmod(0o755)

    @property
    def calls(self) -> list[tuple[str, str, str]]:
        """Each call: the command, its standard input, the folder that it ran in."""
        file = self.folder / "calls"
        parts = file.read_text().split("\0")[:-1] if file.exists() else []
        return list(zip(parts[0::3], parts[1::3], parts[2::3], strict=True))

    @property
    def lines(self) -> list[str]:
        return [line for line, _, _ in self.calls]


def shell(answer: tuple[int, str, str] | str) -> str:
    if isinstance(answer, str):
        return answer
    code, output, complaint = answer
    return f"printf %s {shlex.quote(output)}; printf %s {shlex.quote(complaint)} >&2; exit {code}"


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Programs:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(eks, "POLL_SECONDS", 0.01)
    return lambda answers: Recorded(tmp_path, answers)


def run(*arguments: str, answer: str | None = None) -> Any:
    return CliRunner().invoke(eks.app, arguments, input=answer)


def commands_in(output: str) -> list[str]:
    return [line for line in output.splitlines() if line and not line.startswith("#")]


def in_order(wanted: list[str], lines: list[str]) -> None:
    """Each of `wanted` is part of a line, and each such line comes after that of the one before."""
    at = -1
    for part in wanted:
        at = next(
            (index for index, line in enumerate(lines) if index > at and part in line), None
        ) or pytest.fail(f"{part!r} does not come after line {at} of {lines}")


ORDER = [
    "describe-instance-type-offerings", "eksctl create cluster", "update-kubeconfig", "eksctl create nodegroup",
    "operators", "mpi-operator/v0.8.2", "trainer.git", "neuron-helm-chart --version 1.9.0", "devices/efa.yaml",
    "volcano/v1.15.1", "queue.yaml", "aws-fsx-csi-driver", "describe-subnets", "clusterSecurityGroupId", "apply -f -",
    "storage/claim.yaml", "etcd.yaml",
]  # fmt: skip
BACK = [
    "delete tfjobs", "delete pods", "etcd.yaml", "storage/claim.yaml", "--for=delete persistentvolumes",
    "delete storageclass lustre", "aws-fsx-csi-driver", "queue.yaml", "volcano/v1.15.1", "devices/efa.yaml",
    "helm uninstall neuron", "trainer.git", "mpi-operator/v0.8.2", "operators", "delete-context",
    "fsx describe-file-systems", "eksctl delete cluster",
]  # fmt: skip


@pytest.mark.parametrize("name", CLUSTERS)
@pytest.mark.parametrize("way", ["create", "delete-all"])
def test_a_dry_run_prints_everything_and_runs_nothing(programs: Programs, way: str, name: str) -> None:
    recorded = programs(ANSWERS)
    said = run(way, name, "--dry-run")
    assert said.exit_code == 0
    assert recorded.calls == []
    wanted = ORDER if way == "create" else BACK
    if name != "trainium":
        wanted = [part for part in wanted if "neuron" not in part and (name == "gpu" or "efa" not in part)]
    in_order(wanted, ["", *commands_in(said.output)])
    assert ("k8s-device-plugin/v0.17.1" in said.output) == (name == "gpu")
    assert str(ROOT) not in said.output
    if way == "create":
        assert "dollars an hour" in said.output


def test_what_a_dry_run_prints_is_what_is_run(programs: Programs) -> None:
    dry = run("create", "trainium", "--dry-run")
    recorded = programs({**ANSWERS, "cluster.status": NO_CLUSTER})
    said = run("create", "trainium", "--yes")
    assert said.exit_code == 0, said.output
    in_order(ORDER, ["", *recorded.lines])
    printed = [line.rpartition("|| ")[2].rpartition("| ")[2] for line in commands_in(dry.output)]
    bare = [line.removesuffix(")").partition("=$(")[2] or line for line in printed]
    questions = [line for line in recorded.lines if "cluster.status" not in line]
    assert [" ".join(shlex.split(line)) for line in bare] == questions
    assert {folder for _, _, folder in recorded.calls} == {str(ROOT)}


def test_the_storage_class_is_filled_in_with_what_the_cluster_has(programs: Programs) -> None:
    recorded = programs(ANSWERS)
    assert run("create", "cpu", "--yes").exit_code == 0
    (given,) = (text for line, text, _ in recorded.calls if line.endswith("apply -f -"))
    described = yaml.safe_load(given)
    assert list(check.problems_of(described)) == []
    parameters = described["parameters"]
    assert (parameters["subnetId"], parameters["securityGroupIds"]) == ("subnet-1", "sg-1")
    assert parameters["extraTags"] == "made-by=distributed-training-workshop,cluster=workshop-cpu"


def test_a_cluster_that_is_there_is_not_made_again(programs: Programs) -> None:
    recorded = programs(ANSWERS)
    said = run("create", "cpu", "--yes")
    assert "there already" in said.output
    assert not any("eksctl create cluster" in line for line in recorded.lines)
    assert any("eksctl create nodegroup" in line for line in recorded.lines)


def test_kubectl_and_helm_are_never_left_to_the_current_context(programs: Programs) -> None:
    recorded = programs(ANSWERS)
    run("create", "trainium", "--yes")
    run("delete-all", "trainium", "--yes")
    for line in recorded.lines:
        if line.startswith("kubectl") and "delete-context" not in line:
            assert line.startswith("kubectl --context workshop-trainium ")
        if line.startswith("helm"):
            assert "--kube-context workshop-trainium" in line


@pytest.mark.parametrize("way", ["create", "delete-all"])
def test_nothing_is_run_before_somebody_has_said_yes(programs: Programs, way: str) -> None:
    recorded = programs(ANSWERS)
    said = run(way, "cpu", answer="n\n")
    assert said.exit_code == 1
    assert recorded.calls == []


def test_an_instance_that_the_zone_does_not_have_stops_it_before_anything_is_made(programs: Programs) -> None:
    recorded = programs({"trn1.32xlarge": (0, "\n", ""), **ANSWERS})
    said = run("create", "trainium", "--yes")
    assert said.exit_code == 1
    assert "is trn1.32xlarge offered in us-west-2d?: no" in said.output
    assert all("describe-instance-type-offerings" in line for line in recorded.lines)


def test_a_step_that_fails_ends_it_with_what_was_said_and_what_to_do(programs: Programs) -> None:
    recorded = programs({"volcano-development.yaml": (1, "", "error: no such host\n"), **ANSWERS})
    said = run("create", "cpu", "--yes")
    assert said.exit_code == 1
    assert "error: no such host" in said.output
    assert "What is there stays, and costs. Run it again to go on, or run delete-all." in said.output
    assert "volcano-development.yaml" in recorded.lines[-1]


def test_whatever_is_fetched_is_fetched_in_one_version() -> None:
    fetched = {
        word for name in CLUSTERS for step in steps(load(name)) for command in step.do for word in command
        if "://" in word
    }  # fmt: skip
    assert len(fetched) == 6
    for word in fetched:
        assert re.search(r"/v\d+\.\d+\.\d+/|\?ref=v\d+\.\d+\.\d+$", word) or word.startswith("oci://"), word
    for described in (each.values[0] for each in objects()):
        for container in described.get("spec", {}).get("template", {}).get("spec", {}).get("containers", []):
            assert re.search(r":v?\d+\.\d+\.\d+", container["image"])


def test_an_interruption_is_told_what_it_leaves(programs: Programs, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    programs(ANSWERS)
    monkeypatch.setattr(eks, "make", interrupted)
    said = run("create", "cpu", "--yes")
    assert said.exit_code == 130
    assert "interrupted\nWhat is there stays, and costs." in said.output


# The way back


def test_delete_all_takes_back_every_step_in_reverse_order(programs: Programs) -> None:
    recorded = programs(ANSWERS)
    said = run("delete-all", "trainium", "--yes")
    assert said.exit_code == 0, said.output
    in_order(BACK, ["", *recorded.lines])
    assert "nothing of workshop-trainium is left" in said.output
    undone = [" ".join(command) for step in reversed(steps(load("trainium"))) for command in step.undo]
    assert [line for line in recorded.lines if line in undone] == undone


@pytest.mark.parametrize("name", CLUSTERS)
def test_whatever_a_step_makes_it_can_take_back(name: str) -> None:
    for step in steps(load(name)):
        makes = any({"apply", "create", "upgrade"} & set(command) for command in step.do)
        # Nodes go with their cluster; the kubeconfig's entry is made by a word of its own.
        assert not makes or step.undo or "nodegroup" in step.do[0]


def test_delete_all_can_be_run_again_when_all_is_gone(programs: Programs) -> None:
    recorded = programs({"cluster.status": NO_CLUSTER, "eksctl delete": NO_CLUSTER})
    said = run("delete-all", "cpu", "--yes")
    assert said.exit_code == 0, said.output
    assert "gone already" in said.output
    assert [line.split()[:3] for line in recorded.lines] == [
        ["aws", "eks", "describe-cluster"], ["aws", "fsx", "describe-file-systems"], ["eksctl", "delete", "cluster"],
    ]  # fmt: skip


def test_kinds_that_a_cluster_never_had_do_not_stop_its_end(programs: Programs) -> None:
    unknown = (1, "", 'error: the server doesn\'t have a resource type "trainjobs"\n')
    none = (1, "", "error: no matching resources found\n")
    recorded = programs({**ANSWERS, "delete trainjobs": unknown, "persistentvolumes": none})
    assert run("delete-all", "cpu", "--yes").exit_code == 0
    assert "eksctl delete cluster" in recorded.lines[-1]


def test_a_claim_that_does_not_go_keeps_the_cluster_so_that_no_file_system_is_left_to_cost(
    programs: Programs,
) -> None:
    recorded = programs(
        {**ANSWERS, "delete -f jobs/clusters/eks/storage/claim.yaml": (1, "", "error: timed out\n")}
    )
    said = run("delete-all", "cpu", "--yes")
    assert said.exit_code == 1
    assert "timed out" in said.output
    assert not any("eksctl delete" in line for line in recorded.lines)


def test_a_login_that_has_expired_is_not_taken_for_a_cluster_that_is_gone(programs: Programs) -> None:
    recorded = programs({"cluster.status": (255, "", "An error occurred (ExpiredToken)\n")})
    said = run("delete-all", "cpu", "--yes")
    assert said.exit_code == 1
    assert "ExpiredToken" in said.output
    assert len(recorded.lines) == 1
    assert "is left" not in said.output


def test_a_file_system_that_was_left_behind_is_deleted_and_waited_for(programs: Programs) -> None:
    goes = 'if [ -e "$folder/twice" ]; then exit; elif [ -e "$folder/once" ]; then : > "$folder/twice"; fi'
    recorded = programs({**ANSWERS, "describe-file-systems": f'{goes}; : > "$folder/once"; echo fs-1'})
    assert run("delete-all", "cpu", "--yes").exit_code == 0
    about = [line for line in recorded.lines if line.startswith("aws fsx")]
    assert [line.split()[2] for line in about] == [
        "describe-file-systems", "delete-file-system", "describe-file-systems", "describe-file-systems",
    ]  # fmt: skip
    assert "cluster'&&Value=='workshop-cpu'" in about[0]
    assert about[1].endswith("--file-system-id fs-1")


def test_a_program_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(JobError, match="aws, eksctl, kubectl, helm: not installed; --dry-run does without"):
        CliRunner().invoke(eks.app, ["create", "cpu", "--yes"], catch_exceptions=False)
