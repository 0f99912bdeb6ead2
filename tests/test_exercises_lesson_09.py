"""The checks of lesson 09 say what is wrong."""

import numpy as np
import pytest

from workshop_utils.exercises import convergence as checks


def outer_step(shared, workers, momentum, rate, decay):
    way = shared - sum(workers) / len(workers)
    momentum = decay * momentum + way
    return shared - rate * (way + decay * momentum), momentum


def test_the_outer_step_of_the_lesson_is_right():
    assert checks.outer_step(outer_step).state == "right"


def no_nesterov(shared, workers, momentum, rate, decay):
    momentum = decay * momentum + shared - np.mean(workers, axis=0)
    return shared - rate * momentum, momentum


def wrong_way(shared, workers, momentum, rate, decay):
    way = np.mean(workers, axis=0) - shared
    return shared - rate * way, way


def sums(shared, workers, momentum, rate, decay):
    return outer_step(shared, [sum(workers)], momentum, rate, decay)


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (no_nesterov, "wrong", "the weights with momentum 0.9 from rest"),
        (wrong_way, "wrong", "way = shared − mean"),
        (sums, "wrong", "the momentum with rate 1 and no momentum"),
        (lambda *_: np.zeros(2), "wrong", "it must be two things"),
        (lambda *_: ..., "not yet", "write it"),
    ],
)
def test_a_wrong_outer_step_is_explained(answer, state, said):
    verdict = checks.outer_step(answer)
    assert verdict.state == state, verdict
    assert said in verdict.text


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (checks.scaled_rate, 0.8, 0.1 * 8**0.5),
        (checks.steps_at_four_times, 250, 100),
        (checks.meetings_of_diloco, 0.2, 0.002),
        (checks.largest_staleness, 20, 25),
    ],
)
def test_numbers_are_checked_and_explained(check, right, wrong):
    assert check(right).state == "right"
    assert check(wrong).state == "wrong"
    assert check(...).state == "not yet"
