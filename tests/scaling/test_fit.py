"""Fits find what made-up measurements were made from, disturbed or not, and say how sure that is."""

import numpy as np
import pytest

from workshop_utils.comm.topology import Link
from workshop_utils.scaling.cost import all_reduce_seconds
from workshop_utils.scaling.fit import fit, path_terms, size_terms

TRUE = Link(2e-3, 12e6)
WORKERS = np.repeat([2, 3, 4, 8], 4)
NBYTES = np.tile([5e4, 2e5, 1e6, 4e6], 4)


def ring(size, nbytes, path):
    return all_reduce_seconds("ring", size, nbytes, path)


def noisy(seed=0):
    return ring(WORKERS, NBYTES, TRUE) * np.exp(np.random.default_rng(seed).normal(0, 0.02, len(WORKERS)))


def test_three_disturbed_measurements_of_sixteen_move_the_fit_little():
    seconds = noisy()
    seconds[[2, 7, 9]] *= 3
    found = fit(path_terms(ring), (WORKERS, NBYTES), seconds).estimates
    assert found["bandwidth"].value == pytest.approx(12e6, rel=0.1)
    assert found["latency"].value == pytest.approx(2e-3, rel=0.1)


def test_intervals_hold_what_is_true_about_as_often_as_they_say():
    held = 0
    for seed in range(20):
        found = fit(path_terms(ring), (WORKERS, NBYTES), noisy(seed), draws=60)
        _, low, high = found.estimates["bandwidth"]
        held += low <= 12e6 <= high
    assert held >= 14


def test_no_coefficient_is_below_zero_even_where_the_best_line_would_be():
    # Faster than in proportion to size: a plain line would begin below 0.
    found = fit(size_terms()[:2], (np.array([1e6, 2e6, 4e6]),), [1.0, 2.2, 4.8])
    assert found.estimates["latency"].value == 0
    assert found.predict(1e5) > 0


def test_three_points_are_met_and_leave_nothing_to_judge_by():
    sizes = np.array([65536.0, 2.0**25, 2.0**34])
    found = fit(size_terms(), (sizes,), [135e-6, 440e-6, 66e-3])
    assert found.predict(sizes) == pytest.approx([135e-6, 440e-6, 66e-3])
    assert np.isnan(found.estimates["latency"][1:]).all()
    assert "–" in str(found)


@pytest.mark.parametrize(
    ("varied", "seconds", "message"),
    [
        (([2], [1e6]), [1.0], "1 measurements cannot tell 2 numbers apart"),
        (([2, 4], [1e6]), [1.0, 2.0], "2 seconds go with 2, 1 values"),
        (([2, 4], [1e6, 1e6]), [1.0, 0.0], "each has to be above 0"),
        (([1, 4], [1e6, 1e6]), [1.0, 2.0], r"measurement 0 \(1, 1e\+06\) costs nothing by any term"),
    ],
)
def test_measurements_that_say_nothing_are_refused(varied, seconds, message):
    with pytest.raises(ValueError, match=message):
        fit(path_terms(ring), varied, seconds)
