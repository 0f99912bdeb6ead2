"""The checks of lesson 05: right answers pass, and each likely mistake is named."""

import numpy as np
import pytest

from workshop_utils import adasum
from workshop_utils.exercises import horovod


def test_a_warm_up_from_one_workers_rate_to_that_of_all_is_right():
    verdict = horovod.warm_up(
        lambda rate, workers, step, steps: rate * (1 + (workers - 1) * min(1, step / steps))
    )
    assert verdict.state == "right"


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (lambda rate, workers, step, steps: rate * workers, "it begins at that of one worker"),
        (lambda rate, workers, step, steps: rate, "8 times that of one"),
        (lambda rate, workers, step, steps: rate * (1 + (workers - 1) * step / steps), "it grows no further"),
        (
            lambda rate, workers, step, steps: rate * workers ** min(1, step / steps),
            "it grows by the same amount in every step",
        ),
        (
            lambda rate, workers, step, steps: rate * workers * min(1, step / steps),
            "one worker needs no warm-up",
        ),
    ],
)
def test_a_wrong_schedule_is_told_what_is_wrong(answer, words):
    verdict = horovod.warm_up(answer)
    assert verdict.state == "wrong"
    assert words in verdict.text


def test_adasum_is_right_and_mean_and_sum_are_wrong_for_their_own_reasons():
    assert horovod.adasum_of_two(adasum.combine).state == "right"
    mean = horovod.adasum_of_two(lambda first, second: (first + second) / 2)
    assert (mean.state, "both count in full" in mean.text) == ("wrong", True)
    total = horovod.adasum_of_two(lambda first, second: first + second)
    assert (total.state, "so it counts once" in total.text) == ("wrong", True)
    swapped = horovod.adasum_of_two(
        lambda first, second: first + second - first @ second / 2 * (first + second) / np.sqrt(first @ first)
    )
    assert swapped.state == "wrong"


def test_unsolved_exercises_say_so():
    assert horovod.warm_up(...).state == "not yet"
    assert horovod.adasum_of_two(lambda first, second: ...).state == "not yet"


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (horovod.learning_rate_half_way, 0.45, 0.8),
        (horovod.messages_of_a_step, 5, 200),
        (horovod.half_precision_megabytes, 300, 600),
    ],
)
def test_the_numbers_of_check_yourself(check, right, wrong):
    assert check(right).state == "right"
    assert check(wrong).state == "wrong"
    assert check(...).state == "not yet"
