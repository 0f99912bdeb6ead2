"""The jobs of lesson 05 with real Horovod, compared with one process in NumPy."""

import random

import numpy as np
import pytest
from launching import launched, trained_by_one_process

from workshop_utils.training import data, horovod_timeline

EPOCHS, BATCH, RATE, HIDDEN, IMAGES = 2, 16, 0.2, 64, 1500

pytestmark = [pytest.mark.processes, pytest.mark.horovod, pytest.mark.usefixtures("nothing_is_left")]


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


def test_keras_takes_the_steps_that_one_process_would(tmp_path):
    workers = 3
    run = launched("digits_horovod_keras", tmp_path, workers=workers, arguments={"epochs": EPOCHS})
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


@pytest.mark.parametrize(("threshold", "least", "most"), [(128 << 20, 1, 3), (0, 10, 10)])
def test_the_timeline_shows_fused_gradients_in_few_messages_and_others_in_one_each(
    threshold, least, most, tmp_path
):
    launched(
        "horovod_fusion",
        tmp_path,
        arguments={"tensors": 10, "repeats": 3, "timeline": 1},
        environment={"HOROVOD_FUSION_THRESHOLD": f"{threshold}"},
    )
    (spans,) = horovod_timeline.steps(horovod_timeline.read_timeline(tmp_path / "timeline.json"))
    messages = horovod_timeline.messages(spans)
    sent = sorted(name for message in messages for name in message)
    assert sent == [f"allreduce.gradient {number}" for number in range(10)]
    assert least <= len(messages) <= most  # a busy machine may spread a step over several cycles


def combine(first, second):
    """Adasum of two gradients, of which one may be zero."""
    both, squares = first @ second, (first @ first, second @ second)
    of_first, of_second = (1 - both / (2 * square) if square else 1 for square in squares)
    return of_first * first + of_second * second


def test_horovods_adasum_is_the_one_that_is_taught():
    workers = 4  # of pairs, and of a pair of pairs
    run = launched("horovod_adasum", workers=workers, arguments={"angles": "0,30,90,135"})
    for row in run.metrics.itertuples():
        angles, lengths = np.radians(row.angle) * np.arange(workers), np.arange(1, workers + 1)
        first, *others = (lengths * [np.cos(angles), np.sin(angles)]).T
        adasum, zero = (
            combine(combine(each, others[0]), combine(*others[1:])) for each in (first, 0 * first)
        )
        assert (row.adasum_x, row.adasum_y) == pytest.approx(tuple(adasum), abs=1e-5)
        assert (row.zero_x, row.zero_y) == pytest.approx(tuple(zero), abs=1e-5)
        assert (row.mean_x, row.mean_y) == pytest.approx(tuple((first + sum(others)) / workers), abs=1e-5)
