"""TensorFlow's forms of data parallelism, between real processes: synchronous ones equal one process."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pandas as pd
import pytest
from launching import launched

from workshop_utils.training import data

BATCH = 17  # images a worker takes in a step; 17, 13 and 10 classes are odd for 2 and 3
HIDDEN, EPOCHS = 13, 2
WORKERS = 3
RATE = 0.15  # of one step, whoever takes part in it

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]


class Trained(NamedTuple):
    """What a run left: metrics, the variables' devices by name, and the weights in one array."""

    metrics: pd.DataFrame
    devices: dict[str, set[str]]
    weights: np.ndarray


def trained(name, folder, workers, servers=1, **arguments):
    arguments = {"batch_size": BATCH, "hidden": HIDDEN, "epochs": EPOCHS, "learning_rate": RATE, **arguments}
    changes = {"workers": workers, "parameter_servers": servers, "arguments": arguments}
    warm = workers > 1  # so that one starts as a command line would have it
    run = launched(name, folder, warm=warm, **changes)
    assert run.warm is warm
    lines = list(run.logs())
    assert [line for line in lines if line.stream == "stderr"] == [], "TensorFlow's notices stay out of sight"
    words = [line.text.split() for line in lines]
    assert all(word[0] == "variable" for word in words)
    devices = {}
    for _, variable, _, device in words:
        devices.setdefault(variable, set()).add(device.replace("/replica:0", ""))
    with np.load(folder / "model.npz") as model:
        return Trained(
            run.metrics, devices, np.concatenate([model[key].ravel() for key in ("w1", "b1", "w2", "b2")])
        )


def steps_an_epoch(workers):
    count = len(data.arrays(data.prepare("digits")).train_labels)
    return count // workers // BATCH


def assert_equal(one, other, steps):
    """The same loss after every epoch, and the same weights in the end; and it has learnt."""
    tested, expected = (found.metrics.dropna(subset=["test_loss"]) for found in (one, other))
    assert list(tested["step"]) == list(expected["step"]) == [steps * epoch for epoch in range(EPOCHS + 1)]
    # float32, added in another order
    np.testing.assert_allclose(tested["test_loss"], expected["test_loss"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(one.weights, other.weights, rtol=0, atol=2e-5)
    assert tested["accuracy"].iloc[-1] > 0.8
    assert tested["test_loss"].iloc[-1] < 0.5 * tested["test_loss"].iloc[0]


def test_workers_in_a_ring_equal_one_that_takes_the_batch_of_all_however_gradients_are_packed(tmp_path):
    serial = trained("mnist_multi_worker_mirrored", tmp_path, 1, batch_size=WORKERS * BATCH)
    run = trained("mnist_multi_worker_mirrored", tmp_path, WORKERS, bytes_per_pack=1)
    assert_equal(run, serial, steps_an_epoch(WORKERS))
    mirrors = {f"/job:worker/task:{index}/device:CPU:0" for index in range(WORKERS)}
    assert run.devices == dict.fromkeys(("w1", "b1", "w2", "b2"), mirrors)


def test_a_coordinator_makes_an_update_of_every_batch_and_has_its_variables_on_the_servers(tmp_path):
    servers = 2
    run = trained("mnist_parameter_server", tmp_path, WORKERS, servers, learning_rate=RATE / WORKERS)
    tested = run.metrics.dropna(subset=["test_loss"])
    assert tested["step"].iloc[-1] == WORKERS * EPOCHS * steps_an_epoch(WORKERS)
    assert tested["accuracy"].iloc[-1] > 0.8
    assert {server for places in run.devices.values() for server in places} == {
        f"/job:ps/task:{server}/device:CPU:0" for server in range(servers)
    }
