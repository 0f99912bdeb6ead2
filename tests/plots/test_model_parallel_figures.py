"""The figures of lesson 08 show the timelines, shares and bytes that they are given."""

import matplotlib
import numpy as np
import pytest
from matplotlib import pyplot as plt
from matplotlib.patches import Rectangle

from workshop_utils.parallel.schedule import bubble_fraction, predict, schedule_of
from workshop_utils.plots import pipeline, style, tensor

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    plt.close("all")


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def points(axes) -> dict[str, list[tuple[float, float]]]:
    """What is drawn with markers, by colour."""
    found = {}
    for line in axes.get_lines():
        if line.get_marker() not in ("None", None, "") and len(line.get_xdata()):
            pairs = zip(line.get_xdata(), line.get_ydata(), strict=True)
            found.setdefault(line.get_color(), []).extend(pairs)
    return found


def test_a_timeline_has_a_bar_a_pass_on_its_rank_and_both_sides_one_scale():
    plan = schedule_of("interleaved", 2, 4, 2)
    predicted, slower = predict(plan, 1.0, 2.0), predict(plan, 1.5, 3.0)
    figure = pipeline.timelines({"interleaved": (predicted, slower)})
    left, right = figure.axes
    for axes, timeline in ((left, predicted), (right, slower)):
        bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
        drawn = sorted((bar.get_x(), bar.get_width(), round(bar.get_y() + 0.4)) for bar in bars)
        np.testing.assert_allclose(drawn, sorted((t.start, t.end - t.start, t.rank) for t in timeline))
    assert left.get_xlim() == right.get_xlim()
    assert right.get_xlim()[1] >= max(timed.end for timed in slower)
    assert {"interleaved 1F1B, predicted: 11 % idle", "interleaved 1F1B, measured: 11 % idle"} <= set(
        words(figure)
    )
    assert len({bar.get_facecolor() for bar in left.patches}) == 4, "two kinds of pass, two stages a rank"


def test_idle_shares_stand_beside_the_formula_of_their_number_of_stages():
    measured = {"gpipe": {1: [0.7], 4: [0.4, 0.5]}, "interleaved": {4: [0.3]}}
    (axes,) = pipeline.idle_shares(measured, 3, {"interleaved": 2}).axes
    assert sorted(share for _, share in points(axes)[pipeline.COLOURS["gpipe"]]) == [0.4, 0.5, 0.7]
    lines = {line.get_label(): line for line in axes.get_lines()}
    for label, chunks in (("formula", 1), ("formula, v = 2", 2)):
        assert lines[label].get_ydata()[-1] == pytest.approx(bubble_fraction(3, 4, chunks))


def test_held_microbatches_are_named_at_the_end_of_their_line():
    figure = pipeline.held_microbatches({"gpipe": [8, 8], "one_f_one_b": [2, 1]})
    assert {"GPipe", "1F1B"} <= set(words(figure))
    np.testing.assert_array_equal(figure.axes[0].get_lines()[1].get_ydata(), [2, 1])


def test_all_training_curves_lie_on_that_of_one_process():
    curve = {step: 5.0 - step for step in range(1, 5)}
    (axes,) = pipeline.training({"one process": curve, "tensor": curve, "pipeline": curve}).axes
    assert list(axes.get_lines()[0].get_xdata()) == [1, 2, 3, 4]
    taken = [step for pairs in points(axes).values() for step, _ in pairs]
    assert sorted(taken) == [1, 2, 3, 4]


def test_bytes_are_counted_in_activations():
    counted = {"tensor parallel": {2: 800.0, 3: 1200.0}}
    (axes,) = tensor.bytes_sent(counted, {"tensor parallel": lambda ranks: 400.0 * ranks}, 100).axes
    assert points(axes)[style.colour_of("model parallel")] == [(2, 8.0), (3, 12.0)]
    assert axes.get_lines()[0].get_ydata()[2] == 12.0


def test_activations_are_given_as_parts_of_those_of_one_process():
    figure = tensor.activations({"one process": 1000.0, "tensor": 500.0, "sequence": 250.0}, ranks=4)
    assert {"1.00", "0.50", "0.25", "1/4"} <= set(words(figure))
    figure.draw_without_rendering()
    (axes,) = figure.axes
    (name,) = (text for text in axes.texts if text.get_text() == "1/4")
    assert not name.get_window_extent().overlaps(axes.patches[0].get_window_extent())


def test_each_direction_of_a_mesh_has_a_part_of_the_bar():
    sent = {"2 × 2 × 2": {"data": 1.0, "tensor": 3.0, "pipeline": 0.5}}
    (axes,) = tensor.bytes_by_direction(sent).axes
    assert [(bar.get_x(), bar.get_width()) for bar in axes.patches] == [(0, 3), (3, 1), (4, 0.5)]
    assert {"data", "tensor", "pipeline"} <= set(words(axes.figure))
