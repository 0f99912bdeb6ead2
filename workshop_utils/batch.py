"""Runs the lessons in batch: executes notebooks in order, measures how strategies scale, writes one report."""

from __future__ import annotations

import ast
import logging
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat
import papermill
import yaml
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from workshop_utils import lessons, report
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.scaling import sweep

JOBS = Path("jobs")
CELL_TIMEOUT_SECONDS = 600
logging.getLogger("papermill").setLevel(
    logging.ERROR
)  # it warns of each line of parameters that has two equals signs
LESSON_SECONDS = 180  # that a lesson may take on two cores; one that takes longer is marked


@dataclass
class Lesson:
    """One executed notebook: whether it succeeded, how long it took, and what went wrong where it did not."""

    notebook: Path
    seconds: float = 0.0
    error: str = ""
    executed: Any = field(default=None, repr=False)

    @property
    def succeeded(self) -> bool:
        """Whether every cell ran."""
        return not self.error

    @property
    def took_too_long(self) -> bool:
        """Whether it took longer than a lesson may."""
        return self.seconds > LESSON_SECONDS


def run(
    notebooks: Sequence[Path], output: Path, parameters: Sequence[str], with_sweep: bool, strategies: str = ""
) -> int:
    """Execute `notebooks` (all of `notebooks/` when empty) into `output` and write `report.html` there.

    `parameters` are NAME=VALUE; each notebook gets those that its parameters cell names. Returns 0 if every
    notebook and every run of the sweep succeeded, otherwise 1.

    `strategies` names those to sweep, with commas between; all by default.

    Raises:
        JobError: for a notebook that does not exist, a parameter that no notebook has, or an unknown strategy.
    """
    chosen = lessons.chosen(notebooks)
    values = parsed(parameters)
    accepted = check_parameters(chosen, values)
    planned = _planned(values, [name for name in strategies.split(",") if name])
    output.mkdir(parents=True, exist_ok=True)
    executed = []
    with tqdm(
        chosen, desc="lessons", unit="lesson", bar_format="{desc} {n}/{total} |{bar:30}| {elapsed}"
    ) as bar:
        for notebook in bar:
            bar.set_description(notebook.stem)
            mine = {name: value for name, value in values.items() if name in accepted[notebook]}
            lesson = execute(notebook, output / notebook.name, mine)
            mark = "ok" if lesson.succeeded else "FAILED"
            over = f"  over {LESSON_SECONDS} s" if lesson.took_too_long else ""
            bar.write(f"  {notebook.stem:<40} {mark:<7} {lesson.seconds:6.1f} s{over}")
            executed.append(lesson)
    measured, sweep_seconds = _sweep(planned) if with_sweep else ([], 0.0)
    path = report.write(output, executed, sweep.table(measured) if with_sweep else None, sweep_seconds)
    failed = [lesson for lesson in executed if not lesson.succeeded]
    failed_runs = [row for row in measured if row.state != "succeeded"]
    for lesson in failed:
        print(f"{lesson.notebook}: {lesson.error}")
    for row in failed_runs:
        print(f"sweep, {row.strategy} with {row.workers}: {row.reason}")
    seconds = sum(lesson.seconds for lesson in executed)
    swept = f", the sweep {sweep_seconds:.0f} s" if with_sweep else ""
    print(f"{seconds + sweep_seconds:.0f} s in all: the lessons {seconds:.0f} s{swept}")
    for lesson in executed:
        if lesson.took_too_long:
            print(
                f"{lesson.notebook}: {lesson.seconds:.0f} s; a lesson should take {LESSON_SECONDS} s at most"
            )
    print(f"{len(executed) - len(failed)} of {len(executed)} lessons succeeded; the report is {path}")
    return 1 if failed or failed_runs else 0


def parsed(parameters: Sequence[str]) -> dict[str, Any]:
    """NAME=VALUE pairs as values, read as YAML so that 4 is a number. Raises JobError for another form."""
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


def check_parameters(notebooks: Sequence[Path], values: dict[str, Any]) -> dict[Path, set[str]]:
    """The names that each notebook's parameters cell has.

    papermill takes any name and says nothing, so a misspelt one would silently change nothing.

    Raises:
        JobError: for a name that none of the notebooks has.
    """
    accepted = {path: parameters_of(lessons.read(path)) for path in notebooks}
    known = set().union(*accepted.values())
    for name in values:
        if name not in known:
            raise JobError(
                f"parameter {name!r} is in none of the notebooks; they have {', '.join(sorted(known))}"
            )
    return accepted


def parameters_of(notebook: Any) -> set[str]:
    """The names that the cell tagged `parameters` assigns.

    papermill's own look at that cell goes by equals signs, and misses `epochs = 5 if size == "normal" else 2`.
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
    lesson = Lesson(notebook)
    began = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # papermill's own, of its Jupyter plumbing
            papermill.execute_notebook(
                str(notebook),
                str(target),
                parameters,
                cwd=str(notebook.parent),
                progress_bar=False,
                execution_timeout=CELL_TIMEOUT_SECONDS,
                config=lessons.KERNEL,
            )
    except PapermillExecutionError as error:
        lesson.error = f"cell {error.cell_index}: {error.ename}: {error.evalue}"
    except Exception as error:  # the kernel died, a cell timed out: the other lessons go on all the same
        lesson.error = f"{type(error).__name__}: {error}"
    lesson.seconds = time.monotonic() - began
    if target.is_file():
        lesson.executed = nbformat.read(str(target), as_version=4)
    return lesson


def _planned(values: dict[str, Any], strategies: Sequence[str]) -> list[TrainingJob]:
    largest = values.get("workers", 4)
    if not isinstance(largest, int) or largest < 1:
        raise JobError(f"parameter 'workers' is {largest!r}; it must be a whole number of at least 1")
    small = os.environ.get("WORKSHOP_SIZE") == "small"
    counts = [count for count in (1, 2, 4, 8, 16) if count < largest] + [largest]
    jobs = sweep.plan(JOBS, counts, **({"epochs": 1} if small else {}))
    known = sorted({job.strategy for job in jobs})
    for name in strategies:
        if name not in known:
            raise JobError(f"strategy is {name!r}; it must be one of {', '.join(known)}")
    return [job for job in jobs if not strategies or job.strategy in strategies]


def _sweep(jobs: Sequence[TrainingJob]) -> tuple[list[sweep.Measurement], float]:
    began = time.monotonic()
    rows = []
    with tqdm(total=len(jobs), desc="sweep", bar_format="{desc} {n}/{total} |{bar:30}| {elapsed}") as bar:
        for row in sweep.sweep(jobs):
            rows.append(row)
            bar.update()
            bar.write(
                f"  {row.strategy:<24} {row.workers} workers  {row.state:<10} {row.samples_per_second:9,.0f} samples/s"
            )
    return rows, time.monotonic() - began
