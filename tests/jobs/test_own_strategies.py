"""NumPy trains the digits between real processes: in a ring, by MPI and at the workshop's own parameter servers."""

import numpy as np
import pytest
from launching import launched

from workshop_utils.comm.parameter_server import REQUEST_NBYTES
from workshop_utils.comm.ring import ring_bytes_sent

SERVERS = "digits_ring/parameter_server.yaml"
EPOCHS = {"epochs": 8}

pytestmark = pytest.mark.processes


def trained(name, folder, **changes):
    """The run, and the weights that it saved as one array."""
    run = launched(name, folder, **changes)
    with np.load(folder / "model.npz") as model:
        return run, np.concatenate([model[name].ravel() for name in ("w1", "b1", "w2", "b2")])


def accuracy(run):
    return float(run.metrics["accuracy"].dropna().iloc[-1])


def assert_same_weights(one, other):
    """float32, added in another order; where that decides whether a unit is on, weights differ by one example."""
    difference = np.abs(one - other)
    assert np.quantile(difference, 0.95) <= 1e-5
    assert difference.max() <= 1e-3


@pytest.mark.parametrize("workers", [1, 3])
def test_ring_mpi_and_servers_come_to_the_same_weights_and_send_what_the_formulas_say(workers, tmp_path):
    run, by_ring = trained("digits_ring", tmp_path / "ring", workers=workers, arguments=EPOCHS)
    assert accuracy(run) > 0.85
    reports = run.metrics.dropna(subset=["bytes_sent"])
    mean_of_ranks = (reports["bytes_sent"] / reports["step"]).mean()
    assert mean_of_ranks == pytest.approx(ring_bytes_sent(workers, by_ring.nbytes), rel=1e-3)
    _, by_mpi = trained("digits_ring/mpi.yaml", tmp_path / "mpi", workers=workers, arguments=EPOCHS)
    assert_same_weights(by_mpi, by_ring)
    steps = run.metrics["step"].max()
    for servers in (1, 2):
        changes = {"workers": workers, "parameter_servers": servers, "arguments": EPOCHS}
        run, by_servers = trained(SERVERS, tmp_path / f"{servers}-servers", **changes)
        assert_same_weights(by_servers, by_ring)
        ends = run.metrics.dropna(subset=["bytes_received"])
        assert ends["staleness_max"].tolist() == [0] * servers
        pushed = workers * by_ring.nbytes / servers  # in a step
        requests = (steps + 1) * workers * REQUEST_NBYTES if servers > 1 else 0
        assert set(ends["bytes_received"]) == {steps * pushed + requests}
        # Workers pull as much, and once at the start, behind 8 bytes of the version.
        assert set(ends["bytes_sent"]) == {(steps + 1) * (pushed + workers * 8)}


@pytest.mark.parametrize(
    ("workers", "servers", "arguments"),
    [
        (3, 2, {"consistency": "stale_synchronous", "bound": 2}),
        (3, 2, {"consistency": "asynchronous"}),
    ],
)
def test_servers_learn_though_workers_do_not_wait(workers, servers, arguments, tmp_path):
    changes = {"workers": workers, "parameter_servers": servers, "arguments": {**EPOCHS, **arguments}}
    run, _ = trained(SERVERS, tmp_path, **changes)
    assert accuracy(run) > 0.85
    ends = run.metrics.dropna(subset=["staleness_mean"])
    assert sorted(ends["worker"]) == [f"server-{index}" for index in range(servers)]
