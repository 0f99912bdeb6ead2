"""Runs the lessons in batch: executes notebooks in order, measures how strategies scale, writes a report."""

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

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.lessons import report, selection
from workshop_utils.scaling import experiment, scale_model

JOBS = Path("jobs")
CELL_TIMEOUT_SECONDS = 600
SWEPT = (
    "strategy", "workers", "network", "state", "reason", "samples_per_second", "first_step_seconds", "accuracy",
)  # fmt: skip
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
    with_sweep: bool,
    strategies: str = "",
    bare: bool = False,
) -> int:
    """Execute `notebooks` (all of `notebooks/` if empty) into `output` and write `report.html` there.

    Args:
        notebooks: paths.
        output: a folder.
        parameters: NAME=VALUE; each notebook gets those that its parameters cell has.
        with_sweep: whether to measure how training scales: on a scale model of a cluster, and on this machine's cores.
        strategies: those to measure on cores, separated by commas; all by default.
        bare: measure on cores alone.

    Returns:
        The exit code: 0 if every notebook and every run of the sweep succeeded, otherwise 1.

    Raises:
        JobError: for a notebook that does not exist, a parameter that no notebook has, or an unknown strategy.
    """
    paths = selection.notebook_paths(notebooks)
    values = parsed(parameters)
    accepted = {path: parameters_of(selection.read_notebook(path)) for path in paths}
    names = sorted(set().union(*accepted.values()))
    for name in values:  # papermill accepts any, so a misspelt one would have no effect
        if name not in names:
            raise JobError(f"parameter {name!r} is in none of the notebooks; they have {', '.join(names)}")
    planned = _planned(values, [name for name in strategies.split(",") if name])
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
    measured = scaled = None
    failures = []
    if with_sweep and not bare:
        try:
            scaled = scale_model.headline(
                experiment.Store.default(), (1, 2, 4) if _is_small() else (1, 2, 4, 8, 16)
            )
        except JobError as error:
            failures.append(f"scale model: {error}")
    if with_sweep:
        settings = [experiment.Setting(job) for job in planned]
        measured = experiment.measure_all(settings, experiment.Store.default())[[*SWEPT]]
    path = report.write_report(
        output / "report.html", "The workshop, run through", executed, measured, scaled
    )
    failures += [f"{lesson.notebook}: {lesson.error}" for lesson in executed if lesson.error]
    succeeded = sum(not lesson.error for lesson in executed)
    if measured is not None:
        failures += [f"sweep, {failure}" for failure in experiment.failures(measured)]
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


def _is_small() -> bool:
    return os.environ.get("WORKSHOP_SIZE") == "small"


def _planned(values: dict[str, Any], strategies: Sequence[str]) -> list[TrainingJob]:
    largest = values.get("workers", 4)
    if not isinstance(largest, int) or largest < 1:
        raise JobError(f"parameter 'workers' is {largest!r}; it must be a whole number of at least 1")
    counts = [count for count in (1, 2, 4, 8, 16) if count < largest] + [largest]
    jobs = experiment.mnist_jobs(JOBS, counts, epochs=1 if _is_small() else 5)
    allowed = sorted({job.strategy for job in jobs})
    for name in strategies:
        if name not in allowed:
            raise JobError(f"strategy is {name!r}; it must be one of {', '.join(allowed)}")
    return [job for job in jobs if not strategies or job.strategy in strategies]
