"""How figures look: colours that everybody can tell apart, words that can be read and do not lie on each other."""

import itertools
import warnings

import numpy as np
import pytest
from matplotlib import colors

from workshop_utils.plots import (
    baseline,
    model_parallel,
    prediction,
    style,
    tensorflow,
)

# CIEDE2000 in CIE Lab: about 2 can be told apart side by side, 10 at a glance.
LEAST_DIFFERENCE = 10
WORKERS = [f"worker {index}" for index in range(8)]
TOGETHER = {
    "workers": WORKERS,
    "strategies": [
        "single", "ring", "workshop_parameter_server", "horovod", "parameter_server", "multi_worker_mirrored",
        "torch_ddp", "mpi", "spark",
    ],
    "a worker's time": ["compute", "send", "wait", "load"],
    "two ways to split": ["one process", "data parallel", "model parallel"],
    "parts of a step": [*baseline.PHASES.values()],
    "all-reduces by size": ["ring", *style.MUTED[1:]],
    "neither workers nor strategies": [*style.MUTED],
    "passes": [model_parallel.FORWARD, model_parallel.BACKWARD],
    "schedules": [*model_parallel.COLOURS.values()],
    "directions of a mesh": [*model_parallel.DIRECTIONS.values()],
    "algorithms": [colour for _, colour in prediction.ALGORITHMS.values()],
    "forms of replication": [*tensorflow.FORMS.values()],
}  # fmt: skip


@pytest.fixture(scope="module")
def science():
    """The package colour-science, which takes seconds to import and then sets NumPy's print options."""
    with np.printoptions():
        import colour
    return colour


def lab(colour, things, seen):
    """The things' colours in CIE Lab; `seen` is a blindness of severity 1, after Machado et al. (2009)."""
    light = colour.cctf_decoding(np.array([colors.to_rgb(style.colour_of(thing)) for thing in things]))
    if seen is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Machado's model of tritanopia is an approximation
            light = np.clip(light @ colour.matrix_cvd_Machado2009(seen, 1.0).T, 0, 1)
    return colour.XYZ_to_Lab(colour.sRGB_to_XYZ(colour.cctf_encoding(light)))


def test_things_drawn_together_differ_for_everybody(science):
    for seen in (None, "Protanomaly", "Deuteranomaly", "Tritanomaly"):
        for group, things in TOGETHER.items():
            seen_as = zip(things, lab(science, things, seen), strict=True)
            for (one, first), (other, second) in itertools.combinations(seen_as, 2):
                difference = science.delta_E(first, second, method="CIE 2000")
                assert difference >= LEAST_DIFFERENCE, (group, seen, one, other)


def test_words_on_a_colour_can_be_read(science):
    def luminance(thing):
        red_green_blue = np.array(colors.to_rgb(style.colour_of(thing)))
        return float(science.models.eotf_sRGB(red_green_blue) @ [0.2126, 0.7152, 0.0722])

    for thing in (*style.COLOURS, *WORKERS):
        low, high = sorted([luminance(thing), luminance(style.ink_on(thing))])
        assert (high + 0.05) / (low + 0.05) > 3, thing  # WCAG 2.1 for large text and graphics


def test_a_thing_has_one_colour_whatever_it_is_called_and_one_without_a_colour_is_named():
    same = [("worker 2", "worker-2"), ("rank 2", "worker 2"), ("worker 0", "worker 8"), ("ps-1", "server")]
    for thing, other in same:
        assert style.colour_of(thing) == style.colour_of(other)
    with pytest.raises(ValueError, match="'wroker 1' has no colour; known are"):
        style.colour_of("wroker 1")


def test_labels_at_the_ends_of_lines_that_coincide_do_not_overlap():
    figure, axes = style.figure()
    for shift in range(6):
        axes.plot([0, 1], [0, 1 + shift / 1000], label=f"line {shift}")
    axes.plot([0, 1], [0, 1])  # without a label
    style.label_ends(axes)
    figure.draw_without_rendering()
    boxes = [text.get_window_extent() for text in axes.texts]
    assert len(boxes) == 6
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
