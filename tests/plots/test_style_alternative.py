"""A figure's alternative text: what it says, and that a notebook gets it."""

import nbformat
import pytest
from nbclient import NotebookClient

from workshop_utils.plots import alternative, style


def test_the_finding_comes_first_then_conditions_axes_and_names_each_once():
    figure, axes = style.figure()
    style.theory(axes, [1, 2, 3], [1, 2, 3], "ideal")
    style.measured(axes, [1, 2, 3], [1, 1.9, 2.7], "ring")
    axes.set(xlabel="workers", ylabel="speed-up")
    style.headline(axes, "A ring stays\nflat for $8,172", r"16 MB, $\mathrm{t}_1$ of $N$")
    style.label_ends(axes)
    assert alternative.describe(figure) == (
        "A ring stays flat for $8,172. 16 MB, t_1 of N. speed-up against workers. Named in it: ideal, ring."
    )


@pytest.mark.processes
def test_a_notebook_gets_the_words_and_html_only_in_a_server_s_kernel(monkeypatch):
    monkeypatch.delenv(alternative.STARTED_BY_SERVER, raising=False)
    draw = "figure, axes = style.figure()\nstyle.headline(axes, 'a < b')"
    sources = (
        f"from workshop_utils.plots import style\nstyle.use()\n{draw}",
        f"import os\nos.environ['{alternative.STARTED_BY_SERVER}'] = 'lesson.ipynb'\n{draw}",
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    NotebookClient(notebook, kernel_name="python3", timeout=120).execute()
    for cell, started_by_server in zip(notebook.cells, (False, True), strict=True):
        (output,) = [each for each in cell.outputs if each.output_type == "display_data"]
        assert output.data["text/plain"] == output.metadata["image/png"]["alt"] == "a < b."
        assert output.metadata["image/png"]["width"] > 500
        assert ('alt="a &lt; b."' in output.data.get("text/html", "")) == started_by_server
