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
    assert types == ["0", "1", "types\n1", "0"]
    assert "the best check 2" in figure.get_suptitle()
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


def test_the_title_of_curves_is_how_far_the_wrong_runs_end_from_the_right_one():
    figure = silent_bugs.curves({"right": [5.0, 4.0], "wrong": [5.0, 4.04], "worse": [5.0, 3.9]})
    assert figure.axes[0].get_title(loc="left") == "2 wrong runs end within 2.5 % of the right one"
    on_the_page(figure)


def on_the_page(figure):
    figure.draw_without_rendering()
    page = figure.bbox.padded(1)
    for axes in figure.axes:
        for text in (*axes.texts, *axes.get_yticklabels(), *figure.texts):
            assert page.count_contains(text.get_window_extent().corners()) == 4, text.get_text()
