"""`TrainingJob.from_function`: a notebook's function as a script, what travels with it, and that it runs on targets."""

import os
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from IPython.core.interactiveshell import InteractiveShell
from traitlets.config import Config

from workshop_utils import on_ranks
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import EmulatedKubernetes, Kubernetes
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.sagemaker import EmulatedSageMaker

ROLE = "arn:aws:iam::123456789012:role/workshop"


class Notebook:
    """An IPython shell of this process, as a kernel has one."""

    def __init__(self, shell):
        self.shell = shell

    def __getitem__(self, name):
        return self.shell.user_ns[name]

    def cell(self, text):
        self.shell.run_cell(textwrap.dedent(text), store_history=True).raise_error()

    def job(self, arguments=None, framework=None, **fields):
        return TrainingJob.from_function(self["program"], arguments, framework, **fields)


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    before = sys.modules["__main__"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("IPYTHONDIR", str(tmp_path_factory.mktemp("ipython")))
        if InteractiveShell.initialized():  # another file's, which knows nothing of this one's cells
            type(InteractiveShell.instance()).clear_instance()
        started = InteractiveShell.instance(config=Config(HistoryManager={"enabled": False}))
        yield started
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = before


@pytest.fixture
def notebook(shell, tmp_path, monkeypatch):
    """An empty notebook, whose functions' scripts go to `tmp_path`, and which finds modules there."""
    monkeypatch.setattr("workshop_utils.jobs.function.cache_folder", lambda: tmp_path / "cache")
    monkeypatch.syspath_prepend(tmp_path)
    before = dict(shell.user_ns)
    yield Notebook(shell)
    shell.user_ns.clear()
    shell.user_ns.update(before)


def text_of(job):
    return job.script_path.read_text()


def called(job, *arguments):
    """What the job's function returns here, where only its script has defined it."""
    names = {"__name__": "train"}
    exec(compile(text_of(job), "train.py", "exec"), names)
    return names["program"](None, *arguments)


# What travels: the script's function returns what the notebook's does.

TRAVELS = yaml.safe_load(Path(__file__).with_name("travelling_cells.yaml").read_text(encoding="utf-8"))


@pytest.mark.processes
@pytest.mark.parametrize("text", TRAVELS.values(), ids=TRAVELS)
def test_what_a_function_uses_travels(notebook, text):
    notebook.cell(text)
    assert called(notebook.job()) == notebook["program"](None)


def test_a_class_travels_as_it_was_last_defined(notebook):
    first = "from dataclasses import dataclass\n@dataclass\nclass Point:\n    x: int = 1"
    for text in (first, first.replace("1", "2"), first):
        notebook.cell(text)
    notebook.cell("def program(group): return Point().x")
    assert called(notebook.job()) == 1


def test_functions_of_a_file_beside_the_notebook_travel_as_their_source(notebook, tmp_path):
    (tmp_path / "own_steps.py").write_text(
        "from __future__ import annotations\nRATE = 0.5\ndef step(x: Unknown) -> Unknown: return x * RATE\n"
    )
    notebook.cell("from own_steps import step\ndef program(group): return step(4)")
    assert called(notebook.job()) == 2.0
    assert "own_steps" not in text_of(notebook.job())


def test_nothing_travels_that_the_function_does_not_use(notebook):
    notebook.cell("import pandas\nSECRET = 'pass'\ndef other(): return SECRET\ndef program(group): pass")
    assert not {"pandas", "SECRET", "other"} & set(text_of(notebook.job()).replace("(", " ").split())


# What does not: refused, by name.

CORPUS = Path(__file__).with_name("guards") / "bad_inputs.yaml"
REFUSED = yaml.safe_load(CORPUS.read_text(encoding="utf-8"))["functions"]


@pytest.mark.processes
@pytest.mark.parametrize("entry", REFUSED, ids=lambda entry: entry["says"][0])
def test_what_cannot_travel_is_refused_by_name(notebook, tmp_path, entry):
    (tmp_path / "own_helper.py").write_text("def f(): return 1\n")
    notebook.cell(entry["cell"])
    with pytest.raises(JobError) as refusal:
        notebook.job()
    assert all(words in str(refusal.value) for words in entry["says"])
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": 1, "y": {1, 2}}, "arguments.y (set) cannot travel: a job's arguments are JSON"),
        ({"x": (1, 2)}, "arguments.x (tuple) cannot travel"),
        ({"x": {1: 2}}, "arguments.x (dict) cannot travel"),
        ({"x": float("nan")}, "arguments.x (float) cannot travel"),
        ({"x": [float("inf")]}, "arguments.x (list) cannot travel"),
        ({"z": 1}, "a rank would call program(communicator, z=…): missing a required argument: 'x'"),
        ([1], "arguments is [1]; it must hold values by the names of parameters"),
    ],
)
def test_arguments_that_cannot_travel_are_refused_by_name(notebook, arguments, message):
    notebook.cell("def program(group, x, y=1): pass")
    with pytest.raises(JobError) as refusal:
        notebook.job(arguments)
    assert message in str(refusal.value)


# The job


def test_a_cache_folder_that_cannot_be_written_is_named(notebook, tmp_path, monkeypatch):
    (tmp_path / "cache").touch()
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))
    notebook.cell("def program(group): return 1")
    message = (
        f"cache folder {tmp_path / 'cache'} cannot be written .*; set WORKSHOP_CACHE to a folder that can"
    )
    with pytest.raises(JobError, match=message):
        notebook.job()


def test_the_same_function_is_the_same_folder_even_when_threads_write_it_and_one_long_unused_goes(
    notebook, tmp_path
):
    notebook.cell("def program(group): return 1")
    with ThreadPoolExecutor(8) as pool:
        folders = {job.folder for job in pool.map(lambda _: notebook.job(), range(32))}
    (folder,) = folders
    assert [path.name for path in folder.parent.rglob("*")] == [folder.name, "train.py"]
    os.utime(folder, times=(0, 0))
    assert notebook.job().folder == folder  # as new
    notebook.cell("def program(group): return 2")
    other = notebook.job().folder
    assert other != folder
    os.utime(folder, times=(0, 0))
    notebook.job()
    assert list(folder.parent.iterdir()) == [other]


@pytest.mark.parametrize(
    ("framework", "imports", "kind"),
    [
        ("horovod", "import horovod.torch", "MPIJob"),
        ("tensorflow", "import tensorflow", "TFJob"),
        ("torch", "import torch.distributed", "PyTorchJob"),
    ],
)
def test_a_framework_decides_the_strategy_and_what_the_script_imports(notebook, framework, imports, kind):
    notebook.cell("def program(group): pass")
    with pytest.raises(JobError, match="framework is 'jax'; it must be 'torch', 'horovod', 'tensorflow', or"):
        notebook.job(framework="jax")
    job = notebook.job(framework=framework, workers=2)
    assert f"    {imports}  #" in text_of(job)
    assert Kubernetes().render(job).resource["kind"] == kind


# On targets: one function whose ranks speak through the Communicator, with what is awkward on a command line.

PROGRAM = """
    import numpy as np
    from workshop_utils.comm.ring import ring_all_reduce

    def program(communicator, length, **others):
        array = np.full(length, communicator.rank + 0.5)
        ring_all_reduce(communicator, array, "mean")
        return array.tolist(), sorted(others.items())
"""
ARGUMENTS = {
    "length": 3,
    "nested": {"a": [None, {"b": 1}], "c": [1, -2.5]},
    "help": "--help",
    "small": -1e-05,
    "large": 2**70,
    "yes": True,
    "nothing": None,
    "title": "True",
    "nan": "NaN",
    "list": "[1]",
    "empty": "",
    "lines": "a\nb",
    "quotes": 'it\'s "$HOME" `x` ö \\n',
}


@pytest.mark.processes
@pytest.mark.parametrize("target", [Local, EmulatedSageMaker, EmulatedKubernetes])
def test_a_function_s_job_gives_on_every_target_what_on_ranks_gives(target, notebook, data_folder):
    notebook.cell(PROGRAM)
    values = on_ranks(2, notebook["program"], ARGUMENTS).values
    assert values[0] == (
        [1.0] * 3,
        sorted((name, value) for name, value in ARGUMENTS.items() if name != "length"),
    )
    with target().launch(notebook.job(ARGUMENTS, workers=2, data=str(data_folder))) as run:
        run.wait(120)
        assert sorted(line.text for line in run.logs() if " returned " in line.text) == [
            f"rank {rank} returned {value!r}" for rank, value in enumerate(values)
        ]
