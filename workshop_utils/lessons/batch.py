"""Runs the lessons in batch: executes notebooks in order, measures a scale model, writes a report."""

from __future__ import annotations

import ast
import contextlib
import difflib
import json
import math
import os
import re
import symtable
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
from IPython.core.inputtransformer2 import TransformerManager
from papermill.cli import _resolve_type
from papermill.exceptions import PapermillExecutionError
from tqdm import tqdm

from workshop_utils.jobs import JobError
from workshop_utils.lessons import report, selection
from workshop_utils.scaling import experiment, scale_model

CELL_TIMEOUT_SECONDS = 600
BAR = "{desc} {n}/{total} |{bar:30}| {elapsed}"
TAGS = {"parameters", "injected-parameters"}  # the second is papermill's, in a notebook that it has executed
ALIKE = {bool}, {int, float}, {list, tuple, set}, {dict}  # types of defaults and of what may replace them


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
    parameters: Mapping[str, str],
    with_scale_model: bool,
) -> int:
    """Execute `notebooks` (all of `notebooks/` if empty) into `output` and write `report.html` there.

    Args:
        notebooks: paths.
        output: a folder.
        parameters: texts by name; each notebook gets those that its parameters cell has.
        with_scale_model: whether to measure how training scales on a scale model of a cluster.

    Returns:
        The exit code: 0 if every notebook and the scale model succeeded, otherwise 1.

    Raises:
        JobError: for a notebook that does not exist, or a parameter that no notebook has or that one can't take.
    """
    paths = selection.notebook_paths(notebooks)
    contents = {path: selection.read_notebook(path) for path in paths}
    stems = ["report", *(path.stem for path in paths)]
    for path in paths:
        if stems.count(path.stem) > 1:
            raise JobError(f"{path} is not the only one with a page {output / path.stem}.html; rename it")
        if (output / path.name).resolve() == path.resolve():
            raise JobError(f"output is {output}, where {path} would be overwritten; give another folder")
    size = parameters.get("size", os.environ.get("WORKSHOP_SIZE", "normal"))
    workers = parameters.get("workers", "1")
    if any("WORKSHOP_SIZE" in str(each) for each in contents.values()):  # lessons
        if size not in ("normal", "small"):
            raise JobError(f"size is {size!r}; it must be normal or small")
        if not workers.isdecimal() or int(workers) < 1:
            raise JobError(f"parameter 'workers' is {workers!r}; it must be a whole number of at least 1")
    values = values_of(contents, parameters) if parameters else {}
    with _locked(output):
        executed = []
        bar = tqdm(paths, bar_format=BAR)
        for notebook in bar:
            bar.set_description(notebook.stem)
            try:
                lesson = execute(notebook, output / notebook.name, values.get(notebook, {}))
            except KeyboardInterrupt:
                bar.close()
                print(f"stopped in {notebook.stem}; what was executed is in {output}")
                return 130
            mark = "FAILED" if lesson.error else "ok"
            bar.write(f"  {notebook.stem:<40} {mark:<7} {lesson.seconds:6.1f} s")
            executed.append(lesson)
        scaled = None
        failures = []
        if with_scale_model:
            counts = (4, 8) if size == "small" else (4, 8, 16)
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


@contextlib.contextmanager
def _locked(output: Path) -> Iterator[None]:
    """Make the folder `output`, and keep other runs out of it, whose notebooks and pages have the same names."""
    import fcntl  # not on Windows

    output.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(output, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:  # NFS has no locks for folders
            if isinstance(error, BlockingIOError):
                raise JobError(f"output is {output}, where another run writes; give another folder") from None
        yield
    finally:
        os.close(descriptor)


def values_of(notebooks: Mapping[Path, Any], texts: Mapping[str, str]) -> dict[Path, dict[str, str]]:
    """What each notebook takes of `texts`, as Python; prints it. Raises JobError for a name or a value."""
    defaults = {path: defaults_of(path, notebook) for path, notebook in notebooks.items()}
    names = sorted(set().union(*defaults.values()))
    values: dict[Path, dict[str, str]] = {path: {} for path in notebooks}
    for name, text in texts.items():
        if name not in names:  # papermill accepts any, so a misspelt one would have no effect
            close = difflib.get_close_matches(name, names, n=1)
            known = f"they have {', '.join(names) or 'no such cell with the tag parameters'}"
            advice = f"did you mean {close[0]}?" if close else known
            raise JobError(f"parameter {name!r} is in none of the notebooks; {advice}")
        takers: dict[str, list[str]] = {}
        for path in notebooks:
            if name in defaults[path]:
                values[path][name] = value = converted(name, text, defaults[path][name], path)
                takers.setdefault(value, []).append(path.stem)
        for value, stems in takers.items():
            where = ", ".join(stems) if len(stems) < len(notebooks) else "all notebooks"
            print(f"{name} = {value} in {where}")
    return values


def converted(name: str, text: str, default: Any, path: Path) -> str:
    """What papermill makes of `text`, or the list or mapping in it, as Python. Raises JobError for a wrong type."""
    value = _resolve_type(text)
    if isinstance(default, str) and isinstance(value, int | float) and not isinstance(value, bool):
        value = text  # such as 007 or 1.10
    elif not isinstance(default, str) and text.startswith(("[", "(", "{")):
        for read in (json.loads, ast.literal_eval):
            with contextlib.suppress(ValueError, SyntaxError):
                value = read(text)
    alike = next((types for types in ALIKE if type(default) in types), None)
    if alike and value is not None and type(value) not in alike:
        raise JobError(
            f"parameter {name!r} is {text!r}; in {path.stem} it must be like its default, {default!r}"
        )
    return f"float({text!r})" if isinstance(value, float) and not math.isfinite(value) else repr(value)


def defaults_of(path: Path, notebook: Any) -> dict[str, Any]:
    """The names that cells tagged `parameters` assign, and what they assign, or None where that is no plain value.

    papermill's own inspection looks for equals signs, and misses `epochs = 5 if size == "normal" else 2`.
    """
    code = "".join(_code(cell.source) for cell in _tagged(notebook))
    try:
        names, body = symtable.symtable(code, path.name, "exec").get_symbols(), ast.parse(code).body
    except SyntaxError as error:
        line = str(error.text).strip()
        raise JobError(f"{path}: its parameters have the line {line!r}, no Python: {error.msg}") from None
    assigned = [each for each in names if each.is_assigned() and not each.is_namespace()]
    defaults: dict[str, Any] = {each.get_name(): None for each in assigned}
    for node in body:
        value: Any = getattr(node, "value", None)
        value = value.body if isinstance(value, ast.IfExp) else value
        targets = getattr(node, "targets", [getattr(node, "target", None)])
        with contextlib.suppress(ValueError, TypeError):
            parts: Any = [isinstance(value, ast.Compare) or ast.literal_eval(value)]
            if isinstance(targets[0], ast.Tuple):
                targets, parts = targets[0].elts, parts[0]
            pairs = zip(targets, parts, strict=False)
            defaults |= {each.id: part for each, part in pairs if isinstance(each, ast.Name)}
    return defaults


def _tagged(notebook: Any) -> list[Any]:
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    return [cell for cell in cells if TAGS & {*cell.metadata.get("tags", [])}]


def _code(source: str) -> str:
    """A cell's code, without the magic whose cell it is; other magics are calls."""
    return TransformerManager().transform_cell(re.sub(r"\A\s*%%.*", "", source))


def with_values(source: str, values: Mapping[str, str]) -> str:
    """A parameters cell in which `values` follow their defaults, so that others are derived from them."""
    code = _code(source)
    lines = code.encode().split(b"\n")
    for node in reversed(ast.parse(code).body):
        row, column = (node.end_lineno or 1) - 1, node.end_col_offset
        names = [each for each in ast.walk(node) if isinstance(each, ast.Name)]
        for name in values.keys() & {each.id for each in names if isinstance(each.ctx, ast.Store)}:
            line = f"\n{name} = {values[name]}".encode()
            lines[row] = lines[row][:column] + line + lines[row][column:]
    last = [f"{name} = {value}" for name, value in values.items() if value[0] in "[{"]  # maybe changed since
    return "\n".join([*re.findall(r"\A\s*%%.*", source), b"\n".join(lines).decode().strip(), *last])


def execute(notebook: Path, target: Path, parameters: Mapping[str, str]) -> Lesson:
    """Execute one notebook into `target`, with its parameters as Python; a failure is part of the result."""
    error = ""
    start = time.monotonic()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # papermill's own, about Jupyter
            parameterized = selection.read_notebook(notebook)
            for cell in _tagged(parameterized) if parameters else ():
                cell.source = with_values(cell.source, parameters)
            nbformat.write(parameterized, str(target))
            name = str(target.absolute()).replace("{", "{{").replace("}", "}}")  # which papermill fills in
            papermill.execute_notebook(
                name, name, cwd=str(notebook.parent), progress_bar=False,
                execution_timeout=CELL_TIMEOUT_SECONDS, kernel_name="python3", config=selection.KERNEL,
            )  # fmt: skip
    except PapermillExecutionError as failure:
        error = f"cell {failure.cell_index}: {failure.ename}: {failure.evalue}"
    except Exception as failure:  # the kernel died, a cell timed out: the other lessons still run
        begun = [
            cell.metadata.get("papermill", {}).get("start_time") for cell in _saved(target, notebook).cells
        ]
        where = f"cell {max(index for index, when in enumerate(begun) if when)}: " if any(begun) else ""
        error = f"{where}{type(failure).__name__}: {next(iter(str(failure).splitlines()), '')}"
    seconds = time.monotonic() - start
    return Lesson(notebook, seconds, error, _saved(target, notebook))


def _saved(target: Path, notebook: Path) -> Any:
    """What was executed, or `notebook` where nothing was, or where a full disk has cut it short."""
    try:
        return selection.read_notebook(target)
    except (JobError, OSError):
        return selection.read_notebook(notebook)
