"""HTML pages: a whole run of the workshop (lessons, times, figures), and how training scales."""

from __future__ import annotations

import base64
import functools
import io
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from jinja2 import Environment, PackageLoader, select_autoescape
from matplotlib import pyplot as plt

from workshop_utils.lesson_page import inline, lesson_page
from workshop_utils.machine import cores
from workshop_utils.plots import alternative, prediction, scaling, style
from workshop_utils.scaling import efficiency, validation

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
RUN_COLUMNS = (
    "strategy", "workers", "network", "scaling", "gradient_nbytes", "batch_size", "repeats", "outliers", "step_seconds",
    "lowest", "highest", "speedup", "efficiency", "communication_share", "bytes_sent", "server_bytes_received",
)  # fmt: skip


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
        if lesson.executed is not None:
            page = lesson_page(lesson.executed, lesson.notebook)
            (output / f"{lesson.notebook.stem}.html").write_text(page, encoding="utf-8")
    path = output / "report.html"
    return _render(
        path,
        title="The workshop, run through",
        lessons=[
            {
                "lesson": lesson,
                "figures": figures_of(lesson.executed),
                "slowest": slowest_cell(lesson.executed),
            }
            for lesson in lessons
        ],
        total_seconds=sum(lesson.seconds for lesson in lessons) + sweep_seconds,
        sweep_seconds=sweep_seconds,
        rows=None if measured is None else _rows(measured),
        columns=[HEADINGS.get(name, name) for name in SHOWN],
        plot=None if measured is None or measured.empty else _plot(measured),
        failures=[] if measured is None else measured[measured["state"] != "succeeded"].to_dict("records"),
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
        rows=None,
        runs=_runs(runs),
        validation=_validation(),
    )


def _render(path: Path, **values: Any) -> Path:
    templates = Environment(
        loader=PackageLoader("workshop_utils", "templates"), autoescape=select_autoescape(["html"])
    )
    templates.filters["markdown"] = inline
    page = templates.get_template("report.html").render(
        **values,
        machine=f"{platform.system()} {platform.machine()}, {cores()} cores",
        versions=", ".join(
            f"{name} {version(name)}" for name in ("torch", "tensorflow-cpu", "numpy") if _has(name)
        ),
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
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
                words = produced.get("metadata", {}).get("image/png", {}).get("alt")
                alt = words or f"Figure under the heading {heading}"  # one that Matplotlib drew by itself
                found.append(Figure(png.replace("\n", ""), heading, alt))
    return found


def slowest_cell(notebook: Any) -> str:
    """A notebook's longest cell, in seconds, and the heading above it; "" if papermill noted none."""
    longest, under, heading = 0.0, "", ""
    for cell in notebook.cells if notebook is not None else []:
        if cell.cell_type == "markdown":
            heading = (re.findall(r"^#+\s*(.+)$", cell.source, flags=re.MULTILINE) or [heading])[-1]
        seconds = cell.metadata.get("papermill", {}).get("duration") or 0.0
        if seconds > longest:
            longest, under = seconds, heading
    return f"{longest:.1f} s: {under}" if longest else ""


def _rows(measured: pd.DataFrame) -> list[list[str]]:
    return [
        ["" if pd.isna(row[name]) else form.format(row[name]) for name, form in SHOWN.items()]
        for row in measured.to_dict("records")
    ]


def _runs(runs: pd.DataFrame) -> dict[str, Any]:
    """Figures and the table of a sweep of training steps; of other jobs the rows as they are."""
    figures: list[Figure] = []
    shown = runs
    if "step_seconds" in runs:
        fine = runs[runs["state"] == "succeeded"]
        rows = efficiency.scaling(runs)
        shown = rows[[name for name in RUN_COLUMNS if name in rows]]
        for _, alike in rows.groupby(
            [name for name in ("network", "scaling", "gradient_nbytes") if name in rows]
        ):
            detail = _detail(alike)
            curves = scaling.efficiency(alike, {}, "Efficiency against workers", detail).get_figure(root=True)
            figures.append(_figure(curves, f"Efficiency, {detail}"))
            if "transfer_seconds" in alike:
                parts = scaling.where_time_goes(alike, "Where a step's time goes", detail)
                figures.append(_figure(parts, f"Parts of a step, {detail}"))
        marked = efficiency.mark_outliers(fine)
        noise = scaling.noise(
            marked, f"{marked['outlier'].sum()} of {len(marked)} runs are outliers", "crosses: outliers"
        )
        figures.append(_figure(noise, "Noise: every run over the median of its setting"))
    table = shown.round(4).astype(object).where(shown.notna(), "")
    return {
        "figures": figures,
        "columns": [str(name).replace("_", " ") for name in table.columns],
        "rows": table.astype(str).to_numpy().tolist(),
        "failures": efficiency.failures(runs),
    }


def _detail(rows: pd.DataFrame) -> str:
    first = rows.iloc[0]
    size = f", {first['gradient_nbytes'] / 1e6:.2g} MB of gradients" if "gradient_nbytes" in rows else ""
    return f"{first['network']}{size}, {first['scaling']} scaling"


@functools.cache
def _validation() -> dict[str, Any]:
    """How far predictions are from published results, misses included, with a sentence on each."""
    predictions = validation.published_predictions()
    scores = validation.scores(predictions)
    plain = validation.scores(validation.published_predictions(by_size=validation.size_terms()[:2]))["error"]
    facts = validation.scores(validation.hardware_predictions())["error"]
    style.use()
    finding = f"Off by {scores['error'].to_dict()['all']:.1%} (geometric mean)"
    axes = prediction.against_known(
        predictions[~predictions["fitted"]], 0.1, finding, "points that were not fitted; grey: within 10 %"
    )
    rows = []
    for row in scores.assign(plain=plain, facts=facts).reset_index().to_dict("records"):
        errors = (row[name] for name in ("error", "largest", "plain", "facts"))
        shown = ("" if pd.isna(error) else f"{error:.1%}" for error in errors)
        rows.append([row["system"], str(row["points"]), *shown, validation.reason(row["system"])])
    others = [
        [
            row["what"],
            f"{row['measured']:.2f}",
            f"{row['predicted_low']:.2f} … {row['predicted_high']:.2f}",
            row["why"],
        ]
        for row in validation.other_predictions().to_dict("records")
    ]
    return {"plot": _figure(axes.get_figure(root=True)), "rows": rows, "others": others}


def _plot(measured: pd.DataFrame) -> Figure:
    style.use()
    return _figure(scaling.throughput(measured, cores()))


def _figure(figure: Any, heading: str = "") -> Figure:
    """What was drawn, as PNG and in words; it is closed."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    plt.close(figure)
    return Figure(base64.b64encode(buffer.getvalue()).decode(), heading, alternative.describe(figure))


def _has(distribution: str) -> bool:
    try:
        version(distribution)
    except ModuleNotFoundError:
        return False
    return True
