"""Colours by computation: whoever sees no red, no green or no blue still tells one thing from another."""

import itertools
import warnings

import numpy as np
import pytest
from matplotlib import colors

from workshop_utils.plots import (
    baseline,
    communication,
    consistency,
    convergence,
    horovod,
    pipeline,
    prediction,
    scaling,
    style,
    tensorflow,
)

with np.printoptions():  # it sets NumPy's for the whole process when it is imported
    import colour

# CIEDE2000 in CIE Lab: about 2 can be told apart side by side, 10 at a glance.
LEAST_DIFFERENCE = 10
SEEN = ("Protanomaly", "Deuteranomaly", "Tritanomaly")
TOGETHER = {
    "workers": [f"worker {index}" for index in range(8)],
    "strategies": [
        "single", "ring", "workshop_parameter_server", "horovod", "parameter_server",
        "multi_worker_mirrored", "torch_ddp", "mpi", "spark",
    ],
    "a worker's time": ["compute", "send", "wait", "load"],
    "two ways to split": ["one process", "data parallel", "model parallel"],
    "parts of a step": [*baseline.PHASES.values()],
    "parts of a step among workers": [colour for _, colour in scaling.PARTS.values()],
    "numbers of workers": [*communication.SHADES],
    "modes of a server": [*consistency.SERVER_MODES],
    "trainings": [*convergence.HUES],
    "front ends of Horovod": [*horovod.FRONT_ENDS],
    "passes": [pipeline.FORWARD, pipeline.BACKWARD],
    "schedules": [*pipeline.COLOURS.values()],
    "algorithms": [colour for _, colour in prediction.ALGORITHMS.values()],
    "forms of replication": [*tensorflow.FORMS.values()],
}  # fmt: skip


def lab(things: list[str], seen: str | None) -> np.ndarray:
    """The things' colours in CIE Lab; `seen` is a blindness of severity 1, after Machado et al. (2009)."""
    light = colour.cctf_decoding(np.array([colors.to_rgb(style.colour_of(thing)) for thing in things]))
    if seen is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that Machado's model of tritanopia is an approximation
            light = np.clip(light @ colour.matrix_cvd_Machado2009(seen, 1.0).T, 0, 1)
    return colour.XYZ_to_Lab(colour.sRGB_to_XYZ(colour.cctf_encoding(light)))


@pytest.mark.parametrize("seen", [None, *SEEN])
@pytest.mark.parametrize("group", TOGETHER)
def test_things_drawn_together_differ_for_everybody(group, seen):
    things = TOGETHER[group]
    for (one, first), (other, second) in itertools.combinations(
        zip(things, lab(things, seen), strict=True), 2
    ):
        assert colour.delta_E(first, second, method="CIE 2000") >= LEAST_DIFFERENCE, (one, other)


@pytest.mark.parametrize(("one", "other"), [("compute", "wait"), ("send", "wait"), ("worker 0", "worker 1")])
def test_neighbours_differ_in_lightness_for_grey_print(one, other):
    first, second = lab([one, other], None)[:, 0]
    assert abs(first - second) >= 20


def test_the_measure_itself_finds_red_and_green_alike_for_those_who_see_no_red():
    red_and_green = ["#B00000", "#5A5A00"]
    assert colour.delta_E(*lab(red_and_green, None), method="CIE 2000") > 40
    assert colour.delta_E(*lab(red_and_green, "Deuteranomaly"), method="CIE 2000") < LEAST_DIFFERENCE
