"""Batch normalisation is PyTorch's, and synchronised among workers it is that of one process."""

import numpy as np
import pytest
import torch

from workshop_utils.comm import threads
from workshop_utils.parallel.batch_norm import EPSILON, MOMENTUM, BatchNorm


def arrays(batch: int, networks: int = 2, units: int = 3):
    random = np.random.default_rng(1)
    return random.normal(2, 3, (networks, batch, units)), random.normal(size=(networks, batch, units))


def whole(values, upstream):
    norm = BatchNorm(len(values), values.shape[2])
    return norm.forward(values), norm.backward(upstream), norm


def test_forward_and_backward_are_those_of_pytorch():
    values, upstream = arrays(batch=6)
    normalised, by_values, norm = whole(values, upstream)
    for network in range(2):
        tensor = torch.tensor(values[network], requires_grad=True)
        mean, variance = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        theirs = torch.nn.functional.batch_norm(
            tensor, mean, variance, training=True, momentum=MOMENTUM, eps=EPSILON
        )
        theirs.backward(torch.tensor(upstream[network]))
        np.testing.assert_allclose(normalised[network], theirs.detach(), atol=1e-12)
        np.testing.assert_allclose(by_values[network], tensor.grad, atol=1e-12)
        np.testing.assert_allclose(norm.running_mean[network, 0], mean, atol=1e-12)


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_synchronised_statistics_are_those_of_the_whole_batch_with_any_number_of_workers(workers):
    values, upstream = arrays(batch=12)
    normalised, by_values, alone = whole(values, upstream)

    def program(communicator):
        mine = np.split(np.arange(12), workers)[communicator.rank]
        norm = BatchNorm(2, 3, communicator)
        forward = norm.forward(values[:, mine])
        return forward, norm.backward(upstream[:, mine]), norm.running_mean, norm.running_variance

    for rank, (forward, backward, mean, variance) in enumerate(threads.run(workers, program)):
        mine = np.split(np.arange(12), workers)[rank]
        np.testing.assert_allclose(forward, normalised[:, mine], atol=1e-12)
        np.testing.assert_allclose(backward, by_values[:, mine], atol=1e-12)
        np.testing.assert_allclose(mean, alone.running_mean, atol=1e-12)
        np.testing.assert_allclose(variance, alone.running_variance, atol=1e-12)


def test_in_testing_an_example_does_not_depend_on_its_fellows():
    values, upstream = arrays(batch=12)
    _, _, norm = whole(values, upstream)
    np.testing.assert_array_equal(norm.test(values)[:, :1], norm.test(values[:, :1]))
    expected = (values - norm.running_mean) / np.sqrt(norm.running_variance + EPSILON)
    np.testing.assert_array_equal(norm.test(values), expected)
