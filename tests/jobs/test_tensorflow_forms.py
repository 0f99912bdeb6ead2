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

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


class Trained(NamedTuple):
    """What a run left: metrics, the variables' devices by name, and the weights in one array."""

    metrics: pd.DataFrame
    devices: dict[str, set[str]]
    weights: np.ndarray

    def of(self, worker):
        """The steps that `worker` reported."""
        return self.metrics[self.metrics["worker"] == worker].dropna(subset=["loss"])


def trained(name, folder, workers, servers=1, **arguments):
    arguments = {"batch_size": BATCH, "hidden": HIDDEN, "epochs": EPOCHS, "learning_rate": RATE, **arguments}
    changes = {"workers": workers, "parameter_servers": servers, "arguments": arguments}
    warm = name != "digits_mirrored"  # so that one starts as a command line would have it
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


@pytest.fixture(scope="module")
def mirrored(tmp_path_factory):
    """What replicas in one process come to; a test below compares them with one without any."""
    return trained("digits_mirrored", tmp_path_factory.mktemp("mirrors"), 1, replicas=WORKERS)


def assert_equal(one, other, steps):
    """The same loss after every epoch, and the same weights in the end; and it has learnt."""
    tested, expected = (found.metrics.dropna(subset=["test_loss"]) for found in (one, other))
    assert list(tested["step"]) == list(expected["step"]) == [steps * epoch for epoch in range(EPOCHS + 1)]
    # float32, added in another order
    np.testing.assert_allclose(tested["test_loss"], expected["test_loss"], rtol=0, atol=2e-5)
    np.testing.assert_allclose(one.weights, other.weights, rtol=0, atol=2e-5)
    assert tested["accuracy"].iloc[-1] > 0.8
    assert tested["test_loss"].iloc[-1] < 0.5 * tested["test_loss"].iloc[0]


def test_in_graph_replication_equals_one_process_of_replicas_and_has_its_variables_on_the_servers(
    mirrored, tmp_path
):
    servers = 2
    run = trained("digits_in_graph", tmp_path, WORKERS, servers)
    assert_equal(run, mirrored, steps_an_epoch(WORKERS))
    assert set().union(*run.devices.values()) == {f"/job:ps/task:{server}" for server in range(servers)}
    # Nobody else has a training loop.
    assert set(run.metrics.dropna(subset=["loss"])["worker"]) == {"chief-0"}


def test_synchronous_between_graph_replication_equals_the_same_and_goes_at_the_pace_of_the_slowest(
    mirrored, tmp_path
):
    late = {"slow_worker": WORKERS - 1, "slow_seconds": 0.02}
    run = trained("digits_between_graph", tmp_path, WORKERS, consistency="synchronous", **late)
    assert_equal(run, mirrored, steps_an_epoch(WORKERS))
    assert set().union(*run.devices.values()) == {"/job:ps/task:0"}
    # The slow worker reports a step before it pushes for the next one, without which nobody ends that.
    fast, slow = (run.of(f"worker-{index}").set_index("step")["seconds"] for index in (0, WORKERS - 1))
    for step, following in zip(slow.index[:-1], slow.index[1:], strict=True):
        assert slow[step] < fast[following]


def test_asynchronous_between_graph_replication_steps_for_every_batch_and_waits_for_nobody(tmp_path):
    late = {"slow_worker": WORKERS - 1, "slow_seconds": 0.1}
    one = {"consistency": "asynchronous", "learning_rate": RATE / WORKERS}  # its steps are of one worker
    run = trained("digits_between_graph", tmp_path, WORKERS, **one, **late)
    tested = run.metrics.dropna(subset=["test_loss"])
    assert tested["step"].iloc[-1] == WORKERS * EPOCHS * steps_an_epoch(WORKERS)
    assert tested["accuracy"].iloc[-1] > 0.8
    reports = {index: run.of(f"worker-{index}") for index in range(WORKERS)}
    assert {table["step"].iloc[-1] for table in reports.values()} == {EPOCHS * steps_an_epoch(WORKERS)}
    assert reports[0]["seconds"].iloc[-1] < reports[WORKERS - 1]["seconds"].iloc[-1]


def test_replicas_equal_one_that_takes_the_batch_of_all_and_have_a_mirror_of_every_variable(
    mirrored, tmp_path
):
    serial = trained("digits_mirrored", tmp_path, 1, replicas=1, batch_size=WORKERS * BATCH)
    assert_equal(mirrored, serial, steps_an_epoch(WORKERS))
    mirrors = {f"/job:localhost/task:0/device:CPU:{index}" for index in range(WORKERS)}
    assert mirrored.devices == dict.fromkeys(("w1", "b1", "w2", "b2"), mirrors)


def test_workers_in_a_ring_equal_the_same_and_have_a_mirror_each_however_gradients_are_packed(
    mirrored, tmp_path
):
    run = trained("mnist_multi_worker_mirrored", tmp_path, WORKERS, bytes_per_pack=1)
    assert_equal(run, mirrored, steps_an_epoch(WORKERS))
    mirrors = {f"/job:worker/task:{index}/device:CPU:0" for index in range(WORKERS)}
    assert run.devices == dict.fromkeys(("w1", "b1", "w2", "b2"), mirrors)


def test_a_hint_decides_how_many_collectives_there_are():
    arguments = {"tensors": 7, "nbytes": 400, "bytes_per_pack": "1,400,1000,0", "repeats": 2}
    changes = {"workers": WORKERS, "arguments": arguments}
    metrics = launched("measure_collective_hints", **changes).metrics
    assert dict(metrics.groupby("bytes_per_pack")["collectives"].unique().map(list)) == {
        1: [7],
        400: [4],  # two in a pack, since one is not more than 400
        1000: [3],
        0: [1],
    }
    assert len(metrics) == 3 * 4 * 2
    assert (metrics["all_reduce_seconds"] > 0).all()
