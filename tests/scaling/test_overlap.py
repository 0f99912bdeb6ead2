"""Timelines of steps, read from what runs have reported."""

from types import SimpleNamespace

import pandas as pd
import pytest

from workshop_utils.scaling.overlap import Phase, timeline

MARKS = {"forward_start": 0.0, "forward_end": 1.0, "backward_end": 3.0}


def run_of(*records):
    return SimpleNamespace(name="made up", records=records, metrics=pd.DataFrame(records))


def test_the_phases_of_a_step_come_in_order_and_all_reduces_after_them():
    found = timeline(
        run_of(
            {"rank": 1, **MARKS, "synchronised": 4.0},
            {"rank": 1, "all_reduce": 0, "nbytes": 8.0, "start": 2.0, "end": 3.5},
            {"rank": 0, **MARKS, "synchronised": 5.0},
        )
    )
    assert list(found) == [0, 1]
    assert found[0] == [Phase("forward", 0, 1), Phase("backward", 1, 3), Phase("wait", 3, 5)]
    assert found[1][2:] == [Phase("wait", 3, 4), Phase("all-reduce", 2, 3.5, 8)]


def test_where_the_backward_pass_waits_itself_the_wait_begins_with_the_last_bucket():
    spans = [
        {"rank": 0, "all_reduce": index, "nbytes": 8.0, "start": start, "end": 3.0}
        for index, start in enumerate((1.5, 2.5))
    ]
    found = timeline(run_of({"rank": 0, **MARKS}, *spans))[0]
    assert found[:3] == [Phase("forward", 0, 1), Phase("backward", 1, 2.5), Phase("wait", 2.5, 3)]


def test_a_run_without_a_timeline_is_refused():
    with pytest.raises(ValueError, match="made up has reported no timeline"):
        timeline(run_of({"rank": 0, "step": 1}))
