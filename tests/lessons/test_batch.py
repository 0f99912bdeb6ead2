"""Running lessons in batch: parameters, failures that stop nothing, and the report."""

import errno
import fcntl
import os
import re
from pathlib import Path

import nbformat
import pandas as pd
import pytest
from bs4 import BeautifulSoup

from workshop_utils.jobs import JobError
from workshop_utils.lessons import batch, report
from workshop_utils.plots import playable

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
    assert batch.run_lessons([bad, good], output, {}, with_scale_model=False) == 1
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


def test_a_page_holds_drawings_from_outside_the_folder_words_of_figures_and_figures_to_play_with(tmp_path):
    for folder in ("images", "notebooks", "build"):
        (tmp_path / folder).mkdir()
    (tmp_path / "images" / "drawn.svg").write_text("<svg xmlns='http://www.w3.org/2000/svg'/>")
    picture = nbformat.v4.new_output(
        "display_data", {"image/png": "aaaa"}, metadata={"image/png": {"alt": 'It "falls".'}}
    )
    data = {playable.SPECIFICATION: {"mark": "line"}, "image/png": "aaaa", "text/plain": "A line."}
    played = [nbformat.v4.new_output("display_data", dict(data)) for _ in range(2)]
    cells = [
        nbformat.v4.new_markdown_cell("![A ring](../images/drawn.svg) ![Lost](../images/lost.svg)"),
        nbformat.v4.new_code_cell("1", outputs=[picture, *played]),
    ]
    lesson = batch.Lesson(
        tmp_path / "notebooks" / "00_own.ipynb", 1.0, "", nbformat.v4.new_notebook(cells=cells)
    )
    report.write_report(tmp_path / "build" / "report.html", [lesson])
    text = (tmp_path / "build" / "00_own.html").read_text()
    drawing, lost, figure = BeautifulSoup(text, "html.parser").select("img")
    assert drawing["src"].startswith("data:image/svg+xml;base64,")
    assert lost["src"] == "../images/lost.svg"
    assert figure["alt"] == 'It "falls".'
    assert text.count(playable.player()) == 1
    assert [f'vegaEmbed("#playable-{number}"' in text for number in range(3)] == [True, True, False]


def run(tmp_path, parameters, **notebooks):
    """What notebooks of these cells, the first tagged, print last if they are run with `parameters`."""
    paths = [
        write_notebook(
            tmp_path / f"{name}.ipynb", parameters_cell(first), *map(nbformat.v4.new_code_cell, others)
        )
        for name, (first, *others) in notebooks.items()
    ]
    assert batch.run_lessons(paths, tmp_path / "build", parameters, with_scale_model=False) == 0
    executed = [nbformat.read(str(tmp_path / "build" / path.name), as_version=4) for path in paths]
    return [each.cells[-1].outputs[-1].text.strip() if each.cells[-1].outputs else "" for each in executed]


DEFAULTS = """
size, answer, tag, day, words = "normal", "yes", "v1", "2020-01-01", "a=b"
learning_rate, seconds, limit = 0.1, 2, 1.0
shuffle: bool = True
folder: str | None = None
sizes, sizes_of = [1], len
sizes.append(2)
batches = (256, 512)
weights = {}
weights["a"] = 1.0
schedule = dict(warmup=5)
"""
GIVEN = {
    "size": "no", "answer": "False", "tag": "007", "day": "2021-02-03", "words": "c=d", "learning_rate": "1e-3",
    "seconds": "2.5", "limit": "inf", "shuffle": "False", "folder": "it's \\n", "sizes": "[1e-3, 2]", "batches": "(8,)",
    "weights": "{0: 1.0, 1: 5.0}", "schedule": '{"warmup": null}',
}  # fmt: skip


def test_values_are_what_papermill_makes_of_them_and_lists_and_mappings_are_values_too(tmp_path):
    (printed,) = run(tmp_path, GIVEN, own=(DEFAULTS, f"print([{', '.join(GIVEN)}])"))
    assert printed == (
        "['no', False, '007', '2021-02-03', 'c=d', 0.001, 2.5, inf, False, \"it's \\\\n\", [0.001, 2], (8,), "
        "{0: 1.0, 1: 5.0}, {'warmup': None}]"
    )


def test_what_is_derived_from_a_parameter_follows_it_unless_it_is_given_itself(tmp_path, capfd):
    first = """%matplotlib inline
size = "normal"  # or small
!true
# Of an epoch, in "ü"
ü = "é"; is_small = size == "small"
epochs, steps = (2, 20) if is_small else (5, 100); rate = 1 / epochs
def plain(size="normal"):
    steps = 1
    return size
if is_small:
    rows = [steps]
"""
    timed = "%%capture\nwidth = 8\nwidth += 1\ndouble = 2 * width"
    other = "print(size, epochs, steps, rate, rows, plain())"
    given = {"size": "small", "steps": "7", "width": "3"}
    ran = run(tmp_path, given, derived=(first, other), magic=(timed, "print(width, double)"))
    assert ran == ["small 2 7 0.5 [7] normal", "3 6"]
    said = "".join(capfd.readouterr())
    assert "size = 'small' in derived\nsteps = 7 in derived\nwidth = 3 in magic\n" in said
    assert "Unable to parse" not in said
    assert "encryption" not in said


def test_what_papermill_has_executed_and_cells_with_two_of_its_tags_take_parameters(tmp_path):
    first, second = parameters_cell("rate = 0.1"), parameters_cell("size = 3\nnumbers = [rate] * size")
    injected = nbformat.v4.new_code_cell("rate = 0.2", metadata={"tags": ["injected-parameters"]})
    work = nbformat.v4.new_code_cell("print(rate, numbers)")
    path = write_notebook(tmp_path / "again.ipynb", first, injected, second, work)
    given = {"rate": "0.5", "size": "2"}
    assert batch.run_lessons([path], tmp_path / "build", given, with_scale_model=False) == 0
    executed = nbformat.read(str(tmp_path / "build" / "again.ipynb"), as_version=4)
    assert executed.cells[-1].outputs[0].text == "0.5 [0.5, 0.5]\n"


def test_a_notebook_of_any_name_runs_in_its_own_folder(tmp_path, monkeypatch):
    folder = tmp_path / "my {own} folder"
    folder.mkdir()
    (folder / "data.txt").write_text("42")
    work = nbformat.v4.new_code_cell("print(open('data.txt').read())")
    write_notebook(folder / "-{x} ü.ipynb", work)
    monkeypatch.chdir(folder)
    assert batch.run_lessons([Path("-{x} ü.ipynb")], Path("out {y}"), {}, with_scale_model=False) == 0
    executed = nbformat.read(str(folder / "out {y}" / "-{x} ü.ipynb"), as_version=4)
    assert executed.cells[0].outputs[0].text == "42\n"


@pytest.mark.parametrize(
    ("source", "parameters", "message"),
    [
        ("workers = 2\nsteps = 5", {"wrokers": "3"}, "'wrokers' is in none of the notebooks; did you mean workers?"),
        ("workers = 2\nsteps = 5", {"lr": "3"}, "'lr' is in none of the notebooks; they have steps, workers"),
        ("print(1)", {"lr": "3"}, "they have no such cell with the tag parameters"),
        ("def f():\n    lr = 1\nrate = 2", {"lr": "3"}, "'lr' is in none of the notebooks; they have rate"),
        ("import os", {"os": "3"}, "'os' is in none of the notebooks"),
        ("epochs = 5 if True else 2", {"epochs": "five"}, "'epochs' is 'five'; in own it must be like its default, 5"),
        ("a, epochs = 1, 5", {"epochs": ""}, "'epochs' is ''; in own it must be like its default, 5"),
        ("rate: float = 0.1", {"rate": "True"}, "'rate' is 'True'; in own it must be like its default, 0.1"),
        ("shuffle = True", {"shuffle": "false"}, "'shuffle' is 'false'; in own it must be like its default, True"),
        ("full = size == 'all'", {"full": "no"}, "'full' is 'no'; in own it must be like its default, True"),
        ("sizes = [1, 2]", {"sizes": "3"}, "'sizes' is '3'; in own it must be like its default, [1, 2]"),
        ("names = ['a']", {"names": "[b, c]"}, "'names' is '[b, c]'; in own it must be like its default, ['a']"),
        ("table = {}", {"table": "[1]"}, "'table' is '[1]'; in own it must be like its default, {}"),
        ("lr = \nx = 1", {"x": "2"}, "its parameters have the line 'lr =', no Python"),
        ("size = environ.get('WORKSHOP_SIZE')", {"size": "no"}, "size is 'no'; it must be normal or small"),
        ("# WORKSHOP_SIZE\nworkers = 2", {"workers": "0"}, "'workers' is '0'; it must be a whole number of at least"),
        ("# WORKSHOP_SIZE\nworkers = 2", {"workers": "2.5"}, "'workers' is '2.5'; it must be a whole number"),
    ],
)  # fmt: skip
def test_a_parameter_that_would_change_nothing_or_break_the_lesson_is_refused(
    source, parameters, message, tmp_path
):
    path = write_notebook(tmp_path / "own.ipynb", parameters_cell(source))
    with pytest.raises(JobError, match=re.escape(message)):
        batch.run_lessons([path], tmp_path / "build", parameters, with_scale_model=False)
    assert not (tmp_path / "build").exists()


def test_a_misspelt_size_of_the_environment_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_SIZE", "tiny")
    lesson = parameters_cell("size = os.environ.get('WORKSHOP_SIZE', 'normal')")
    with pytest.raises(JobError, match="size is 'tiny'; it must be normal or small"):
        batch.run_lessons([write_notebook(tmp_path / "00_own.ipynb", lesson)], tmp_path / "build", {}, False)


def test_no_notebook_is_overwritten(tmp_path):
    (tmp_path / "other").mkdir()
    first, second = write_notebook(tmp_path / "a.ipynb"), write_notebook(tmp_path / "other" / "a.ipynb")
    with pytest.raises(JobError, match=r"where .*a\.ipynb would be overwritten; give another folder"):
        batch.run_lessons([first], tmp_path / "other" / "..", {}, with_scale_model=False)
    with pytest.raises(JobError, match=r"is not the only one with a page .*a\.html; rename it"):
        batch.run_lessons([first, second], tmp_path / "build", {}, with_scale_model=False)
    with pytest.raises(JobError, match=r"is not the only one with a page .*report\.html; rename it"):
        batch.run_lessons([write_notebook(tmp_path / "report.ipynb")], tmp_path / "build", {}, False)


def test_a_hang_and_a_dead_kernel_are_named_with_their_cell_and_the_others_still_run(
    tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(batch, "CELL_TIMEOUT_SECONDS", 3)
    sources = {
        "00_hangs": "import time; time.sleep(600)",
        "01_dies": "import os; os.kill(os.getpid(), 9)",
        "02_runs": "",
    }
    paths = [
        write_notebook(
            tmp_path / f"{name}.ipynb", nbformat.v4.new_code_cell("1"), nbformat.v4.new_code_cell(source)
        )
        for name, source in sources.items()
    ]
    assert batch.run_lessons(paths, tmp_path / "build", {}, with_scale_model=False) == 1
    said = capsys.readouterr().out
    hang = "00_hangs.ipynb: cell 1: CellTimeoutError: A cell timed out while it was being executed, after 3 seconds."
    assert f"{hang}\n{tmp_path}/01_dies.ipynb: cell 1: DeadKernelError: Kernel died\n1 of 3 lessons" in said


def interrupted(path):
    raise KeyboardInterrupt


def out_of_space(path):
    Path(path).write_text("{")
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("failure", "code", "sentence"),
    [
        (interrupted, 130, "stopped in 00_own; what was executed is in "),
        (out_of_space, 1, "00_own.ipynb: OSError: [Errno 28] No space left on device\n"),
    ],
)
def test_an_interrupt_and_a_full_disk_are_said_in_a_sentence(
    failure, code, sentence, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(batch.papermill, "execute_notebook", lambda path, *_, **__: failure(path))
    notebook = write_notebook(tmp_path / "00_own.ipynb")
    assert batch.run_lessons([notebook], tmp_path / "build", {}, with_scale_model=False) == code
    assert sentence in capsys.readouterr().out


def test_two_runs_do_not_write_into_one_folder(tmp_path):
    notebook, output = write_notebook(tmp_path / "00_own.ipynb"), tmp_path / "build"
    output.mkdir()
    other = os.open(output, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(JobError, match="where another run writes; give another folder"):
        batch.run_lessons([notebook], output, {}, with_scale_model=False)
    os.close(other)
    assert batch.run_lessons([notebook], output, {}, with_scale_model=False) == 0


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


def test_the_report_begins_with_the_scale_model_a_picture_a_model(tmp_path):
    rows = pd.concat([scaled(), scaled().assign(model="resnet101")])
    page = report.write_report(tmp_path / "report.html", scaled=rows)
    page = BeautifulSoup(page.read_text(), "html.parser")
    first, second = page.select("figure img")
    assert "VGG-16: 2 workers are worth 1.50 devices with a ring" in first["alt"]
    assert "ResNet-101" in second["alt"]
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
    [("normal", True, [(4, 8, 16)]), ("small", True, [(4, 8)]), ("normal", False, [])],
)
def test_a_scale_model_is_measured_unless_asked_otherwise(
    asked, size, with_scale_model, counts, monkeypatch, tmp_path
):
    monkeypatch.setenv("WORKSHOP_SIZE", size)
    notebook = write_notebook(tmp_path / "00_none.ipynb")
    assert batch.run_lessons([notebook], tmp_path / "build", {}, with_scale_model) == 0
    assert asked == counts
    assert ("emulated device" in (tmp_path / "build" / "report.html").read_text()) == with_scale_model


def test_a_scale_model_that_cannot_be_measured_is_a_failure_beside_the_report(monkeypatch, tmp_path, capsys):
    def headline(store, workers):
        raise JobError("16 workers keep 30% of this machine busy")

    monkeypatch.setattr(batch.scale_model, "headline", headline)
    notebook = write_notebook(tmp_path / "00_none.ipynb")
    assert batch.run_lessons([notebook], tmp_path / "build", {}, with_scale_model=True) == 1
    assert "16 workers keep 30% of this machine busy" in capsys.readouterr().out
    assert "00_none" in (tmp_path / "build" / "report.html").read_text()
