"""Running lessons in batch: parameters, failures that stop nothing, and the report."""

import base64
import re

import nbformat
import pandas as pd
import pytest
from bs4 import BeautifulSoup

from workshop_utils import batch, report
from workshop_utils.jobs import JobError
from workshop_utils.scaling import efficiency, sweep

PNG = base64.b64encode(b"a picture").decode()


def write_notebook(path, *cells):
    notebook = nbformat.v4.new_notebook(cells=list(cells))
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(notebook, str(path))
    return path


def parameters_cell(source):
    return nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})


@pytest.fixture
def good(tmp_path):
    return write_notebook(
        tmp_path / "00_good.ipynb",
        parameters_cell("workers = 2"),
        nbformat.v4.new_code_cell("print('with', workers)"),
    )


@pytest.fixture
def bad(tmp_path):
    return write_notebook(
        tmp_path / "01_bad.ipynb",
        parameters_cell("size = 'small'"),
        nbformat.v4.new_code_cell("raise ValueError('this lesson is broken')"),
    )


def test_a_failing_lesson_does_not_stop_the_next_and_the_exit_code_says_so(good, bad, tmp_path, capsys):
    output = tmp_path / "build"
    assert batch.run([bad, good], output, [], with_sweep=False) == 1
    page = (output / "report.html").read_text()
    assert "this lesson is broken" in page
    assert "00_good" in page
    assert (output / "00_good.html").is_file()
    assert "1 of 2 lessons succeeded" in capsys.readouterr().out


def test_a_parameter_whose_default_depends_on_the_size_can_be_given_and_nothing_is_said_of_it(
    tmp_path, capfd
):
    notebook = write_notebook(
        tmp_path / "00_long.ipynb",
        parameters_cell(
            'size = "normal"\nepochs = 5 if size == "normal" else 2  # passes\nseen, unseen = 1, 2'
        ),
        nbformat.v4.new_code_cell("print('epochs', epochs, 'unseen', unseen)"),
    )
    output = tmp_path / "build"
    assert batch.run([notebook], output, ["epochs=7", "unseen=9"], with_sweep=False) == 0
    executed = nbformat.read(str(output / "00_long.ipynb"), as_version=4)
    assert any("epochs 7 unseen 9" in str(cell.get("outputs")) for cell in executed.cells)
    said = "".join(capfd.readouterr())
    assert "Unable to parse" not in said
    assert "encryption" not in said


def test_parameters_reach_the_notebooks_that_have_them(good, bad, tmp_path):
    output = tmp_path / "build"
    batch.run([good, bad], output, ["workers=5"], with_sweep=False)
    executed = nbformat.read(str(output / "00_good.ipynb"), as_version=4)
    printed = [out.text for cell in executed.cells for out in cell.get("outputs", []) if out.get("text")]
    assert printed == ["with 5\n"]


def test_a_parameter_that_no_notebook_has_is_refused_by_name(good, tmp_path):
    with pytest.raises(JobError, match=r"'wrokers' is in none of the notebooks; they have workers"):
        batch.run([good], tmp_path / "build", ["wrokers=5"], with_sweep=False)


@pytest.mark.parametrize("pair", ["workers", "=3", "a b=3"])
def test_a_parameter_without_name_or_value_is_refused(pair):
    with pytest.raises(JobError, match="NAME=VALUE"):
        batch.parsed([pair])


def test_parameters_are_read_as_numbers_where_they_are(good):
    assert batch.parsed(["workers=4", "name=ring", "rate=0.5"]) == {"workers": 4, "name": "ring", "rate": 0.5}


def test_a_notebook_that_is_not_there_is_named(tmp_path):
    with pytest.raises(JobError, match=r"nothing\.ipynb"):
        batch.run([tmp_path / "nothing.ipynb"], tmp_path, [], with_sweep=False)


def test_figures_are_found_with_the_heading_above_them():
    shown = nbformat.v4.new_output("display_data", {"image/png": PNG})
    notebook = nbformat.v4.new_notebook(
        cells=[
            nbformat.v4.new_markdown_cell("# First\n\ntext\n\n## Then"),
            nbformat.v4.new_code_cell("plot()", outputs=[shown]),
        ]
    )
    assert report.figures_of(notebook) == [report.Figure(PNG, "Then", "Figure under the heading Then")]


def test_a_lesson_s_figure_says_in_the_report_what_it_says_in_the_notebook(tmp_path):
    words = 'A ring stays "flat". seconds against workers.'
    shown = nbformat.v4.new_output(
        "display_data", {"image/png": PNG}, metadata={"image/png": {"width": 10, "height": 5, "alt": words}}
    )
    cells = [nbformat.v4.new_code_cell("plot()", outputs=[shown])]
    executed = nbformat.v4.new_notebook(cells=cells)
    assert report.figures_of(executed) == [report.Figure(PNG, "", words)]
    lesson = batch.Lesson(tmp_path / "00_good.ipynb", executed=executed)
    report.write(tmp_path, [lesson], None, 0.0)
    for page in ("report.html", "00_good.html"):
        images = BeautifulSoup((tmp_path / page).read_text(), "html.parser").select("img")
        assert [image["alt"] for image in images] == [words], page


def test_a_formula_in_a_heading_is_a_formula_in_the_report(tmp_path):
    shown = nbformat.v4.new_output("display_data", {"image/png": PNG})
    cells = [
        nbformat.v4.new_markdown_cell(r"## A ring sends $2\frac{N-1}{N}$ of *it*"),
        nbformat.v4.new_code_cell("plot()", outputs=[shown], metadata={"papermill": {"duration": 2.0}}),
    ]
    lesson = batch.Lesson(tmp_path / "00_good.ipynb", executed=nbformat.v4.new_notebook(cells=cells))
    page = BeautifulSoup(report.write(tmp_path, [lesson], None, 0.0).read_text(), "html.parser")
    for place in ("figcaption", "td.why"):
        (text,) = [found for found in page.select(place) if "ring sends" in found.text]
        assert text.select_one("math mfrac") is not None, place
        assert text.select_one("em").text == "it", place
        assert "frac" not in text.text, place


def measurement(strategy, workers, samples_per_second, state="succeeded", reason=""):
    return sweep.Measurement(strategy, workers, state, 3.0, 1.0, samples_per_second, 0.1, 0.97, reason)


def test_the_report_shows_the_scaling_table_and_names_the_run_that_failed(tmp_path):
    rows = [
        measurement("torch_ddp", 1, 1000.0),
        measurement("torch_ddp", 2, 1500.0),
        measurement("mpi", 2, float("nan"), "failed", "mpi failed: rank 1 was killed"),
    ]
    path = report.write(tmp_path, [], sweep.table(rows), sweep_seconds=9.0)
    page = path.read_text()
    assert "75%" in page
    assert "relative to the fastest strategy with the fewest workers" in page
    (alt,) = re.findall(r'<img class="plot" width="760" alt="(2 workers on [^"]*)"', page)
    assert "samples per second, all workers together against workers" in alt
    assert "mpi failed: rank 1 was killed" in page
    assert "data:image/png;base64," in page


def test_efficiency_is_throughput_a_worker_over_that_of_the_fastest_with_the_fewest_workers():
    rows = [
        measurement("a", 4, 2000.0),
        measurement("a", 1, 1000.0),
        measurement("b", 1, 500.0),
        measurement("b", 2, 1000.0),
        measurement("c", 1, float("nan"), "failed"),
    ]
    assert list(sweep.table(rows)["efficiency"][:4]) == [0.5, 1.0, 0.5, 0.5]
    assert sweep.table(rows)["efficiency"].isna().tolist()[4]


def test_a_sweep_s_efficiency_is_that_of_a_grid_with_the_same_throughput():
    speeds = {
        ("ring", 1): 1000.0,
        ("ring", 2): 1500.0,
        ("ring", 4): 2400.0,
        ("mpi", 1): 800.0,
        ("mpi", 4): 3200.0,
    }
    of_sweep = sweep.table([measurement(*key, speed) for key, speed in speeds.items()])
    of_grid = efficiency.scaling(
        pd.DataFrame(
            {
                "strategy": strategy, "workers": workers, "batch_size": 10, "scaling": "weak", "state": "succeeded",
                "reason": "", "repeat": 0, "step_seconds": 10 * workers / speed,
            }
            for (strategy, workers), speed in speeds.items()
        )
    )  # fmt: skip
    assert of_sweep["efficiency"].to_numpy() == pytest.approx(of_grid["efficiency"].to_numpy())


def test_a_sweep_in_which_nothing_succeeded_has_no_efficiency():
    table = sweep.table([measurement("mpi", 2, float("nan"), "failed")])
    assert table["efficiency"].isna().all()


def test_the_sweep_has_single_once_and_parameter_servers_from_two():
    planned = pd.DataFrame(
        [(job.strategy, job.workers) for job in sweep.plan("jobs", (1, 2, 4))],
        columns=["strategy", "workers"],
    )
    counts = planned.groupby("strategy")["workers"].apply(list).to_dict()
    assert counts == {
        "single": [1],
        "parameter_server": [2, 4],
        "horovod": [1, 2, 4],
        "mpi": [1, 2, 4],
        "multi_worker_mirrored": [1, 2, 4],
        "torch_ddp": [1, 2, 4],
    }


def test_a_run_that_fails_is_a_row_of_the_sweep_and_not_its_end(make_job, nothing_is_left):
    failing = make_job("raise SystemExit(2)")
    fine = make_job(
        "from workshop_utils import place",
        "place.here()",
        "place.report(step=1, loss=0.5, samples_per_second=10)",
        "place.report(step=2, accuracy=0.9, samples_per_second=30)",
    )
    first, second = sweep.sweep([failing, fine])
    assert (first.state, second.state) == ("failed", "succeeded")
    assert "exit code 2" in first.reason
    assert (second.samples_per_second, second.loss, second.accuracy) == (20, 0.5, 0.9)


def test_the_total_is_printed_and_a_lesson_that_takes_too_long_is_marked(good, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(batch, "execute", lambda notebook, *_: batch.Lesson(notebook, seconds=200.4))
    output = tmp_path / "build"
    assert batch.run([good], output, [], with_sweep=False) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "200 s in all: the lessons 200 s" in printed
    assert f"{good}: 200 s; a lesson should take 180 s at most" in printed
    assert " s, too long</td>" in (output / "report.html").read_text()


def test_the_slowest_cell_is_named_by_the_heading_above_it():
    def timed(seconds):
        return nbformat.v4.new_code_cell("...", metadata={"papermill": {"duration": seconds}})

    heading = nbformat.v4.new_markdown_cell
    cells = [
        heading("# One"),
        timed(1.0),
        heading("## Two"),
        timed(7.25),
        heading("text"),
        heading("# Three"),
        timed(3),
    ]
    assert report.slowest_cell(nbformat.v4.new_notebook(cells=cells)) == "7.2 s: Two"
    assert report.slowest_cell(None) == ""
