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


def old_momentum(shared, workers, momentum, rate, decay):
    _, after = outer_step(shared, workers, momentum, rate, decay)
    return shared - rate * (shared - np.mean(workers, axis=0) + decay * momentum), after


def upwards(shared, workers, momentum, rate, decay):
    way = np.mean(workers, axis=0) - shared
    momentum = decay * momentum + way
    return shared - rate * (way + decay * momentum), momentum


def no_momentum_at_all(shared, workers, momentum, rate, decay):
    way = shared - np.mean(workers, axis=0)
    return shared - rate * way, way


def sums(shared, workers, momentum, rate, decay):
    return outer_step(shared, [sum(workers)], momentum, rate, decay)


def sums_of_ways(shared, workers, momentum, rate, decay):
    way = sum(shared - each for each in workers)
    return outer_step(shared, [shared - way], momentum, rate, decay)


def no_fading(shared, workers, momentum, rate, decay):
    momentum = momentum + shared - np.mean(workers, axis=0)
    return shared - rate * (shared - np.mean(workers, axis=0) + decay * momentum), momentum


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (no_nesterov, "wrong", "that is plain momentum"),
        (old_momentum, "wrong", "with the new momentum"),
        (upwards, "wrong", "it goes the wrong way"),
        (sums, "wrong", "you sum what the workers have come to"),
        (sums_of_ways, "wrong", "you sum the workers' ways"),
        (no_fading, "wrong", "the old momentum does not fade"),
        (lambda s, w, m, r, d: outer_step(s, w[:1], m, r, d), "wrong", "only worker 0's weights"),
        (lambda s, w, m, r, d: outer_step(s, w[-1:], m, r, d), "wrong", "only the last worker's weights"),
        (lambda s, w, m, r, d: outer_step(s, w, m, r, d)[::-1], "wrong", "in the wrong order"),
        (lambda s, w, m, r, d: (outer_step(s, w, m, r, d)[0], m), "wrong", "handed back as it came"),
        (no_momentum_at_all, "wrong", "the weights with momentum 0.9 from rest"),
        (lambda *_: np.zeros(2), "wrong", "it must be two things"),
        (lambda s, w, m, r, d: (s, s[:1]), "wrong", "has shape (1,); it must be (2,)"),
        (lambda s, w, m, r, d: s @ 3, "wrong", "line 1 of your function"),
        (lambda *_: ..., "not yet", "write it"),
        (..., "not yet", "in place of the dots"),
    ],
)
def test_a_wrong_outer_step_is_explained(answer, state, said):
    verdict = checks.outer_step(answer)
    assert verdict.state == state, verdict
    assert said in verdict.text, verdict


@pytest.mark.parametrize(
    ("check", "right", "wrong", "said"),
    [
        (checks.scaled_rate, 0.8, 0.1 * 8**0.5, "scaling by the root"),
        (checks.scaled_rate, 0.8, 0.0125, "the other way round"),
        (checks.steps_at_four_times, 250, 100, "hardly help"),
        (checks.steps_at_four_times, 250, 500, "400 is 2 S_min"),
        (checks.meetings_of_diloco, 0.2, 0.002, "in per cent"),
        (checks.largest_staleness, 20, 25, "the worker itself"),
        (checks.largest_staleness, 20, 8, "2 behind"),
    ],
)
def test_numbers_are_checked_and_explained(check, right, wrong, said):
    assert check(right).state == "right"
    verdict = check(wrong)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict
    assert check(...).state == "not yet"
