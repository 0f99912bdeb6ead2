"""Figures of lesson 15: what is drawn is what was measured and predicted."""

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from workshop_utils.plots import prediction, scaling
from workshop_utils.scaling import efficiency
from workshop_utils.scaling.cost import Path, all_reduce_seconds

PATH = Path(1e-3, 2e7)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture
def runs():
    rows = []
    for strategy, first in (("ring", 0.1), ("workshop_parameter_server", 0.2)):
        for workers in (1, 2, 4):
            for repeat, factor in enumerate((0.98, 1.0, 1.0, 1.5)):
                step = first * (1 + workers / 4) * factor
                parts = {
                    "compute_seconds": 0.4,
                    "transfer_seconds": 0.4,
                    "waiting_seconds": 0.1,
                    "other_seconds": 0.1,
                }
                rows.append(
                    {
                        "strategy": strategy, "workers": workers, "batch_size": 64, "network": "100Mbit",
                        "scaling": "weak", "repeat": repeat, "state": "succeeded", "reason": "", "step_seconds": step,
                        "bytes_sent": 1e6 if workers > 1 else 0.0,
                        **{name: part * step for name, part in parts.items()},
                    }
                )  # fmt: skip
    return pd.DataFrame(rows)


def points(axes):
    """Coordinates of all that is drawn as markers."""
    found = [line.get_xydata() for line in axes.get_lines() if line.get_marker() not in ("None", "")]
    return np.concatenate(found)


def covered(axes):
    """The words that lie on one of the points, which are taken to be 8 typographical points wide."""
    axes.figure.draw_without_rendering()
    places = axes.transData.transform(points(axes))
    radius = 4 * axes.figure.dpi / 72
    boxes = {text.get_text(): text.get_window_extent().padded(radius) for text in axes.texts}
    return {words for words, box in boxes.items() if any(box.contains(*place) for place in places)}


def texts(figure):
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def test_efficiency_has_a_point_for_each_median_and_a_line_for_each_theory(runs):
    rows = efficiency.scaling(runs)
    axes = scaling.efficiency(rows, {"ring": ([1, 2, 4], [1, 0.8, 0.6])}, "finding", "detail")
    drawn = {tuple(point) for point in points(axes).round(6)}
    assert drawn == {(row.workers, round(row.efficiency, 6)) for row in rows.itertuples()}
    assert any(
        np.allclose(line.get_ydata(), [1, 0.8, 0.6])
        for line in axes.get_lines()
        if len(line.get_ydata()) == 3
    )
    assert {"ring", "parameter server"} <= set(texts(axes.figure))


def test_the_parts_of_a_step_are_stacked_to_its_median_and_the_share_is_written(runs):
    rows = efficiency.scaling(runs)
    figure = scaling.where_time_goes(rows, "finding")
    (axes,) = figure.axes
    ends = {round(bar.get_y(), 6): 0.0 for bar in axes.patches}
    for bar in axes.patches:
        ends[round(bar.get_y(), 6)] += bar.get_width()
    assert sorted(ends.values()) == pytest.approx(sorted(rows["step_seconds"]))
    assert texts(figure).count("50%") == len(rows)


def test_every_run_is_a_point_of_the_noise_and_outliers_are_crosses(runs):
    marked = efficiency.mark_outliers(runs)
    assert marked["outlier"].sum() == 6
    (axes,) = scaling.noise(marked, "finding").axes
    crosses = [line for line in axes.get_lines() if line.get_marker() == "x"]
    assert sum(len(line.get_xdata()) for line in crosses) == 6
    assert len(points(axes)) == len(runs)


def test_the_roof_is_the_lower_of_link_and_computing_and_only_senders_are_under_it(runs):
    rows = efficiency.scaling(runs)
    flops = pd.Series(1e9, index=rows.index)
    (axes,) = scaling.roofline(rows, flops, peak=1e10, bandwidth=1e7, finding="finding").axes
    roof = axes.get_lines()[0]
    assert np.allclose(roof.get_ydata(), np.minimum(1e10, 1e7 * roof.get_xdata()))
    assert len(points(axes)) == 4  # one worker sends nothing
    assert points(axes)[:, 0] == pytest.approx(1e3)


def test_no_name_lies_on_a_point_below_the_roof():
    rows = pd.DataFrame(
        {
            "strategy": ["ring"] * 2 + ["workshop_parameter_server"] * 3,
            "workers": [2, 4, 1, 2, 4],
            "bytes_sent": [1.3e6, 1.95e6, 1.3e6, 1.3e6, 1.3e6],
            "step_seconds": [0.08, 0.104, 0.12, 0.228, 0.446],
        }
    )
    flops = pd.Series(1e9, index=rows.index)
    (axes,) = scaling.roofline(rows, flops, peak=9.4e10, bandwidth=2.45e7, finding="finding").axes
    assert covered(axes) == set()


def test_no_name_lies_on_a_dot_of_the_map():
    path = Path(2.36e-3, 2.5e7)
    grid = [(workers, nbytes) for workers in (4, 16, 64) for nbytes in (1e3, 32e3, 1e6, 32e6)]
    checked = pd.DataFrame(grid, columns=["workers", "nbytes"]).assign(fastest="ring")
    assert covered(prediction.fastest_map(path, "finding", checked=checked)) == set()


def test_the_map_has_the_fastest_of_the_closed_forms_at_every_place():
    axes = prediction.fastest_map(PATH, "finding")
    (mesh,) = axes.collections
    best = np.asarray(mesh.get_array())
    workers, nbytes = 64, 1e8
    seconds = [all_reduce_seconds(name, workers, nbytes, PATH) for name in ("ring", "tree", "central")]
    row = int(np.argmin(np.abs(np.unique(np.round(np.geomspace(2, 4096, 181))) - workers)))
    column = int(np.argmin(np.abs(np.geomspace(100, 1e9, 281) - nbytes)))
    assert best[row, column] == np.argmin(seconds) == 0
    assert {"ring", "tree", "parameter server"} <= set(texts(axes.figure))


def test_a_check_that_disagrees_with_the_map_is_a_cross():
    checked = pd.DataFrame({"workers": [64, 64], "nbytes": [1e8, 1e8], "fastest": ["ring", "tree"]})
    axes = prediction.fastest_map(PATH, "finding", checked=checked)
    counts = {line.get_marker(): len(line.get_xdata()) for line in axes.get_lines()}
    assert counts == {"o": 1, "X": 1}


def test_a_curve_shows_what_was_fitted_held_out_and_simulated():
    workers = np.array([2.0, 8.0, 1000.0])
    line = np.asarray(all_reduce_seconds("ring", workers, 1e6, PATH))
    curve = prediction.Curve(
        "ring", "ring", workers, line, 0.9 * line, 1.1 * line, {2: 0.1, 4: 0.2}, {8: 0.3}, {1000: 4.0}
    )
    axes = prediction.to_a_thousand([curve], "finding")
    drawn = {tuple(point) for point in points(axes)}
    assert drawn == {(2, 0.1), (4, 0.2), (8, 0.3), (1000, 4.0)}
    hollow = [
        line
        for line in axes.get_lines()
        if line.get_markerfacecolor() == "white" and line.get_marker() == "o"
    ]
    assert [tuple(line.get_xydata()[0]) for line in hollow] == [(8, 0.3)]
    assert len(axes.collections) == 1


def test_what_is_off_by_more_than_the_band_is_hollow():
    rows = pd.DataFrame(
        {"system": ["a", "a", "b"], "predicted": [1.05, 1.3, 0.5], "measured": [1.0, 1.0, 1.0]}
    )
    axes = prediction.against_known(rows, 0.1, "finding")
    hollow = [line for line in axes.get_lines() if line.get_markerfacecolor() == "white"]
    assert sorted(x for line in hollow for x in line.get_xdata()) == pytest.approx([0.5, 1.3])
    low, high = axes.get_xlim()
    assert low < 0.5 < 1.3 < high


def test_bars_are_as_long_as_their_numbers():
    figure = prediction.compared(
        {"64": {"ring": 1e-3, "tree": 2e-3}}, {"ring": "ring", "tree": "#CC6677"}, "finding"
    )
    assert [bar.get_width() for bar in figure.axes[0].patches] == [1e-3, 2e-3]
    assert any(text.startswith("tree: 2.0 ms") for text in texts(figure))
