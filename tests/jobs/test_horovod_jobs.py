"""The jobs of lesson 05 with real Horovod, compared with one process in NumPy."""

import random

import numpy as np
import pytest
import torch
from launching import launched, trained_by_one_process

from workshop_utils.parallel import adasum
from workshop_utils.training import data, horovod_timeline
from workshop_utils.training.horovod_settings import Tuning

EPOCHS, BATCH, RATE, HIDDEN, IMAGES = 2, 16, 0.2, 64, 1500

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


def expectation(workers):
    """The losses and the network of one process, which takes the batches of all workers as one."""
    steps, whole, rows = IMAGES // workers // BATCH, BATCH * workers, []
    for epoch in range(EPOCHS):
        order = list(range(IMAGES))
        random.Random(epoch + 1).shuffle(order)
        rows += [order[step * whole : (step + 1) * whole] for step in range(steps)]
    return trained_by_one_process(
        HIDDEN, rows, lambda step: RATE * (1 + (workers - 1) * min(1.0, step / steps))
    )


@pytest.mark.parametrize("front_end", ["torch", "tensorflow", "keras"])
def test_every_front_end_takes_the_steps_that_one_process_would(front_end, tmp_path):
    workers = 3
    run = launched(f"digits_horovod_{front_end}", tmp_path, workers=workers, arguments={"epochs": EPOCHS})
    assert run.warm  # Horovod is loaded in the fork
    expected, mlp = expectation(workers)
    reports = run.metrics.dropna(subset=["loss"])
    assert set(reports["rank"]) == set(range(workers))
    for step, ranks in reports.groupby("step"):
        assert len(ranks) == workers
        assert ranks["loss"].mean() == pytest.approx(expected[int(step) - 1], rel=2e-3)
    epochs = run.metrics.dropna(subset=["accuracy"])
    assert list(epochs["rank"]) == [0] * EPOCHS
    for row in epochs.itertuples():  # metric averaging: what rank 0 reports is the mean of all ranks' own
        own = reports[reports["step"] == row.step]["loss"]
        assert row.mean_loss == pytest.approx(own.mean(), rel=1e-5)
    digits = data.arrays(data.prepare("digits"))
    assert epochs["accuracy"].iloc[-1] == pytest.approx(
        mlp.accuracy(digits.test_images, digits.test_labels), abs=2.5 / len(digits.test_labels)
    )
    rates = reports.groupby("step")["learning_rate"].first()
    assert rates.iloc[0] == pytest.approx(RATE)
    assert rates.iloc[-1] == pytest.approx(RATE * workers)
    if front_end == "torch":
        weights = torch.load(tmp_path / "model.pt")
        assert pytest.approx(mlp.w1, abs=1e-3) == weights["0.weight"].numpy().T


@pytest.fixture(scope="module")
def plain():
    """What rank 0 reports after each epoch, of a job as it stands."""
    return after_epochs()


def after_epochs(**arguments):
    metrics = launched("digits_horovod_torch", arguments={"epochs": 3, **arguments}).metrics
    return metrics.dropna(subset=["spread"])


def test_without_a_broadcast_the_ranks_never_agree_and_with_it_they_always_do(plain):
    assert (plain["spread"] == 0).all()
    assert (after_epochs(broadcast=0)["spread"] > 0.1).all()


def test_half_precision_rounds_and_still_learns_and_leaves_the_ranks_equal(plain):
    half = after_epochs(compression="fp16")
    assert list(half["mean_loss"]) != list(plain["mean_loss"])
    assert list(half["mean_loss"]) == pytest.approx(list(plain["mean_loss"]), rel=0.05)
    assert (half["spread"] == 0).all()


@pytest.mark.parametrize(("threshold", "least", "most"), [("128MiB", 1, 3), ("0", 10, 10)])
def test_the_timeline_shows_fused_gradients_in_few_messages_and_others_in_one_each(
    threshold, least, most, tmp_path
):
    run = launched(
        "digits_horovod_torch",
        tmp_path,
        arguments={"epochs": 2, "layers": 4, "timeline-steps": 3},
        environment=Tuning(fusion_threshold=threshold).environment,
    )
    steps = horovod_timeline.steps(horovod_timeline.read_timeline(tmp_path / "timeline.json"))
    assert len(steps) == 3
    counts = []
    for spans in steps:
        messages = horovod_timeline.messages(spans)
        assert sorted(name for message in messages for name in message.tensors) == sorted(
            f"allreduce.{layer}.{part}" for layer in (0, 2, 4, 6, 8) for part in ("weight", "bias")
        )
        counts.append(len(messages))
    assert least <= min(counts) <= most  # a busy machine may spread a step over several cycles
    assert list(run.metrics["spread"].dropna()) == [0.0, 0.0]


def test_horovods_adasum_is_the_one_that_is_taught():
    workers = 4  # of pairs, and of a pair of pairs
    run = launched("horovod_adasum", workers=workers, arguments={"angles": "0,30,90,135"})
    for row in run.metrics.itertuples():
        ranks = np.radians(row.angle) * np.arange(workers)
        gradients = [np.array([np.cos(angle), np.sin(angle)]) for angle in ranks]
        assert (row.adasum_x, row.adasum_y) == pytest.approx(tuple(adasum.reduce(gradients)), abs=1e-5)
        assert (row.mean_x, row.mean_y) == pytest.approx(tuple(np.mean(gradients, axis=0)), abs=1e-5)


def test_training_with_adasum_over_mpi_needs_no_scaled_learning_rate():
    table = launched(
        "digits_horovod_torch", strategy="mpi", arguments={"epochs": 4, "reduction": "adasum"}
    ).metrics
    assert set(table["learning_rate"].dropna()) == {RATE}
    assert table["accuracy"].dropna().iloc[-1] > 0.85
    assert table["spread"].dropna().max() == 0
