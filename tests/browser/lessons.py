"""Every lesson in a real JupyterLab in a real browser, as a learner has it: `make test-browser`.

    make test-browser NOTEBOOKS="notebooks/04_ring_all_reduce.ipynb"

Chromium is driven by Playwright: the program that the system has, nothing is downloaded. What was seen is kept in
build/browser/, a folder a lesson, to be looked at. Not part of `make test`, for all lessons take half an hour.
"""

import os
from pathlib import Path

import nbformat
import pytest
from conftest import eventually
from jupyterlab import PICTURES, ROOT, playables, running_lab

from workshop_utils.plots import playable

LESSONS = [Path(name).name for name in os.environ.get("NOTEBOOKS", "").split()] or sorted(
    path.name for path in (ROOT / "notebooks").glob("*.ipynb")
)
LESSON_SECONDS = 600
NARROW, WIDE = 640, 1280

pytestmark = [pytest.mark.browser, pytest.mark.timeout(2 * LESSON_SECONDS + 300)]


@pytest.fixture(scope="session")
def lab(tmp_path_factory):
    with running_lab(tmp_path_factory.mktemp("lab")) as started:
        yield started


@pytest.fixture(scope="module")
def bench(lab):
    """A notebook with a question, and a cell that says which answer was chosen."""
    cells = [
        "from workshop_utils.lessons.checks.choice import Choice\n"
        "prediction = Choice(1, 8, 125, unit='times')\nprediction",
        "print('chosen:', prediction.chosen)",
    ]
    notebook = nbformat.v4.new_notebook(
        cells=[nbformat.v4.new_code_cell(source) for source in cells],
        metadata={"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}},
    )
    nbformat.write(notebook, str(lab.folder / "notebooks" / "bench.ipynb"))
    return "notebooks/bench.ipynb"


def test_a_button_of_a_question_is_the_answer_that_is_chosen(lab, bench):
    with lab.notebook(bench) as notebook:
        notebook.run_cell(0)
        notebook.wait_until_done(60)
        notebook.page.locator(".widget-radio-box input[type=radio]").nth(1).check()
        notebook.run_cell(1)
        notebook.until(lambda: "chosen:" in notebook.output(1), 60, "the answer")
        assert notebook.output(1).strip() == "chosen: b"
        assert not notebook.errors()


@pytest.mark.parametrize("name", LESSONS)
def test_a_lesson_runs_in_the_browser_without_errors_and_shows_its_figures(lab, name):
    lab.use_theme("JupyterLab Light")
    pictures = PICTURES / Path(name).stem
    with lab.notebook(f"notebooks/{name}", WIDE) as notebook:
        notebook.menu("Edit", "Clear Outputs of All Cells")
        notebook.menu("Run", "Run All Cells")
        notebook.until(lambda: {"[*]:", "[1]:"} & set(notebook.prompts()), 60, "a cell to start")
        notebook.wait_until_done(LESSON_SECONDS)
        notebook.photograph(pictures, "wide")
        assert not notebook.errors()
        assert all(prompt != "[ ]:" for prompt in notebook.prompts()), "a cell did not run"
        check_figures(notebook, name)
        check_playables(notebook.page, name)
        answers = notebook.verdicts()
        assert sum(answer.startswith(("Right: ", "Answered: ")) for answer in answers) >= solutions(name)
        notebook.page.set_viewport_size({"width": NARROW, "height": 900})
        notebook.hide_files()
        notebook.photograph(pictures, "narrow")
        check_figures(notebook, name)
        notebook.menu("Settings", "Theme", "JupyterLab Dark")
        notebook.page.wait_for_selector("body[data-jp-theme-light='false']", state="attached")
        notebook.page.set_viewport_size({"width": WIDE, "height": 900})
        notebook.photograph(pictures, "dark")


def test_closing_a_lesson_ends_its_kernel_and_all_that_it_started(lab):
    assert eventually(lambda: not lab.processes(), 60), [process.cmdline() for process in lab.processes()]


def check_figures(notebook, name):
    """As many as the committed notebook has; each is drawn, lies inside its cell, and says in words what it shows."""
    figures = notebook.figures()
    assert len(figures) >= committed_figures(name) > 0
    for figure in figures:
        assert figure["pixels"] > 0
        assert figure["width"] > 100
        assert figure["beyond"] <= 1, figure
        assert len(figure["alt"]) > 30, figure


def committed_figures(name):
    return sum("image/png" in data and playable.SPECIFICATION not in data for data in committed(name))


def committed(name):
    """What the outputs of a lesson hold, by MIME type."""
    outputs = [output for cell in source(name).cells for output in cell.get("outputs", [])]
    return [output.get("data", {}) for output in outputs]


def check_playables(page, name):
    """Each figure to play with is drawn, and every slider of it changes it."""
    played = playables(page)
    assert len(played) == sum(playable.SPECIFICATION in data for data in committed(name))
    for figure in played:
        assert figure["sliders"]
        assert all(figure["sliders"].values()), figure


def solutions(name):
    return sum("solution" in cell.metadata.get("tags", []) for cell in source(name).cells)


def source(name):
    return nbformat.read(str(ROOT / "notebooks" / name), as_version=4)
