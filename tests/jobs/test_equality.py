"""Data parallel and model parallel training between real processes, compared with one process in NumPy."""

import numpy as np
import pytest
import torch
from launching import launched, trained_by_one_process

from workshop_utils.training import models

LEARNING_RATE, IMAGES = 0.5, 1500

pytestmark = pytest.mark.slow


def expectation(steps, batch_size, width):
    """The losses and the network of one process."""
    batches = (np.arange(step * batch_size, (step + 1) * batch_size) % IMAGES for step in range(steps))
    return trained_by_one_process(width, batches, lambda _: LEARNING_RATE)


def trained_by_job(name, folder, workers, **arguments):
    """Each rank's losses, and the weights in the end."""
    run = launched(name, folder, workers=workers, arguments=arguments)
    losses = {int(rank): list(table["loss"]) for rank, table in run.metrics.groupby("rank")}
    w1, b1, w2, b2 = (weights.numpy() for weights in torch.load(folder / "model.pt"))
    return losses, models.MLP(models.Dense(w1, b1), models.Dense(w2, b2))


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("by", ["hand", "framework"])
@pytest.mark.parametrize("name", ["digits_data_parallel", "digits_model_parallel"])
def test_parallel_equals_serial_where_neither_batch_nor_width_nor_classes_divide(name, by, workers, tmp_path):
    sizes = {"steps": 8, "batch_size": 17, "width": 13}  # 13, 17 and 10 classes are no multiples of 2 and 3
    losses, mlp = trained_by_job(name, tmp_path, workers, by=by, **sizes, learning_rate=LEARNING_RATE)
    expected_losses, expected = expectation(8, 17, 13)
    assert set(losses) == set(range(workers))
    for rank in losses:  # every rank knows the loss of the whole batch, not only of its shard
        assert losses[rank] == pytest.approx(expected_losses, abs=1e-12)
    assert mlp.distance(expected) < 1e-12


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("digits_data_parallel", {"batch-size": 2, "width": 5}),  # the third worker's shard is empty
        ("digits_model_parallel", {"batch-size": 1, "width": 2}),  # the third worker has no hidden unit
    ],
)
def test_a_worker_without_a_share_changes_nothing(name, sizes, tmp_path):
    losses, mlp = trained_by_job(name, tmp_path, workers=3, steps=3, **sizes)
    expected_losses, expected = expectation(3, sizes["batch-size"], sizes["width"])
    assert losses[0] == pytest.approx(expected_losses, abs=1e-12)
    assert mlp.distance(expected) < 1e-12
