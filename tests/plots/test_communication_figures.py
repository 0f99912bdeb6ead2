"""Figures of lessons 03 and 04 show what was measured."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from workshop_utils.comm.central import central_all_reduce
from workshop_utils.comm.communicator import Event
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.simulated import Link, Shape, simulate
from workshop_utils.plots import communication, consistency

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    plt.close("all")


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


@pytest.mark.parametrize("size", [2, 3, 5])
def test_each_step_of_a_ring_adds_one_contribution_to_one_chunk_of_each_rank(size):
    for rank, history in enumerate(communication.moments(ring_all_reduce, size)):
        assert len(history) == 1 + 2 * (size - 1)
        for step in range(1, size):
            assert history[step].came == (rank - step) % size
            assert history[step].has[history[step].came].sum() == step + 1
        assert (history[-1].has == 1).all()  # every chunk has every rank's contribution once


def test_the_figure_of_the_ring_has_a_panel_a_step_and_frames_what_came():
    figure = communication.ring_steps(ring_all_reduce, 4)
    shown = words(figure)
    assert [f"reduce-scatter {step}" in shown for step in (1, 2, 3, 4)] == [True, True, True, False]
    assert [f"all-gather {step}" in shown for step in (1, 2, 3, 4)] == [True, True, True, False]
    frames = [len([patch for patch in axes.patches if not patch.get_fill()]) for axes in figure.axes]
    assert frames[:7] == [0, 4, 4, 4, 4, 4, 4]


def test_a_timeline_has_a_bar_for_every_message_at_its_time():
    link = Link(0.0, 1e6)
    traces = {
        name: simulate(3, lambda rank, run=run: run(rank, Shape(750)), link, trace=True).traces
        for name, run in (("ring", ring_all_reduce), ("central", central_all_reduce))
    }
    figure = communication.timelines({"simulated": traces})
    # In the central one, rank 2's message leaves with rank 1's and waits for it at the root's link.
    assert [len(axes.patches) for axes in figure.axes] == [3 * 4, 4 + 1]
    pale = figure.axes[1].patches[4]
    assert (pale.get_x(), pale.get_width()) == (pytest.approx(3e-3), pytest.approx(3e-3))
    assert {"ring, simulated: 4 ms", "central, simulated: 12 ms"} <= set(words(figure))
    assert figure.axes[0].patches[1].get_x() == pytest.approx(1e-3)


def test_timelines_of_two_ways_stand_side_by_side_on_one_axis_and_only_sends_are_bars():
    def trace(end):
        return {"ring": [[Event("send", 1, 10, 0.0, end, "")], [Event("recv", 0, 10, 0.0, end, "")]]}

    figure = communication.timelines({"simulated": trace(0.5), "real": trace(1.0)})
    left, right = figure.axes
    assert [len(axes.patches) for axes in figure.axes] == [1, 1]
    assert left.get_xlim() == right.get_xlim() == (0.0, pytest.approx(1.02))
    assert {"ring, simulated: 500 ms", "ring, real: 1.00 s"} <= set(words(figure))


def test_points_and_lines_against_workers_are_the_given_ones_and_their_ratio_stands_beside():
    series = {"ring": communication.Series([2, 4], [1.0, 1.5], [1.0, 1.25], "ring")}
    figure = communication.against_workers(series, "finding")
    left, right = figure.axes
    assert [list(line.get_ydata()) for line in left.get_lines()] == [[1.0, 1.25], [1.0, 1.5]]
    assert list(right.get_lines()[0].get_ydata()) == pytest.approx([1.0, 1.2])


def test_bytes_of_a_rank_stay_under_the_bound_in_the_figure():
    figure = communication.bytes_a_rank({2: 1.0, 4: 1.5}, lambda size: 2 * (size - 1) / size)
    line = figure.axes[0].get_lines()[0].get_ydata()
    assert max(line) < 2
    assert (np.diff(line) > 0).all()


def test_fusion_compares_medians_with_the_smallest():
    figure = communication.fusion({1: [0.01, 0.02, 0.03], 10: [0.06, 0.06, 0.9]}, 1_000_000)
    assert {"1 × 1 MB", "10 × 100 kB", " 1.0×", " 3.0×"} <= set(words(figure))


def test_sizes_are_compared_with_the_crossover_marked():
    axes = communication.against_size(
        [1000, 10000], {"ring": [1e-3, 2e-3]}, {}, 3000.0, ("finding", "detail")
    )
    assert any(list(line.get_xdata()) == [3000.0, 3000.0] for line in axes.get_lines())


def pushes(*rows: tuple[int, float, int, int]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["pusher", "push_seconds", "staleness", "late"])


def test_pushes_are_dots_and_late_ones_are_hollow():
    runs = {"one": pushes((0, 0.0, 0, 0), (1, 0.1, 0, 0), (0, 0.2, 1, 1))}
    figure = consistency.pushes(runs, 1.0, straggler=0)
    lines = figure.axes[0].get_lines()
    solid = sum(len(line.get_xdata()) for line in lines if line.get_markerfacecolor() != "white")
    hollow = sum(len(line.get_xdata()) for line in lines if line.get_markerfacecolor() == "white")
    assert (solid, hollow) == (2, 1)
    assert "0, slow" in words(figure)


def test_lines_of_the_kernel_go_as_far_as_it_was_asked_and_points_are_the_real_processes():
    def table(**rows):
        return pd.DataFrame.from_dict(rows, orient="index", columns=["updates per second", "mean staleness"])

    kernel = table(a=[10, 0], b=[100, 9], c=[200, 999]).set_index(pd.Index([1, 10, 1000]))
    real = table(a=[11, 0], b=[90, 9.5]).set_index(pd.Index([1, 10]))
    figure = consistency.thousand_workers(kernel, real, np.array([10.0, 200.0, 200.0]), "detail")
    left, right = (
        [(list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()]
        for axes in figure.axes
    )
    assert left == [([1, 10, 1000], [10, 100, 200]), ([1, 10], [11, 90]), ([1, 10, 1000], [10, 200, 200])]
    assert right == [([10, 1000], [9, 999]), ([10], [9.5])]
    assert {"the server's link is full: 1/s", "W − 1"} <= set(words(figure))


def test_trials_with_and_without_a_lock_are_points_and_their_medians_lines():
    trials = pd.DataFrame(
        [
            ("lock", 10.0, 0.0, 0.0),
            ("none", 30.0, 0.1, 0.3),
            ("none", 20.0, 0.2, 0.4),
            ("none", 40.0, 0.0, 0.5),
        ],
        columns=["kind", "updates_per_second", "lost", "overlapped"],
    )
    figure = consistency.hogwild(trials)
    lock, its_median, none, median = figure.axes[0].get_lines()
    assert list(lock.get_xdata()) == [10.0]
    assert list(none.get_xdata()) == [30.0, 20.0, 40.0]
    assert (its_median.get_xdata()[0], median.get_xdata()[0]) == (10.0, 30.0)
    assert {"lock", "none"} <= set(words(figure))


def test_staleness_leaves_out_what_was_dropped_and_keeps_what_is_long_ago():
    figure = consistency.staleness({"run": pushes((0, 0, 0, 0), (1, 0, 40, 0), (1, 0, 9, 1))})
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights[0] == heights[-1] == 0.5
    assert sum(heights) == 1
    assert "mean 20.0\nmost 40" in words(figure)


def test_losses_are_named_and_in_the_order_of_time():
    table = pd.DataFrame({"seconds": [2.0, 1.0], "loss": [1.0, 3.0]})
    figure = consistency.losses({"synchronous": table, "asynchronous": table})
    assert list(figure.axes[0].get_lines()[0].get_xdata()) == [1.0, 2.0]
    assert {"synchronous", "asynchronous"} <= set(words(figure))
