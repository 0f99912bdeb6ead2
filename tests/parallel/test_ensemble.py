"""Networks that are trained side by side are the ones that would be trained alone."""

import numpy as np
import pytest
from one_process import MLP

from workshop_utils.parallel.ensemble import Ensemble


def examples(networks, batch, seed=0):
    random = np.random.default_rng(seed)
    return random.uniform(size=(networks, batch, 7)), random.integers(0, 10, (networks, batch))


def as_mlp(ensemble, flat, network):
    w1, b1, w2, b2 = (layer[network] for layer in ensemble.layers(flat))
    return MLP(w1, b1[0], w2, b2[0])


@pytest.mark.parametrize("batch", [1, 5])
def test_each_network_has_the_loss_the_gradients_and_the_accuracy_that_it_has_alone(batch):
    ensemble = Ensemble([3, 4, 4], inputs=7, hidden=5)
    weights = ensemble.initialise(np.float64)
    gradients = np.full_like(weights, np.nan)
    x, y = examples(3, batch)
    losses = ensemble.loss_and_gradients(weights, x, y, gradients)
    losses_of_first, accuracies = ensemble.loss_and_accuracy(weights, x[0], y[0])
    for network in range(3):
        alone = as_mlp(ensemble, weights, network)
        loss, expected = alone.gradients(x[network], y[network])
        assert losses[network] == pytest.approx(loss, abs=1e-12)
        np.testing.assert_allclose(as_mlp(ensemble, gradients, network).flat(), expected.flat(), atol=1e-12)
        assert losses_of_first[network] == pytest.approx(alone.gradients(x[0], y[0])[0])
        assert accuracies[network] == alone.accuracy(x[0], y[0])


def test_an_epoch_holds_each_example_once_and_leaves_out_what_fills_no_batch():
    shard = np.arange(100, 111)
    batches = list(Ensemble([0, 5], inputs=7, hidden=5).batches(shard, size=3, steps=6))
    assert [batch.shape for batch in batches] == [(2, 3)] * 6
    for epoch in (batches[:3], batches[3:]):
        for network in range(2):
            seen = np.concatenate([batch[network] for batch in epoch])
            assert len(set(seen)) == 9
            assert set(seen) <= set(shard)
    assert not np.array_equal(batches[0], batches[3]), "the next epoch has another order"
    assert not np.array_equal(batches[0][0], batches[0][1]), "each seed has its own order"


def test_a_batch_larger_than_the_shard_is_refused_in_words():
    with pytest.raises(ValueError, match="the batch is 5; this shard has only 4 examples"):
        next(Ensemble([0], inputs=7, hidden=5).batches(np.arange(4), size=5, steps=1))
