"""The job of lesson 09 between real processes: local SGD and DiLoCo, against the same steps in one process."""

import numpy as np
import pytest
import torch
from launching import launched
from torch import nn
from torch.nn.functional import cross_entropy

from workshop_utils.training import data

pytestmark = pytest.mark.processes

ROUNDS, LOCAL_STEPS, BATCH, RATE, OUTER, MOMENTUM = 3, 4, 8, 0.1, 0.7, 0.9


def in_one_process(size):
    """The loss after each round, by DiLoCo's formulas with SGD inside, one worker after the other."""
    digits = data.arrays(data.prepare("digits"))
    images, labels = torch.tensor(digits.train_images), torch.tensor(digits.train_labels)
    torch.manual_seed(0)
    shards = torch.randperm(len(images)).tensor_split(size)
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    shared = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    velocity, losses = torch.zeros_like(shared), []
    draws = [torch.Generator().manual_seed(rank) for rank in range(size)]
    for _ in range(ROUNDS):
        reached = []
        for shard, draw in zip(shards, draws, strict=True):
            nn.utils.vector_to_parameters(shared.clone(), model.parameters())
            for _ in range(LOCAL_STEPS):
                batch = shard[torch.randint(len(shard), (BATCH,), generator=draw)]
                loss = cross_entropy(model(images[batch]), labels[batch])
                for parameter, gradient in zip(
                    model.parameters(), torch.autograd.grad(loss, model.parameters()), strict=True
                ):
                    parameter.data -= RATE * gradient
            reached.append(nn.utils.parameters_to_vector(model.parameters()).detach().clone())
        way = shared - torch.stack(reached).mean(0)
        velocity = MOMENTUM * velocity + way
        shared = shared - OUTER * (way + MOMENTUM * velocity)
        nn.utils.vector_to_parameters(shared.clone(), model.parameters())
        losses.append(cross_entropy(model(images), labels).item())
    return losses


@pytest.mark.parametrize("size", [1, 3])
def test_diloco_between_processes_takes_the_steps_of_its_formulas(size):
    arguments = {"rounds": ROUNDS, "local_steps": LOCAL_STEPS, "inner": "sgd", "learning_rate": RATE}
    table = launched("digits_local_sgd", workers=size, arguments=arguments).metrics
    np.testing.assert_allclose(table["loss"].dropna(), in_one_process(size), rtol=1e-4)
    assert table["numbers_reduced"].max() == ROUNDS * (64 * 32 + 32 + 32 * 10 + 10)
