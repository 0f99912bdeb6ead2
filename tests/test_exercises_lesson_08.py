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


def test_1f1b_is_right():
    assert exercises.one_f_one_b(order_of("one_f_one_b")).state == "right"


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (order_of("gpipe"), "wrong", "rank 0 holds the activations of 4 microbatches at once; 2 would do"),
        (
            order_of("naive"),
            "wrong",
            "with 2 ranks and 4 microbatches, ranks wait 50 % of the time; 1F1B waits 20 %",
        ),
        (lambda *_: ..., "not yet", "your function gave nothing"),
        (lambda *_: None, "not yet", "gave nothing"),
        (
            lambda rank, ranks, count: [("forward", 0)],
            "wrong",
            r"rank 0 of 2 .* runs forward of microbatches \[0\]",
        ),
        (lambda rank, ranks, count: ["F0"], "wrong", "has 'F0'; each pass must look like"),
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
    ("check", "right", "wrong"),
    [
        (exercises.idle_percent, 17.95, 21.9),
        (exercises.microbatches_for_five_percent, 133, 152),
        (exercises.megabytes_a_block, 117.4, 58.7),
    ],
)
def test_numbers(check, right, wrong):
    assert check(right).state == "right"
    assert check(wrong).state == "wrong"
