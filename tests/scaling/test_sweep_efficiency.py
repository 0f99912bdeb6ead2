"""Medians, ranges, and the two kinds of efficiency, on tables whose answers are known."""

import pandas as pd
import pytest

from workshop_utils.jobs import JobError
from workshop_utils.scaling import efficiency


def runs(strategy, workers, seconds, scaling="weak", batch=64, state="succeeded", **more):
    return [
        {
            "strategy": strategy, "workers": workers, "batch_size": batch, "network": "100Mbit", "scaling": scaling,
            "repeat": repeat, "state": state, "reason": "", "step_seconds": each, **more,
        }
        for repeat, each in enumerate(seconds)
    ]  # fmt: skip


def table(*rows):
    return pd.DataFrame([row for group in rows for row in group])


def test_a_setting_has_the_median_of_its_repeats_and_their_range():
    row = efficiency.summary(table(runs("ring", 2, [0.1, 0.101, 0.102, 0.3, 0.1]))).iloc[0]
    assert (row["repeats"], row["lowest"], row["step_seconds"], row["highest"]) == (5, 0.1, 0.101, 0.3)


@pytest.mark.parametrize(
    ("scaling", "four", "batch", "efficient", "faster"),
    [("weak", 1.25, 64, 0.8, 3.2), ("strong", 0.4, 16, 0.625, 2.5)],
)
def test_weak_and_strong_efficiency_are_those_of_their_definitions(scaling, four, batch, efficient, faster):
    rows = efficiency.scaling(
        table(runs("ring", 1, [1.0], scaling), runs("ring", 4, [four], scaling, batch=batch))
    )
    assert rows["efficiency"].tolist() == pytest.approx([1.0, efficient])
    assert rows["speedup"].tolist() == pytest.approx([1.0, faster])


def test_the_baseline_is_the_fastest_strategy_with_the_same_sizes():
    one, two = runs("ring", 1, [1.0], width=8), runs("ring", 2, [5.0], width=16)
    servers = runs("servers", 1, [2.0], width=8), runs("servers", 2, [2.0], width=8)
    rows = efficiency.scaling(table(one, two, *servers))
    assert rows["efficiency"].tolist() == pytest.approx([1.0, 1.0, 0.5, 0.5])


def test_failed_runs_are_left_out_and_named_and_so_is_a_table_of_nothing_else():
    failed = runs("ring", 2, [float("nan")] * 2, state="failed")
    measured = table(runs("ring", 1, [1.0]), [{**row, "reason": "worker-1 was killed"} for row in failed])
    assert efficiency.summary(measured)["workers"].tolist() == [1]
    assert efficiency.failures(measured) == ["ring with 2: worker-1 was killed"] * 2
    with pytest.raises(JobError, match="no run succeeded; the first of 2 that failed: ring with 2: worker-1"):
        efficiency.scaling(measured[1:])
    with pytest.raises(JobError, match="no run has reported step_seconds"):
        efficiency.summary(measured[:1].drop(columns="step_seconds"))
