"""What a figure shows, in words, for those who do not see it: alternative text, made from what is written in it.

    alternative.describe(figure)     # "A ring stays flat. 16 MB. Time (s) against workers. Named in it: ring."
    alternative.show_in_notebook()   # every later figure of this kernel carries it (`style.use` calls this)

The headline states the finding, so it comes first; then the conditions, the axes, and the names of what is drawn.

The text goes into the output's metadata, as `alt` of `image/png`, and stands in place of the figure's Python name in
`text/plain`. JupyterLab 4.6 writes neither into the page, only HTML with an `<img alt=...>` of its own: so a kernel
that a Jupyter server has started sends that too. An executed notebook that is committed has the image once.
"""

from __future__ import annotations

import html
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.category import StrCategoryFormatter
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FuncFormatter

DETAIL = "_detail"  # the label of the text below a headline
MOST_NAMES = 12  # of one panel: a drawing may have a hundred cells with a word in each
WORDS = (FixedFormatter, FuncFormatter, StrCategoryFormatter)  # what may write words at an axis
STARTED_BY_SERVER = "JPY_SESSION_NAME"  # set by a Jupyter server for the kernels that it starts


def describe(figure: Figure) -> str:
    """`figure` in sentences: its headline, its conditions, and for each panel its axes and the names in it."""
    sentences = [figure.get_suptitle(), *(text.get_text() for text in figure.texts)]
    for axes in figure.axes:
        if axes.get_visible() and axes.get_label() != "<colorbar>":
            sentences += _panel(axes)
    said = dict.fromkeys(_plain(sentence) for sentence in sentences)  # each once, in order
    return " ".join(sentence if sentence[-1] in ".?!" else f"{sentence}." for sentence in said if sentence)


def show_in_notebook() -> None:
    """Show every later figure of this IPython kernel as PNG of twice the dpi, with its alternative text."""
    from IPython.core.getipython import get_ipython
    from matplotlib_inline.backend_inline import set_matplotlib_formats

    set_matplotlib_formats()  # what IPython itself registers for a figure would go before ours
    shell: Any = get_ipython()
    shell.display_formatter.mimebundle_formatter.for_type(Figure, bundle)


def bundle(figure: Figure) -> tuple[dict[str, str], dict[str, Any]]:
    """What a notebook gets to show of `figure`, by MIME type, and its metadata."""
    from IPython.core.pylabtools import retina_figure

    drawn = retina_figure(figure, base64=True)
    if drawn is None:  # nothing was drawn in it
        return {}, {}
    png, size = drawn
    about = {**size, "alt": describe(figure)}
    data = {"image/png": png, "text/plain": about["alt"]}
    if os.environ.get(STARTED_BY_SERVER):
        data["text/html"] = html_image(png, about)
    return data, {"image/png": about}


def html_image(png: str, about: Mapping[str, Any]) -> str:
    """An `<img>` of base64 `png`, whose metadata are `about`: as wide as they say, but no wider than its place."""
    return (
        f'<img alt="{html.escape(about["alt"])}" src="data:image/png;base64,{png.strip()}" '
        f'width="{about["width"]}" height="{about["height"]}" style="max-width: 100%; height: auto">'
    )


def _panel(axes: Axes) -> Iterator[str]:
    yield from (axes.get_title(loc) for loc in ("left", "center", "right"))
    yield from (text.get_text() for text in axes.texts if text.get_label() == DETAIL)
    both = (axes.xaxis, axes.yaxis)
    across, up = (_plain(axis.get_label_text()) if axis.get_visible() else "" for axis in both)
    if axes.axison and (across or up):
        yield f"{up or 'Values'} against {across}" if across else f"Up the side: {up}"
    names = list(_names(axes))
    if names:
        more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
        yield f"Named in it: {', '.join(names[:MOST_NAMES])}{more}"


def _names(axes: Axes) -> Iterable[str]:
    """Lines, bars and areas by their label, categories by their tick, and what is written beside them; each once."""
    legend = axes.get_legend()
    found = [str(handle.get_label()) for handle in axes.get_legend_handles_labels()[0]]
    found += [text.get_text() for text in legend.get_texts()] if legend else []
    for axis in (axes.xaxis, axes.yaxis) if axes.axison else ():
        if isinstance(axis.get_major_formatter(), WORDS):
            found += [label.get_text() for label in axis.get_ticklabels()]
    found += [text.get_text() for text in axes.texts if text.get_label() != DETAIL]
    return dict.fromkeys(name for name in map(_plain, found) if re.search(r"[^\W\d_]", name))


def _plain(text: str) -> str:
    """`text` on one line, without the signs of mathtext; a dollar sign without a second one means dollars."""
    signs = r"\\(mathrm|mathbf|,|;|!)|[{}]" + (r"|\$" if text.count("$") % 2 == 0 else "")
    return " ".join(re.sub(signs, "", text).split())
