"""The figures of the first two lessons show the numbers that they are given."""

import matplotlib
import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot as plt

from workshop_utils.plots import baseline, speedup, style, welcome
from workshop_utils.runs import Run, RunState
from workshop_utils.scaling.memory import TrainingMemory

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    plt.close("all")


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def metrics() -> pd.DataFrame:
    rows = [
        ("worker-0", 1, 2.0, None),
        ("worker-1", 1, 2.5, None),
        ("worker-0", 5, 0.5, None),
        ("worker-1", 5, 0.4, None),
    ]
    return pd.DataFrame([*rows, ("worker-0", 5, None, 0.875)], columns=["worker", "step", "loss", "accuracy"])


def test_each_worker_has_its_own_loss_in_its_own_colour_and_all_have_one_accuracy():
    figure = welcome.losses(metrics())
    upper, lower = figure.axes
    drawn = {line.get_label(): line for line in upper.get_lines()}
    np.testing.assert_array_equal(drawn["worker-1"].get_ydata(), [2.5, 0.4])
    assert drawn["worker-1"].get_color() == style.colour_of("worker 1")
    assert len(lower.get_lines()) == 1
    assert "87.5 %" in words(figure)


class Finished(Run):
    def __init__(self, seconds: tuple[float, float, float]) -> None:
        super().__init__("finished", ("worker-0",))
        imported, first, last = (self.launched_at + second for second in seconds)
        self._records = [{"workshop": "start", "worker": "worker-0", "rank": 0, "time": imported, "pid": 1}]
        self._records += [
            {"workshop": "metric", "worker": "worker-0", "rank": 0, "time": time, "step": step}
            for step, time in ((1, first), (9, last))
        ]
        self._finish(RunState.SUCCEEDED)

    def _request_stop(self) -> None:
        return


def test_starts_are_drawn_from_the_launch_to_the_last_step():
    figure = welcome.starts({"cold": Finished((2.0, 6.0, 7.0)), "warm": Finished((0.1, 0.2, 1.2))})
    bars = [(round(bar.get_x(), 3), round(bar.get_width(), 3)) for bar in figure.axes[0].patches]
    assert bars == [(0, 2), (2, 4), (6, 1), (0, 0.1), (0.1, 0.1), (0.2, 1)]
    assert any("30 times sooner" in text for text in words(figure))


def test_the_parts_of_a_step_fill_its_bar():
    figure = baseline.step_time(
        {
            16: {"data": 0.001, "forward": 0.002, "backward": 0.004, "update": 0.013},
            64: {"data": 0.001, "forward": 0.01, "backward": 0.02, "update": 0.013},
        }
    )
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert sum(widths[:4]) == pytest.approx(1)
    assert widths[3] == pytest.approx(0.65)
    assert "20.0 ms" in words(figure)


def test_memory_is_drawn_as_bars_for_the_formulas_and_points_for_what_was_seen():
    figure = baseline.memory(
        {"model": 10e6, "forward": 14e6, "backward": 21e6, "update": 41e6},
        TrainingMemory(10e6, 10e6, 20e6, 5e6),
    )
    axes = figure.axes[0]
    tops = {round(bar.get_x() + bar.get_width() / 2): bar.get_y() + bar.get_height() for bar in axes.patches}
    assert tops == {0: 10, 1: 15, 2: 20, 3: 40}
    np.testing.assert_allclose(axes.get_lines()[0].get_ydata(), [10, 14, 21, 41])


def test_published_runs_lie_where_their_hours_say():
    figure = baseline.time_to_train()
    points = [line.get_xydata()[0] for line in figure.axes[0].get_lines() if line.get_marker() in ("o", "s")]
    assert len(points) == 5
    assert points[2] == pytest.approx((6 * 65.2e9 * 1.4e12, 1_022_362 / (24 * 365.25)))


def test_the_laws_are_drawn_side_by_side_with_a_label_for_each_serial_fraction():
    figure = speedup.laws((0.1, 0.5), largest=64)
    ends = [[line.get_ydata()[-1] for line in axes.get_lines()] for axes in figure.axes]
    assert ends[0] == pytest.approx([64, 1 / (0.1 + 0.9 / 64), 1 / (0.5 + 0.5 / 64)])
    assert ends[1] == pytest.approx([64, 0.1 + 0.9 * 64, 0.5 + 0.5 * 64])
    assert words(figure).count("10 %") >= 2


def test_measured_speedups_are_points_over_the_fitted_line():
    figure = speedup.measured({1: [1.0], 2: [1.5, 1.6, 1.7], 4: [1.2]}, serial_fraction=0.25, cores=2)
    lines = figure.axes[0].get_lines()
    points = [tuple(line.get_xydata()[0]) for line in lines if line.get_marker() == "o"]
    assert points == [(1, 1.0), (2, 1.6), (4, 1.2)]
    fitted = next(line for line in lines if str(line.get_label()).startswith("Amdahl, s = 25 %"))
    assert fitted.get_ydata()[-1] == pytest.approx(1 / (0.25 + 0.75 / 8))
    assert any("2 workers are 1.6 times as fast as one; 4 share 2 cores" in text for text in words(figure))
