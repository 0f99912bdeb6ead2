"""Batch normalisation is PyTorch's, in training and in testing; the job of lesson 09 has it synchronised."""

import numpy as np
import torch
from torch.nn.functional import batch_norm

from workshop_utils.parallel.batch_norm import EPSILON, MOMENTUM, BatchNorm


def test_training_and_testing_are_those_of_pytorch():
    random = np.random.default_rng(1)
    values, upstream = random.normal(2, 3, (2, 6, 3)), random.normal(size=(2, 6, 3))
    norm = BatchNorm(2, 3)
    normalised, by_values, tested = norm.forward(values), norm.backward(upstream), norm.test(values)
    for network in range(2):
        tensor = torch.tensor(values[network], requires_grad=True)
        mean = torch.zeros(3, dtype=torch.float64)
        variance = torch.tensor(norm.running_variance[network, 0])
        theirs = batch_norm(tensor, mean, torch.ones_like(mean), None, None, True, MOMENTUM, EPSILON)
        theirs.backward(torch.tensor(upstream[network]))
        np.testing.assert_allclose(normalised[network], theirs.detach(), atol=1e-12)
        np.testing.assert_allclose(by_values[network], tensor.grad, atol=1e-12)
        np.testing.assert_allclose(norm.running_mean[network, 0], mean, atol=1e-12)
        expected = batch_norm(tensor.detach(), mean, variance, eps=EPSILON)
        np.testing.assert_allclose(tested[network], expected, atol=1e-12)
