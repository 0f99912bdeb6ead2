"""What every committed notebook must hold to, beside running (which nbval checks)."""

import ast
import base64
import io
import json
import re
from pathlib import Path

import nbformat
import numpy as np
import pytest
from lesson_kinds import best_verdict
from PIL import Image, ImageColor, ImageDraw

from workshop_utils.lessons import freshness, without_horovod
from workshop_utils.lessons.checks.choice import WIDGET_VIEW

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
MOST_NBYTES = 400_000  # of one, so that a browser and GitHub open it at once
MOST_NBYTES_OF_ALL = 4_500_000
FETCHED = re.compile(r"""(src=|url\(|@import )["']?(https?:)?//""")
MACHINE_PATH = re.compile(r"(/(home|root|tmp|Users|work)/|site-packages)")


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request):
    return nbformat.read(str(request.param), as_version=4)


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def outputs(notebook):
    """Each output, with the source of its cell."""
    return [(cell.source, output) for cell in code_cells(notebook) for output in cell.outputs]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_outputs_belong_to_the_present_code(path):
    assert freshness.is_fresh(path), f"{path.name} is stale: run `workshop refresh notebooks/{path.name}`"


def test_every_code_cell_was_executed_in_order(notebook):
    counts = [cell.execution_count for cell in code_cells(notebook)]
    assert counts == list(range(1, len(counts) + 1))


def test_outputs_hold_no_errors_warnings_widgets_or_paths_of_a_machine_and_light_pictures(notebook):
    for source, output in outputs(notebook):
        data = output.get("data", {})
        assert output.output_type != "error", source
        assert output.get("name") != "stderr", output.get("text")
        assert without_horovod.RECORDED not in output.get("text", ""), "refresh it where Horovod is installed"
        assert WIDGET_VIEW not in data, source
        shown = {kind: text for kind, text in data.items() if not kind.startswith("image/")}
        assert not MACHINE_PATH.search(json.dumps([output.get("text", ""), shown])), source
        assert not FETCHED.search("".join(data.get("text/html", ""))), source
        if png := data.get("image/png"):
            assert Image.open(io.BytesIO(base64.b64decode(png))).mode == "P", source


def test_there_is_one_cell_of_parameters_that_reads_the_size(notebook):
    tagged = [cell for cell in code_cells(notebook) if "parameters" in cell.metadata.get("tags", [])]
    assert len(tagged) == 1
    assert "WORKSHOP_SIZE" in tagged[0].source


def test_code_cells_fit_a_glance(notebook):
    for cell in code_cells(notebook):
        most = 45 if "idea" in tags(cell) else 18
        assert len(cell.source.splitlines()) <= most, cell.source


def test_imports_stand_in_one_cell_of_nine_lines(notebook):
    """What a learner is to see comes first; a wall of imports is not it. Ranks and exercises may have their own."""
    importing = []
    for cell in code_cells(notebook):
        if cell.source.startswith("%%") or {"exercise", "solution", "parameters"} & set(tags(cell)):
            continue
        lines = [line for line in cell.source.splitlines() if re.match(r"(import|from) ", line)]
        importing += [len(lines)] if lines else []
    assert len(importing) <= 1
    assert sum(importing) <= 9


def test_each_exercise_is_shown_unsolved_and_has_a_folded_solution_that_is_right(notebook):
    exercises = [cell for cell in code_cells(notebook) if "exercise" in tags(cell)]
    solutions = [cell for cell in code_cells(notebook) if "solution" in tags(cell)]
    assert 1 <= len(exercises) == len(solutions)
    for cell in solutions:
        assert any(said(output).startswith(best_verdict(cell.source)) for output in cell.outputs), cell.source
        assert cell.metadata.jupyter.source_hidden
    for cell in exercises:
        assert any(said(output).startswith("Not yet: ") for output in cell.outputs), cell.source


def test_what_learners_keep_needs_nothing_of_the_solutions(notebook):
    bound, used = {True: set(), False: set()}, set()
    for cell in code_cells(notebook):
        is_solution = "solution" in tags(cell)
        # A cell with %% runs elsewhere, among names of its own; other magics are no Python.
        source = "" if cell.source.startswith("%%") else re.sub("^%.*", "", cell.source, flags=re.MULTILINE)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Name):
                is_bound = isinstance(node.ctx, ast.Store)
                (bound[is_solution] if is_bound else set() if is_solution else used).add(node.id)
    assert not used & (bound[True] - bound[False])


def tags(cell):
    return cell.metadata.get("tags", [])


def said(output):
    return output.get("data", {}).get("text/plain", "")


def test_every_picture_says_in_words_what_it_shows(notebook):
    for cell in notebook.cells:
        for alternative in re.findall(r"!\[(.*?)\]\(", cell.source if cell.cell_type == "markdown" else ""):
            assert len(alternative) > 15, f"a picture needs alternative text: {cell.source[:80]}"


def test_a_changed_cell_makes_a_notebook_stale_and_a_comment_does_not():
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("x = 1")])
    before = freshness.fingerprint(notebook)
    notebook.cells[0].source = "x = 1  # one"
    assert freshness.fingerprint(notebook) == before
    notebook.cells[0].source = "x = 2"
    assert freshness.fingerprint(notebook) != before


# Their weight


def test_notebooks_are_light():
    nbytes = {path.name: path.stat().st_size for path in NOTEBOOKS}
    assert {name: size for name, size in nbytes.items() if size > MOST_NBYTES} == {}, (
        "which figure is so large?"
    )
    assert sum(nbytes.values()) <= MOST_NBYTES_OF_ALL


def drawn():
    """A transparent picture as Matplotlib draws one: areas, a thin line, and greys of soft edges."""
    picture = Image.new("RGBA", (400, 200), (0, 0, 0, 0))
    pen = ImageDraw.Draw(picture)
    for left, colour in ((20, "#0072B2"), (120, "#D55E00"), (220, "#BABA82")):
        pen.rectangle((left, 20, left + 80, 120), fill=colour)
    pen.line((340, 20, 340, 30), fill="#D69EA7")  # few pixels, as bright as another colour
    for grey in range(256):
        pen.line((grey, 140, grey, 150), fill=(grey, grey, grey))
    file = io.BytesIO()
    picture.save(file, "PNG")
    return file.getvalue()


def on_white(png):
    picture = Image.open(io.BytesIO(png)).convert("RGBA")
    return np.asarray(Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture)).astype(int)


def test_a_light_picture_nearly_keeps_its_colours_on_white():
    before, made = on_white(drawn()), freshness.light(drawn())
    difference = np.abs(on_white(made) - before)
    assert difference.max() <= 2 + 256 // freshness.COLOURS
    for colour in ("#0072B2", "#D55E00", "#FFFFFF"):
        assert difference[(before[..., :3] == ImageColor.getrgb(colour)).all(axis=2)].max() <= 1, colour
    assert freshness.light(made) == made


def test_what_differs_from_run_to_run_is_removed_and_pictures_are_made_light():
    picture = base64.b64encode(drawn()).decode()
    cell = nbformat.v4.new_code_cell(
        "draw()",
        outputs=[
            nbformat.v4.new_output("display_data", {"image/png": picture, WIDGET_VIEW: {"model_id": "1"}}),
            nbformat.v4.new_output("stream", text="\r0/2 |  |\r2/2 |██|\nsaid after a bar\n"),
            nbformat.v4.new_output("stream", text="and in another turn\n"),
            nbformat.v4.new_output("stream", name="stderr", text="\r2/2 |██|\n"),
        ],
        metadata={"execution": {"iopub.execute_input": "now"}, "tags": ["idea"]},
    )
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {}, "papermill": {}})
    freshness.clean(notebook)
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert notebook.cells[0].metadata == {"tags": ["idea"]}
    output, text = notebook.cells[0].outputs
    assert text.text == "said after a bar\nand in another turn\n"
    assert list(output.data) == ["image/png"]
    assert Image.open(io.BytesIO(base64.b64decode(output.data["image/png"]))).mode == "P"
