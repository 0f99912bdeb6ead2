"""No request is ignored: each field of a job changes what a target renders, or is refused by its name.

A new field needs a row in CHANGES, and every target an answer to it.
"""

import functools
import re

import pytest

from workshop_utils.jobs import Resources, TrainingJob
from workshop_utils.launchers.kubernetes import EmulatedKubernetes, Kubernetes
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.sagemaker import EmulatedSageMaker, SageMaker
from workshop_utils.launchers.slurm import Slurm

LAUNCHERS = {
    "local": Local(),
    "slurm": Slurm(),
    "sagemaker": SageMaker(role="arn:aws:iam::123456789012:role/workshop", region="eu-west-1"),
    "sagemaker-local": EmulatedSageMaker(),
    "kubernetes": Kubernetes(),
    "kubernetes-local": EmulatedKubernetes(),
}
STORAGE = ("OTHER/kept", "s3://bucket/kept", "claim:kept")
# By field: fields of a job, and how they are changed. OTHER is another folder.
CHANGES = {
    "name": [({}, {"name": "another"})],
    "folder": [({}, {"folder": "OTHER"})],
    "script": [({}, {"script": "other.py"})],
    "module": [({}, {"module": "package.train"})],
    "strategy": [({}, {"strategy": "mpi"}), ({}, {"strategy": "ring"}), ({}, {"strategy": "horovod_elastic"})],
    "workers": [({}, {"workers": 3})],
    "nodes": [({"workers": 4, "nodes": 2}, {"workers": 4, "nodes": 4})],
    "processes_per_node": [({"workers": 4, "nodes": 4}, {"workers": 4, "processes_per_node": 2})],
    "parameter_servers": [({}, {"parameter_servers": 2})],
    "arguments": [({}, {"arguments": words}) for words in ({"epochs": 1}, [1], ["{rank}"], {"amp": None})],
    "data": [({}, {"data": data}) for data in (None, "OTHER", "s3://bucket/data", {"code": "OTHER"})],
    "outputs": [({}, {"outputs": place}) for place in STORAGE],
    "checkpoints": [({}, {"checkpoints": place}) for place in STORAGE],
    "resources.cpu": [({}, {"resources": {"cpu": 700}})],
    "resources.memory": [({}, {"resources": {"memory": "9000Gi"}})],
    "resources.gpu": [({}, {"resources": {"gpu": 1}})],
    "image": [({}, {"image": "mine:1"})],
    "timeout": [({}, {"timeout": "3h"})],
    "environment": [({}, {"environment": {"SEED": 0}})],
    "requirements": [({}, {"requirements": False})],
}  # fmt: skip
# What a launch carries out, though no request shows it.
BY_LAUNCH = {
    ("local", "name"): "what the run is called",
    ("local", "timeout"): "the supervisor's",
    ("sagemaker-local", "outputs", "OTHER/kept"): "in place of /opt/ml/model",
    ("sagemaker-local", "checkpoints", "OTHER/kept"): "in place of /opt/ml/checkpoints",
}


@pytest.fixture
def folder(tmp_path):
    """That of a job which asks for a package that is not there; beside it OTHER."""
    for name in ("job", "OTHER"):
        for file in ("train.py", "other.py", "package/train.py"):
            (tmp_path / name / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name / file).write_text(f"import torch\n\nfolder = {name!r}\n")
        (tmp_path / name / "requirements.txt").write_text("no-such-package\n")
    return tmp_path / "job"


def answer(target, folder, fields):
    """What `target` renders of a job with `fields`, without names and ports of the moment; or why it does not."""

    def placed(value):
        if isinstance(value, dict):
            return {name: placed(each) for name, each in value.items()}
        return value.replace("OTHER", str(folder.parent / "OTHER")) if isinstance(value, str) else value

    values = {
        "name": "job",
        "folder": folder,
        "strategy": "torch_ddp",
        "workers": 2,
        "data": "digits",
        **placed(fields),
    }
    try:
        rendered = LAUNCHERS[target].render(TrainingJob(**values))
    except ValueError as refused:
        return str(refused), True
    parts = [str(rendered), getattr(rendered, "source", None), getattr(rendered, "archive", None)]
    parts += [process.folder for process in getattr(rendered, "processes", ())]
    parts += [
        text for name, text in getattr(rendered, "uploads", {}).items() if name.endswith((".sh", ".json"))
    ]
    return re.sub(r"-\d{14}(-[0-9a-f]{4})?|_PORT=\d+", "", str(parts)), False


def test_every_field_has_a_row():
    described = {*TrainingJob.model_fields, *(f"resources.{name}" for name in Resources.model_fields)}
    assert described - {"resources"} == CHANGES.keys()


@pytest.fixture
def quick_sdk(monkeypatch):
    """SageMaker's SDK checks its configuration anew for every request, and reads AWS's list of regions."""
    from sagemaker.core import common_utils
    from sagemaker.core.config import config_manager

    monkeypatch.setattr(config_manager.jsonschema, "validate", lambda *_, **__: None)
    monkeypatch.setattr(common_utils, "_botocore_resolver", functools.cache(common_utils._botocore_resolver))


@pytest.mark.usefixtures("quick_sdk")
@pytest.mark.parametrize("target", LAUNCHERS)
def test_a_field_that_changes_is_carried_out_or_refused_by_its_name(target, folder):
    ignored, unnamed = [], []
    usual, _ = answer(target, folder, {"requirements": False})
    assert answer(target, folder, {"requirements": False}) == (usual, False)
    for field, changes in CHANGES.items():
        common = {} if field == "requirements" else {"requirements": False}
        for before, change in changes:
            was = answer(target, folder, {**common, **before})[0] if before or not common else usual
            now, is_refused = answer(target, folder, {**common, **before, **change})
            if (
                now == was
                and not {(target, field), (target, *change, *map(str, change.values()))} & BY_LAUNCH.keys()
            ):
                ignored.append(change)
            if is_refused and field not in now:
                unnamed.append((change, now))
    assert not ignored
    assert not unnamed


@pytest.mark.usefixtures("quick_sdk")
@pytest.mark.parametrize("target", LAUNCHERS)
def test_a_secret_s_value_is_sent_and_not_shown(target, make_job):
    environment = {"API_KEY": "abc123", "HUB": "https://me:hunter2@hub", "PLAIN": "shown"}
    request = LAUNCHERS[target].render(make_job("", strategy="single", environment=environment))
    assert not re.search("abc123|hunter2", repr(request))
    assert "shown" in repr(request)
    sent = [request.body] if hasattr(request, "body") else getattr(request, "objects", None)
    sent = sent or getattr(request, "secrets", None) or [each.environment for each in request.processes]
    assert re.search(r"abc123.*hunter2", str(sent))
