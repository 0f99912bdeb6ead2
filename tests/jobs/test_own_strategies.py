"""The workshop's own ring and parameter servers train the digits between real processes."""

import numpy as np
import pytest
from launching import launched

from workshop_utils.comm.ring import ring_bytes_sent

pytestmark = pytest.mark.slow


def trained(name, folder, **changes):
    """The run, and the weights that it saved as one array."""
    run = launched(name, folder, **changes)
    with np.load(folder / "model.npz") as model:
        return run, np.concatenate([model[name].ravel() for name in ("w1", "b1", "w2", "b2")])


def accuracy(run):
    return float(run.metrics["accuracy"].dropna().iloc[-1])


@pytest.mark.parametrize("workers", [1, 3])
def test_the_ring_sends_what_the_formula_says_and_synchronous_servers_come_to_its_weights(workers, tmp_path):
    arguments = {"epochs": 8}
    run, by_ring = trained("digits_ring", tmp_path / "ring", workers=workers, arguments=arguments)
    assert accuracy(run) > 0.85
    reports = run.metrics.dropna(subset=["bytes_sent"])
    mean_of_ranks = (reports["bytes_sent"] / reports["step"]).mean()
    assert mean_of_ranks == pytest.approx(ring_bytes_sent(workers, by_ring.nbytes), rel=1e-3)
    for servers in (1, 2):
        changes = {"workers": workers, "parameter_servers": servers, "arguments": arguments}
        run, by_server = trained("digits_parameter_server", tmp_path / f"{servers}-servers", **changes)
        # float32, added in another order; where that decides whether a unit is on, its weights differ by one example.
        difference = np.abs(by_server - by_ring)
        assert np.quantile(difference, 0.95) <= 1e-5
        assert difference.max() <= 1e-3
        assert run.metrics["staleness_max"].dropna().tolist() == [0] * servers


@pytest.mark.parametrize(
    ("workers", "servers", "arguments"),
    [
        (3, 2, {"consistency": "stale_synchronous", "bound": 2}),
        (1, 2, {"consistency": "asynchronous"}),
        (3, 2, {"consistency": "asynchronous"}),
    ],
)
def test_servers_learn_though_workers_do_not_wait(workers, servers, arguments, tmp_path):
    changes = {"workers": workers, "parameter_servers": servers, "arguments": {"epochs": 8, **arguments}}
    run, _ = trained("digits_parameter_server", tmp_path, **changes)
    assert accuracy(run) > 0.85
    ends = run.metrics.dropna(subset=["staleness_mean"])
    assert sorted(ends["worker"]) == [f"server-{index}" for index in range(servers)]
