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
        (
            lambda rate, workers, step, steps: rate * (1 + (workers - 1) * min(1, (step + 1) / steps)),
            "it is one step ahead",
        ),
        (
            lambda rate, workers, step, steps: rate * (1 + workers * min(1, step / steps)),
            "ends at N + 1 times",
        ),
        (lambda rate, workers, step, steps: rate * min(1, step / steps), "it ends at one worker's rate"),
        (lambda rate, workers, step, steps: rate / 0, "ZeroDivisionError"),
        (lambda rate, workers, step, steps: rate * (1 + (workers - 1) * step / steps), "it grows no further"),
        (
            lambda rate, workers, step, steps: rate * workers ** min(1, step / steps),
            "it grows by the same amount in every step",
        ),
        (
            lambda rate, workers, step, steps: rate * workers * min(1, step / steps),
            "it must have at step 0",
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


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (
            lambda a, b: a - a @ b / (a @ a) * a + b - a @ b / (b @ b) * b,
            "take *half* of the projection away",
        ),
        (
            lambda a, b: a - a @ b / (2 * b @ b) * a + b - a @ b / (2 * a @ a) * b,
            "the norms are swapped",
        ),
        (
            lambda a, b: a - a @ b / 2 / (a @ a) ** 0.5 * a + b - a @ b / 2 / (b @ b) ** 0.5 * b,
            "the lengths are not squared",
        ),
        (lambda a, b: a * b, "Adasum of two orthogonal gradients gave"),
    ],
)
def test_a_mistake_in_adasum_is_named(answer, said):
    verdict = horovod.adasum_of_two(answer)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (horovod.learning_rate_half_way, 0.4, "it begins at one worker's 0.1"),
        (horovod.learning_rate_half_way, 0.35, "what has been added by now"),
        (horovod.messages_of_a_step, 40, "how many gradients go into one buffer"),
        (horovod.messages_of_a_step, 1, "the threshold is 4 MB"),
        (horovod.half_precision_megabytes, 600, "that is with 32 bits"),
        (horovod.half_precision_megabytes, 150, "one of the ring's two phases"),
    ],
)
def test_a_number_from_a_typical_mistake_is_told_so(check, answer, said):
    verdict = check(answer)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict


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
