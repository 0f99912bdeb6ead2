"""The figures of silent bugs count what they show, and nothing runs out of the page."""

import numpy as np
import pandas as pd

from workshop_utils.plots import silent_bugs

COLUMNS = ["class", "falls", "gradients", "types"]
BUGS = pd.DataFrame(
    [
        ("positions of a chunk", "missed", "caught", "outside"),
        ("bias on every rank", "missed", "caught", "caught"),
        ("positions of a chunk", "caught", "missed", "error: PeerDied"),
    ],
    index=["positions_start_at_zero", "bias_on_every_rank", "places_of_the_neighbour"],
    columns=COLUMNS,
)


def words_of(figure):
    (axes,) = figure.axes
    return [text.get_text() for text in axes.texts]


def test_bugs_are_counted_by_class_and_a_check_that_states_none_has_a_dash():
    figure = silent_bugs.by_class(BUGS, {"falls": 0, "gradients": 1, "types": 0}, 9)
    falls, gradients, types = np.reshape(words_of(figure), (3, -1)).tolist()
    assert falls == ["1", "0", "loss\nfalls\n1", "0"]
    assert gradients == ["1", "1", "gradients\nequal\n2", "1"]
    assert types == ["0 of 1", "1", "types\n1", "0"]
    assert figure.get_suptitle().strip() == "“gradients equal” finds 2 of 3 bugs, with “loss falls” 3"
    on_the_page(figure)
    stated = BUGS.assign(types="outside")
    assert "–" in words_of(silent_bugs.by_class(stated, {"falls": 0, "gradients": 1, "types": 0}, 9))


def test_fresh_bugs_stand_apart_and_in_the_title():
    every, none = BUGS.assign(verify="caught"), dict.fromkeys([*COLUMNS[1:], "verify"], 0)
    fresh = {"at first": every.assign(verify="missed"), "now": every}
    figure = silent_bugs.by_class(every, none, 9, fresh)
    title = figure.get_suptitle().strip()
    assert title == "Only “verify” finds all 3 bugs; at first, 0 of 3 fresh ones"
    assert words_of(figure)[-6:] == ["2", "1", "0", "3", "verify\n3", "0"]
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows[-3:] == ["fresh bugs, at first (3)", "fresh bugs, now (3)", "alarms in 9 right runs"]
    on_the_page(figure)


def test_classes_of_few_bugs_share_a_row():
    figure = silent_bugs.by_class(BUGS, {"falls": 0, "gradients": 1, "types": 0}, 9, least=2)
    rows = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert rows == ["positions of a chunk (2)", "1 other classes (1)", "alarms in 9 right runs"]


def test_the_title_of_deviations_has_the_largest_and_the_mean():
    right, wrong, worse = [[5.0, 4.0]], [[5.0, 4.04]], [[5.0, 3.9]]
    figure = silent_bugs.deviations({"right": right, "wrong": wrong, "worse": worse})
    assert figure.axes[0].get_title(loc="left") == "Wrong runs' losses: 2.5 % off at most, 0.9 % on average"
    on_the_page(figure)


def test_a_tolerance_is_judged_by_the_first_and_the_last_precision():
    errors = {
        "right": {"norm.weight": 1e-15, "up.weight": 0.0},
        "a bug": {"norm.weight": 1e-7, "up.weight": 1e-8},
    }
    low = {"right": {"norm.weight": 0.5, "up.weight": 1e-3}, "a bug": {"norm.weight": 0.5, "up.weight": 1e-3}}
    figure = silent_bugs.tolerances({"float64": errors, "bfloat16": low}, 1e-5)
    title = "1e-5 passes a bug in float64 and rejects what is right in bfloat16"
    assert figure.axes[0].get_title(loc="left") == title


def on_the_page(figure):
    figure.draw_without_rendering()
    page = figure.bbox.padded(1)
    for axes in figure.axes:
        for text in (*axes.texts, *axes.get_yticklabels(), *figure.texts):
            assert page.count_contains(text.get_window_extent().corners()) == 4, text.get_text()
