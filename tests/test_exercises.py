"""The checks of exercises say what is wrong, never raise, and agree with the right answer."""

import pytest

from workshop_utils import exercises
from workshop_utils.exercises import NotYet, Wrong, one_worker, welcome
from workshop_utils.runs import Run, RunState
from workshop_utils.scaling.laws import amdahl_speedup


@pytest.mark.parametrize("answer", [None, ..., lambda serial, workers: ..., lambda serial, workers: None])
def test_what_is_not_written_yet_is_not_wrong(answer):
    assert one_worker.amdahl(answer).state == "not yet"


def test_a_function_that_is_announced_but_not_written_is_not_yet():
    def unwritten(serial_fraction, workers):
        raise NotImplementedError

    assert one_worker.amdahl(unwritten).state == "not yet"


def test_the_right_law_is_right():
    verdict = one_worker.amdahl(amdahl_speedup)
    assert verdict.state == "right"
    assert repr(verdict) == "Right: that is Amdahl's law."


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda s, n: 1 / s if s else 1.0, "speed-up with 1 worker gave 20; it must be 1"),
        (
            lambda s, n: n,
            "speed-up with serial fraction 1 and 8 workers gave 8; it must be 1; nothing can be shared",
        ),
        (lambda s, n: s + (1 - s) * n, "speed-up with serial fraction 0.05 and 1,000 workers gave 950.05"),
        (lambda s, n: "fast", "gave 'fast', which is no number"),
        (lambda s, n: [1, 2], "has shape (2,); it must be ()"),
    ],
)
def test_what_is_wrong_is_said(wrong, said):
    verdict = one_worker.amdahl(wrong)
    assert verdict.state == "wrong"
    assert said in verdict.text


def test_an_exception_in_the_learners_function_is_told_with_its_line():
    def broken(serial_fraction, workers):
        half = serial_fraction / 2
        return half / 0

    verdict = one_worker.amdahl(broken)
    assert verdict.state == "wrong"
    assert "ZeroDivisionError" in verdict.text
    assert "line 3 of your function" in verdict.text


def test_a_function_of_the_wrong_shape_is_told():
    assert "TypeError" in one_worker.amdahl(lambda: 1).text


@pytest.mark.parametrize(
    ("predicted", "state", "said"),
    [
        (None, "not yet", "write down what you expect"),
        (950, "wrong", "you predicted 950 times, it is 19.6 times: 48 times less"),
        (2, "wrong", "9.8 times more"),
        (20, "right", "you predicted 20 times, it is 19.6 times."),
        (-1, "wrong", "you predicted -1 times"),
        ("many", "wrong", "'many' is no number"),
    ],
)
def test_a_prediction_is_held_against_what_came_out(predicted, state, said):
    verdict = exercises.prediction(predicted, 19.63, "times")
    assert (verdict.state, said in verdict.text) == (state, True), verdict


def test_how_near_a_prediction_has_to_be_can_be_said():
    assert exercises.prediction(0.95, 0.98, within=0.01).state == "wrong"
    assert exercises.prediction(0.95, 0.98, within=0.1).state == "right"


def test_a_new_exercise_needs_only_to_say_what_is_wrong():
    @exercises.exercise
    def even(answer):
        if answer % 2:
            raise Wrong(f"{answer} is odd.")
        if answer == 0:
            raise NotYet("zero is where you start.")
        return "it is even."

    assert [even(value).state for value in (3, 0, 4, None)] == ["wrong", "not yet", "right", "not yet"]


@pytest.mark.parametrize(
    ("check", "right", "wrong"),
    [
        (one_worker.ceiling, 50, 20),
        (one_worker.karp_flatt, 0.111, 0.25),
        (one_worker.adam_gigabytes, 112, 28),
        (one_worker.days_on_one_gpu, 172, 86),
    ],
)
def test_questions_with_a_number_know_it(check, right, wrong):
    assert check(...).state == "not yet"
    assert check(right).state == "right"
    assert check(wrong).state == "wrong"


class FakeRun(Run):
    def __init__(self, workers: int, state: RunState) -> None:
        super().__init__("fake", tuple(f"worker-{rank}" for rank in range(workers)))
        if state is not RunState.RUNNING:
            self._finish(state, "worker-1 ended with exit code 3." if state is RunState.FAILED else "")

    def _request_stop(self) -> None:
        return


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (..., "not yet", "in place of the dots"),
        ("a run", "wrong", "this is str"),
        (FakeRun(3, RunState.RUNNING), "wrong", "it still runs"),
        (FakeRun(3, RunState.FAILED), "wrong", "the run has failed. worker-1 ended with exit code 3."),
        (FakeRun(2, RunState.SUCCEEDED), "wrong", "it has 2 workers"),
        (FakeRun(3, RunState.SUCCEEDED), "right", "worker-0, worker-1, worker-2 trained one model"),
    ],
)
def test_the_first_exercise_wants_three_workers_that_ended_well(answer, state, said):
    verdict = welcome.three_workers(answer)
    assert (verdict.state, said in verdict.text) == (state, True), verdict
