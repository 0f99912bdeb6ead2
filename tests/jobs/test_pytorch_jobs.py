"""The small job with PyTorch's DDP comes to the parameters of one process."""

import runpy

import pytest
import torch
from launching import JOBS, launched
from torch.nn.functional import cross_entropy

from workshop_utils import place
from workshop_utils.training import data

SIZES = {"steps": 4, "batch_size": 31, "width": 33, "layers": 2}  # no multiples of 2 and 3


def by_one_process():
    """The losses, and the parameters in the end, of plain training on the same batches."""
    network = runpy.run_path(str(JOBS / "digits_torch_ddp" / "train.py"))["network"]
    images, labels = place.load("train", data.prepare("digits")).tensors()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        module = network(images.shape[1], SIZES["width"], SIZES["layers"])
    optimizer = torch.optim.SGD(module.parameters(), 0.2, momentum=0.9)
    losses = []
    for step in range(SIZES["steps"]):
        batch = torch.arange(step * SIZES["batch_size"], (step + 1) * SIZES["batch_size"]) % len(images)
        loss = cross_entropy(module(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_ddp_takes_the_steps_of_one_process(workers, tmp_path):
    run = launched("digits_torch_ddp", tmp_path, workers=workers, arguments={**SIZES, "bucket_bytes": 4000})
    parameters = torch.cat([tensor.reshape(-1) for tensor in torch.load(tmp_path / "model.pt").values()])
    losses, expected = by_one_process()
    table = run.metrics.dropna(subset=["loss"])
    assert set(table["rank"]) == set(range(workers))
    assert table.groupby("step")["loss"].mean().tolist() == pytest.approx(losses, abs=1e-5)
    torch.testing.assert_close(parameters, expected, rtol=0, atol=2e-5)  # float32, summed in another order
