"""What a notebook and a terminal show of a call's results."""

import numpy as np
import pytest
from bs4 import BeautifulSoup

from workshop_utils.ranks.results import RankResult, Results

pytestmark = pytest.mark.processes


def results(*values, lines=(), messages=1, nbytes=8, **options):
    lines = lines or ((),) * len(values)
    ranks = [
        RankResult(rank, tuple(lines[rank]), value, messages, nbytes, 0.25)
        for rank, value in enumerate(values)
    ]
    return Results(tuple(ranks), **{"network": None, "warm": True, "seconds": 0.5, **options})


def rows(shown):
    """The table's rows: their first cells, and each other cell with the number of columns that it takes."""
    table = BeautifulSoup(shown._repr_html_(), "html.parser")
    return [
        (row.th.text, [(cell.text, int(cell["colspan"])) for cell in row.find_all("td")])
        for row in table.find_all("tr")[1:]
    ]


def test_a_dictionary_keeps_its_order():
    shown = results({"loss": 1, "accuracy": {"b": 2, "a": {}}}, dict.fromkeys(range(50, 0, -1)))
    assert "rank 0 returned: {'loss': 1, 'accuracy': {'b': 2, 'a': {}}}\n" in str(shown)
    assert "rank 1 returned: {50: None, 49: None," in str(shown)


def test_equal_neighbours_are_folded_into_one():
    shown = results(1, 1, 2, 1, lines=(["a", "b"], ["a", "c"], ["a"], ["a", "b"]))
    assert rows(shown) == [
        ("returned", [("1", 2), ("2", 1), ("1", 1)]),
        ("printed", [("a", 4)]),
        ("", [("b", 1), ("c", 1), ("", 1), ("b", 1)]),
        ("sent", [("1 message, 8 bytes", 4)]),
        ("took", [("0.250 s", 4)]),
    ]
    assert str(shown).splitlines()[:2] == ["4 ranks, 0.50 s", "ranks 0 to 1 returned: 1"]


def test_many_ranks_have_a_column_where_they_differ_and_what_they_share_is_seen_without_scrolling():
    table = BeautifulSoup(results(*[1] * 63, 2)._repr_html_(), "html.parser")
    assert [cell.text for cell in table.tr.find_all("th")] == ["", "ranks 0 to 62", "rank 63"]
    assert rows(results(*[1] * 63, 2))[-1] == ("took", [("0.250 to 0.250 s", 2)])
    assert "text-align: center" in str(table)
    shown = results(*range(64))
    assert rows(shown)[1:] == [("sent", [("1 message, 8 bytes", 64)]), ("took", [("0.250 to 0.250 s", 64)])]
    assert "text-align: center" not in shown._repr_html_()
    assert "ranks 0 to 63 took: 0.250 to 0.250 s" in str(shown)


def test_what_there_is_not_is_not_shown():
    assert [label for label, _ in rows(results(None, None))] == ["sent", "took"]
    assert rows(results(None, 0))[0] == ("returned", [("None", 1), ("0", 1)])
    assert "message" not in str(results(1, messages=None))
    shown = results(1, lines=(["said"],), lines_are_shown=True)
    assert "said" not in str(shown) + shown._repr_html_()


class Broken:
    def __repr__(self):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (np.float64(6), "6.0"),
        (np.float32(0.1), "0.1"),
        ([0.5] * 12, str([0.5] * 12)),
        ("<b>", "'<b>'"),
        (np.zeros((2, 2)), "array([[0., 0.],\n       [0., 0.]])"),
        (Broken(), "Broken instance"),
    ],
)
def test_a_value_looks_as_in_a_notebook(value, words):
    assert words in rows(results(value))[0][1][0][0]


@pytest.mark.parametrize(
    "value", ["x" * 10**6, list(range(10**6)), np.zeros(10**6), {n: n for n in range(10**5)}]
)
def test_long_values_and_lines_are_cut(value):
    shown = results(value, lines=(["y" * 10**6],))
    assert len(str(shown)) + len(shown._repr_html_()) < 5000


def test_a_table_is_shown_as_a_table_and_what_cannot_be_as_text():
    class Table:
        def _repr_html_(self):
            return "<b>bold</b>"

        def __repr__(self):
            return "<a table>"

    class Failing(Table):
        def _repr_html_(self):
            raise ValueError

    shown = results(Table(), Failing(), Table)
    assert [text for text, _ in rows(shown)[0][1]][:2] == ["bold", "<a table>"]
    assert "<b>bold</b>" in shown._repr_html_()
    assert "ranks 0 to 1 returned: <a table>" in str(shown)


class Rich:
    def __init__(self, html):
        self.html = html

    def _repr_html_(self):
        return self.html

    def __repr__(self):
        return "as text"


def test_only_an_objects_own_html_is_shown_as_html():
    text, rich = np.str_("<i>x</i>"), Rich("<i>x</i>")
    shown = results(text, rich, rich, text, np.str_("\0<i>x</i>"))
    assert rows(shown)[0][1] == [("<i>x</i>", 1), ("x", 1), ("<i>x</i>", 1), ("\0<i>x</i>", 1)]
    assert shown._repr_html_().count("<i>") == 1


@pytest.mark.parametrize(
    ("html", "text"),
    [
        (("<b>bold</b>", {"isolated": True}), "bold"),
        ((None, {}), "as text"),
        ((), "as text"),
        (None, "as text"),
        (["<b>bold</b>"], "as text"),
        ("x" * 100_000, "x" * 100_000),
        ("x" * 100_001, "as text"),
    ],
)
def test_html_is_a_text_of_some_length_perhaps_with_metadata(html, text):
    assert rows(results(Rich(html)))[0][1] == [(text, 1)]
