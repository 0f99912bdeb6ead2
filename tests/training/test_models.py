import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workshop_utils.training import models
from workshop_utils.training.models import MLP

BATCH, INPUTS, WIDTH, CLASSES = 17, 6, 13, 10


@pytest.fixture
def mlp():
    return MLP.initialise(INPUTS, WIDTH, CLASSES, seed=1)


@pytest.fixture
def images():
    return np.random.default_rng(0).normal(size=(BATCH, INPUTS))


@pytest.fixture
def labels():
    return np.random.default_rng(1).integers(CLASSES, size=BATCH)


def test_loss_and_gradients_are_those_of_torch(mlp, images, labels):
    w1, b1, w2, b2 = (torch.tensor(array, requires_grad=True) for array in mlp.arrays)
    logits = torch.relu(torch.tensor(images) @ w1 + b1) @ w2 + b2
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    expected.backward()
    loss, gradients = mlp.gradients(images, labels)
    assert loss == pytest.approx(expected.item(), abs=1e-14)
    for gradient, weights in zip(gradients.arrays, (w1, b1, w2, b2), strict=True):
        assert weights.grad is not None
        np.testing.assert_allclose(gradient, weights.grad.numpy(), atol=1e-14)


def test_the_loss_of_huge_logits_does_not_overflow():
    loss, gradient = models.cross_entropy(np.array([[1e4, 0.0], [0.0, 1e4]]), np.array([0, 0]))
    assert loss == pytest.approx(5e3)
    assert np.isfinite(gradient).all()


def test_initial_weights_never_change_between_versions():
    # Training scripts draw the same numbers by themselves; a change here would silently part the two.
    assert MLP.initialise(2, 1, 1, seed=0).flat() == pytest.approx(
        [0.9741721072, 0.7296052302, 0.0, -0.2751481151, 0.0]
    )


@given(length=st.integers(0, 50), workers=st.integers(1, 12))
def test_shards_cover_everything_once_and_differ_by_one_at_most(length, workers):
    cut = models.shards(length, workers)
    sizes = [len(range(length)[share]) for share in cut]
    assert [index for share in cut for index in range(length)[share]] == list(range(length))
    assert len(cut) == workers
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("workers", [1, 2, 3, 5, BATCH])
def test_the_weighted_mean_of_the_shards_gradients_is_the_batchs_gradient(workers, mlp, images, labels):
    cut = models.shards(BATCH, workers)
    gradients = [mlp.gradients(images[share], labels[share])[1] for share in cut]
    sizes = [share.stop - share.start for share in cut]
    assert models.weighted_mean(gradients, sizes).distance(mlp.gradients(images, labels)[1]) < 1e-14


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda mlp: mlp.gradients(np.zeros((0, INPUTS)), np.zeros(0, dtype=int)), "batch is empty"),
        (lambda mlp: models.shards(10, 0), "workers is 0; there must be at least 1"),
        (lambda mlp: models.weighted_mean([mlp, mlp], [1]), "2 gradients have 1 weights"),
        (lambda mlp: models.weighted_mean([mlp, mlp], [0, 0]), "above zero"),
    ],
)
def test_what_cannot_be_is_refused(call, message, mlp):
    with pytest.raises(ValueError, match=message):
        call(mlp)


@pytest.mark.parametrize("workers", [1, 2, 3, 4, WIDTH, WIDTH + 1])
def test_partitions_that_exchange_activations_are_the_whole_network(workers, mlp, images):
    parts = models.partition(mlp, workers)
    assert models.join(parts).distance(mlp) == 0
    assert sum(part.hidden.weights.size for part in parts) == INPUTS * WIDTH
    activations = np.hstack([models.relu(part.hidden.forward(images)) for part in parts])
    logits = np.hstack([part.output.forward(activations) for part in parts])
    np.testing.assert_allclose(logits, mlp.forward(images)[1], atol=1e-14)
