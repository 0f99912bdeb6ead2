"""One HTML page of a whole run of the workshop: lessons, times, figures, and how the strategies scaled."""

from __future__ import annotations

import base64
import io
import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import nbconvert
import pandas as pd
from jinja2 import Environment, PackageLoader, select_autoescape
from matplotlib import pyplot as plt

from workshop_utils.plots import scaling, style

if TYPE_CHECKING:
    from workshop_utils.batch import Lesson

SHOWN = {
    "strategy": "{}",
    "workers": "{}",
    "state": "{}",
    "samples_per_second": "{:,.0f}",
    "efficiency": "{:.0%}",
    "accuracy": "{:.3f}",
    "loss": "{:.3f}",
    "first_step_seconds": "{:.1f}",
    "seconds": "{:.1f}",
}
HEADINGS = {
    "samples_per_second": "samples/s",
    "first_step_seconds": "first step, s",
    "seconds": "whole run, s",
}


class Figure(NamedTuple):
    """A picture of a lesson, as base64 PNG, and the heading under which it stands."""

    png: str
    heading: str


def write(
    output: Path, lessons: Sequence[Lesson], measured: pd.DataFrame | None, sweep_seconds: float
) -> Path:
    """Write `output/report.html`, self-contained, and each executed lesson as HTML beside it."""
    for lesson in lessons:
        if lesson.executed is not None:
            html, _ = nbconvert.HTMLExporter().from_notebook_node(lesson.executed)
            (output / f"{lesson.notebook.stem}.html").write_text(html, encoding="utf-8")
    templates = Environment(
        loader=PackageLoader("workshop_utils", "templates"), autoescape=select_autoescape(["html"])
    )
    page = templates.get_template("report.html").render(
        lessons=[{"lesson": lesson, "figures": figures_of(lesson.executed)} for lesson in lessons],
        total_seconds=sum(lesson.seconds for lesson in lessons) + sweep_seconds,
        sweep_seconds=sweep_seconds,
        rows=None if measured is None else _rows(measured),
        columns=[HEADINGS.get(name, name) for name in SHOWN],
        plot=None if measured is None or measured.empty else _plot(measured),
        failures=[] if measured is None else measured[measured["state"] != "succeeded"].to_dict("records"),
        machine=f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        versions=", ".join(
            f"{name} {version(name)}" for name in ("torch", "tensorflow-cpu", "numpy") if _has(name)
        ),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path = output / "report.html"
    path.write_text(page, encoding="utf-8")
    return path


def figures_of(notebook: Any) -> list[Figure]:
    """The PNG figures among a notebook's outputs, in order, each with the last heading above it."""
    found: list[Figure] = []
    heading = ""
    for cell in notebook.cells if notebook is not None else []:
        if cell.cell_type == "markdown":
            headings = re.findall(r"^#+\s*(.+)$", cell.source, flags=re.MULTILINE)
            heading = headings[-1] if headings else heading
            continue
        for produced in cell.get("outputs", []):
            png = produced.get("data", {}).get("image/png")
            if png:
                found.append(Figure(png.replace("\n", ""), heading))
    return found


def _rows(measured: pd.DataFrame) -> list[list[str]]:
    return [
        ["" if pd.isna(row[name]) else form.format(row[name]) for name, form in SHOWN.items()]
        for row in measured.to_dict("records")
    ]


def _plot(measured: pd.DataFrame) -> str:
    style.use()
    figure = scaling.throughput(measured, os.cpu_count() or 1)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    plt.close(figure)
    return base64.b64encode(buffer.getvalue()).decode()


def _has(distribution: str) -> bool:
    try:
        version(distribution)
    except ModuleNotFoundError:
        return False
    return True
