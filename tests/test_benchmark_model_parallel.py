"""The bench of model parallelism, on made-up numbers: rows and bars."""

import pytest

from workshop_utils.benchmarks import model_parallel
from workshop_utils.benchmarks.model_parallel import beside_formula, beside_torch, bubbles
from workshop_utils.parallel.schedule import bubble_fraction, predict, schedule_of


def test_steps_may_take_a_tenth_longer_than_theirs_and_no_more():
    for ours, is_met in ((0.5, True), (1.09, True), (1.12, False)):
        (row,) = beside_torch(2, {"GPipe": {"ours": [ours] * 3, "theirs": [1.0] * 3}})
        assert row.is_met is is_met
        assert row.subject == "GPipe × 2: a step, beside ScheduleGPipe"


@pytest.mark.parametrize("schedule", model_parallel.CHUNKS)
def test_an_idle_share_is_held_against_its_formula(schedule):
    formula = bubble_fraction(4, model_parallel.MICROBATCHES, model_parallel.CHUNKS[schedule])
    assert beside_formula(schedule, 4, [formula]).ratio.median == pytest.approx(1)
    assert beside_formula(schedule, 4, [1.09 * formula]).is_met
    assert not beside_formula(schedule, 4, [1.11 * formula]).is_met


def test_a_bubble_is_taken_from_each_repeat(monkeypatch):
    schedule = schedule_of("gpipe", 2, model_parallel.MICROBATCHES)
    predicted = predict(schedule, 1.0, 2.0)
    records = [
        {"step": repeat, "rank": timed.rank, **timed.record()} for repeat in range(3) for timed in predicted
    ]

    class Finished:
        def __init__(self, **_):
            self.records = records

        def launch(self, job):
            assert (job.workers, job.arguments["schedule"], job.arguments["repeats"]) == (2, "gpipe", 3)
            return self

        def wait(self):
            return self

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    monkeypatch.setattr(model_parallel, "Local", Finished)
    assert bubbles("gpipe", 2) == pytest.approx([bubble_fraction(2, model_parallel.MICROBATCHES)] * 3)
