"""The HTML page of a complete run of the workshop: how training scales, the lessons and their times."""

from __future__ import annotations

import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from nbconvert import HTMLExporter

from workshop_utils.plots import alternative, scaling, style
from workshop_utils.setup.machine import cores

if TYPE_CHECKING:
    from workshop_utils.lessons.batch import Lesson


def write_report(path: Path, lessons: Sequence[Lesson] = (), scaled: pd.DataFrame | None = None) -> Path:
    """Write the page `path`, and each executed lesson as one beside it; no page needs a network.

    With `scaled`, of `scaling.scale_model.headline`, the page begins with that.
    """
    style.use()
    template = Path(__file__).with_name("templates") / "lesson.html"
    exporter = HTMLExporter(template_file=str(template), embed_images=True)
    pages = "|".join(re.escape(lesson.notebook.stem) for lesson in lessons)
    for lesson in lessons:
        lesson.executed.metadata.pop("widgets", None)  # their static form needs no script of another host
        resources = {"metadata": {"name": lesson.notebook.stem, "path": str(lesson.notebook.parent)}}
        text, _ = exporter.from_notebook_node(lesson.executed, resources)
        text = re.sub(rf'href="({pages})\.ipynb', r'href="\1.html', text)
        path.with_name(f"{lesson.notebook.stem}.html").write_text(text, encoding="utf-8")
    templates = Environment(
        loader=PackageLoader("workshop_utils.lessons", "templates"), autoescape=select_autoescape(["html"])
    )
    page = templates.get_template("report.html").render(
        lessons=lessons,
        total_seconds=sum(lesson.seconds for lesson in lessons),
        headline=None if scaled is None else _picture(scaling.throughput(scaled)),
        machine=f"{platform.system()} {platform.machine()}, {cores()} cores",
        versions=f"torch {version('torch')}, numpy {version('numpy')}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _picture(figure: Figure) -> Markup:
    """A drawn figure as an `<img>` with its description in words; the figure is closed."""
    data, metadata = alternative.bundle(figure)
    plt.close(figure)
    return Markup(alternative.html_image(data["image/png"], metadata["image/png"]))
