"""A job whose package is not installed is refused before anything starts, with what brings it; it can be rendered."""

from importlib.util import find_spec

import pytest

from workshop_utils.jobs import JobError
from workshop_utils.launchers.kubernetes import EmulatedKubernetes
from workshop_utils.launchers.local import Local, environment
from workshop_utils.launchers.sagemaker import EmulatedSageMaker
from workshop_utils.ranks import on_ranks

STRATEGY = "strategy is 'horovod', but horovod is not installed; `workshop install horovod` brings it"
SCRIPT = "train.py imports horovod, but horovod is not installed; `workshop install horovod` brings it"
ROLE = "arn:aws:iam::123456789012:role/workshop"


@pytest.fixture(autouse=True)
def without_horovod(monkeypatch):
    monkeypatch.setattr(environment, "find_spec", lambda name: None if name == "horovod" else find_spec(name))


@pytest.mark.parametrize(
    "target",
    [Local(), Local(warm=True), EmulatedKubernetes(), EmulatedSageMaker(role=ROLE, region="us-east-1")],
    ids=["local", "warm", "kubernetes", "sagemaker"],
)
def test_a_strategy_of_horovod_is_refused_and_rendered(target, make_job, nothing_is_left):
    image = "123456789012.dkr.ecr.us-east-1.amazonaws.com/workshop-horovod:cpu"
    job = make_job("import horovod.torch", strategy="horovod", workers=2)
    if not isinstance(target, Local):
        job = job.replace(image=image)
    assert target.render(job)
    with pytest.raises(JobError) as refusal:
        target.launch(job)
    assert str(refusal.value) == STRATEGY
    assert list(nothing_is_left.iterdir()) == []


def test_ranks_of_horovod_are_refused():
    with pytest.raises(JobError) as refusal:
        on_ranks(2, lambda hvd: hvd.rank(), framework="horovod")
    assert str(refusal.value) == STRATEGY


def test_a_script_that_imports_it_is_refused_by_its_name(make_job):
    job = make_job("import os\nfrom horovod import torch as hvd", strategy="torch_ddp", workers=2)
    with pytest.raises(JobError) as refusal:
        Local().launch(job)
    assert str(refusal.value) == SCRIPT


def test_keras_2_is_asked_for_where_a_job_s_environment_does(make_job, monkeypatch):
    monkeypatch.setattr(
        environment, "find_spec", lambda name: None if name == "tf_keras" else find_spec(name)
    )
    with pytest.raises(
        JobError, match=r"TF_USE_LEGACY_KERAS is '1', but tf_keras .* `workshop install tf-keras`"
    ):
        Local().launch(make_job("", environment={"TF_USE_LEGACY_KERAS": "1"}))


@pytest.mark.parametrize(
    ("script", "variables", "warned"),
    [
        ("import horovod.tensorflow.keras as hvd", {}, True),
        ("from horovod.tensorflow import keras as hvd", {}, True),
        ("import keras, horovod.keras as hvd", {}, True),
        ("import horovod.tensorflow as hvd", {}, False),
        ("import horovod.tensorflow.keras as hvd", {"TF_USE_LEGACY_KERAS": "1"}, False),
        ("import horovod.tensorflow.keras as hvd", {"TF_USE_LEGACY_KERAS": "0"}, True),
        ("os.environ['TF_USE_LEGACY_KERAS'] = '1'\nimport horovod.tensorflow.keras as hvd", {}, False),
    ],
)
def test_horovod_s_modules_for_keras_2_are_not_joined_with_keras_3_in_silence(
    script, variables, warned, make_job, monkeypatch
):
    monkeypatch.delenv("TF_USE_LEGACY_KERAS", raising=False)
    job = make_job(script, strategy="horovod", workers=2, environment=variables)
    assert ("averages no gradients of Keras 3" in Local().render(job).warning) == warned


@pytest.mark.processes
@pytest.mark.parametrize(
    "script",
    [
        "try:\n    import horovod.no_such\nexcept ImportError:\n    print('without')",
        "def train():\n    import horovod\nprint('without')",
    ],
)
def test_a_script_that_can_do_without_it_runs(script, make_job):
    run = Local().launch(make_job(script)).wait(60)
    assert [line.text for line in run.logs()] == ["without"]


@pytest.mark.processes
def test_a_script_that_brings_a_module_of_that_name_runs(make_job):
    job = make_job("import horovod\nprint(horovod.TEXT)")
    (job.folder / "horovod.py").write_text("TEXT = 'mine'")
    assert [line.text for line in Local().launch(job).wait(60).logs()] == ["mine"]
