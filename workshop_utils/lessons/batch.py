"""Runs the lessons in batch: executes notebooks in order, measures a scale model, writes a report."""

from __future__ import annotations

import ast
import logging
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import papermill
import yaml
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from workshop_utils.jobs import JobError
from workshop_utils.lessons import report, selection
from workshop_utils.scaling import experiment, scale_model

CELL_TIMEOUT_SECONDS = 600
BAR = "{desc} {n}/{total} |{bar:30}| {elapsed}"
# It warns about each line of parameters with two equals signs.
logging.getLogger("papermill").setLevel(logging.ERROR)


@dataclass(frozen=True)
class Lesson:
    """One executed notebook, its time, and its error, which is "" if every cell ran."""

    notebook: Path
    seconds: float
    error: str
    executed: Any


def run_lessons(
    notebooks: Sequence[Path],
    output: Path,
    parameters: Sequence[str],
    with_scale_model: bool,
) -> int:
    """Execute `notebooks` (all of `notebooks/` if empty) into `output` and write `report.html` there.

    Args:
        notebooks: paths.
        output: a folder.
        parameters: NAME=VALUE; each notebook gets those that its parameters cell has.
        with_scale_model: whether to measure how training scales on a scale model of a cluster.

    Returns:
        The exit code: 0 if every notebook and the scale model succeeded, otherwise 1.

    Raises:
        JobError: for a notebook that does not exist, or a parameter that no notebook has.
    """
    paths = selection.notebook_paths(notebooks)
    values = parsed(parameters)
    accepted = {path: parameters_of(selection.read_notebook(path)) for path in paths}
    names = sorted(set().union(*accepted.values()))
    for name in values:  # papermill accepts any, so a misspelt one would have no effect
        if name not in names:
            raise JobError(f"parameter {name!r} is in none of the notebooks; they have {', '.join(names)}")
    workers = values.get("workers", 1)
    if not isinstance(workers, int) or workers < 1:
        raise JobError(f"parameter 'workers' is {workers!r}; it must be a whole number of at least 1")
    output.mkdir(parents=True, exist_ok=True)
    executed = []
    bar = tqdm(paths, bar_format=BAR)
    for notebook in bar:
        bar.set_description(notebook.stem)
        own = {name: value for name, value in values.items() if name in accepted[notebook]}
        lesson = execute(notebook, output / notebook.name, own)
        mark = "FAILED" if lesson.error else "ok"
        bar.write(f"  {notebook.stem:<40} {mark:<7} {lesson.seconds:6.1f} s")
        executed.append(lesson)
    scaled = None
    failures = []
    if with_scale_model:
        counts = (1, 2, 4) if os.environ.get("WORKSHOP_SIZE") == "small" else (1, 2, 4, 8, 16)
        try:
            scaled = scale_model.headline(experiment.Store.default(), counts)
        except JobError as error:
            failures.append(f"scale model: {error}")
    path = report.write_report(output / "report.html", executed, scaled)
    failures += [f"{lesson.notebook}: {lesson.error}" for lesson in executed if lesson.error]
    succeeded = sum(not lesson.error for lesson in executed)
    for failure in failures:
        print(failure)
    seconds = sum(lesson.seconds for lesson in executed)
    print(f"{succeeded} of {len(executed)} lessons succeeded, in {seconds:.0f} s; the report is {path}")
    return 1 if failures else 0


def parsed(parameters: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs as a dict of values, read as YAML so that 4 is a number. Raises JobError for another form."""
    values = {}
    for pair in parameters:
        name, equals, text = pair.partition("=")
        if not (name.isidentifier() and equals):
            raise JobError(f"parameter is {pair!r}; it must be NAME=VALUE, such as workers=4")
        try:
            values[name] = yaml.safe_load(text)
        except yaml.YAMLError:
            raise JobError(f"parameter {name!r} is {text!r}; it is not a value that YAML can read") from None
    return values


def parameters_of(notebook: Any) -> set[str]:
    """The names that the cell tagged `parameters` assigns.

    papermill's own inspection looks for equals signs, and misses `epochs = 5 if size == "normal" else 2`.
    """
    return {
        node.id
        for cell in notebook.cells
        if "parameters" in cell.metadata.get("tags", [])
        for node in ast.walk(ast.parse(cell.source))
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }


def execute(notebook: Path, target: Path, parameters: dict[str, Any]) -> Lesson:
    """Execute one notebook into `target`; a failure is part of the result."""
    error = ""
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # papermill's own, about Jupyter
            papermill.execute_notebook(
                str(notebook), str(target), parameters, cwd=str(notebook.parent), progress_bar=False,
                execution_timeout=CELL_TIMEOUT_SECONDS, kernel_name="python3", config=selection.KERNEL,
            )  # fmt: skip
    except PapermillExecutionError as failure:
        error = f"cell {failure.cell_index}: {failure.ename}: {failure.evalue}"
    except Exception as failure:  # the kernel died, a cell timed out: the other lessons still run
        error = f"{type(failure).__name__}: {failure}"
    seconds = time.monotonic() - start
    return Lesson(notebook, seconds, error, selection.read_notebook(target if target.is_file() else notebook))
