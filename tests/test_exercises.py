"""The checks of exercises say what is wrong, never raise, and agree with the right answer."""

import numpy as np
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
        (
            lambda s, n: n / 2,
            "speed-up with 1 worker gave 0.5; it must be 1; one worker is as fast as itself",
        ),
        (
            lambda s, n: 1 / (s * s + (1 - s * s) / n),
            "speed-up with serial fraction 0.05 and 1,000 workers gave 285.919",
        ),
        (lambda s, n: 1 / s if s else 1.0, "that is the ceiling"),
        (lambda s, n: n, "that is the number of workers"),
        (lambda s, n: s + (1 - s) * n, "that is Gustafson's law"),
        (lambda s, n: s + (1 - s) / n, "that is the time"),
        (lambda s, n: 1 / (1 - s + s / n), "the parts are swapped"),
        (lambda s, n: 1 / (s or 1) + (1 - s) / n, "brackets: the whole sum"),
        (lambda s, n: n / ((1 - s) or 1), "the serial part s has to be added"),
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
        (one_worker.days_on_one_gpu, 170, 86),
        (welcome.steps_of_an_epoch, 15, 17),
    ],
)
def test_questions_with_a_number_know_it(check, right, wrong):
    assert check(...).state == "not yet"
    assert check(right).state == "right"
    assert check(wrong).state == "wrong"


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (one_worker.ceiling, 2, "that is s in per cent"),
        (one_worker.karp_flatt, 0.75, "0.75: that is the efficiency"),
        (one_worker.karp_flatt, 1 / 12, "divide once more"),
        (one_worker.adam_gigabytes, 28, "28 GB: those are the parameters alone"),
        (one_worker.days_on_one_gpu, 56.7, "the forward pass alone"),
        (one_worker.days_on_one_gpu, 14_700_000, "those are seconds"),
        (welcome.steps_of_an_epoch, 46, "that is one worker alone"),
        (welcome.steps_of_an_epoch, 16, "16 steps: the last one would have 20 images a worker"),
    ],
)
def test_a_number_that_comes_from_a_typical_mistake_is_told_which(check, answer, said):
    verdict = check(answer)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict
    assert "it must be" not in verdict.text  # whoever knows the mistake may find the number


def test_a_slip_of_the_unit_is_told_and_an_unknown_number_gets_the_reason():
    gigabytes = exercises.number(112.0, "GB", "16 bytes each", {28: "parameters alone"})
    assert "the digits are right, but it is 1,000 times too large" in gigabytes(112_000).text
    assert "1,000,000,000 times too large" in gigabytes(112e9).text
    assert "1,000 times too small" in gigabytes(np.float64(0.112)).text
    assert gigabytes(77).text == "your answer gave 77; it must be 112; 16 bytes each."
    assert gigabytes(115).state == "right"
    assert "is no number" in gigabytes("many").text
    assert "has shape (2,)" in gigabytes([28, 28]).text


def test_a_mistake_is_recognised_by_all_cases_and_the_arguments_are_copies():
    @exercises.exercise
    def doubled(answer):
        exercises.recognise(
            answer, [([1.0],), ([2.0],)], {"that is the square.": lambda x: [x[0] ** 2], "that is it.": list}
        )
        return "neither."

    assert doubled(lambda x: [x[0] * x[0]]).text == "that is the square."
    assert doubled(lambda x: x).text == "that is it."
    assert doubled(lambda x: [x.pop() * 2]).text == "neither."
    assert doubled(lambda x: "two").text == "neither."
    assert "it stopped with ZeroDivisionError" in doubled(lambda x: 1 / 0).text


def dealt(environment, count):
    return range(int(environment["RANK"]), count, int(environment["WORLD_SIZE"]))


def blocks(environment, count):
    rank, workers = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    return list(range(rank * count // workers, (rank + 1) * count // workers))


def rounded_down(environment, count):
    rank, share = int(environment["RANK"]), count // int(environment["WORLD_SIZE"])
    return range(rank * share, (rank + 1) * share)


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (dealt, "right", "every image belongs to one worker"),
        (blocks, "right", "every image belongs to one worker"),
        (lambda environment, count: ..., "not yet", "your function gave nothing"),
        (lambda environment, count: range(environment["RANK"], count), "wrong", "an environment holds text"),
        (lambda environment, count: range(count), "wrong", "each worker gives all images"),
        (rounded_down, "wrong", "with 3 workers and 10 images, image 9 belongs to nobody"),
        (
            lambda environment, count: range(int(environment["RANK"]), count, 2),
            "wrong",
            "with 3 workers and 10 images, image 2 belongs to rank 0 and rank 2",
        ),
        (
            lambda environment, count: [index + 1 for index in dealt(environment, count)],
            "wrong",
            "with RANK=1, WORLD_SIZE=2 and 10 images it gave image 10",
        ),
        (
            lambda environment, count: range(count) if environment["RANK"] == "0" else [],
            "wrong",
            "the ranks have [10, 0] images; so the others wait for rank 0",
        ),
        (lambda environment, count: 5, "wrong", "it gave 5"),
        (lambda environment, count: environment["LOCAL"], "wrong", "KeyError: 'LOCAL' (line 1"),
    ],
)
def test_images_are_shared_so_that_each_belongs_to_one_worker(answer, state, said):
    verdict = welcome.my_images(answer)
    assert (verdict.state, said in verdict.text) == (state, True), verdict


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
