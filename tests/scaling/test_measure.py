"""The stopwatch, the memory meter, and the throughput of a whole run."""

import time
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from workshop_utils.scaling.measure import MemoryMeter, Stopwatch, samples_per_second


def test_the_stopwatch_keeps_each_visit_and_its_median_leaves_out_the_first_ones():
    clock = Stopwatch()
    for seconds in (0.05, 0.01, 0.01):
        with clock("sleep"):
            time.sleep(seconds)
    assert clock.seconds["sleep"][0] >= 0.05
    assert clock.medians(skip=1)["sleep"] < 0.05
    with pytest.raises(ValueError, match="sleep was visited 3 times, not more than skip=3"):
        clock.medians(skip=3)


def test_the_meter_sees_memory_come_and_go():
    meter = MemoryMeter()
    block = np.ones(64 * 2**20, dtype=np.uint8)  # large enough for the system to hand out by itself
    held = meter.read("held")
    del block
    gone = meter.read("gone")
    assert 60 * 2**20 < held < 80 * 2**20
    assert gone < 16 * 2**20


def test_throughput_is_the_sum_of_the_workers_last_reports_which_are_of_the_whole_run():
    reports = [
        (0, 1, None),
        (1, 1, None),
        (0, 2, 100.0),
        (1, 2, 50.0),
        (1, 4, 70.0),
        (0, 4, 80.0),
        (0, 5, None),
    ]
    metrics = pd.DataFrame(reports, columns=["worker", "step", "samples_per_second"])
    run = SimpleNamespace(name="finished", metrics=metrics)
    assert samples_per_second(run) == 150
    run.metrics = metrics[:2]
    with pytest.raises(ValueError, match="finished has reported no samples_per_second yet"):
        samples_per_second(run)
