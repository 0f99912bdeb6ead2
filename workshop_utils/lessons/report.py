"""HTML pages: a whole run of the workshop (lessons, times, figures), and how training scales."""

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

SWEEP_COLUMNS = (
    "strategy", "workers", "state", "samples_per_second", "efficiency", "accuracy", "loss", "first_step_seconds",
    "run_seconds",
)  # fmt: skip
SCORE_COLUMNS = (
    "system",
    "points",
    "error",
    "largest",
    "plain_line",
    "hardware_alone",
    "where_errors_come_from",
)
OTHER_COLUMNS = ("what", "measured", "predicted_low", "predicted_high", "why")


class Figure(NamedTuple):
    """A picture as base64 PNG, the heading under which it stands (Markdown), and what it shows in words."""

    png: str
    heading: str
    alt: str


def write(
    output: Path, lessons: Sequence[Lesson], measured: pd.DataFrame | None, sweep_seconds: float
) -> Path:
    """Write `output/report.html`, self-contained, and each executed lesson as HTML beside it.

    Where a sweep was `measured`, the page also says how well scaling is predicted, misses included.
    """
    for lesson in lessons:
        page = lesson_page(lesson.executed, lesson.notebook)
        (output / f"{lesson.notebook.stem}.html").write_text(page, encoding="utf-8")
    return _render(
        output / "report.html",
        title="The workshop, run through",
        lessons=[(lesson, slowest_cell(lesson.executed), figures_of(lesson.executed)) for lesson in lessons],
        total_seconds=sum(lesson.seconds for lesson in lessons) + sweep_seconds,
        sweep=None if measured is None else _sweep(measured, sweep_seconds),
        validation=None if measured is None else _validation(),
    )


def write_scaling(output: Path, runs: pd.DataFrame) -> Path:
    """Write `output/scaling.html`, self-contained: what was measured, where time went, how far predictions are off.

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
                words = output.get("metadata", {}).get("image/png", {}).get("alt")
                alt = words or f"Figure under the heading {heading}"  # one that Matplotlib drew by itself
                figures.append(Figure(png.replace("\n", ""), heading, alt))
    return figures


def slowest_cell(notebook: Any) -> str:
    """A notebook's longest cell, in seconds, and the heading above it; "" if papermill noted none."""
    timed = [
        (cell.metadata.get("papermill", {}).get("duration") or 0.0, heading)
        for heading, cell in headed_cells(notebook)
    ]
    seconds, heading = max(timed, default=(0.0, ""))
    return f"{seconds:.1f} s: {heading}" if seconds else ""


def _table(rows: pd.DataFrame, columns: Sequence[str], kind: str = "") -> Markup:
    """These columns of `rows` as HTML; `kind` is a class of the style sheet."""
    shown = rows[list(columns)].rename(columns=lambda name: name.replace("_", " "))
    return Markup(shown.to_html(index=False, border=0, na_rep="", float_format=_number, classes=kind))


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _sweep(measured: pd.DataFrame, seconds: float) -> dict[str, Any]:
    style.use()
    return {
        "seconds": seconds,
        "figure": None if measured.empty else _figure(scaling.throughput(measured, cores())),
        "table": _table(measured, SWEEP_COLUMNS),
        "failures": efficiency.failures(measured),
    }


def _runs(runs: pd.DataFrame) -> dict[str, Any]:
    """Figures and the table of measured training steps; of other jobs the rows as they are."""
    figures, shown, columns = [], runs, [str(name) for name in runs]
    if "step_seconds" in runs:
        rows = efficiency.scaling(runs)
        shown, columns = rows, [name for name in efficiency.SHOWN if name in rows]
        compared = [name for name in ("network", "scaling", "gradient_nbytes") if name in rows]
        for _, alike in rows.groupby(compared):
            detail = _detail(alike)
            curves = scaling.efficiency(alike, {}, "Efficiency against workers", detail).get_figure(root=True)
            figures.append(_figure(curves, f"Efficiency, {detail}"))
            if "transfer_seconds" in alike:
                parts = scaling.where_time_goes(alike, "Where a step's time goes", detail)
                figures.append(_figure(parts, f"Parts of a step, {detail}"))
        marked = efficiency.mark_outliers(runs[runs["state"] == "succeeded"])
        finding = f"{marked['outlier'].sum()} of {len(marked)} runs are outliers"
        noise = scaling.noise(marked, finding, "crosses: outliers")
        figures.append(_figure(noise, "Noise: every run over the median of its setting"))
    return {"figures": figures, "table": _table(shown, columns), "failures": efficiency.failures(runs)}


def _detail(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    size = f", {first['gradient_nbytes'] / 1e6:.2g} MB of gradients" if "gradient_nbytes" in rows else ""
    return f"{first['network']}{size}, {first['scaling']} scaling"


@functools.cache
def _validation() -> dict[str, Any]:
    """How far predictions are from published results, misses included, with a sentence on each."""
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
    """What was drawn, as PNG and in words; it is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    plt.close(figure)
    return Figure(base64.b64encode(buffer.getvalue()).decode(), heading, alternative.describe(figure))
