"""A question is asked before its run, answered by a letter, and compared after."""

import pytest
from ipywidgets.widgets.widget import _instances

from workshop_utils.lessons.checks.choice import WIDGET_VIEW, AnswerError, Choice


def test_the_answer_nearest_by_ratio_is_the_right_one():
    choice = Choice(1, 8, 125, 1000, unit="times").choose("b")
    assert repr(choice.compare(9.5)) == "Right: you chose b) 8 times; it is 9.5 times."
    assert repr(choice.compare(400)) == "Wrong: you chose b) 8 times; it is 400 times, which is d)."
    assert repr(choice.compare(35)).endswith("which is c).")  # nearer to 8 by difference, to 125 by ratio


def test_nothing_chosen_is_no_error():
    verdict = Choice(1, 8, unit="times").compare(8)
    assert verdict.state == "not yet"
    assert verdict.text.startswith("it is 8 times, which is b)")


def test_an_answer_that_is_not_there_is_refused_and_the_choice_stays():
    choice = Choice(1, 8).choose("B)")
    with pytest.raises(AnswerError, match="no answer 'c'; choose one of a, b"):
        choice.choose("c")
    assert choice.chosen == "b"
    assert choice.choose(None).chosen is None


@pytest.mark.parametrize("answers", [(), (1,), (1, 1)])
def test_a_question_needs_two_answers_that_differ(answers):
    with pytest.raises(ValueError, match="at least two, all different"):
        Choice(*answers)


def test_a_button_chooses_and_a_page_without_a_kernel_has_the_list():
    choice = Choice(1, 8, unit="times")
    shown = choice._repr_mimebundle_()
    assert "<li>b) 8 times</li>" in shown["text/html"]  # style sheets may number a list as they like
    assert shown[WIDGET_VIEW]["model_id"]
    buttons = _instances[shown[WIDGET_VIEW]["model_id"]]
    buttons.value = "b"
    assert choice.chosen == "b"
