"""Figures: colours keep their promises, labels do not overlap, and pictures are those that the code draws."""

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib import colors
from matplotlib import pyplot as plt

from workshop_utils import models
from workshop_utils.plots import parallelism, style

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    plt.close("all")


@pytest.mark.parametrize(
    ("thing", "same"),
    [("worker 2", "worker-2"), ("rank 2", "worker 2"), ("worker 0", "worker 8"), ("ps-1", "server")],
)
def test_a_thing_has_one_colour_whatever_it_is_called(thing, same):
    assert style.colour_of(thing) == style.colour_of(same)


def test_the_first_eight_workers_have_eight_colours():
    assert len({style.colour_of(f"worker {index}") for index in range(8)}) == 8


def test_a_thing_without_a_colour_is_named():
    with pytest.raises(ValueError, match="'wroker 1' has no colour; known are"):
        style.colour_of("wroker 1")


def grey(colour: str) -> float:
    return float(np.array(colors.to_rgb(colour)) @ [0.2126, 0.7152, 0.0722])


def seen_with_deuteranopia(colour: str) -> np.ndarray:
    """Machado et al. (2009), severity 1.0."""
    matrix = [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]]
    return np.clip(np.array(matrix) @ colors.to_rgb(colour), 0, 1)


def test_workers_differ_for_the_colour_blind():
    seen = [seen_with_deuteranopia(style.colour_of(f"worker {index}")) for index in range(4)]
    for first in range(4):
        for second in range(first):
            assert np.linalg.norm(seen[first] - seen[second]) > 0.15, (first, second)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("worker 0", "worker 1"),
        ("send", "wait"),
        ("compute", "wait"),
        ("data parallel", "model parallel"),
    ],
)
def test_pairs_that_stand_side_by_side_differ_in_grey_print(one, other):
    assert abs(grey(style.colour_of(one)) - grey(style.colour_of(other))) > 0.1


@pytest.mark.parametrize("thing", [*style.COLOURS, *(f"worker {index}" for index in range(8))])
def test_words_on_a_colour_can_be_read(thing):
    def luminance(colour: str) -> float:
        channels = np.array(colors.to_rgb(colour))
        return float(
            np.where(channels <= 0.03928, channels / 12.92, ((channels + 0.055) / 1.055) ** 2.4)
            @ [0.2126, 0.7152, 0.0722]
        )

    low, high = sorted([luminance(style.colour_of(thing)), luminance(style.ink_on(thing))])
    assert (high + 0.05) / (low + 0.05) > 3  # WCAG 2.1 for large text and graphics


@given(
    positions=st.lists(st.floats(-1e3, 1e3), max_size=12),
    gap=st.floats(0, 50),
)
def test_spread_positions_keep_their_order_and_distance(positions, gap):
    moved = style.spread(positions, gap)
    assert len(moved) == len(positions)
    order = np.argsort(positions, kind="stable")
    assert (np.diff(moved[order]) >= gap - 1e-6).all()
    assert np.mean(moved) == pytest.approx(np.mean(positions), abs=1e-6) if positions else True


def test_positions_that_are_far_enough_apart_stay():
    assert style.spread([30.0, 0.0, 15.0], 12.0).tolist() == [30.0, 0.0, 15.0]


def test_labels_at_lines_ends_do_not_overlap():
    figure, axes = style.figure()
    for shift in range(6):
        axes.plot([0, 1], [0, 1 + shift / 1000], label=f"line {shift}")
    style.label_ends(axes)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 6
    for first in range(6):
        for second in range(first):
            assert not boxes[first].overlaps(boxes[second])


def test_a_line_without_a_label_gets_none():
    _, axes = style.figure()
    axes.plot([0, 1], [0, 1])
    style.label_ends(axes)
    assert not axes.texts


@pytest.mark.parametrize("kind", ["axes", "figure"])
def test_a_headline_stays_inside_the_figure(kind):
    figure, axes = style.figure()
    style.headline(axes if kind == "axes" else figure, "What is found", "under which conditions")
    figure.canvas.draw()
    texts = [*figure.texts, *axes.texts, axes._left_title, *([figure._suptitle] if figure._suptitle else [])]
    for text in texts:
        box = text.get_window_extent()
        assert box.y1 <= figure.bbox.y1 + 1
        assert box.x1 <= figure.bbox.x1 + 1


def test_counted_bytes_stand_on_the_line_of_the_formula():
    network = models.MLP.initialise(64, 50, 10)
    counted = {batch: models.model_parallel_bytes(network, 3, batch) for batch in (8, 64, 512)}
    figure = parallelism.bytes_per_step(network, 3, counted)
    lines = {line.get_label(): line for line in figure.axes[0].get_lines()}
    line = np.asarray(lines["model parallel"].get_xydata())
    for batch, sent in counted.items():
        assert np.interp(batch, line[:, 0], line[:, 1]) == pytest.approx(sent, rel=1e-6)


def test_what_one_worker_sends_is_not_drawn():
    with pytest.raises(ValueError, match="workers is 1; one worker sends nothing"):
        parallelism.bytes_per_step(models.MLP.initialise(4, 3, 2), 1, {8: 0.0})


def test_the_largest_difference_stands_in_the_headline():
    figure = parallelism.losses_agree([2.0, 1.0], {"data parallel, N = 2": [2.0, 1.0 + 2.5e-15]})
    assert figure.axes[1].get_title(loc="left") == "They differ by 2.4 · 10⁻¹⁵ at most"


def test_equal_losses_have_no_difference_to_name():
    figure = parallelism.losses_agree([2.0, 1.0], {"model parallel, N = 2": [2.0, 1.0]})
    assert figure.axes[1].get_title(loc="left") == "They differ by 0 at most"


def test_asynchronous_runs_are_each_named():
    figure = parallelism.asynchronous_losses(np.ones(30), {"4 replicas": np.ones(30), "16": np.ones(30)})
    assert {text.get_text() for text in figure.axes[0].texts} >= {"one process", "4 replicas", "16"}
