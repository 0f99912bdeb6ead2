"""The templates and policies that an account is set up with: correct, and with no more rights than are needed."""

import ast
import subprocess
import sys
from pathlib import Path

import boto3
import pytest
import yaml
from conftest import Lenient

from workshop_utils.launchers.sagemaker import account, cleanup
from workshop_utils.launchers.sagemaker.account import TAG

FOLDER = Path(__file__).parents[2] / "jobs" / "clusters" / "sagemaker"
TEMPLATES = sorted((FOLDER / "templates").glob("*.yaml"))
# Actions for which AWS knows no resources, so that "*" is the narrowest there is.
WITHOUT_RESOURCES = (
    "cloudformation:DescribeStacks",
    "cloudwatch:PutMetricData",
    "ec2:",
    "ecr:DescribeRepositories",
    "sagemaker:ListNotebookInstances",
    "sagemaker:ListTags",  # of whatever the clean-up finds
    "ecr:GetAuthorizationToken",
    "s3:ListAllMyBuckets",
    "sagemaker:ListTrainingJobs",
)
WITH_TAGS = {
    *(f"AWS::EC2::{kind}" for kind in ("VPC", "Subnet", "SecurityGroup", "RouteTable")),
    "AWS::IAM::Role",
    "AWS::SageMaker::NotebookInstance",
}


@pytest.mark.processes
def test_cfn_lint_finds_nothing():
    program, regions = Path(sys.prefix) / "bin" / "cfn-lint", ("us-east-1", "eu-west-1")
    command = [program, "--regions", *regions, "--", *TEMPLATES]
    checked = subprocess.run(command, capture_output=True, text=True, check=False)
    assert len(TEMPLATES) == 3
    assert (checked.returncode, checked.stdout) == (0, "")


def _statements():
    resources = yaml.load((FOLDER / "templates" / "roles.yaml").read_text(), Loader=Lenient)["Resources"]
    training, learner = (resources[name]["Properties"] for name in ("TrainingRole", "Learner"))
    documents = {"training": training["Policies"][0]["PolicyDocument"], "learner": learner["PolicyDocument"]}
    for name, document in documents.items():
        for statement in document["Statement"]:
            yield name, statement


def listed(value):
    """AWS writes a list of one as its one item."""
    return value if isinstance(value, list) else [value]


def test_nothing_is_allowed_wholesale():
    for name, statement in _statements():
        actions = listed(statement["Action"])
        assert not any("*" in action for action in actions), (name, statement["Sid"])
        if "*" in listed(statement["Resource"]):
            assert all(action.startswith(WITHOUT_RESOURCES) for action in actions), (name, statement["Sid"])
    assert "AdministratorAccess" not in (FOLDER / "templates" / "roles.yaml").read_text()


def test_a_learner_starts_jobs_within_limits_of_time_and_type_with_the_workshop_s_tag_and_one_role():
    statements = {statement["Sid"]: statement for name, statement in _statements() if name == "learner"}
    limits = statements["StartWithinLimits"]["Condition"]
    assert limits["NumericLessThanEquals"] == {"sagemaker:MaxRuntimeInSeconds": "${MostSeconds}"}
    assert limits["NumericLessThanEqualsIfExists"] == {"sagemaker:KeepAlivePeriod": "0"}
    assert limits["ForAllValues:StringEquals"] == {"sagemaker:InstanceTypes": "InstanceTypes"}
    assert limits["Null"] == {"sagemaker:InstanceTypes": "false"}
    tagged = {"aws:ResourceTag/made-by": "distributed-training-workshop"}
    assert statements["EndWhatCosts"]["Condition"] == {"StringEquals": tagged}
    assert limits["StringEquals"] == {f"aws:RequestTag/{TAG['Key']}": TAG["Value"]}
    handed = statements["HandTheRoleOver"]
    assert handed["Resource"] == "TrainingRole.Arn"
    assert handed["Condition"] == {"StringEquals": {"iam:PassedToService": "sagemaker.amazonaws.com"}}


def test_everything_that_can_bear_a_tag_bears_the_workshop_s():
    from cfnlint.decode import cfn_yaml  # it takes seconds

    for path in TEMPLATES:
        for name, resource in cfn_yaml.load(str(path))["Resources"].items():
            if resource["Type"] in WITH_TAGS:
                assert TAG in resource["Properties"]["Tags"], (path.name, name)


# Rights that the code needs

PACKAGE = Path(account.__file__).parent
# Operations whose permission has another name, or that need more than one.
# Source: AWS, "Service Authorization Reference".
OTHERWISE = {
    "s3:HeadBucket": ["s3:ListBucket"],
    "s3:ListObjectsV2": ["s3:ListBucket"],
    "s3:ListBuckets": ["s3:ListAllMyBuckets"],
    "s3:upload_fileobj": ["s3:PutObject", "s3:AbortMultipartUpload"],
    "s3:PutPublicAccessBlock": ["s3:PutBucketPublicAccessBlock"],
    "sagemaker:CreateTrainingJob": ["sagemaker:CreateTrainingJob", "sagemaker:AddTags", "iam:PassRole"],
}
ADMINISTRATORS = {f"cloudformation:{verb}Stack" for verb in ("Create", "Delete")}
# Of `docker push` and `aws ecr` in build.sh. Source: AWS, "IAM permissions for pushing an image".
_PUSHING = """
    BatchCheckLayerAvailability BatchGetImage CompleteLayerUpload CreateRepository DescribeRepositories
    GetAuthorizationToken InitiateLayerUpload PutImage TagResource UploadLayerPart
"""
OF_BUILD_SH = {f"ecr:{action}" for action in _PUSHING.split()}


def calls():
    """Each call that the launcher makes: service and operation, of `aws.call(...)`, `aws.pages(...)` and REMOVALS."""
    found = {(service, operation) for service, operation, *_ in cleanup.REMOVALS.values()}
    for path in PACKAGE.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if is_call and node.func.attr in ("call", "pages") and len(node.args) >= 2:
                service, operation = node.args[:2]
                if isinstance(service, ast.Constant) and isinstance(operation, ast.Constant):
                    found.add((service.value, operation.value))
                else:
                    assert path.name == "cleanup.py", ast.unparse(node)  # those of REMOVALS
    return found


def test_a_learner_may_make_every_call_that_the_code_makes_and_no_other():
    needed, made = set(OF_BUILD_SH), calls()
    clients = {service: boto3.client(service, region_name="us-east-1") for service, _ in made}
    for service, operation in made:
        # What boto3 adds to the service's own operations is called as there.
        name = clients[service].meta.method_to_api_mapping.get(operation, operation)
        action = f"{service}:{name}"
        needed |= set(OTHERWISE.get(action, [action]))
    allowed = {
        action
        for name, statement in _statements()
        if name == "learner"
        for action in listed(statement["Action"])
    }
    assert needed - allowed == ADMINISTRATORS
    assert allowed - needed == set()
