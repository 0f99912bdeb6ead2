"""Figures of lesson 11 show what was measured."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from workshop_utils.plots import sagemaker as figures


def test_the_gains_of_threads_are_those_of_the_medians() -> None:
    rows = []
    for repeat in range(3):
        for width, gain in ((64, 0.9), (1024, 1.8)):
            rows += [(repeat, width, 1, 100.0 + repeat), (repeat, width, 2, (100.0 + repeat) * gain)]
    (axes,) = figures.threads(
        pd.DataFrame(rows, columns=["step", "width", "threads", "samples_per_second"])
    ).axes
    (line,) = [line for line in axes.get_lines() if line.get_label() == "layers of 1,024 units"]
    assert list(line.get_ydata()) == pytest.approx([1.0, 1.8])


@pytest.mark.parametrize("seconds", [0.12, math.nan])
def test_racks_are_drawn_even_where_nothing_could_be_measured(seconds: float) -> None:
    rows = [("ring", "one rack", seconds, 0.125), ("ring", "two racks", seconds, 0.25)]
    figures.racks(rows, "4 hosts").draw_without_rendering()
