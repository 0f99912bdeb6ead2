"""Clusters on EKS: their files fit each other, and what makes and deletes them runs against recording programs."""

import os
import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import Kubernetes, check
from workshop_utils.scaling import catalogue

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "jobs" / "clusters" / "eks"))

import eks  # type: ignore[import-not-found]  # noqa: E402  # a program beside the clusters

FOLDER = eks.ROOT / eks.FOLDER


def objects(name):
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


# The files


def test_names_agree_between_place_claim_plugin_and_cluster():
    place = Kubernetes.load(FOLDER / "place.yaml")
    (claim,) = objects("storage/claim.yaml")
    assert place.data_claim == claim["metadata"]["name"]
    assert place.context == eks.load("cpu")["metadata"]["name"]
    assert claim["spec"]["resources"]["requests"]["storage"] == f"{eks.LUSTRE_GB}Gi"
    assert claim["spec"]["storageClassName"] == objects("storage/storage-class.yaml")[0]["metadata"]["name"]
    plugin = objects("devices/efa.yaml")[0]["spec"]["template"]["spec"]["affinity"]["nodeAffinity"]
    (term,) = plugin["requiredDuringSchedulingIgnoredDuringExecution"]["nodeSelectorTerms"]
    clusters = [eks.load(name) for name in ("cpu", "gpu", "trainium")]
    for group in (group for cluster in clusters for group in cluster["managedNodeGroups"]):
        listed = group["instanceType"] in term["matchExpressions"][0]["values"]
        assert listed == group.get("efaEnabled", False)


def test_what_is_fetched_has_a_fixed_version_and_files_that_are_named_exist():
    text = (FOLDER / "create.sh").read_text() + (FOLDER / "delete-all.sh").read_text()
    for address in re.findall(r"https://\S+", text):
        assert re.search(r"/v\d+\.\d+\.\d+/|\?ref=v\d+\.\d+\.\d+'?$", address), address
    named = re.findall(r"(?:\$folder|jobs/clusters/eks)/([\w/.-]+)", text)
    assert len(named) >= 7
    assert all((FOLDER / name).exists() for name in named)


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
        ("availabilityZones: [us-west-2a, us-west-2b]", "availabilityZones: [us-west-2a]", "in at least two"),
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
Run = Callable[..., tuple[Any, list[str]]]


@pytest.fixture
def run(tmp_path, monkeypatch):
    """`run("create", "cpu", "--yes", **answers)`: what the command line said, and the commands that it ran."""
    app = typer.Typer()
    app.command()(eks.main)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def carry_out(*words, answers=ANSWERS, typed=""):
        cases = "\n".join(f"*{shlex.quote(part)}*) {answer} ;;" for part, answer in answers.items())
        for name in ("aws", "eksctl", "kubectl", "helm", "sleep"):
            (tmp_path / name).write_text(PROGRAM.format(folder=shlex.quote(str(tmp_path)), answers=cases))
            (tmp_path / name).chmod(0o755)
        calls = tmp_path / "calls"
        calls.write_text("")
        said = CliRunner().invoke(app, words, input=typed)
        return said, calls.read_text().splitlines()

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
    app = typer.Typer()
    app.command()(eks.main)
    said = CliRunner().invoke(app, [action, "cpu"], input="y\n")
    assert said.exit_code == 2
    assert said.output.strip().endswith("eksctl.io, kubernetes.io and helm.sh say how.")
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
    left = 'echo >> "$folder/n"; case $(wc -l < "$folder/n") in 1) echo fs-1 AVAILABLE ;; 2) echo fs-1 DELETING ;; esac'
    said, lines = run("delete-all", "cpu", "--yes", answers={**ANSWERS, "describe-file-systems": left})
    assert said.exit_code == 0, said.output
    (deleted,) = (index for index, line in enumerate(lines) if "delete-file-system " in line)
    assert deleted < min(index for index, line in enumerate(lines) if line.startswith("eksctl"))
    assert sum("describe-file-systems" in line for line in lines[deleted:]) == 2


def test_delete_all_can_be_run_again_and_then_deletes_what_eksctl_left(run):
    gone = {"list-clusters": ":"}
    lines = run("delete-all", "cpu", "--yes", answers=gone)[1]
    assert not any(line.startswith(("eksctl", "kubectl --context")) for line in lines)
    lines = run("delete-all", "cpu", "--yes", answers={**gone, "describe-stacks": "echo eksctl-stack"})[1]
    assert any("eksctl delete cluster --name workshop-cpu" in line for line in lines)
