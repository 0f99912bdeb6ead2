"""The jobs of lesson 09 between real processes: what must not depend on the number of workers does not."""

import functools

import numpy as np
import pytest
from launching import launched

from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.scaling.convergence import staleness_at_most

PARAMETERS = 64 * 32 + 32 + 32 * 10 + 10

pytestmark = pytest.mark.slow


def metrics(name, workers, **arguments):
    return launched(name, workers=workers, arguments={"seeds": 2, **arguments}).metrics


def ends(table, column):
    """What each network of each worker that reports it ended with."""
    return table.dropna(subset=[column, "seed"]).groupby(["worker", "seed"])[column].last().to_numpy()


@pytest.fixture(scope="module")
def in_one_process():
    return ends(metrics("digits_large_batch", 1, batch_size=48, learning_rates=0.3, epochs=3), "loss")


# A sum is a mean with as many times the learning rate.
@pytest.mark.parametrize(("reduction", "rate"), [("mean", 0.3), ("sum", 0.1)])
def test_a_batch_trains_the_same_with_any_number_of_workers(reduction, rate, in_one_process):
    arguments = {"batch_size": 48, "learning_rates": rate, "epochs": 3, "reduction": reduction}
    table = metrics("digits_large_batch", 3, **arguments)
    # float32, another order of adding
    np.testing.assert_allclose(ends(table, "loss"), in_one_process, rtol=1e-3)
    assert (ends(table, "accuracy") > 0.85).all()


def test_a_warm_up_begins_with_shorter_steps():
    arguments = {"batch_size": 48, "learning_rates": 0.3, "epochs": 1}
    cold = metrics("digits_large_batch", 2, **arguments)
    warm = metrics("digits_large_batch", 2, **arguments, warmup_steps=20, first_learning_rate=0.001)
    after_one = [table[table["step"] == 1]["loss"].mean() for table in (cold, warm)]
    assert after_one[1] > after_one[0]
    assert ends(warm, "loss").mean() > ends(cold, "loss").mean()


def test_training_ends_when_all_seeds_of_one_rate_have_reached_the_target_and_one_that_diverges_is_reported():
    rates = {"learning_rates": "0.0001,0.4,1e30", "target_loss": 0.5}
    table = metrics("digits_large_batch", 2, batch_size=48, **rates)
    last = table[table["step"] == table["step"].max()].dropna(subset=["accuracy"])
    losses = last.set_index("learning_rate")["loss"]
    assert losses[1e30].isna().all()
    assert losses[0.4].max() <= 0.5 < losses[0.0001].max()
    assert table["step"].max() < 8 * 1500 // 48


def test_who_meets_seldom_sends_less_by_as_much():
    table = metrics("digits_local_sgd", 3, local_steps=8, steps=128)
    last = table.dropna(subset=["bytes_sent"]).iloc[-1]
    assert last["meetings"] == 128 / 8
    assert last["bytes_sent"] == pytest.approx(16 * ring_bytes_sent(3, 4 * PARAMETERS), rel=0.01)
    assert (ends(table, "accuracy") > 0.75).all()


def test_an_outer_step_of_rate_one_without_momentum_is_local_sgd():
    arguments = {"local_steps": 16, "steps": 64}
    plain = metrics("digits_local_sgd", 2, **arguments)
    nesterov = {"outer": "nesterov", "outer_learning_rate": 1, "outer_momentum": 0}
    outer = metrics("digits_local_sgd", 2, **nesterov, **arguments)
    np.testing.assert_allclose(ends(plain, "loss"), ends(outer, "loss"), rtol=1e-4)


def test_staleness_stays_below_its_bound():
    workers = 4
    arguments = {"consistency": "stale_synchronous", "bound": 1, "slow_worker": 0, "updates": 60}
    table = metrics("digits_staleness", workers, **arguments)
    assert 0 < table["staleness_max"].max() <= staleness_at_most(workers, 1)
    assert (ends(table, "loss") < 2.2).all()


def test_one_asynchronous_worker_has_fresh_gradients_and_every_rate_sees_the_same_age():
    table = metrics("digits_staleness", 1, learning_rates="0.1,0.2", updates=30)
    assert table["staleness_max"].tolist()[-4:] == [0] * 4
    assert sorted(table["learning_rate"].dropna()) == [0.1, 0.1, 0.2, 0.2]


@functools.cache
def normalised(workers, **arguments):
    """The mean loss of every step, and whether all workers come to the same accuracy, by seed."""
    table = metrics("digits_batch_norm", workers, batch_size=24, steps=40, **arguments)
    same = table.dropna(subset=["accuracy"]).groupby("seed")["accuracy"].nunique() == 1
    return table.groupby("step")["loss"].mean().dropna(), same


@pytest.mark.parametrize(
    ("workers", "statistics", "cut"),
    [(2, "synchronised", "shuffled"), (3, "synchronised", "sorted"), (2, "none", "sorted")],
)
def test_with_statistics_of_the_whole_batch_or_none_training_is_that_of_one_process(workers, statistics, cut):
    alone, _ = normalised(1, statistics={"synchronised": "local"}.get(statistics, statistics))
    together, same = normalised(workers, statistics=statistics, cut=cut)
    np.testing.assert_allclose(together, alone, atol=1e-10)
    assert same.all(), "all workers have collected the same statistics"


def test_local_batch_normalisation_is_another_training_and_each_worker_keeps_its_own_statistics():
    alone, _ = normalised(1)
    local, same = normalised(3, cut="sorted")
    assert np.abs(local - alone).max() > 0.01
    assert not same.all()
