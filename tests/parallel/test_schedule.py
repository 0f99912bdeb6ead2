"""Schedules as data: complete, and as idle as their formulas say."""

from itertools import pairwise

import pytest

from workshop_utils.parallel import schedule as schedules
from workshop_utils.parallel.schedule import (
    Pass,
    Schedule,
    ScheduleError,
    bubble,
    bubble_fraction,
    held,
    predict,
    schedule_of,
    timetable,
)

pytestmark = pytest.mark.processes

SIZES = [(1, 1), (1, 5), (2, 1), (2, 3), (3, 2), (3, 7), (4, 4), (4, 9), (5, 11), (8, 64)]


FILLED = [(name, *sizes, 1) for name in ("gpipe", "one_f_one_b") for sizes in SIZES]
CHUNKED = [("interleaved", *sizes) for sizes in ((1, 3, 2), (2, 2, 2), (2, 6, 3), (3, 6, 2), (4, 16, 4))]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), FILLED + CHUNKED)
def test_the_predicted_bubble_is_that_of_the_formula(name, ranks, microbatches, chunks):
    schedule = schedule_of(name, ranks, microbatches, chunks)
    assert schedule.stages == ranks * chunks
    expected = bubble_fraction(ranks, microbatches, chunks)
    for forward, backward in ((1.0, 1.0), (1.0, 2.0), (0.3, 0.7)):
        assert bubble(predict(schedule, forward, backward)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_the_naive_schedule_lets_one_rank_work_at_a_time(ranks, microbatches):
    timeline = predict(schedule_of("naive", ranks, microbatches), 1.0, 2.0)
    assert bubble(timeline) == pytest.approx((ranks - 1) / ranks)
    in_order = sorted(timeline, key=lambda timed: timed.start)
    assert all(after.start >= before.end - 1e-9 for before, after in pairwise(in_order))


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_1f1b_holds_no_more_microbatches_than_there_are_ranks_behind_and_gpipe_holds_all(ranks, microbatches):
    by_1f1b = [held(passes) for passes in schedule_of("one_f_one_b", ranks, microbatches).passes]
    assert by_1f1b == [min(microbatches, ranks - rank) for rank in range(ranks)]
    assert [held(p) for p in schedule_of("gpipe", ranks, microbatches).passes] == [microbatches] * ranks
    assert [held(p) for p in schedule_of("naive", ranks, microbatches).passes] == [1] * ranks


def test_a_timetable_shows_passes_and_bubble():
    assert timetable(schedule_of("one_f_one_b", 2, 2)).splitlines()[1:] == [
        "rank 0 | F0 F1 .. .. B0 –– .. B1 ––",
        "rank 1 | .. F0 B0 –– F1 B1 –– .. ..",
    ]
    assert "f1" in timetable(schedule_of("interleaved", 2, 2, 2))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: schedule_of("gpipes", 2, 2), "schedule is 'gpipes'; it must be one of naive, gpipe"),
        (lambda: schedule_of("interleaved", 3, 4, 2), "microbatches is 4; .* multiple of the 3 ranks"),
        (lambda: schedule_of("one_f_one_b", 2, 0), "microbatches is 0; it must be at least 1"),
        (lambda: schedule_of("naive", 0, 2), "ranks is 0; it must be at least 1"),
        (lambda: schedules.interleaved(2, 2, 0), "chunks is 0; it must be at least 1"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_name(call, said):
    with pytest.raises(ValueError, match=said):
        call()


ONCE = "must run every pass of its stages exactly once; look at"
FORWARD, BACKWARD = Pass("forward", 0, 0), Pass("backward", 0, 0)


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        ((FORWARD,), ONCE),
        ((FORWARD, BACKWARD, BACKWARD), ONCE),
        ((FORWARD, BACKWARD, Pass("forward", 0, 1)), ONCE),
        ((BACKWARD, FORWARD), "runs backward of microbatch 0 through stage 0 before its forward"),
    ],
    ids=["missing", "repeated", "foreign", "too early"],
)
def test_a_pass_that_is_out_of_place_is_named(passes, said):
    with pytest.raises(ScheduleError, match=f"rank 0 {said}"):
        Schedule("mine", (passes,), microbatches=1)


def test_passes_that_wait_for_each_other_are_named():
    def order(stage, numbers):
        return tuple(Pass(kind, number, stage) for number in numbers for kind in ("forward", "backward"))

    with pytest.raises(ScheduleError, match="backward of microbatch 0 through stage 0 waits"):
        predict(Schedule("mine", (order(0, (0, 1)), order(1, (1, 0))), microbatches=2), 1.0, 2.0)
