"""What waiting for the slowest costs, beside draws."""

import numpy as np
import pytest

from workshop_utils.scaling.stragglers import LognormalTimes


@pytest.mark.parametrize(("workers", "backup"), [(1, 0), (16, 0), (16, 3), (1000, 0)])
def test_the_slowest_is_as_slow_as_drawn_times_say(workers, backup):
    draws = max(2000, 400_000 // workers) // 2
    z = np.random.default_rng(0).standard_normal((draws, workers))
    drawn = np.sort(0.1 * np.exp(0.2 * z), axis=1)[:, workers - 1 - backup]
    tolerance = 5 * drawn.std() / np.sqrt(draws)
    found = LognormalTimes(0.1, 0.2).slowest(workers, backup)
    assert found == pytest.approx(drawn.mean(), abs=tolerance)


def test_more_backup_workers_than_workers_are_refused():
    with pytest.raises(ValueError, match="backup is 4; it must be at least 0 and less than the 4 workers"):
        LognormalTimes().slowest(4, backup=4)
