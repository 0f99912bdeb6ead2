"""Figures of lesson 11 show what was measured, and say only what that allows."""

from __future__ import annotations

import math

import matplotlib
import pandas as pd
import pytest

from workshop_utils.plots import sagemaker as figures

matplotlib.use("Agg")


@pytest.mark.parametrize(("narrow", "wide"), [(0.9, 1.8), (1.7, 1.8), (0.5, 0.9)])
def test_the_gains_of_threads_are_those_of_the_medians(narrow: float, wide: float) -> None:
    rows = []
    for repeat in range(3):
        for width, gain in ((64, narrow), (1024, wide)):
            rows += [(width, 1, 100.0 + repeat), (width, 2, (100.0 + repeat) * gain)]
    axes = figures.threads(pd.DataFrame(rows, columns=["width", "threads", "samples_per_second"]))
    (line,) = [line for line in axes.get_lines() if line.get_label() == "layers of 1,024 units"]
    assert list(line.get_ydata()) == pytest.approx([1.0, wide])


def test_racks_are_drawn_even_where_nothing_could_be_measured() -> None:
    placements = (("one rack", 0.125), ("two racks", 0.25))
    for seconds in (0.12, math.nan):
        rows = [("ring", placement, seconds, theory) for placement, theory in placements]
        figures.racks(rows, "4 hosts").draw_without_rendering()
