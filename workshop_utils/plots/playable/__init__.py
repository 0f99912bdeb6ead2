"""Figures to play with: sliders and curves that need neither a kernel nor a network.

    playable.figure("ring")     # the file ring.json beside this one

Each is a Vega-Lite 5 specification, a file of JSON that can be opened in any Vega editor: data from `sequence` or
`values`, closed forms in `calculate`, sliders in `params`. JupyterLab has the player built in; pages made from a
notebook bring one (`player`); elsewhere, as on GitHub, the picture of the first setting stands in its place.
"""

from __future__ import annotations

import base64
import functools
import json
from html import escape
from pathlib import Path
from typing import Any

import nbformat
import vl_convert

SPECIFICATION = "application/vnd.vegalite.v5+json"
# JupyterLab 4.6 has Vega-Lite 5.6; the oldest that vl-convert has is 5.8. A test in a browser draws them in JupyterLab.
VERSION = "5.8"
FOLDER = Path(__file__).parent


# Every colour is given: what is not, JupyterLab's dark theme takes for white.
CONFIG: dict[str, Any] = json.loads(FOLDER.with_name("workshop.vega.json").read_text(encoding="utf-8"))


class Playable:
    """A figure with sliders, as a notebook shows it; `specification` is the Vega-Lite dictionary."""

    def __init__(self, specification: dict[str, Any]) -> None:
        self.specification = {**specification, "config": {**CONFIG, **specification.get("config", {})}}

    @property
    def alternative(self) -> str:
        """What the figure shows and what its sliders change, in words: its `description`."""
        return str(self.specification["description"])

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # No HTML: JupyterLab would prefer it, and drop its script where the notebook is not trusted.
        png = vl_convert.vegalite_to_png(self.specification, vl_version=VERSION, scale=1.5)
        data = {
            SPECIFICATION: self.specification,
            "image/png": base64.b64encode(png).decode(),
            "text/plain": self.alternative,
        }
        return data, {"image/png": {"alt": self.alternative}}


def figure(name: str) -> Playable:
    """The figure of the file NAME.json.

    Raises:
        ValueError: if there is none; the message lists all.
    """
    path = FOLDER / f"{name}.json"
    if not path.is_file():
        names = ", ".join(sorted(each.stem for each in FOLDER.glob("*.json")))
        raise ValueError(f"there is no figure {name!r} to play with; there are {names}")
    return Playable(json.loads(path.read_text(encoding="utf-8")))


@functools.cache
def player() -> str:
    """The JavaScript that plays such figures: it defines `vegaEmbed`, and no other global name. It is 0.9 MB."""
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", vl_version=VERSION)
    return f"(() => {{{bundle}\n}})();"


def play_in_page(notebook: nbformat.NotebookNode, loader: str) -> None:
    """Put in place of each figure to play with its HTML; `loader`, HTML that brings the player, before the first."""
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    played = [output for output in outputs if SPECIFICATION in output.get("data", {})]
    for number, output in enumerate(played):
        figure = html(output.data[SPECIFICATION], output.data["text/plain"], f"playable-{number}")
        output.data = {"text/html": loader * (number == 0) + figure}


def html(specification: dict[str, Any], alternative: str, place: str) -> str:
    """The figure as HTML for a page that has the `player`; `place` is an id that the page has once."""
    source = json.dumps(specification).replace("<", "\\u003c")  # no tag, no comment begins in it
    play = f'vegaEmbed("#{place}", {source}, {{actions: false, renderer: "svg"}})'
    return (
        f'<div class="playable" role="figure" aria-label="{escape(alternative)}" id="{place}"></div>'
        f'<script>window.addEventListener("load", () => {play});</script>'
    )
