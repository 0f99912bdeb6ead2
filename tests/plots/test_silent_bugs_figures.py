"""The figures of silent bugs count what they show, and nothing runs out of the page."""

import pandas as pd

from workshop_utils.plots import alternative, silent_bugs

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


def test_filled_squares_are_as_many_as_were_caught_and_counts_stand_above():
    figure = silent_bugs.matrix(BUGS, {"falls": 0, "gradients": 1, "types": 0}, 9)
    (axes,) = figure.axes
    filled = [line for line in axes.get_lines() if line.get_markerfacecolor() == silent_bugs.CAUGHT]
    assert [line.get_xdata().tolist() for line in filled] == [[0], [1, 1], [2]]
    words = [text.get_text() for text in axes.texts]
    assert words[:6:2] == ["loss\nfalls\n1 of 3", "gradients\nequal\n2 of 3", "types\n1 of 3"]
    assert words[1:6:2] == ["0", "1", "0"]
    assert alternative.describe(figure).startswith("No check catches all 3 bugs; together they catch 3.")
    on_the_page(figure)


def test_a_check_that_catches_all_is_named():
    every = BUGS.assign(verify="caught")
    assert silent_bugs.matrix(every).get_suptitle().startswith("“verify” catches all 3 bugs")


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
