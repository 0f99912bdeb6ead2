"""The GPUs of this machine are dealt out to the workers. No test needs one: nothing here asks a framework for any."""

import json
from types import SimpleNamespace

import pytest

from workshop_utils.jobs import JobError
from workshop_utils.launchers.local import Local, environment
from workshop_utils.setup import machine

pytestmark = pytest.mark.usefixtures("nothing_is_left")

NAMES = ("CUDA_VISIBLE_DEVICES", "WORKSHOP_DEVICE")
LOOK = """
    import json, os
    from workshop_utils import place
    place.here()
    print("sees", json.dumps([os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "WORKSHOP_DEVICE")]))
    if False:
        import cupy  # so that nobody can say that this script uses no GPU
"""


@pytest.fixture
def gpus(monkeypatch):
    """Lets this machine have so many GPUs, and this process see those of CUDA_VISIBLE_DEVICES."""

    def have(count, visible=None):
        monkeypatch.setattr(machine, "nvidia_gpus", lambda: count)
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return have


def dealt(job):
    """What each process is told about its GPUs, by its name: CUDA_VISIBLE_DEVICES and WORKSHOP_DEVICE."""
    return {
        process.name: tuple(process.environment.get(name) for name in NAMES)
        for process in Local().render(job).processes
    }


def seen(run):
    """What each worker of a finished run saw of the same."""
    run.wait()
    lines = [(line.worker, line.text.partition("sees ")[2]) for line in run.logs()]
    return {worker: tuple(json.loads(text)) for worker, text in lines if text}


FIRST, SECOND, NONE = ("0", "cuda:0"), ("1", "cuda:0"), ("", None)


@pytest.mark.parametrize(
    ("strategy", "each", "expected"),
    [
        ("torch_ddp", 1, {"worker-0": FIRST, "worker-1": SECOND}),
        ("torch_ddp", 2, {"worker-0": ("0,1", "cuda:0"), "worker-1": ("2,3", "cuda:0")}),
        ("torch_ddp", 0, {"worker-0": NONE, "worker-1": NONE}),
        ("horovod", 1, {"rendezvous-0": NONE, "worker-0": FIRST, "worker-1": SECOND}),
        ("workshop_parameter_server", 1, {"server-0": NONE, "worker-0": FIRST, "worker-1": SECOND}),
        ("parameter_server", 1, {"chief-0": NONE, "ps-0": NONE, "worker-0": FIRST, "worker-1": SECOND}),
        ("mpi", 1, {"mpirun": ("0,1", None)}),  # each of its ranks takes the GPU of its local rank
        ("horovod_elastic", 1, {"driver-0": ("0,1", None)}),
    ],
)
def test_each_worker_sees_its_own_gpus_and_what_does_not_train_sees_none(
    strategy, each, expected, make_job, gpus, monkeypatch
):
    gpus(4)
    monkeypatch.setenv("WORKSHOP_DEVICE", "cuda:3")  # of the run from which this one is launched
    assert dealt(make_job(LOOK, strategy=strategy, workers=2, resources={"gpu": each})) == expected


def test_only_the_gpus_that_this_process_may_use_are_dealt_out(make_job, gpus):
    job = make_job(LOOK, strategy="ring", workers=2, resources={"gpu": 1})
    gpus(4, "3,GPU-8932f937")
    assert dealt(job) == {"worker-0": ("3", "cuda:0"), "worker-1": ("GPU-8932f937", "cuda:0")}
    said = r"need 2 GPU\(s\), and (1 can be used here: take at most 1 worker\(s\), or|0 can be used here:) set it to 0"
    for few in ("2", "2,7,0", ""):  # CUDA stops reading at a GPU that does not exist
        gpus(4, few)
        with pytest.raises(JobError, match=said):
            Local().render(job)


@pytest.mark.parametrize(
    ("script", "frameworks"),
    [("import tensorflow", "tensorflow"), ("import torch, keras\ntorch.cuda.init()", "torch")],
)
def test_a_framework_that_is_built_for_cpus_is_refused_before_anything_starts(
    script, frameworks, make_job, gpus, monkeypatch
):
    gpus(1)
    versions = {"tensorflow-cpu": "2.21.0", "torch": "2.13.0+cpu"}
    installed = SimpleNamespace(
        distributions=lambda name: [SimpleNamespace(version=versions[name])] if name in versions else []
    )
    monkeypatch.setattr(environment, "metadata", installed)
    job = make_job(script, resources={"gpu": 1})
    with pytest.raises(JobError, match=rf"only a CPU build of {frameworks}: .*--gpus 0"):
        Local().render(job)
    versions = {"torch": "2.13.0+cu130"}  # and TensorFlow's distribution is another one
    assert dealt(job) == {"worker-0": FIRST}


def test_a_process_that_starts_several_ranks_has_one_gpu_for_each(make_job, gpus):
    gpus(8)
    job = make_job(LOOK, strategy="mpi", workers=2, resources={"gpu": 2})
    with pytest.raises(JobError, match="each takes one of its GPUs: set it to 1"):
        Local().render(job)


def test_a_job_s_own_variables_come_before_what_is_dealt_out(make_job, gpus):
    gpus(1)
    own = {"CUDA_VISIBLE_DEVICES": "0"}
    assert dealt(make_job(LOOK, environment=own)) == {"worker-0": ("0", None)}


@pytest.mark.processes
@pytest.mark.parametrize("warm", [False, True])
def test_workers_see_on_their_start_what_was_dealt_out(warm, make_job, gpus):
    gpus(2, "1,0")
    job = make_job("import numpy", LOOK, strategy="torch_ddp", workers=2)
    assert seen(Local(warm=warm).launch(job)) == {"worker-0": NONE, "worker-1": NONE}
    job = job.replace(resources={"gpu": 1})
    with Local(warm=warm).launch(job) as run:
        assert not run.warm  # a fork of a process that has touched CUDA cannot use it
        assert seen(run) == {"worker-0": ("1", "cuda:0"), "worker-1": FIRST}


@pytest.mark.processes
@pytest.mark.horovod
def test_the_workers_of_elastic_horovod_see_one_gpu_each(make_job, gpus):
    gpus(2)
    job = make_job(LOOK, strategy="horovod_elastic", workers=2, resources={"gpu": 1})
    assert seen(Local().launch(job)) == {"worker-0": ("0", None), "worker-1": ("1", None)}
