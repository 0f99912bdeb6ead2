"""Medians, outliers, and the two kinds of efficiency, on tables whose answers are known."""

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


def test_a_repeat_unlike_the_others_is_marked_and_the_median_does_not_mind():
    measured = table(runs("ring", 2, [0.1, 0.101, 0.102, 0.3]))
    assert efficiency.mark_outliers(measured)["outlier"].tolist() == [False, False, False, True]
    (row,) = efficiency.summary(measured).to_dict("records")
    assert row["step_seconds"] == pytest.approx(0.1015)
    assert (row["repeats"], row["outliers"], row["lowest"], row["highest"]) == (4, 1, 0.1, 0.3)


@pytest.mark.parametrize(
    ("seconds", "marked"),
    [
        ([0.1, 0.1, 0.1, 0.105], []),  # per cents off, however well the others agree
        ([0.1] * 6 + [0.9], [6]),
    ],
)
def test_what_is_an_outlier_among_equals(seconds, marked):
    measured = table(
        runs("ring", 2, seconds), runs("ring", 4, [0.9] * 3)
    )  # another setting has its own median
    outliers = efficiency.mark_outliers(measured)["outlier"]
    assert outliers[outliers].index.tolist() == marked


def test_weak_efficiency_is_the_first_step_over_this_one_and_speed_up_counts_examples():
    rows = efficiency.scaling(table(runs("ring", 1, [1.0]), runs("ring", 4, [1.25])))
    assert rows["efficiency"].tolist() == pytest.approx([1.0, 0.8])
    assert rows["speedup"].tolist() == pytest.approx([1.0, 3.2])


def test_strong_efficiency_is_speed_up_over_workers():
    rows = efficiency.scaling(
        table(runs("ring", 1, [1.0], "strong", batch=64), runs("ring", 4, [0.4], "strong", batch=16))
    )
    assert rows["speedup"].tolist() == pytest.approx([1.0, 2.5])
    assert rows["efficiency"].tolist() == pytest.approx([1.0, 0.625])


def test_a_slow_first_worker_makes_no_strategy_look_good():
    rows = efficiency.scaling(
        table(runs("ring", 1, [1.0]), runs("servers", 1, [2.0]), runs("servers", 2, [2.0]))
    ).set_index(["strategy", "workers"])
    assert rows["efficiency"]["servers", 2] == pytest.approx(0.5)


def test_what_was_measured_with_another_size_is_no_baseline():
    rows = efficiency.scaling(table(runs("ring", 1, [1.0], width=8), runs("ring", 2, [5.0], width=16)))
    assert rows["efficiency"].tolist() == pytest.approx([1.0, 1.0 * 2 / 2])


def test_failed_runs_are_left_out_and_named():
    measured = table(runs("ring", 1, [1.0]), runs("ring", 2, [float("nan")], state="failed"))
    measured.loc[1, "reason"] = "worker-1 was killed"
    assert efficiency.summary(measured)["workers"].tolist() == [1]
    assert efficiency.failures(measured) == ["ring with 2: worker-1 was killed"]


def test_where_no_run_succeeded_the_first_failure_is_told():
    measured = table(runs("ring", 2, [1.0, 1.0], state="failed")).drop(columns="step_seconds")
    measured["reason"] = "worker-1 was killed"
    with pytest.raises(JobError, match="no run succeeded; the first of 2 that failed: ring with 2: worker-1"):
        efficiency.scaling(measured)
    with pytest.raises(JobError, match="no run has reported step_seconds"):
        efficiency.mark_outliers(table(runs("ring", 1, [1.0])).drop(columns="step_seconds"))


def test_communication_is_what_is_sent_and_waited_for():
    parts = {"compute_seconds": 0.5, "transfer_seconds": 0.3, "waiting_seconds": 0.1, "other_seconds": 0.1}
    rows = efficiency.scaling(table(runs("ring", 2, [1.0], **parts)))
    assert rows["communication_share"].tolist() == pytest.approx([0.4])
