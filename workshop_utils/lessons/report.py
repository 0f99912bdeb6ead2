"""HTML pages: a complete run of the workshop (lessons and their times), and how training scales."""

from __future__ import annotations

import base64
import io
import platform
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from matplotlib import pyplot as plt

from workshop_utils.lessons.page import lesson_page
from workshop_utils.plots import alternative, scaling, style
from workshop_utils.scaling import efficiency
from workshop_utils.setup.machine import cores

if TYPE_CHECKING:
    from workshop_utils.lessons.batch import Lesson

SWEEP_COLUMNS = [
    "strategy", "workers", "state", "samples_per_second", "efficiency", "accuracy", "loss", "first_step_seconds",
    "run_seconds",
]  # fmt: skip


class Figure(NamedTuple):
    """A picture as base64 PNG, its caption, and its alternative text."""

    png: str
    caption: str
    alt: str


def write_report(output: Path, lessons: Sequence[Lesson], sweep: pd.DataFrame | None) -> Path:
    """Write `output/report.html`, self-contained, and each executed lesson as HTML beside it.

    With a `sweep` the page also shows how the strategies scaled.
    """
    for lesson in lessons:
        page = lesson_page(lesson.executed, lesson.notebook)
        (output / f"{lesson.notebook.stem}.html").write_text(page, encoding="utf-8")
    return _render(
        output / "report.html",
        title="The workshop, run through",
        lessons=lessons,
        total_seconds=sum(lesson.seconds for lesson in lessons),
        sweep=None if sweep is None else _sweep(sweep),
    )


def write_scaling(output: Path, runs: pd.DataFrame) -> Path:
    """Write `output/scaling.html`, self-contained: measurements, and where the time went.

    `runs` is a table of `scaling.experiment.measure_all`.
    """
    output.mkdir(parents=True, exist_ok=True)
    return _render(
        output / "scaling.html",
        title="How training scales",
        lessons=[],
        total_seconds=float(runs["run_seconds"].sum()),
        runs=_runs(runs),
    )


def _render(path: Path, **values: Any) -> Path:
    templates = Environment(
        loader=PackageLoader("workshop_utils.lessons", "templates"), autoescape=select_autoescape(["html"])
    )
    page = templates.get_template("report.html").render(
        **values,
        machine=f"{platform.system()} {platform.machine()}, {cores()} cores",
        versions=f"torch {version('torch')}, numpy {version('numpy')}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _table(rows: pd.DataFrame, columns: list[str]) -> Markup:
    """These columns of `rows` as HTML."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

    renamed = rows[columns].rename(columns=lambda name: name.replace("_", " "))
    return Markup(renamed.to_html(index=False, border=0, na_rep="", float_format=number))


def _sweep(measured: pd.DataFrame) -> dict[str, Any]:
    style.use()
    return {
        "figure": None if measured.empty else _figure(scaling.throughput(measured, cores())),
        "table": _table(measured, SWEEP_COLUMNS),
        "failures": efficiency.failures(measured),
    }


def _runs(runs: pd.DataFrame) -> dict[str, Any]:
    """Figures and the table of measured training steps; for other jobs only their rows."""
    figures, rows, columns = [], runs, list(map(str, runs))
    if "step_seconds" in runs:
        rows = efficiency.scaling(runs)
        columns = [name for name in efficiency.SHOWN if name in rows]
        compared = [name for name in ("network", "scaling", "gradient_nbytes") if name in rows]
        for _, alike in rows.groupby(compared):
            first = alike.iloc[0]
            detail = f"{first['network']}, {first['scaling']} scaling"
            if "gradient_nbytes" in rows:
                detail += f", {first['gradient_nbytes'] / 1e6:.2g} MB of gradients"
            curves = scaling.efficiency(alike, {}, "Efficiency against workers", detail).get_figure(root=True)
            figures.append(_figure(curves, f"Efficiency, {detail}"))
            if "transfer_seconds" in alike:
                parts = scaling.where_time_goes(alike, "Where a step's time goes", detail)
                figures.append(_figure(parts, f"Parts of a step, {detail}"))
        marked = efficiency.mark_outliers(runs[runs["state"] == "succeeded"])
        finding = f"{marked['outlier'].sum()} of {len(marked)} runs are outliers"
        noise = scaling.noise(marked, finding, "crosses: outliers")
        figures.append(_figure(noise, "Noise: every run over the median of its setting"))
    return {"figures": figures, "table": _table(rows, columns), "failures": efficiency.failures(runs)}


def _figure(figure: Any, caption: str = "") -> Figure:
    """A drawn figure as PNG and in words; it is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    plt.close(figure)
    return Figure(base64.b64encode(buffer.getvalue()).decode(), caption, alternative.describe(figure))
