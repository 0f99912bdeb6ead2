"""The HTML page of a complete run of the workshop: how training scales, the lessons and their times."""

from __future__ import annotations

import base64
import mimetypes
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote

import pandas as pd
from jinja2 import Environment, PackageLoader, select_autoescape
from markupsafe import Markup
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from nbconvert import HTMLExporter

from workshop_utils.plots import alternative, playable, scaling, style
from workshop_utils.setup.machine import cores

if TYPE_CHECKING:
    from workshop_utils.lessons.batch import Lesson


def write_report(path: Path, lessons: Sequence[Lesson] = (), scaled: pd.DataFrame | None = None) -> Path:
    """Write the page `path`, and each executed lesson as one beside it; no page needs a network.

    With `scaled`, of `scaling.scale_model.headline`, the page begins with that.
    """
    style.use()
    template = Path(__file__).with_name("templates") / "lesson.html"
    exporter = HTMLExporter(template_file=str(template))
    pages = "|".join(re.escape(lesson.notebook.stem) for lesson in lessons)
    for lesson in lessons:
        lesson.executed.metadata.pop("widgets", None)  # their static form needs no script of another host
        playable.play_in_page(lesson.executed, f"<script>{playable.player()}</script>")
        text, _ = exporter.from_notebook_node(lesson.executed, {"metadata": {"name": lesson.notebook.stem}})
        text = re.sub(rf'href="({pages})\.ipynb', r'href="\1.html', text)
        text = _with_drawings(text, lesson.notebook.parent)
        path.with_name(f"{lesson.notebook.stem}.html").write_text(text, encoding="utf-8")
    of_models = [] if scaled is None else [rows for _, rows in scaled.groupby("model", sort=False)]
    templates = Environment(
        loader=PackageLoader("workshop_utils.lessons", "templates"), autoescape=select_autoescape(["html"])
    )
    page = templates.get_template("report.html").render(
        lessons=lessons,
        total_seconds=sum(lesson.seconds for lesson in lessons),
        longest_seconds=max((lesson.seconds for lesson in lessons), default=0.0) or 1.0,
        headline=[_picture(scaling.throughput(rows)) for rows in of_models],
        machine=f"{platform.system()} {platform.machine()}, {cores()} cores",
        versions=f"torch {version('torch')}, numpy {version('numpy')}",
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )
    path.write_text(page, encoding="utf-8")
    return path


def _with_drawings(page: str, folder: Path) -> str:
    """The page with the files that its images name, relative to `folder`, inside it.

    nbconvert embeds none from outside the notebook's own folder, where the lessons' drawings are.
    """

    def embedded(image: re.Match[str]) -> str:
        file = folder / unquote(image[2])
        if not file.is_file():
            return image[0]
        kind, _ = mimetypes.guess_type(file)
        return f'{image[1]}data:{kind};base64,{base64.b64encode(file.read_bytes()).decode()}"'

    return re.sub(r'(<img\b[^>]*?\bsrc=")([^":]+)"', embedded, page)


def _picture(figure: Figure) -> Markup:
    """A drawn figure as an `<img>` with its description in words; the figure is closed."""
    data, metadata = alternative.bundle(figure)
    plt.close(figure)
    return Markup(alternative.html_image(data["image/png"], metadata["image/png"]))
