"""Horovod's settings as people write them, and as Horovod reads them."""

import pytest

from workshop_utils.horovod_tuning import Tuning
from workshop_utils.jobs import JobError


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


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"fusion_threshold": "big"}, "fusion_threshold is 'big'; it must be a size"),
        ({"fusion_threshold": "-1"}, "fusion_threshold is '-1'; it must be a size"),
        ({"cycle_time": "5"}, "cycle_time is '5'; it must be more than zero and at most 1 s"),
        ({"cycle_time": "0ms"}, "cycle_time is '0ms'; it must be more than zero"),
        ({"cycle_time": "soon"}, "cycle_time is 'soon'; it must be a duration"),
        ({"fusion_size": "0"}, "fusion_size: unknown field; the fields are fusion_threshold, cycle_time"),
    ],
)
def test_what_horovod_would_silently_take_for_zero_is_refused_in_words(fields, sentence):
    with pytest.raises(JobError) as caught:
        Tuning(**fields)
    assert str(caught.value).startswith(sentence)
