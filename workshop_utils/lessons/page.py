"""An executed lesson as one HTML file that needs no network and no other file.

nbconvert leaves formulas to MathJax and widgets to JavaScript, both on other hosts, and pictures in their files. Here
formulas become MathML, which browsers draw themselves, widgets show their static form, and the page contains its
pictures, and the player of its figures to play with.
"""

from __future__ import annotations

import html
import mimetypes
from base64 import b64encode
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import latex2mathml.converter
import nbconvert
import nbformat
from jinja2 import pass_context
from nbconvert.filters.markdown_mistune import IPythonRenderer, MarkdownWithMath

from workshop_utils.plots import alternative, playable

TEMPLATE = Path(__file__).with_name("templates") / "lesson.html"


def lesson_page(executed: Any, notebook: Path) -> str:
    """The page of an executed notebook, which was read from the file `notebook`."""
    static = nbformat.from_dict(executed)  # a deep copy
    static.metadata.pop("widgets", None)  # without their state nbconvert shows the static form
    outputs = [output for cell in static.cells for output in cell.get("outputs", [])]
    played = play(outputs)
    for output in outputs:
        data = output.get("data", {})
        about = output.get("metadata", {}).get("image/png", {})
        if "alt" in about and "text/html" not in data:  # nbconvert omits a picture's alternative text
            data["text/html"] = alternative.html_image(data["image/png"], about)
    resources: dict[str, Any] = {"metadata": {"name": notebook.stem, "path": str(notebook.parent)}}
    if played:
        resources["player"] = playable.player()
    page, _ = _Exporter(template_file=str(TEMPLATE)).from_notebook_node(static, resources)
    return str(page)


def play(outputs: list[Any]) -> list[Any]:
    """Those `outputs` that are figures to play with, which from now on are HTML for a page that has the player."""
    played = [output for output in outputs if playable.SPECIFICATION in output.get("data", {})]
    for number, output in enumerate(played, 1):
        specification, words = output.data[playable.SPECIFICATION], output.data["text/plain"]
        output.data = {"text/html": playable.html(specification, words, f"playable-{number}")}
    return played


class _Exporter(nbconvert.HTMLExporter):
    @pass_context
    def markdown2html(self, context: Any, source: str) -> str:
        path = context["resources"]["metadata"]["path"]
        return MarkdownWithMath(renderer=_Renderer(escape=False, path=path)).render(source)


class _Renderer(IPythonRenderer):
    """Writes the formulas that nbconvert recognises, and includes pictures."""

    def inline_math(self, body: str) -> str:
        return _mathml(body, "inline")

    def block_math(self, body: str) -> str:
        return _mathml(body, "block")

    def latex_environment(self, name: str, body: str) -> str:
        return _mathml(rf"\begin{{{name}}}{body}\end{{{name}}}", "block")

    def image(self, text: str, url: str, title: str | None = None) -> str:
        file = Path(self.path, unquote(url))
        kind, _ = mimetypes.guess_type(file.name)
        if kind and file.is_file():
            url = f"data:{kind};base64,{b64encode(file.read_bytes()).decode()}"
        return super().image(text, url, title)


def _mathml(tex: str, display: str) -> str:
    """A formula as MathML, or its source if it has a mistake, so that the rest of the page is still made."""
    try:
        formula = latex2mathml.converter.convert(tex, xmlns="", display=display)
    except Exception:  # the library has a class for each mistake, without a common base
        return f"<code>{html.escape(tex)}</code>"
    # HTML needs no namespace, and nbconvert would write it as a prefix into headings.
    return formula.replace(' xmlns=""', "", 1)
