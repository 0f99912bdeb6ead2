"""HTML pages: a complete run of the workshop (lessons, times, figures), and how training scales."""

from __future__ import annotations

import base64
import functools
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

from workshop_utils.lessons.page import inline, lesson_page
from workshop_utils.lessons.selection import headed_cells
from workshop_utils.plots import alternative, prediction, scaling, style
from workshop_utils.scaling import efficiency, validation
from workshop_utils.setup.machine import cores

if TYPE_CHECKING:
    from workshop_utils.lessons.batch import Lesson

SWEEP_COLUMNS = [
    "strategy", "workers", "state", "samples_per_second", "efficiency", "accuracy", "loss", "first_step_seconds",
    "run_seconds",
]  # fmt: skip
SCORE_COLUMNS = [
    "system", "points", "error", "largest", "plain_line", "hardware_alone", "where_errors_come_from",
]  # fmt: skip
OTHER_COLUMNS = ["what", "measured", "predicted_low", "predicted_high", "why"]


class Figure(NamedTuple):
    """A picture as base64 PNG, the heading above it (Markdown), and its alternative text."""

    png: str
    heading: str
    alt: str


def write_report(output: Path, lessons: Sequence[Lesson], sweep: pd.DataFrame | None, seconds: float) -> Path:
    """Write `output/report.html`, self-contained, and each executed lesson as HTML beside it.

    With a `sweep`, which took so many `seconds`, the page also compares predictions of scaling with published results.
    """
    for lesson in lessons:
        page = lesson_page(lesson.executed, lesson.notebook)
        (output / f"{lesson.notebook.stem}.html").write_text(page, encoding="utf-8")
    return _render(
        output / "report.html",
        title="The workshop, run through",
        lessons=[(lesson, slowest_cell(lesson.executed), figures_of(lesson.executed)) for lesson in lessons],
        total_seconds=sum(lesson.seconds for lesson in lessons) + seconds,
        sweep=None if sweep is None else _sweep(sweep, seconds),
        validation=None if sweep is None else _validation(),
    )


def write_scaling(output: Path, runs: pd.DataFrame) -> Path:
    """Write `output/scaling.html`, self-contained: measurements, where the time went, and errors of predictions.

    `runs` is a table of `scaling.experiment.measure_all`.
    """
    output.mkdir(parents=True, exist_ok=True)
    return _render(
        output / "scaling.html",
        title="How training scales",
        lessons=[],
        total_seconds=float(runs["run_seconds"].sum()),
        runs=_runs(runs),
        validation=_validation(),
    )


def _render(path: Path, **values: Any) -> Path:
    templates = Environment(
        loader=PackageLoader("workshop_utils.lessons", "templates"), autoescape=select_autoescape(["html"])
    )
    templates.filters["markdown"] = inline
    page = templates.get_template("report.html").render(
        **values,
        machine=f"{platform.system()} {platform.machine()}, {cores()} cores",
        versions=f"torch {version('torch')}, numpy {version('numpy')}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path.write_text(page, encoding="utf-8")
    return path


def figures_of(notebook: Any) -> list[Figure]:
    """The PNG figures among a notebook's outputs, in order, each with the last heading above it."""
    figures = []
    for heading, cell in headed_cells(notebook):
        for output in cell.outputs:
            if png := output.get("data", {}).get("image/png"):
                about = output.get("metadata", {}).get("image/png", {})
                alt = about.get("alt") or f"Figure under the heading {heading}"
                figures.append(Figure(png.replace("\n", ""), heading, alt))
    return figures


def slowest_cell(notebook: Any) -> str:
    """The time of a notebook's slowest cell and the heading above it; "" without papermill's times."""
    cells = headed_cells(notebook)
    times = [(cell.metadata.get("papermill", {}).get("duration") or 0.0, heading) for heading, cell in cells]
    seconds, heading = max(times, default=(0.0, ""))
    return f"{seconds:.1f} s: {heading}" if seconds else ""


def _table(rows: pd.DataFrame, columns: list[str], kind: str = "") -> Markup:
    """These columns of `rows` as HTML; `kind` is a class of the style sheet."""

    def number(value: float) -> str:
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"

    renamed = rows[columns].rename(columns=lambda name: name.replace("_", " "))
    return Markup(renamed.to_html(index=False, border=0, na_rep="", float_format=number, classes=kind))


def _sweep(measured: pd.DataFrame, seconds: float) -> dict[str, Any]:
    style.use()
    return {
        "seconds": seconds,
        "figure": None if measured.empty else _figure(scaling.throughput(measured, cores())),
        "table": _table(measured, SWEEP_COLUMNS),
        "failures": efficiency.failures(measured),
    }


def _runs(runs: pd.DataFrame) -> dict[str, Any]:
    """Figures and the table of measured training steps; for other jobs only their rows."""
    figures, rows, columns = [], runs, [str(name) for name in runs]
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


@functools.cache
def _validation() -> dict[str, Any]:
    """The errors of predictions against published results, with a sentence on each."""
    predictions = validation.published_predictions()
    scores = validation.scores(predictions)
    plain = validation.published_predictions(by_size=validation.size_terms()[:2])
    hardware = validation.hardware_predictions()
    style.use()
    finding = f"Off by {scores['error'].to_dict()['all']:.1%} (geometric mean)"
    detail = "points that were not fitted; grey: within 10 %"
    axes = prediction.against_known(predictions[~predictions["fitted"]], 0.1, finding, detail)
    rows = scores.assign(
        plain_line=validation.scores(plain)["error"], hardware_alone=validation.scores(hardware)["error"]
    ).reset_index()
    rows["where_errors_come_from"] = rows["system"].map(validation.reason)
    return {
        "figure": _figure(axes.get_figure(root=True)),
        "table": _table(rows, SCORE_COLUMNS, "explained"),
        "others": _table(validation.other_predictions(), OTHER_COLUMNS, "explained"),
    }


def _figure(figure: Any, heading: str = "") -> Figure:
    """A drawn figure as PNG and in words; it is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    plt.close(figure)
    return Figure(base64.b64encode(buffer.getvalue()).decode(), heading, alternative.describe(figure))
