"""The mnist jobs of PyTorch and Horovod train as one process, survive a kill, and refuse what they cannot do."""

import math

import numpy as np
import pytest
import torch
from conftest import with_horovod
from launching import job_of, killed, launched
from torch.nn.functional import cross_entropy

from workshop_utils import place
from workshop_utils.runs import RunFailed
from workshop_utils.training import data

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

EVERYTHING = {"dropout": 0.1, "accumulate": 3, "clip_norm": 1}
UNFUSED = {"HOROVOD_FUSION_THRESHOLD": "0"}


def weights(folder):
    """The parameters that a run has saved in `folder`, as one array."""
    (file,) = (path for path in folder.iterdir() if path.name != "logs")
    if file.suffix == ".pt":
        arrays = [tensor.numpy() for tensor in torch.load(file, weights_only=True).values()]
    else:
        with np.load(file) as model:
            arrays = list(model.values())
    return np.concatenate([array.reshape(-1) for array in arrays])


def kill_at(step, job):
    """Launch `job`, and kill its last worker once one has reported `step`."""
    killed(job, f"worker-{job.workers - 1}", lambda run: any(each["step"] >= step for each in run.records))


def printed(run):
    return [line.text for line in run.logs(worker="worker-0")]


def steps_of_rank_0(run):
    table = run.metrics
    return table[(table["rank"] == 0) & table["loss"].notna()]["step"].tolist() if len(table) else []


@pytest.mark.parametrize(
    ("name", "workers", "arguments", "environment"),
    [
        # Small parts of the batch, so that it takes its time.
        pytest.param(
            "mnist_torch_ddp/single.yaml", 1, {"dropout": 0.1, "accumulate": 60}, {}, id="one process"
        ),
        pytest.param("mnist_torch_ddp", 4, EVERYTHING, {}, id="DDP"),
        with_horovod("mnist_horovod", 4, EVERYTHING, UNFUSED, id="Horovod without fusion"),
    ],
)
def test_a_killed_run_resumes_to_the_bits_of_an_uninterrupted_one(
    name, workers, arguments, environment, tmp_path
):
    # 25 steps an epoch, whatever the number of workers.
    arguments = {"batch_size": 60 // workers, "epochs": 4, "checkpoint_steps": 7, **arguments}
    fields = {"workers": workers, "arguments": arguments, "environment": environment}
    run = launched(name, tmp_path / "whole", **fields)
    assert run.metrics["device"].dropna().tolist() == ["cpu"] * workers
    whole = weights(tmp_path / "whole")

    saved = tmp_path / "saved"
    job = job_of(name, checkpoints=str(saved), **fields)
    kill_at(20, job)
    resumed = launched(name, tmp_path / "resumed", checkpoints=str(saved), **fields)
    (step,) = [int(text.split()[-1]) for text in printed(resumed) if text.startswith("resumed after step ")]
    assert step % 7 == 0
    assert 14 <= step < 25 * arguments["epochs"]
    assert steps_of_rank_0(resumed)[0] == step + 1
    assert weights(tmp_path / "resumed").tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", [*map(with_horovod, ["mnist_torch_ddp", "mnist_horovod"])])
def test_a_run_with_checkpoints_ends_again_and_refuses_another_run(name, tmp_path):
    saved = tmp_path / "saved"
    arguments = {"batch_size": 30, "epochs": 1, "checkpoint_steps": 10, "learning_rate": 0.1}
    fields = {"workers": 2, "arguments": arguments, "checkpoints": str(saved)}
    launched(name, tmp_path / "whole", **fields)
    whole = weights(tmp_path / "whole")
    ended = launched(name, tmp_path / "ended", **fields)
    assert "resumed after step 25" in printed(ended)
    assert steps_of_rank_0(ended) == []
    assert weights(tmp_path / "ended").tobytes() == whole.tobytes()

    with pytest.raises(RunFailed) as other:
        launched(name, **{**fields, "workers": 3})
    assert "are of another run: workers is 3 and was 2; give another folder" in str(other.value)


def by_one_process(rate, batch_size, clip_norm):
    """The parameters after 2 epochs of plain training on batches of all workers, 25 steps each, from the job's seeds.

    `rate(step)` is the learning rate.
    """
    images, labels = place.load("train", data.prepare("digits")).tensors()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimize = torch.optim.SGD(model.parameters(), lr=0.0, momentum=0.9)
    for step in range(50):
        epoch, position = divmod(step, 25)
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(epoch))
        batch = order[position * batch_size : (position + 1) * batch_size]
        optimize.zero_grad()
        cross_entropy(model(images[batch]), labels[batch]).backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        norm = math.sqrt(sum(float(gradient.square().sum()) for gradient in gradients))
        for gradient in gradients:
            gradient.mul_(min(1.0, clip_norm / norm))
        optimize.param_groups[0]["lr"] = rate(step)
        optimize.step()
    return np.concatenate([parameter.detach().numpy().reshape(-1) for parameter in model.parameters()])


def half_a_cosine(step):
    return (1 + math.cos(math.pi * step / 50)) / 2


def to_one(step):
    return 0.05 * half_a_cosine(step)


def to_twice(step):  # in 10 of 50 steps
    return min(1 + step / 10, 2) * to_one(step)


@pytest.mark.parametrize(
    ("name", "strategy", "workers", "arguments", "rate"),
    [
        ("mnist_torch_ddp", "single", 1, {"batch_size": 60}, to_one),
        ("mnist_torch_ddp", "torch_ddp", 2, {"parallel": "naive"}, to_twice),
        ("mnist_torch_ddp", "torch_ddp", 2, {"parallel": "ddp", "bucket_bytes": 4000}, to_twice),
        with_horovod("mnist_horovod", "horovod", 2, {}, to_twice),
        with_horovod("mnist_horovod", "mpi", 2, {}, to_twice),
    ],
)
def test_workers_shuffle_accumulate_clip_and_warm_up_as_one_process_with_the_whole_batch(
    name, strategy, workers, arguments, rate, tmp_path
):
    arguments = {"epochs": 2, "batch_size": 30, "warmup": 0.2, "accumulate": 3, "clip_norm": 0.5, **arguments}
    launched(name, tmp_path, workers=workers, strategy=strategy, arguments=arguments)
    expected = by_one_process(rate, batch_size=60, clip_norm=0.5)
    np.testing.assert_allclose(weights(tmp_path), expected, rtol=0, atol=2e-5)
