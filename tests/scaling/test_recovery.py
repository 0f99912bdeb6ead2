"""What failures cost: formulas against simulated runs, and against each other."""

import numpy as np
import pytest

from workshop_utils.scaling import recovery


def simulated_lost_share(interval, save, failure, restart, intervals):
    """Of one run of so many intervals, a failure at a time: also in saves and restarts."""
    random, clock, done, needed = np.random.default_rng(0), 0.0, 0, interval + save
    while done < intervals:
        until_failure = random.exponential(failure)
        failed = until_failure < needed
        clock += until_failure if failed else needed
        done += not failed
        needed = interval + save + restart * failed
    return 1 - intervals * interval / clock


@pytest.mark.parametrize("restart", [0.0, 300.0])
@pytest.mark.parametrize("interval", [300.0, 1000.0, 6000.0])
def test_dalys_formula_is_what_simulated_failures_cost(interval, restart):
    simulated = simulated_lost_share(interval, 60.0, 5000.0, restart, intervals=4000)
    assert simulated == pytest.approx(recovery.lost_share(interval, 60.0, 5000.0, restart), abs=0.02)


def test_youngs_interval_is_close_to_the_best():
    intervals = np.geomspace(10, 1e5, 4000)
    for failure in (1e4, 1e5, 1e6):
        best = intervals[np.argmin(recovery.lost_share(intervals, 20.0, failure))]
        assert recovery.best_interval(20.0, failure) == pytest.approx(best, rel=0.1)
