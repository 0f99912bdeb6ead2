"""The bench of recovery, on made-up records."""

import pytest

from workshop_utils.benchmarks import recovery
from workshop_utils.benchmarks.comparison import BenchmarkError
from workshop_utils.benchmarks.recovery import STEPS, Recovery


def records(*lives):
    """A record a rank and step: each life is (first step, last step, seconds of the first step)."""
    return [
        {"rank": rank, "step": step, "loss": 1.0, "time": start + 0.1 * (step - first) + 0.01 * rank}
        for first, last, start in lives
        for step in range(first, last + 1)
        for rank in range(recovery.WORKERS)
    ]


def test_it_lasts_from_the_victims_last_step_to_the_next_that_anybody_makes():
    found = recovery.recovery_of(records((1, 37, 100.0), (31, STEPS, 110.0)))
    assert found.steps_lost == 7
    assert found.seconds == pytest.approx(110.0 - (100.0 + 3.6 + 0.03))


def test_a_step_that_the_others_had_not_reached_is_no_restart():
    together = records((1, 37, 100.0), (31, STEPS, 110.0))
    without = [
        record
        for record in together
        if (record["rank"], record["step"], record["time"] < 109) != (0, 37, True)
    ]
    assert recovery.recovery_of(without).steps_lost == 7


@pytest.mark.parametrize(
    ("lives", "told"),
    [([(1, STEPS, 0.0)], "no step was made again"), ([(1, 37, 0.0), (31, 40, 9.0)], "did not reach step 60")],
)
def test_what_is_no_recovery_is_not_measured(lives, told):
    with pytest.raises(BenchmarkError, match=told):
        recovery.recovery_of(records(*lives))


def test_the_bars_are_torchrun_and_the_interval_of_checkpoints():
    rows = recovery.rows([Recovery(0.5, 7)] * 3, [Recovery(5.0, 7)] * 3)
    assert [row.is_met for row in rows] == [True, True, True]
    assert rows[0].ratio.median == pytest.approx(0.1)
    rows = recovery.rows([Recovery(6.0, 11)], [Recovery(5.0, 7)])
    assert [row.is_met for row in rows] == [False, True, False]
    assert "torchrun --max-restarts=1" in recovery.notes(3)
