"""Open questions: what is asked for is there and could be measured; a person judges the rest."""

import pytest

from workshop_utils.lessons.checks.open_question import OpenQuestion

ASKED = OpenQuestion("workers", (2, 64), "The link is full.")
WHY = "each worker waits for its pull behind all of the others"


def test_numbers_and_words_are_answered_with_an_explanation_to_compare():
    verdict = ASKED(8, 10, WHY)
    assert verdict.state == "answered"
    for part in ("predicted 8 workers", "measured 10, 1.2 times", WHY, "The link is full."):
        assert part in verdict.text


def test_a_prediction_keeps_to_what_the_unit_allows():
    share = OpenQuestion("percent", (85, 95), "The sum is usually right.", predictable=(1, 100))
    assert "between 1 and 100 percent" in share(5000, 91, WHY).text
    assert "between 1 and 100 percent" in share(0.9, 91, WHY).text
    assert share(100, 91, WHY).state == "answered"


@pytest.mark.parametrize(
    ("answer", "state", "says"),
    [
        ((...,), "not yet", "predict a number first"),
        ((8, ..., WHY), "not yet", "predict"),
        ((8, 10, ...), "not yet", "write"),
        (("8", 10, WHY), "wrong", "`predicted` is '8'"),
        ((True, 10, WHY), "wrong", "`predicted` is True"),
        ((8, float("nan"), WHY), "wrong", "`measured` is nan"),
        ((-8, 10, WHY), "wrong", "positive number of workers"),
        ((8, 100, WHY), "wrong", "between 2 and 64 workers"),
        ((8, 10, "because because because"), "wrong", "1 different words"),
        ((8, 10, "a b c d e f g h"), "wrong", "0 different words"),
        ((8, 10, 5), "wrong", "0 different words"),
    ],
)
def test_what_is_missing_or_impossible_is_named(answer, state, says):
    verdict = ASKED(*answer)
    assert (verdict.state, says in verdict.text) == (state, True)
