"""What failures cost: formulas against simulated runs, and against each other."""

import numpy as np
import pytest

from workshop_utils.scaling import recovery


@pytest.mark.parametrize("restart", [0.0, 300.0])
@pytest.mark.parametrize("interval", [300.0, 1000.0, 6000.0])
def test_dalys_formula_is_what_simulated_failures_cost(interval, restart):
    simulated = recovery.simulated_lost_share(interval, 60.0, 5000.0, restart, intervals=4000)
    assert simulated == pytest.approx(recovery.lost_share(interval, 60.0, 5000.0, restart), abs=0.02)


def test_youngs_interval_is_close_to_the_best():
    intervals = np.geomspace(10, 1e5, 4000)
    for failure in (1e4, 1e5, 1e6):
        best = intervals[np.argmin(recovery.lost_share(intervals, 20.0, failure))]
        assert recovery.best_interval(20.0, failure) == pytest.approx(best, rel=0.1)
