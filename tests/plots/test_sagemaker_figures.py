"""Figures of lesson 11 show what was measured, and say only what that allows."""

from __future__ import annotations

import math
from collections.abc import Iterator

import matplotlib
import pandas as pd
import pytest
from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from workshop_utils.plots import sagemaker as figures

matplotlib.use("Agg")

RACKS = [
    ("ring", "one rack", 0.12, 0.125),
    ("ring", "two racks", 0.24, 0.25),
    ("halving_doubling", "one rack", 0.12, 0.125),
    ("halving_doubling", "two racks", 0.36, 0.37),
]


@pytest.fixture(autouse=True)
def _no_figure_is_left() -> Iterator[None]:
    yield
    plt.close("all")


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def table(narrow: float, wide: float) -> pd.DataFrame:
    """Three repeats; with two threads a worker is so many times as fast."""
    rows = []
    for repeat in range(3):
        for width, gain in ((64, narrow), (1024, wide)):
            rows += [(width, 1, 100.0 + repeat), (width, 2, (100.0 + repeat) * gain)]
    return pd.DataFrame(rows, columns=["width", "threads", "samples_per_second"])


@pytest.mark.parametrize(
    ("narrow", "wide", "finding"),
    [
        (0.9, 1.8, "More threads pay where matrices are large"),
        (1.7, 1.8, "More threads pay, for small matrices as for large ones"),
        (0.5, 0.9, "Here and now, 2 threads are no faster than one"),
    ],
)
def test_the_title_says_what_the_threads_brought(narrow: float, wide: float, finding: str) -> None:
    axes = figures.threads(table(narrow, wide))
    assert axes.get_title(loc="left") == finding
    (line,) = [line for line in axes.get_lines() if line.get_label() == "layers of 1,024 units"]
    assert list(line.get_ydata()) == pytest.approx([1.0, wide])


def test_points_are_measured_and_bars_are_theory_and_the_title_has_the_ratios() -> None:
    figure = figures.racks(RACKS, "4 hosts")
    title = "What a second rack costs: ring × 2.0, halving-doubling × 3.0"
    assert any(title in text for text in words(figure))
    lines = figure.axes[0].get_lines()
    bars = [line for line in lines if len(line.get_xdata()) == 2]
    points = [line for line in lines if len(line.get_xdata()) == 1]
    assert [bar.get_xdata()[0] for bar in bars] == [0.125, 0.25, 0.125, 0.37]
    assert [point.get_xdata()[0] for point in points] == [0.12, 0.24, 0.12, 0.36]


def test_where_nothing_could_be_measured_the_title_speaks_of_theory() -> None:
    rows = [(algorithm, placement, math.nan, theory) for algorithm, placement, _, theory in RACKS]
    assert any("In theory" in text for text in words(figures.racks(rows, "4 hosts")))
