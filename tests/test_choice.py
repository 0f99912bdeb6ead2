"""A question is asked before its run, answered by a letter, and compared after."""

import pytest

from workshop_utils.exercises.choice import WIDGET_VIEW, AnswerError, Choice


@pytest.mark.parametrize(
    ("answers", "result", "says"),
    [
        ((1, 8, 125), 9.5, "Right: you chose b) 8 times; it is 9.5 times."),
        ((1, 8, 125), 35, "Wrong: you chose b) 8 times; it is 35 times, that is c)."),  # nearest by ratio
        (
            (0, 10, 100),
            4,
            "Wrong: you chose b) 10 times; it is 4 times, that is a).",
        ),  # with a zero, by difference
        (("fewer", "more"), "more", "Right: you chose b) more; it is more."),
    ],
)
def test_the_answer_nearest_to_the_result_is_the_right_one(answers, result, says):
    unit = "" if isinstance(result, str) else "times"
    assert repr(Choice(*answers, unit=unit).choose("b").compare(result)) == says


def test_nothing_chosen_is_no_error():
    verdict = Choice(1, 8, unit="times").compare(8)
    assert verdict.state == "not yet"
    assert verdict.text.startswith("it is 8 times, that is b)")


def test_answers_that_are_not_there_are_refused_and_the_choice_stays():
    choice = Choice(1, 8).choose("B)")
    with pytest.raises(AnswerError, match="no answer 'c'; choose one of a, b"):
        choice.choose("c")
    assert choice.chosen == "b"
    with pytest.raises(ValueError, match="at least two, all different"):
        Choice(1, 1)


def test_a_page_has_the_list_of_answers_and_with_a_kernel_buttons():
    choice = Choice(1, 8, unit="times")
    shown = choice._repr_mimebundle_()
    assert "<li>b) 8 times</li>" in shown["text/html"]  # style sheets may number a list as they like
    assert shown[WIDGET_VIEW]["model_id"]
