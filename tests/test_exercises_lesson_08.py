"""The checks of lesson 08 say which pass goes wrong."""

import re

import pytest

from workshop_utils.exercises import model_parallel as exercises
from workshop_utils.parallel.schedule import schedule_of


def order_of(name):
    def answer(rank, ranks, microbatches):
        passes = schedule_of(name, ranks, microbatches).passes[rank]
        return [(each.kind, each.microbatch) for each in passes]

    return answer


def one_more_ahead(rank, ranks, microbatches):
    ahead = min(microbatches, ranks - rank)
    order = [("forward", number) for number in range(ahead)]
    for number in range(microbatches):
        if ahead + number < microbatches:
            order.append(("forward", ahead + number))
        order.append(("backward", number))
    return order


def test_1f1b_is_right():
    assert exercises.one_f_one_b(order_of("one_f_one_b")).state == "right"


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (order_of("gpipe"), "wrong", "rank 0 holds .* 4 microbatches at once; 2 would do.* is GPipe"),
        (
            order_of("naive"),
            "wrong",
            "with 2 ranks and 4 microbatches, ranks wait 50 % of the time; 1F1B waits 20 %.* the naive schedule",
        ),
        (lambda *_: ..., "not yet", "your function gave nothing"),
        (lambda *_: None, "not yet", "gave nothing"),
        (
            lambda rank, ranks, count: [("forward", 0)],
            "wrong",
            r"rank 0 of 2 .* runs forward of microbatches \[0\].* \[1, 2, 3\] never come",
        ),
        (
            lambda rank, ranks, count: [("forward", m) for m in (0, *range(count))],
            "wrong",
            r"rank 0 .* \[0\] come more often",
        ),
        (
            lambda rank, ranks, count: [("forward", m) for m in range(count + 1)],
            "wrong",
            r"there are only 4, from 0 on, so \[4\] are too many",
        ),
        (lambda rank, ranks, count: ["F0"], "wrong", "rank 0 .* has 'F0' as its pass 0; each pass must look"),
        (lambda rank, ranks, count: 3, "wrong", "rank 0 .* has 3; it must be a list of passes"),
        (lambda rank, ranks, count: rank / 0, "wrong", "ZeroDivisionError.*line 1 of your function"),
        (
            lambda rank, ranks, count: order_of("one_f_one_b")(0, ranks, count),
            "wrong",
            "ranks wait 43 % of the time",
        ),
        (
            one_more_ahead,
            "wrong",
            "with 2 ranks and 4 microbatches, .* rank 0 holds the activations of 3 microbatches at once; 2 would",
        ),
        (
            lambda rank, ranks, count: [(k, m) for m in range(count) for k in ("backward", "forward")],
            "wrong",
            "with 2 ranks .*rank 0 runs backward of microbatch 0 through stage 0 before its forward",
        ),
    ],
)
def test_a_wrong_order_is_explained(answer, state, said):
    verdict = exercises.one_f_one_b(answer)
    assert verdict.state == state, verdict
    assert re.search(said, verdict.text), verdict


@pytest.mark.parametrize(
    ("check", "right"),
    [
        (exercises.idle_percent, 17.95),
        (exercises.microbatches_for_five_percent, 133),
        (exercises.megabytes_a_block, 117.4),
    ],
)
def test_numbers_that_are_right(check, right):
    assert check(right).state == "right"
    assert check(...).state == "not yet"


@pytest.mark.parametrize(
    ("check", "wrong", "said"),
    [
        (exercises.idle_percent, 21.9, "beside the *work*, 7/32"),
        (exercises.idle_percent, 0.1795, "a hundred times that"),
        (exercises.idle_percent, 50, "7/39"),
        (
            exercises.microbatches_for_five_percent,
            132,
            "7/(132 + 7) = 5.04 % of the time is idle: that is more",
        ),
        (exercises.microbatches_for_five_percent, 140, "7/m is what is lost beside the work"),
        (exercises.microbatches_for_five_percent, 152, "that is 7, not 8"),
        (exercises.microbatches_for_five_percent, 200, "fewer microbatches would do"),
        (exercises.microbatches_for_five_percent, 132.5, "whole microbatches"),
        (exercises.microbatches_for_five_percent, "many", "'many' is no number"),
        (exercises.megabytes_a_block, 58.7, "the forward pass alone"),
        (exercises.megabytes_a_block, 117.44e6, "1,000,000 times too large"),
    ],
)
def test_a_wrong_number_is_told_where_it_comes_from(check, wrong, said):
    verdict = check(wrong)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict
