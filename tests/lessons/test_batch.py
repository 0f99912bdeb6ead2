"""Running lessons in batch: parameters, failures that stop nothing, and the report."""

import base64
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from bs4 import BeautifulSoup

from workshop_utils.jobs import JobError
from workshop_utils.lessons import batch, report
from workshop_utils.scaling import experiment

PNG = base64.b64encode(b"a picture").decode()


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
    good = write_notebook(tmp_path / "01_good.ipynb", parameters, work)
    output = tmp_path / "build"
    assert batch.run_lessons([bad, good], output, [], with_sweep=False) == 1
    page = (output / "report.html").read_text()
    assert "this lesson is broken" in page
    assert "01_good" in page
    assert (output / "01_good.html").is_file()
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
    assert batch.run_lessons([notebook], output, ["epochs=7", "unseen=9"], with_sweep=False) == 0
    executed = nbformat.read(str(output / "00_long.ipynb"), as_version=4)
    assert any("all 16" in str(cell.get("outputs")) for cell in executed.cells)
    said = "".join(capfd.readouterr())
    assert "Unable to parse" not in said
    assert "encryption" not in said


def test_the_report_links_to_a_page_of_each_lesson_whose_figures_are_described_in_words(tmp_path):
    words = 'A ring stays "flat". seconds against workers.'
    about = {"image/png": {"width": 10, "height": 5, "alt": words}}
    shown = nbformat.v4.new_output("display_data", {"image/png": PNG}, metadata=about)
    cells = [nbformat.v4.new_code_cell("plot()", outputs=[shown])]
    lesson = batch.Lesson(tmp_path / "00_good.ipynb", 3.0, "", nbformat.v4.new_notebook(cells=cells))
    page = BeautifulSoup(
        report.write_report(tmp_path / "report.html", "All", [lesson]).read_text(), "html.parser"
    )
    (link,) = page.select("td a")
    page = BeautifulSoup((tmp_path / link["href"]).read_text(), "html.parser")
    assert [image["alt"] for image in page.select("img")] == [words]


def measurement(strategy, workers, samples_per_second, state="succeeded", reason=""):
    return {
        "strategy": strategy, "workers": workers, "network": "full speed", "state": state, "reason": reason,
        "samples_per_second": samples_per_second, "accuracy": 0.97, "first_step_seconds": 1.0,
    }  # fmt: skip


def page_of(folder, *rows, **tables):
    page = report.write_report(folder / "report.html", "All", runs=pd.DataFrame(rows), **tables)
    return BeautifulSoup(page.read_text(), "html.parser")


FAILED = measurement("mpi", 2, float("nan"), "failed", "rank 1 was killed")


def test_the_report_shows_how_strategies_scaled_and_names_the_run_that_failed(tmp_path):
    rows = measurement("torch_ddp", 1, 1000.0), measurement("torch_ddp", 2, 1500.0), FAILED
    page = page_of(tmp_path, *rows)
    assert "0.75" in page.text
    assert "relative to the fastest strategy with the fewest" in page.text
    cells = [[cell.text for cell in row.select("td")] for row in page.select(".scroll tbody tr")]
    columns = [*zip(*cells, strict=True)]
    assert columns[:2] == [("torch_ddp", "torch_ddp", "mpi"), ("1", "2", "2")]
    assert all(any(column) for column in columns)
    for sweep in (page, page_of(tmp_path, FAILED)):
        assert "mpi with 2: rank 1 was killed" in sweep.text


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


def test_the_report_begins_with_the_scale_model_and_calls_the_rest_bare_cores(tmp_path):
    runs = [measurement("torch_ddp", workers, 1000.0) for workers in (1, 2)]
    page = page_of(tmp_path, *runs, scaled=scaled())
    (first,) = page.select("img")
    assert "VGG-16: 2 workers are worth 1.50 devices with a ring" in first["alt"]
    assert first.parent.find_next_sibling("p").find("b").text == "emulated device"
    titles = [title.text for title in page.select("h2")]
    assert len(titles) == 2
    assert "bare cores" in titles[1]
    plain = page_of(tmp_path, *runs)
    assert "emulated" not in plain.text
    assert [title.text for title in plain.select("h2")] == ["Measured"]


@pytest.fixture
def sweeps(monkeypatch, tmp_path):
    """The numbers of workers that scale models and the sweep on bare cores were asked for; nothing is run."""
    asked = {"scaled": [], "bare": []}

    def headline(store, workers):
        asked["scaled"].append(workers)
        return scaled()

    def measure_all(settings, store):
        asked["bare"].append({setting.job.workers for setting in settings})
        return pd.DataFrame([measurement("torch_ddp", 1, 1000.0)])

    monkeypatch.setattr(batch.scale_model, "headline", headline)
    monkeypatch.setattr(batch.experiment, "measure_all", measure_all)
    monkeypatch.chdir(Path(__file__).parents[2])  # where jobs/ is
    asked["notebook"] = write_notebook(tmp_path / "00_none.ipynb")
    return asked


@pytest.mark.parametrize(
    ("size", "options", "scaled_workers", "bare_workers"),
    [
        ("normal", {}, [(1, 2, 4, 8, 16)], [{1, 2, 4}]),
        ("small", {}, [(1, 2, 4)], [{1, 2, 4}]),
        ("normal", {"bare": True}, [], [{1, 2, 4}]),
        ("normal", {"with_sweep": False}, [], []),
    ],
)
def test_a_scale_model_and_bare_cores_are_measured_unless_asked_otherwise(
    sweeps, size, options, scaled_workers, bare_workers, monkeypatch, tmp_path
):
    monkeypatch.setenv("WORKSHOP_SIZE", size)
    assert batch.run_lessons([sweeps["notebook"]], tmp_path, [], **{"with_sweep": True, **options}) == 0
    assert sweeps["scaled"] == scaled_workers
    assert sweeps["bare"] == bare_workers
    assert ("emulated device" in (tmp_path / "report.html").read_text()) == bool(scaled_workers)


def test_a_scale_model_that_cannot_be_measured_is_a_failure_beside_the_report(
    sweeps, monkeypatch, tmp_path, capsys
):
    def headline(store, workers):
        raise JobError("16 workers keep 30% of this machine busy")

    monkeypatch.setattr(batch.scale_model, "headline", headline)
    assert batch.run_lessons([sweeps["notebook"]], tmp_path, [], with_sweep=True) == 1
    assert "16 workers keep 30% of this machine busy" in capsys.readouterr().out
    assert "Measured" in (tmp_path / "report.html").read_text()


def test_the_sweep_has_single_once_and_parameter_servers_from_two():
    planned = [(job.strategy, job.workers) for job in experiment.mnist_jobs("jobs", (1, 2, 4))]
    counts = {strategy: [count for name, count in planned if name == strategy] for strategy, _ in planned}
    others = {name: [1, 2, 4] for name in ("horovod", "mpi", "multi_worker_mirrored", "torch_ddp")}
    assert counts == {"single": [1], "parameter_server": [2, 4], **others}
