"""Running lessons in batch: parameters, failures that stop nothing, and the report."""

import re

import nbformat
import pandas as pd
import pytest
from bs4 import BeautifulSoup

from workshop_utils.jobs import JobError
from workshop_utils.lessons import batch, report

pytestmark = pytest.mark.processes


def write_notebook(path, *cells):
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, str(path))
    return path


def parameters_cell(source):
    return nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})


def test_a_failing_lesson_does_not_stop_the_next_and_the_exit_code_says_so(tmp_path, capsys):
    parameters, work = parameters_cell("workers = 2"), nbformat.v4.new_code_cell("print('with', workers)")
    broken = nbformat.v4.new_code_cell("raise ValueError('this lesson is broken')")
    bad = write_notebook(tmp_path / "00_bad.ipynb", parameters, broken)
    (tmp_path / "drawn.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    words = "![drawn](drawn.svg) After [the first](00_bad.ipynb#run), [another](09_other.ipynb)."
    good = write_notebook(tmp_path / "01_good.ipynb", parameters, work, nbformat.v4.new_markdown_cell(words))
    output = tmp_path / "build"
    assert batch.run_lessons([bad, good], output, [], with_scale_model=False) == 1
    page = (output / "report.html").read_text()
    assert "this lesson is broken" in page
    assert "01_good" in page
    assert 'href="01_good.html"' in page
    lesson = (output / "01_good.html").read_text()
    assert "with 2" in lesson
    assert 'href="00_bad.html#run"' in lesson
    assert 'href="09_other.ipynb"' in lesson  # which was not run
    assert 'src="drawn.svg"' not in lesson
    assert 'src="data:image/svg' in lesson
    assert not re.search(r"(src|href)=.?https?://|@import", lesson)
    assert (output / "01_good.ipynb").is_file()
    assert "1 of 2 lessons succeeded" in capsys.readouterr().out


def test_a_parameter_whose_default_depends_on_the_size_can_be_given_and_nothing_is_said_of_it(
    tmp_path, capfd
):
    notebook = write_notebook(
        tmp_path / "00_long.ipynb",
        parameters_cell(
            'size = "normal"\nepochs = 5 if size == "normal" else 2  # passes\nseen, unseen = 1, 2'
        ),
        nbformat.v4.new_code_cell("print('all', epochs + unseen)"),
    )
    output = tmp_path / "build"
    assert batch.run_lessons([notebook], output, ["epochs=7", "unseen=9"], with_scale_model=False) == 0
    executed = nbformat.read(str(output / "00_long.ipynb"), as_version=4)
    assert any("all 16" in str(cell.get("outputs")) for cell in executed.cells)
    said = "".join(capfd.readouterr())
    assert "Unable to parse" not in said
    assert "encryption" not in said


def scaled():
    """What `ScaleModel.measure` gives of two strategies."""
    rows = [
        {
            "cluster": "p100-25g", "model": "vgg16", "strategy": strategy, "workers": workers, "machines": workers,
            "gradient_nbytes": 553_430_176, "device_seconds": 0.5, "step_seconds": 0.5 / efficiency,
            "throughput": 128 * workers * efficiency, "efficiency": efficiency, "predicted": efficiency,
            "emulated": "", "stretch": 1.0, "host_share": 0.05,
        }
        for strategy, worst in (("ring", 0.75), ("workshop_parameter_server", 0.25))
        for workers, efficiency in ((1, 1.0), (2, worst))
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_the_report_begins_with_the_scale_model(tmp_path):
    page = report.write_report(tmp_path / "report.html", scaled=scaled())
    page = BeautifulSoup(page.read_text(), "html.parser")
    (first,) = page.select("img")
    assert "VGG-16: 2 workers are worth 1.50 devices with a ring" in first["alt"]
    assert first.parent.find_next_sibling("p").find("b").text == "emulated device"


@pytest.fixture
def asked(monkeypatch, tmp_path):
    """The numbers of workers that scale models were asked for; nothing is measured."""
    counts = []

    def headline(store, workers):
        counts.append(workers)
        return scaled()

    monkeypatch.setattr(batch.scale_model, "headline", headline)
    return counts


@pytest.mark.parametrize(
    ("size", "with_scale_model", "counts"),
    [("normal", True, [(1, 2, 4, 8, 16)]), ("small", True, [(1, 2, 4)]), ("normal", False, [])],
)
def test_a_scale_model_is_measured_unless_asked_otherwise(
    asked, size, with_scale_model, counts, monkeypatch, tmp_path
):
    monkeypatch.setenv("WORKSHOP_SIZE", size)
    notebook = write_notebook(tmp_path / "00_none.ipynb")
    assert batch.run_lessons([notebook], tmp_path, [], with_scale_model) == 0
    assert asked == counts
    assert ("emulated device" in (tmp_path / "report.html").read_text()) == with_scale_model


def test_a_scale_model_that_cannot_be_measured_is_a_failure_beside_the_report(monkeypatch, tmp_path, capsys):
    def headline(store, workers):
        raise JobError("16 workers keep 30% of this machine busy")

    monkeypatch.setattr(batch.scale_model, "headline", headline)
    assert batch.run_lessons([write_notebook(tmp_path / "00_none.ipynb")], tmp_path, [], True) == 1
    assert "16 workers keep 30% of this machine busy" in capsys.readouterr().out
    assert "00_none" in (tmp_path / "report.html").read_text()
