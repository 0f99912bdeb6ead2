"""The jobs of the lesson on PyTorch come to the parameters of one process, by our own means and by PyTorch's."""

import runpy
from functools import cache

import pytest
import torch
from launching import JOBS, launched
from torch.nn.functional import cross_entropy

from workshop_utils import place
from workshop_utils.parallel.sharded import zero_bytes_sent
from workshop_utils.runs import RunFailed
from workshop_utils.training import data

SIZES = {"steps": 4, "batch_size": 31, "width": 33, "layers": 2}  # no multiples of 2 and 3

pytestmark = pytest.mark.slow


def trained(job, folder, workers, **arguments):
    """The finished run, and the parameters that it has saved."""
    run = launched(job, folder, workers=workers, arguments={**SIZES, **arguments})
    return run, torch.cat([tensor.reshape(-1) for tensor in torch.load(folder / "model.pt").values()])


@cache
def by_one_process(optimizer):
    """The losses, and the parameters in the end, of plain training on the same batches."""
    network = runpy.run_path(str(JOBS / "digits_buckets" / "train.py"))["network"]
    images, labels = place.load("train", data.prepare("digits")).tensors()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = network(images.shape[1], SIZES["width"], SIZES["layers"])
    kinds = {
        "momentum": lambda parameters: torch.optim.SGD(parameters, 0.2, momentum=0.9),
        "adam": lambda parameters: torch.optim.Adam(parameters, 0.002),
    }
    optimize = kinds[optimizer](module.parameters())
    losses = []
    for step in range(SIZES["steps"]):
        batch = torch.arange(step * SIZES["batch_size"], (step + 1) * SIZES["batch_size"]) % len(images)
        loss = cross_entropy(module(images[batch]), labels[batch])
        optimize.zero_grad()
        loss.backward()
        optimize.step()
        losses.append(loss.item())
    return losses, torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def assert_like_one_process(run, parameters, optimizer):
    losses, expected = by_one_process(optimizer)
    table = run.metrics.dropna(subset=["loss"])
    assert set(table["rank"]) == set(range(len(run.workers)))
    assert table.groupby("step")["loss"].mean().tolist() == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(parameters, expected, rtol=0, atol=2e-5)  # float32, summed in another order


@pytest.mark.parametrize(
    ("by", "workers", "accumulate"), [("naive", 3, 1), ("bucketed", 2, 3), ("overlapped", 3, 4)]
)
def test_the_workshops_own_data_parallelism(by, workers, accumulate, tmp_path):
    run, parameters = trained(
        "digits_buckets", tmp_path, workers, by=by, accumulate=accumulate, bucket_bytes=4000
    )
    assert_like_one_process(run, parameters, "momentum")
    table = run.metrics
    assert table["bytes_sent"].dropna().mean() == pytest.approx(
        zero_bytes_sent(workers, parameters.nbytes, 0), rel=0.01
    )
    spans = table.dropna(subset=["all_reduce"])
    assert len(spans) == workers * {"naive": 6, "bucketed": 4, "overlapped": 4}[by]
    assert spans.groupby("rank")["nbytes"].sum().tolist() == [parameters.nbytes] * workers
    assert (spans["end"] >= spans["start"]).all()
    marks = table.dropna(subset=["synchronised"])
    assert (marks["forward_end"] <= marks["backward_end"]).all()
    assert marks["forward_start"].min() == 0


@pytest.mark.parametrize(("workers", "accumulate"), [(2, 3), (3, 1)])
def test_pytorchs_ddp_beside_it(workers, accumulate, tmp_path):
    run, parameters = trained("digits_torch_ddp", tmp_path, workers, accumulate=accumulate, bucket_bytes=4000)
    assert_like_one_process(run, parameters, "momentum")
    spans = run.metrics.dropna(subset=["all_reduce"])
    assert spans.groupby("rank")["nbytes"].sum().tolist() == [parameters.nbytes] * workers
    assert (run.metrics["all_reduces"].dropna() == spans["all_reduce"].max() + 1).sum() >= workers


@pytest.mark.parametrize(("stage", "workers"), [(0, 2), (1, 3), (2, 3), (3, 3)])
def test_each_stage_of_the_workshops_own_zero(stage, workers, tmp_path):
    run, parameters = trained("digits_sharded", tmp_path, workers, stage=stage, measure_memory=workers - 2)
    assert_like_one_process(run, parameters, "adam")
    most = zero_bytes_sent(workers, parameters.nbytes, stage)
    sent = run.metrics["bytes_sent"].dropna().mean()
    first_layer = 4 * (64 * 33 + 33) * (workers - 1) / workers if stage == 3 else 0
    assert sent == pytest.approx(most - first_layer, rel=0.01)
    assert run.metrics["memory_nbytes"].dropna().size == workers


@pytest.mark.parametrize(("by", "workers"), [("zero", 3), ("fsdp", 3), ("fsdp-keep", 2)])
def test_what_pytorch_has_for_each_stage(by, workers, tmp_path):
    run, parameters = trained("digits_fsdp", tmp_path, workers, by=by)
    assert_like_one_process(run, parameters, "adam")
    assert [line for line in run.logs() if "Warning" in line.text] == []


def test_uneven_inputs_are_joined_by_pytorch_and_refused_by_ours(tmp_path):
    run, _ = trained("digits_torch_ddp", tmp_path, 2, fewer_steps=2, join=1)
    assert run.metrics.groupby("rank")["step"].max().tolist() == [4, 2]
    with pytest.raises(RunFailed, match=r"rank 0 has 4 batches, rank 1 has 2; .*drop the remainder"):
        trained("digits_buckets", tmp_path, 2, fewer_steps=2)
