"""The templates and policies that an account is set up with: correct, and with no more rights than are needed."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cfnlint.decode import cfn_yaml

from workshop_utils.launchers.sagemaker.request import TAG

FOLDER = Path(__file__).parents[2] / "jobs" / "clusters" / "sagemaker"
TEMPLATES = sorted((FOLDER / "templates").glob("*.yaml"))
# A policy document's place in roles.yaml.
DOCUMENTS = {
    "training": ("TrainingRole", "Policies", 0, "PolicyDocument"),
    "training-trust": ("TrainingRole", "AssumeRolePolicyDocument"),
    "learner": ("Learner", "PolicyDocument"),
}
# Actions for which AWS knows no resources, so that "*" is the narrowest there is.
WITHOUT_RESOURCES = (
    "cloudformation:DescribeStacks",
    "cloudwatch:PutMetricData",
    "ec2:",
    "ecr:DescribeRepositories",
    "ecr:GetAuthorizationToken",
    "s3:ListAllMyBuckets",
    "sagemaker:ListTrainingJobs",
)


def template(name: str) -> dict[str, Any]:
    value: dict[str, Any] = cfn_yaml.load(str(FOLDER / "templates" / f"{name}.yaml"))
    return value


def test_cfn_lint_finds_nothing() -> None:
    command = [
        str(Path(sys.prefix) / "bin" / "cfn-lint"),
        "--regions",
        "us-east-1",
        "eu-west-1",
        "--",
        *map(str, TEMPLATES),
    ]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert len(TEMPLATES) == 3
    assert (checked.returncode, checked.stdout) == (0, "")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_policy_s_document_is_that_of_the_template(name: str) -> None:
    found: Any = template("roles")["Resources"][DOCUMENTS[name][0]]["Properties"]
    for step in DOCUMENTS[name][1:]:
        found = found[step]
    assert json.loads((FOLDER / "policies" / f"{name}.json").read_text()) == _with_placeholders(found)


def _with_placeholders(value: Any) -> Any:
    """A part of the template as a person would write it who has no template: ACCOUNT and REGION to be replaced."""
    if isinstance(value, dict):
        if set(value) == {"Fn::Sub"}:
            return _with_placeholders(value["Fn::Sub"])
        if set(value) == {"Ref"}:
            parameters = template("roles")["Parameters"]
            known = {"AWS::AccountId": "ACCOUNT", "MostSeconds": str(parameters["MostSeconds"]["Default"])}
            return known.get(value["Ref"]) or parameters[value["Ref"]]["Default"].split(",")
        if set(value) == {"Fn::GetAtt"}:
            return "arn:aws:iam::ACCOUNT:role/workshop-training"
        return {str(key): _with_placeholders(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_with_placeholders(item) for item in value]
    text = str(value).replace("${AWS::Partition}", "aws").replace("${MostSeconds}", "3600")
    return text.replace("${AWS::Region}", "REGION").replace("${AWS::AccountId}", "ACCOUNT")


def _statements() -> Iterator[tuple[str, dict[str, Any]]]:
    for name in ("training", "learner"):
        for statement in json.loads((FOLDER / "policies" / f"{name}.json").read_text())["Statement"]:
            yield name, statement


def test_nothing_is_allowed_wholesale() -> None:
    for name, statement in _statements():
        actions = statement["Action"] if isinstance(statement["Action"], list) else [statement["Action"]]
        assert not any("*" in action for action in actions), (name, statement["Sid"])
        resources = (
            statement["Resource"] if isinstance(statement["Resource"], list) else [statement["Resource"]]
        )
        if "*" in resources:
            assert all(action.startswith(WITHOUT_RESOURCES) for action in actions), (name, statement["Sid"])
    assert "AdministratorAccess" not in (FOLDER / "templates" / "roles.yaml").read_text()


def test_a_learner_starts_jobs_within_limits_of_time_and_type_with_the_workshop_s_tag_and_one_role() -> None:
    statements = {statement["Sid"]: statement for name, statement in _statements() if name == "learner"}
    limits = statements["StartWithinLimits"]["Condition"]
    assert limits["NumericLessThanEquals"] == {"sagemaker:MaxRuntimeInSeconds": "3600"}
    assert "ml.c5.xlarge" in limits["ForAllValues:StringEquals"]["sagemaker:InstanceTypes"]
    assert limits["StringEquals"] == {f"aws:RequestTag/{TAG['Key']}": TAG["Value"]}
    handed = statements["HandTheRoleOver"]
    assert handed["Resource"].endswith("role/workshop-training")
    assert handed["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}


def test_everything_that_can_bear_a_tag_bears_the_workshop_s() -> None:
    for path in TEMPLATES:
        for name, resource in template(path.stem)["Resources"].items():
            kind = resource["Type"]
            if kind in (
                "AWS::EC2::VPC",
                "AWS::EC2::Subnet",
                "AWS::EC2::SecurityGroup",
                "AWS::EC2::RouteTable",
            ) or (kind in ("AWS::IAM::Role", "AWS::SageMaker::NotebookInstance")):
                assert TAG in resource["Properties"]["Tags"], (path.name, name)
