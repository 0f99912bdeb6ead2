"""Schedules as data: complete, and as idle as their formulas say."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
from torch import nn
from torch.distributed.pipelining import ScheduleZBVZeroBubble

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
SPLIT = [
    (name, *sizes, 1) for name in ("zb_h1", "zbv") for sizes in ((1, 1), (2, 3), (3, 5), (4, 7), (4, 16))
]
CHUNKED = [("interleaved", *sizes) for sizes in ((1, 3, 2), (2, 2, 2), (2, 6, 3), (3, 6, 2), (4, 16, 4))]


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), FILLED + CHUNKED)
def test_the_predicted_bubble_is_that_of_the_formula(name, ranks, microbatches, chunks):
    schedule = schedule_of(name, ranks, microbatches, chunks)
    assert schedule.stages == ranks * chunks
    expected = bubble_fraction(ranks, microbatches, chunks)
    for forward, backward in ((1.0, 1.0), (1.0, 2.0), (0.3, 0.7)):
        assert bubble(predict(schedule, forward, backward)) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("name", "ranks", "microbatches", "chunks"), SPLIT)
def test_split_backward_passes_leave_the_bubble_of_the_formula(name, ranks, microbatches, chunks):
    schedule = schedule_of(name, ranks, microbatches, chunks)
    assert schedule.is_split
    expected = bubble_fraction(ranks, microbatches, schedule.chunks, parts=3)
    assert bubble(predict(schedule, 0.3, 0.6)) == pytest.approx(expected, abs=1e-9)
    unequal = predict(schedule, 1.0, 2.0, weight_seconds=0.5)
    work = sum(timed.end - timed.start for timed in unequal)
    assert work == pytest.approx(3.0 * ranks * microbatches), "what is split takes as long as the whole"


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_split_schedules_wait_no_longer_than_1f1b_and_hold_what_its_rank_0_holds(ranks, microbatches):
    plain = bubble(predict(schedule_of("one_f_one_b", ranks, microbatches), 1.0, 2.0))
    for name in ("zb_h1", "zbv"):
        schedule = schedule_of(name, ranks, microbatches)
        assert bubble(predict(schedule, 1.0, 2.0)) <= plain + 1e-9
        assert max(map(held, schedule.passes)) <= schedule.chunks * min(ranks, microbatches)


def test_zbv_is_in_a_v_with_the_first_and_the_last_stage_on_rank_0():
    schedule = schedule_of("zbv", 3, 1)
    assert [schedule.stages_of(rank) for rank in range(3)] == [[0, 5], [1, 4], [2, 3]]
    assert [schedule.rank_of(stage) for stage in range(6)] == [0, 1, 2, 2, 1, 0]


@pytest.mark.parametrize(("ranks", "microbatches"), [*SIZES, (2, 2), (3, 4), (4, 6), (8, 5)])
def test_zbv_runs_its_passes_in_pytorch_s_order(ranks, microbatches):
    stage = SimpleNamespace(group_size=ranks, group_rank=0, num_stages=2 * ranks, submod=nn.Identity())
    theirs = ScheduleZBVZeroBubble([stage, stage], microbatches).pipeline_order
    kinds = {"FORWARD": "forward", "BACKWARD_INPUT": "backward", "BACKWARD_WEIGHT": "weight"}
    for rank, passes in enumerate(schedule_of("zbv", ranks, microbatches).passes):
        actions = filter(None, theirs[rank])
        assert passes == tuple(
            Pass(kinds[each.computation_type.name], each.microbatch_index, each.stage_index)
            for each in actions
        )


@pytest.mark.parametrize(("ranks", "microbatches"), SIZES)
def test_the_naive_schedule_lets_one_rank_work_at_a_time(ranks, microbatches):
    timeline = predict(schedule_of("naive", ranks, microbatches), 1.0, 2.0)
    assert bubble(timeline) == pytest.approx((ranks - 1) / ranks)
    in_order = sorted(timeline, key=lambda timed: timed.start)
    assert all(after.start >= before.end - 1e-9 for before, after in pairwise(in_order))


@pytest.mark.parametrize(("name", "crossings"), [("naive", 2), ("zbv", 4)])
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_messages_take_their_time_between_ranks_and_none_within_one(name, crossings, ranks):
    timeline = predict(schedule_of(name, ranks, 1), 1.0, 2.0, message_seconds=0.1, weight_seconds=0.0)
    end = max(timed.end for timed in timeline)
    assert end == pytest.approx(3 * ranks + crossings * (ranks - 1) * 0.1)  # forward and backward, each way


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
    assert timetable(schedule_of("zbv", 2, 3)).splitlines()[1:] == [
        "rank 0 | F0 F1 F2 f0 b0 w0 f1 b1 w1 B0 W0 f2 b2 w2 B1 W1 B2 W2 ..",
        "rank 1 | .. F0 f0 F1 f1 b0 w0 F2 B0 W0 f2 b1 w1 B1 b2 B2 W1 w2 W2",
    ]


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: schedule_of("gpipes", 2, 2), "schedule is 'gpipes'; it must be one of naive, gpipe"),
        (lambda: schedule_of("interleaved", 3, 4, 2), "microbatches is 4; .* multiple of the 3 ranks"),
        (lambda: schedule_of("one_f_one_b", 2, 0), "microbatches is 0; it must be at least 1"),
        (lambda: schedule_of("naive", 0, 2), "ranks is 0; it must be at least 1"),
        (lambda: schedule_of("zbv", 2, 0), "microbatches is 0; it must be at least 1"),
        (lambda: schedule_of("zbv", 2, 4, 2), "chunks is 2; schedule 'zbv' cuts the model in its own way"),
        (lambda: schedules.interleaved(2, 2, 0), "chunks is 0; it must be at least 1"),
        (lambda: schedules.interleaved(0, 2), "ranks is 0; it must be at least 1"),
        (lambda: schedule_of("zbv", 2, 2.5), "microbatches is 2.5; it must be at least 1, and whole"),
        (
            lambda: predict(schedule_of("zbv", 2, 3), 1, 2, weight_seconds=-1),
            "weight_seconds is -1; it must be at least 0 and at most backward_seconds, 2",
        ),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_by_name(call, said):
    with pytest.raises(ValueError, match=said):
        call()


ONCE = "must run every pass of its stages exactly once; look at"
FORWARD, BACKWARD, WEIGHT = (Pass(kind, 0, 0) for kind in ("forward", "backward", "weight"))


@pytest.mark.parametrize(
    ("passes", "said"),
    [
        ((FORWARD,), ONCE),
        ((FORWARD, BACKWARD, BACKWARD), ONCE),
        ((FORWARD, BACKWARD, Pass("forward", 0, 1)), ONCE),
        ((BACKWARD, FORWARD), "runs backward of microbatch 0 through stage 0 before its forward"),
        ((FORWARD, WEIGHT, BACKWARD), "runs weight of microbatch 0 through stage 0 before its backward"),
        ((FORWARD, BACKWARD, WEIGHT, WEIGHT), ONCE),
    ],
    ids=["missing", "repeated", "foreign", "too early", "weight too early", "weight repeated"],
)
def test_a_pass_that_is_out_of_place_is_named(passes, said):
    with pytest.raises(ScheduleError, match=f"rank 0 {said}"):
        Schedule("mine", (passes,), microbatches=1)


def test_passes_that_wait_for_each_other_are_named():
    def order(stage, numbers):
        return tuple(Pass(kind, number, stage) for number in numbers for kind in ("forward", "backward"))

    with pytest.raises(ScheduleError, match="backward of microbatch 0 through stage 0 waits"):
        predict(Schedule("mine", (order(0, (0, 1)), order(1, (1, 0))), microbatches=2), 1.0, 2.0)
