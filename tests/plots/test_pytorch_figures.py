"""Figures of the lesson on PyTorch show what was measured."""

import matplotlib
import pytest
from matplotlib import pyplot as plt

from workshop_utils.plots import pytorch, style
from workshop_utils.scaling.memory import zero_memory
from workshop_utils.scaling.overlap import Phase

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    plt.close("all")


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text) if text.get_text()]


def all_reduces(axes) -> list[tuple[float, float, float]]:
    """Left, width and height of the bars in the colour of what is sent."""
    colour = matplotlib.colors.to_rgba(style.colour_of("send"))
    found = [bar for bar in axes.patches if bar.get_facecolor() == colour]
    return [(bar.get_x(), bar.get_width(), bar.get_height()) for bar in found]


STEP = [Phase("forward", 0.0, 1.0), Phase("backward", 1.0, 2.0), Phase("wait", 2.0, 3.5)]


def test_a_step_has_a_bar_for_every_phase_and_says_how_long_ranks_waited():
    one_after_the_other = [*STEP, Phase("all-reduce", 2.0, 3.0, 8), Phase("all-reduce", 3.0, 3.5, 4)]
    figure = pytorch.steps_with_communication({"naive": {0: one_after_the_other, 1: STEP}}, "finding")
    (axes,) = figure.axes
    assert len(axes.patches) == 8
    assert [bar[:2] for bar in all_reduces(axes)] == [(2.0, 1.0), (3.0, 0.5)]
    assert {"rank 0", "rank 1", "forward", "backward", "wait"} <= set(words(figure))
    assert "naive: waited 1500 ms for gradients" in words(figure)


def test_all_reduces_that_overlap_lie_in_lanes_of_their_own():
    def heights(*spans):
        step = [*STEP, *(Phase("all-reduce", *span) for span in spans)]
        return {
            round(bar[2], 3)
            for bar in all_reduces(pytorch.steps_with_communication({"": {0: step}}, "").axes[0])
        }

    assert heights((1, 2), (2, 3)) == {0.36}
    assert heights((1, 2), (1.5, 3), (2, 3)) == {0.18}
    assert heights((1, 3), (1.5, 3), (2, 3)) == {0.12}


def test_the_title_says_what_was_measured_also_where_overlap_won_nothing():
    for overlapped, said in (
        ([0.1, 0.1], "100 ms of waiting are left of 200 ms"),
        ([0.3, 0.3], "waited no less here"),
    ):
        figure = pytorch.exposed_communication({"naive": [0.2, 0.2], "overlapped": overlapped}, 0.2)
        assert any(said in text for text in words(figure))


def test_no_measured_wait_lies_outside_the_axes():
    figure = pytorch.exposed_communication({"naive": [0.2, 0.9], "overlapped": [0.1, 0.1]}, 0.2)
    assert figure.axes[0].get_xlim()[1] > 0.9


def test_memory_is_drawn_in_its_parts_with_what_was_measured():
    ways = {f"stage {stage}": pytorch.Held(1e6 * stage, zero_memory(1e6, 4, stage)) for stage in (0, 3)}
    figure = pytorch.memory_per_rank(ways, 4, 1_000_000)
    widths = [round(bar.get_width(), 6) for bar in figure.axes[0].patches]
    assert widths == [4, 4, 8, 1, 1, 2]
    assert [line.get_xdata()[0] for line in figure.axes[0].get_lines()] == [0, 3]
    assert any("a rank holds 1/4 of what it held" in text for text in words(figure))
