"""An executed lesson's page: all that it shows is in it, and nothing is fetched."""

import base64
import re
from pathlib import Path

import nbformat
import pytest
from bs4 import BeautifulSoup

from workshop_utils.lessons.checks.choice import WIDGET_VIEW, Choice
from workshop_utils.lessons.page import lesson_page
from workshop_utils.plots import playable

ROOT = Path(__file__).parents[2]
WIDGET_STATE = "application/vnd.jupyter.widget-state+json"


def page_of(*cells, notebook=Path("00_lesson.ipynb"), **metadata):
    executed = nbformat.v4.new_notebook(cells=list(cells), metadata=metadata)
    return lesson_page(executed, notebook)


def body_of(*cells, **more):
    return BeautifulSoup(page_of(*cells, **more), "html.parser").body


def fetched(page):
    """The addresses that a page loads to be shown, except data that is in it."""
    html = BeautifulSoup(page, "html.parser")
    found = [element["src"] for element in html.select("[src]")]
    found += [element.get("data") or element["href"] for element in html.select("object[data], link[href]")]
    for style in (
        *(each.text for each in html("style")),
        *(each["style"] for each in html.select("[style]")),
    ):
        found += re.findall(r"""(?:url\(|@import(?!\s*url))\s*["']?([^"')\s;]+)""", style)
    found += re.findall(r"""["'`]((?:https?:)?//[^"'`\s]+)""", " ".join(each.text for each in html("script")))
    return [address for address in found if not address.startswith("data:")]


def text(source):
    return nbformat.v4.new_markdown_cell(source)


def output(data):
    return nbformat.v4.new_code_cell("show()", outputs=[nbformat.v4.new_output("display_data", data)])


def test_a_page_has_the_lesson_s_name_and_fetches_nothing():
    page = page_of(text("# Lesson\n\n$N$ ranks, [a paper](https://example.org)"), output({"text/plain": "3"}))
    assert BeautifulSoup(page, "html.parser").title.text == "00_lesson"
    assert fetched(page) == []


@pytest.mark.parametrize(
    ("source", "display"),
    [
        ("each of $\\frac{N}{2}$ ranks", "inline"),
        ("so it is\n\n$$\\frac{N}{2}$$\n\nof them", "block"),
        ("| a | table |\n| --- | --- |\n| has | $\\frac{N}{2}$ |", "inline"),
        ("\\begin{align}\\frac{N}{2}\\end{align}", "block"),
    ],
)
def test_a_formula_is_drawn_by_the_browser(source, display):
    body = body_of(text(source))
    (formula,) = body.select("math")
    assert formula["display"] == display
    assert formula.select_one("mfrac").text == "N2"
    assert set(formula.attrs) == {"display"}
    assert "$" not in body.text
    assert "\\" not in body.text


def test_what_is_no_formula_stays_as_it_is():
    body = body_of(text("It costs $5.\n\nOr \\$6 and \\$7 later; `$a$`\n\n```\n$b$\n```"))
    assert body.select("math") == []
    for shown in ("costs $5.", "Or $6 and $7 later", "$a$", "$b$"):
        assert shown in body.text


def test_a_formula_with_a_mistake_is_shown_as_it_was_written():
    body = body_of(text("wrong: $\\left(a$"), text("right: $b$"))
    assert body.select_one("p code").text == "\\left(a"
    assert body.select_one("math").text == "b"


def test_every_formula_of_the_lessons_is_drawn():
    cells = [
        text(cell.source)
        for path in sorted((ROOT / "notebooks").rglob("*.ipynb"))
        for cell in nbformat.read(str(path), as_version=4).cells
        if cell.cell_type == "markdown"
    ]
    body = body_of(*cells, notebook=ROOT / "notebooks" / "00_welcome.ipynb")
    formulas = [formula.extract().text for formula in body.select("math")]
    assert len(formulas) > 100
    assert [formula for formula in formulas if "\\" in formula] == []
    for code in body.select("pre, code"):
        code.extract()
    # Neither a formula that was not found, nor one that the library does not know.
    assert "\\" not in body.text
    assert "$$" not in body.text


def test_what_the_lessons_show_is_not_fetched():
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = [cell for cell in nbformat.read(str(path), as_version=4).cells if cell.cell_type == "code"]
        shown = [output.get("data", {}).get("text/html", "") for cell in cells for output in cell.outputs]
        assert fetched("".join(shown)) == [], path.name


def test_a_question_shows_its_answers_though_its_buttons_had_a_state():
    bundle = Choice(1, 8, unit="times")._repr_mimebundle_()
    state = {bundle[WIDGET_VIEW]["model_id"]: {"model_name": "RadioButtonsModel", "state": {}}}
    widgets = {WIDGET_STATE: {"state": state, "version_major": 2, "version_minor": 0}}
    page = page_of(output(bundle), widgets=widgets)
    items = BeautifulSoup(page, "html.parser").select(".jp-OutputArea-output li")
    assert [item.text for item in items] == ["a) 1 times", "b) 8 times"]
    assert fetched(page) == []


def test_a_picture_of_the_text_is_in_the_page_wherever_the_page_goes(tmp_path):
    for folder in ("images", "notebooks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "images" / "a ring.svg").write_text("<svg/>")
    notebook = tmp_path / "notebooks" / "00_lesson.ipynb"
    (image,) = body_of(text("![A ring.](../images/a%20ring.svg)"), notebook=notebook).select("img")
    assert image["src"] == "data:image/svg+xml;base64," + base64.b64encode(b"<svg/>").decode()
    assert image["alt"] == "A ring."


def test_a_figure_to_play_with_brings_its_player_once():
    figure = playable.Playable({"description": "A line.", "mark": "line", "title": "</script>", "params": []})
    data = {playable.SPECIFICATION: figure.specification, "image/png": "aaaa", "text/plain": "A line."}
    page = page_of(output(data), output(dict(data)))
    assert page.count(playable.player()) == 1
    figures = BeautifulSoup(page.replace(playable.player(), ""), "html.parser").select(".playable")
    assert [each["aria-label"] for each in figures] == ["A line.", "A line."]
    assert len({each["id"] for each in figures}) == 2
    assert "aaaa" not in page
    assert playable.player() not in page_of(output({"text/plain": "3"}))
