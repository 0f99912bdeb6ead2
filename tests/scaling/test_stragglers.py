"""What waiting for the slowest costs, beside draws."""

import numpy as np
import pytest

from workshop_utils.scaling.stragglers import Spread


@pytest.mark.parametrize(("workers", "backup"), [(1, 0), (16, 0), (16, 3), (1000, 0)])
@pytest.mark.parametrize("shape", ["normal", "lognormal"])
def test_the_slowest_is_as_slow_as_drawn_times_say(shape, workers, backup):
    random = np.random.default_rng(0)
    draws = max(2000, 400_000 // workers) // 2
    z = random.standard_normal((draws, workers))
    times = 0.1 * (np.exp(0.2 * z) if shape == "lognormal" else 1 + 0.2 * z)
    drawn = np.sort(times, axis=1)[:, workers - 1 - backup]
    tolerance = 5 * drawn.std() / np.sqrt(draws)
    assert Spread(shape, 0.1, 0.2).slowest(workers, backup) == pytest.approx(drawn.mean(), abs=tolerance)


def test_the_slowest_is_slower_among_more_workers_and_backup_workers_take_most_of_it_back():
    spread = Spread("lognormal", 0.1, 0.3)
    slowest = [spread.slowest(workers) for workers in (1, 10, 100, 1000, 100_000)]
    assert (np.diff(slowest) > 0).all()
    assert spread.slowest(1000, backup=50) < 0.65 * spread.slowest(1000)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Spread("uniform"), "shape is 'uniform'; it must be normal or lognormal"),
        (lambda: Spread(spread=-0.1), "spread is -0.1"),
        (lambda: Spread().slowest(0), "workers is 0"),
        (
            lambda: Spread().slowest(4, backup=4),
            "backup is 4; it must be at least 0 and less than the 4 workers",
        ),
    ],
)
def test_numbers_that_cannot_be_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
