"""Horovod's settings as people write them, and as Horovod reads them."""

import pytest

from workshop_utils.training.horovod_settings import Tuning


@pytest.mark.parametrize(
    ("fields", "threshold", "cycle"),
    [
        ({}, "134217728", "1"),  # the defaults are Horovod's own
        ({"fusion_threshold": "0"}, "0", "1"),
        ({"fusion_threshold": 0, "cycle_time": "50us"}, "0", "0.05"),
        ({"fusion_threshold": "64KiB", "cycle_time": "3.5ms"}, "65536", "3.5"),
        ({"fusion_threshold": "1MB", "cycle_time": 0.5}, "1000000", "500"),
    ],
)
def test_settings_become_bytes_and_milliseconds(fields, threshold, cycle):
    assert Tuning(**fields).environment == {
        "HOROVOD_FUSION_THRESHOLD": threshold,
        "HOROVOD_CYCLE_TIME": cycle,
    }
