"""Figures of the lessons show the numbers that they are given, with names and units, and in words too."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle

from workshop_utils.comm.communicator import Event
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.plots import (
    alternative,
    baseline,
    communication,
    consistency,
    convergence,
    failures,
    horovod,
    kubernetes,
    parallelism,
    prediction,
    pytorch,
    sagemaker,
    scaling,
    spark,
    tensorflow,
    torchx,
    welcome,
)
from workshop_utils.training.horovod_timeline import TimelineSpan


def table(columns, *rows):
    return pd.DataFrame(rows, columns=columns.split())


def shown(axes):
    """Where markers or, without any, lines are drawn, from left to right; or, row by row, where each bar begins and how
    long it is."""
    lines = [line for line in axes.get_lines() if line.get_marker() not in ("None", None, "")]
    lines = lines or [line for line in axes.get_lines() if not axes.patches and len(line.get_xydata()) > 1]
    if lines:
        return sorted((float(x), float(y)) for line in lines for x, y in line.get_xydata())
    bars = [patch for patch in axes.patches if isinstance(patch, Rectangle)]
    bars.sort(key=lambda bar: (round(bar.get_y() + bar.get_height() / 2, 3), bar.get_x()))
    return [(bar.get_x(), bar.get_width()) for bar in bars]


PUSHES = table("pusher push_seconds staleness late", (0.0, 0.0, 0, 0), (1.0, 0.1, 40, 0), (0.0, 0.2, 9, 1))
EXCHANGED = {"one": {2: 1.0, 4: 2.0}, "every": {2: 0.5, 4: 0.75}, "ring": {2: 0.5, 4: 0.8}}
EXPECTED = {"one": lambda workers: workers / 2, "every": lambda workers: 1 - 1 / workers}
ARRIVED = table(
    "simulated real gradients", ([0.5, 1.5], 1.0, 80), ([0.25, 1.5], 0.5, 200), ([1.0, math.inf], 1.5, 300)
).set_index(pd.Index(["alone", "all wait", "none waits"]))
STEP = pytorch.Step(5.0, 6.0, 8.0, 9.0, [(6.5, 8.0, 4), (8.0, 9.0, 4)])
PIECES = [("gather", 0, 0, 1), ("forward", 0, 1, 3), ("backward", 0, 3, 7), ("reduce", 0, 7, 8)]
SHARDED = {"DDP": (0, [16, 16]), "ZeRO-1": (1, [12, 8]), "our own": (3, [8, 4])}
STEPS = (10, 1), (11, 2), (12, 3), (14, 2), (15, 3), (16, 4)
RESTARTED = table("seconds step", *STEPS).assign(rank=0, loss=1.0)
FUSED = [TimelineSpan("a", "NEGOTIATE_ALLREDUCE", 1.0, 1.5), TimelineSpan("a", "GLOO_ALLREDUCE", 1.5, 2.5)]
FOLLOWED = [
    {"phase": phase, "operation": "mm", "process": 3e6 + sum(tensors.values()), "tensors": tensors}
    for phase, tensors in (
        ("forward", {"parameters": 10e6}),
        ("forward", {"parameters": 10e6, "activations": 5e6}),
        ("backward", {"parameters": 10e6, "activations": 5e6, "gradients": 1}),  # too little to be drawn
        ("backward", {"parameters": 10e6, "activations": 5e6, "gradients of activations": 9e6}),
        ("update", {"parameters": 10e6, "gradients": 10e6}),
    )
]
EVENTS = [[Event("send", 1, 8, 0, 1, "")], [Event("recv", 0, 8, 0, 3, "")]]
WAITED = table(
    "worker step compute_seconds all_reduce_seconds",
    ("worker-0", 1, 9.0, 9.0),  # the first step does not count
    ("worker-0", 2, 0.1, 0.25),
    ("worker-1", 2, 0.3, 0.05),
)
SENT = pd.Series(
    {(cut, batch): 2.0 + place for place, cut in enumerate(parallelism.CUTS) for batch in (1, 4)}
)
AN_IMAGE = {"layer": 1.0, "column": 2.0, "row": 0.5}
TIMES = {"one": [2.0, 4.0, 9.0], "two": [1.0, 2.0, 3.0]}
FORMS = dict.fromkeys(prediction.MAPPED, lambda n, k: 40) | {"ring": lambda n, k: n}  # up to 40 a ring
CHECKED = table("workers nbytes fastest", (31, 1e3, "ring"), (64, 1e3, "halving_doubling"))
SIMULATED = table("algorithm workers seconds", ("ring", 2, 2.0), ("ring", 8, 8.0))
KNOWN = table("system predicted measured", ("a", 1.05, 1.0), ("a", 1.3, 1.0), ("b", 0.5, 1.0))
LINE = np.array([2.0, 8.0, 1000.0])
CURVES = {"ring": LINE, "tree": 2 * LINE}

ROWS = ("ring", 1, 0.95, 1.0), ("ring", 4, 0.8, 0.75), ("horovod", 1, 0.5, 0.5), ("horovod", 4, 0.2, 0.25)
EMULATED = table("strategy workers efficiency predicted", *ROWS).assign(
    gradient_nbytes=1e8, device_seconds=0.5
)
EMULATED = pd.concat([EMULATED.assign(model=name) for name in ("vgg16", "mine")])
HALVES = {
    name: np.array([[low, high]] * 2)
    for name, low, high in (("alone", 50, 51), ("two workers", 90, 95), ("one process", 91, 96))
}
SHARED = {"one": [8.0], "apart": [4.0], "two": [6.0]}
OTHERS = table("model devices throughput one_device strategy", ("mine", 4, 300.0, 100.0, "ring (NCCL)"))
UNEVEN = EMULATED[
    (EMULATED["strategy"] == "ring") | (EMULATED["workers"] == 1)
]  # one measured at fewer counts


# Figures that order, sum up or mark what they are given; and what their panels show, from the first on.
SHOWN = {
    "step": (lambda: baseline.step_shares({16: {"data": 1, "forward": 2, "backward": 4, "update": 13}}),
        [[(0, 0.05), (0.05, 0.1), (0.15, 0.2), (0.35, 0.65)]]),
    "memory": (lambda: baseline.memory(FOLLOWED, 2e7), [[(0, 13), (1, 18), (2, 18), (3, 27), (4, 23)]]),
    "roofline of a core": (lambda: baseline.roofline({1: (0.5, 4e9), 64: (20, 9e10)}, (1e10, 1e11)),
        [[(0.5, 4), (20, 90)]]),
    "step times": (lambda: baseline.step_times({1: [1.2, 1.2], 2: [0.8], 4: [0.9]}, (0.0, 1.2, 0.2), 2),
        [[(1, 1.2), (1, 1.2), (2, 0.8), (4, 0.9)], [(2, 1 / 3), (4, 2 / 3)]]),
    "bytes of four cuts": (lambda: parallelism.bytes_per_step(SENT, 2, AN_IMAGE, dict.fromkeys(AN_IMAGE, 1.0)),
        [sorted([(batch, 2 + place) for batch in (1, 4) for place in range(4)] + [(4, 16)]), [(2, 16)]]),
    "roofline": (lambda: parallelism.roofline(np.array([4.0, 1.0]), np.array([3.0, 1.0]), 8.0, 2.0, "so"),
        [[(1, 1), (4, 3)]]),
    # Three seeds and their median, to each of two losses.
    "time to a loss": (lambda: parallelism.time_to_loss({0.5: TIMES, 0.1: TIMES}, 0.1),
        [[(1, 1), (2, 0), (2, 1), (3, 1), (4, 0), (9, 0)]] * 2),
    # Two exchanges, each with its line, and a ring on the last line.
    "exchange times": (lambda: consistency.exchange_times(EXCHANGED, EXPECTED, "so"),
        [[(2, 0.5), (2, 0.5), (2, 1), (4, 0.75), (4, 0.8), (4, 2)]]),
    # Two seeds, their median and a real run; a seed that never arrived is at the edge.
    "seconds to a loss": (lambda: consistency.seconds_to_loss({"a": ARRIVED, "b": ARRIVED}, 1, 2),
        [[(0.25, 1), (0.5, 0), (0.5, 1.3), (1, 0.3), (1, 2), (1.5, 0), (1.5, 1), (1.5, 2.3), (2, 2)]] * 2),
    "descents": (lambda: consistency.descents({0.3: {0: [1.0, 0.5], 3: [1.0, -3.0]}}),
        [[(0, 1), (0, 1), (1, -3), (1, 0.5)]]),
    "full link": (lambda: consistency.full_link({1: 4.0, 3: 9.0}, 4, 9, 2.25, "so"), [[(1, 4), (3, 9)]]),
    "crash": (lambda: consistency.crash({"calm": [3, 2, 1], "kept": [3, 2, 1], "lost": [3, 3, 2]}, 1),
        [[(0, 3), (0, 3), (0, 3), (1, 0), (1, 1), (1, 2), (1, 2), (1, 3), (2, 1), (2, 1), (2, 2)]]),
    "pushes": (lambda: consistency.pushes({"a": PUSHES}, 1, 0), [[(0, 0), (0.1, 1), (0.2, 0)]]),
    "density": (lambda: consistency.by_density({"rows": {0.01: 2, 1: 90}, "a ring": {0.01: 80, 1: 80}},
        {"rows": lambda share: 90 * share, "a ring": lambda _: 80}), [[(0.01, 2), (0.01, 80), (1, 80), (1, 90)]]),
    "ring": (lambda: communication.ring_steps(ring_all_reduce, 4), [None] * 7 + [[]]),
    # Pale from when the sender was done with it until it had been received.
    "messages": (lambda: communication.message_timelines({"ring": EVENTS}, "real", "Found", "so"),
        [[(0, 1), (1, 2)]]),
    "ranks": (lambda: communication.against_ranks([2, 4], {"ring": [1.0, 1.5], "central": []}, {"ring": [1, 1]}, "so"),
        [[(2, 1.0), (4, 1.5)]]),
    "sizes": (lambda: communication.against_size([1, 9],
        {"4 ranks": ({"ring": [1, 1], "halving-doubling": [1, 2]}, {"ring": [4, 1]})}, "Found", "so"),
        [[(1, 4), (9, 1)]]),
    "gain of overlap": (lambda: communication.overlap([1, 2], {"after": [4.0, 6.0], "overlapped": [3.0, 5.0]},
        {"after": ([1, 2], [4, 6]), "overlapped": ([1, 2], [3, 5])}, "so"), [[(1, 3), (1, 4), (2, 5), (2, 6)]]),
    "images read": (lambda: horovod.images_read({"not split": [[3, 5]] * 2, "split": [[3], [5]]}, "Found", "so"),
        [[(3, 0), (3, 1), (5, 0), (5, 1)], [(3, 0), (5, 1)]]),
    "tuning": (lambda: horovod.tuning({"off": [0.2], "on": [0.02]}, {"on": 0.02}, "Found", "so"),
        [[(0.02, 1)] * 2 + [(0.2, 0)] * 2]),
    "recorded": (lambda: horovod.gradient_timelines({"fused": FUSED}), [[(0, 500), (500, 1000)]]),
    "overlap": (lambda: pytorch.steps_with_communication({"buckets": [STEP]}, "Found", "so"),
        [[(0, 1), (1, 2), (3, 1), (1.5, 1.5), (3, 1)]]),
    # In each lane, from the top, what was measured, with the waits where it computes, and what was predicted.
    "by unit": (lambda: pytorch.steps_by_unit({"prefetch": (PIECES, PIECES)}, "Found", "so"),
        [[(0, 1), (0, 1), (0, 1), (1, 2), (3, 4), (7, 1), (1, 2), (3, 4), (7, 1), (7, 1)]]),
    "sharded": (lambda: pytorch.memory_by_ranks([2, 4], {"float32": SHARDED, "mixed": SHARDED}),
        [[(2, 8), (2, 12), (2, 16), (4, 4), (4, 8), (4, 16)]] * 2),
    # Where a seed did not arrive there is a ring at the upper edge.
    "seeds": (lambda: convergence.against({"": {"rule": {32: np.array([1, 3]), 64: np.array([1, math.inf])}}},
        ("batch", "images"), "Found", "so"), [[(32, 2), (64, 0.97)]]),
    "lost pod": (lambda: kubernetes.lost_pod(RESTARTED, 12, "worker-1"),
        [[(-2, 1), (-1, 2), (0, 3), (2, 2), (3, 3), (4, 4)]]),
    "places": (lambda: kubernetes.places({"a rule": [[("a", False)], [("a", True)], [None]]}, "Found", "so"),
        [[(0, 1), (1, 1)]]),
    "waiting": (lambda: failures.waiting(WAITED), [[(0, 0.1), (0.1, 0.25), (0, 0.3), (0.3, 0.05)]]),
    "hang": (lambda: failures.hang([["1 all_reduce", "1.2 done", "1.25 barrier"], ["1.1 all_reduce", "1.2 done"]]),
        [[(0, 0.2), (0.2, 0.05), (0.25, 0.075), (0.1, 0.1), (0.2, 0.125)]]),
    "restart": (lambda: failures.restart(RESTARTED.assign(attempt=[0, 0, 0, 1, 1, 1], worker="worker-0")),
        [[(0, 1), (1, 2), (2, 3), (4, 2), (5, 3), (6, 4)]]),
    "curve": (lambda: prediction.to_a_thousand(LINE, CURVES, SIMULATED, "Found", "so"), [[(2, 2), (8, 8)]]),
    "map": (lambda: prediction.fastest_map(FORMS, "Found", "so", CHECKED), [[(1e3, 31), (1e3, 64)]]),
    "known": (lambda: prediction.against_known(KNOWN, 0.1, "Found", "so"), [[(0.5, 1), (1.05, 0), (1.3, 0)]]),
    "compared": (lambda: prediction.compared({"64": {"ring": 1e-3}}, {"ring": "ring"}, "Found", "so"),
        [[(0, 1e-3)]]),
    "by seed": (
        lambda: spark.by_seed({"a": [3.0, 4.0], "b": [5.0]}, "loss", "a", "b"), [[(3.0, 0), (4.0, 0), (5.0, 1)]]
    ),
    "recognised": (lambda: welcome.recognised(HALVES, 20),
        [[(10, 50), (10, 90), (10, 91), (20, 51), (20, 95), (20, 96)], [(10, 90), (10, 91), (20, 95), (20, 96)]]),
    "shared steps": (lambda: welcome.steps({1200: SHARED, 60: SHARED}),
        [[(4, 1.2), (6, 2.2), (8, 0.2)]] * 2),
    "throughput": (lambda: scaling.throughput(EMULATED), [[(1, 0.5), (1, 0.95), (4, 0.8), (4, 3.2)]] * 2),
    "throughput and published": (lambda: scaling.throughput(EMULATED, OTHERS),
        [[(1, 0.5), (1, 0.95), (4, 0.8), (4, 3.2)], [(1, 0.5), (1, 0.95), (4, 0.8), (4, 3.0), (4, 3.2)]]),
    "uneven throughput": (lambda: scaling.throughput(UNEVEN), [[(1, 0.5), (1, 0.95), (4, 3.2)]] * 2),
}  # fmt: skip


@pytest.mark.parametrize("name", SHOWN)
def test_a_figure_shows_its_numbers_under_a_headline_on_named_axes_and_nothing_runs_out_of_it(name):
    make, panels = SHOWN[name]
    figure = make()
    for axes, expected in zip(figure.axes, panels, strict=True):
        if expected is not None:  # of a panel with a drawing
            assert shown(axes) == [pytest.approx(each) for each in expected]
    headline = figure.get_suptitle() or figure.axes[0].get_title(loc="left")
    assert alternative.describe(figure).startswith(headline.strip().replace("\n", " "))
    assert name == "ring" or any(axes.get_xlabel() or axes.get_ylabel() for axes in figure.axes)
    figure.draw_without_rendering()
    page = figure.bbox.padded(1)
    for axes in figure.axes:
        for text in (*axes.texts, axes.xaxis.label, axes.yaxis.label, *figure.texts):
            if text.get_text():
                assert page.count_contains(text.get_window_extent().corners()) == 4, text.get_text()


def test_a_rank_whose_sending_overlaps_nothing_attains_half_the_roof_at_the_ridge():
    figure = parallelism.roofline(np.array([1.0, 16.0]), np.array([1.0, 6.0]), 8.0, 2.0, "so")
    roof, in_turn = (np.interp(4.0, *line.get_data()) for line in figure.axes[0].get_lines()[:2])
    assert (roof, in_turn) == (pytest.approx(8, rel=0.02), pytest.approx(4, rel=0.02))


def test_the_loss_of_a_pretraining_is_the_running_mean_of_its_ranks():
    rows = [
        (rank, step, 2 + sign + (step == 1)) for step in range(1, 31) for rank, sign in ((0, 0.1), (1, -0.1))
    ]
    figure = torchx.pretraining_losses(table("rank step loss", *rows), {"guessing": 5.0, "frequencies": 1.0})
    *_, running = figure.axes[0].get_lines()
    # A step counts a twentieth, and twenty steps have their middle at 10.5.
    assert running.get_ydata() == pytest.approx([2.05] + [2] * 10)
    assert running.get_xdata()[0] == 10.5
    assert "2.00 ± 0.00 nats, above frequencies" in figure.axes[0].get_title(loc="left")
    last = pd.Series([1.9, 2.1] * 10)
    for level, finding in ((2.1, "below"), (2.03, "not clearly apart from"), (1.9, "above")):
        assert torchx.losses_finding(last, {"guessing": 5.0, "it": level}).endswith(f"nats, {finding} it")


def test_the_title_compares_the_first_stage_with_none_at_most_ranks():
    mixed = {"DDP": (0, [16.0, 16.0]), "ZeRO-1": (1, [10.0, 4.0])}
    figure = pytorch.memory_by_ranks([2, 4], {"float32": SHARDED, "mixed": mixed})
    assert "50% in float32 and 75% in mixed with 4 ranks" in figure.get_suptitle()


def test_the_title_of_an_interruption_counts_the_steps_that_were_repeated():
    rows = [(0, step / 10, step) for step in range(1, 30)] + [
        (1, 5 + step / 10, step) for step in range(21, 41)
    ]
    for count, title in (
        (29, "Not interrupted: 0 of 29 steps"),
        (49, "Interrupted once: 9 of 40 steps were repeated"),
        (20, "Interrupted once: 0 of 40 steps were repeated"),  # just after a checkpoint
    ):
        shown = rows[:20] + rows[29:] if count == 20 else rows[:count]
        figure = sagemaker.spot(table("attempt seconds step", *shown), checkpoint_steps=10)
        assert title in figure.axes[0].get_title(loc="left")


def test_the_title_counts_the_predicted_forms_alone():
    distances = {"in-graph": [1e-7, 3e-7], "MirroredStrategy, fit": [2e-7, 2e-3], "JAX, jit": [0, 0]}
    drawn = tensorflow.distances(distances | {"Keras on JAX, fit": [0, 0]}, 1e-4, 1.5)
    assert "2 of 3 forms" in drawn.get_suptitle()


def test_a_form_that_is_not_the_lessons_is_refused():
    with pytest.raises(ValueError, match="Horovod"):
        tensorflow.distances({"Horovod": [0.0]}, 1e-4, 1.5)


def test_gradients_thrown_away_and_slots_stolen_are_named():
    stale, fresh = (1, 0, 0.1, False), [(update, 0, 0.1, True) for update in (1, 2, 3)]
    eager = [(1, 0, 0.1, True), *fresh[:1], stale, *fresh[1:]]
    runs = {"with": {"one late": [[stale, *fresh[1:]], eager]}, "without": {"one late": [fresh, fresh]}}
    figure = tensorflow.means(runs, updates=2)
    assert figure.get_suptitle().startswith("With, gradients thrown away and slots stolen\n")
    notes = {text.get_text() for text in figure.axes[0].texts}
    assert {"thrown away", "slots stolen: 1"} <= notes
