"""An asynchronous server push by push: that it says what the server's own text says on the simulated clock."""

import numpy as np
import pytest

from workshop_utils.comm import parameter_server
from workshop_utils.comm.asynchronous import compute_times, simulate_pushes, updates_per_second_at_most
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.comm.simulated import Link, Shape, SimulatedCommunicator, simulate

SLOW = Link(latency_seconds=1e-3, bandwidth_bytes_per_second=12.5e6)
FAST = Link(latency_seconds=2e-3, bandwidth_bytes_per_second=125e6)


def by_own_text(arrangement, nbytes, times, link):
    """The server's log of `parameter_server.train` on the simulated clock."""

    def program(communicator):
        assert isinstance(communicator, SimulatedCommunicator)

        def gradient_of(parameters, step):
            communicator.compute(times[communicator.rank - 1, step])
            return parameters

        return parameter_server.train(
            communicator, arrangement, Shape(nbytes // 4), gradient_of, lambda *_: None
        )

    return simulate(arrangement.size, program, link).results[0]


@pytest.mark.parametrize("nbytes", [4, 400_000, 4_000_004], ids=["idle", "busy", "choked"])
@pytest.mark.parametrize("workers", [1, 5, 40])
def test_pushes_are_those_of_the_server_s_own_text(workers, nbytes):
    arrangement = Arrangement(1, workers, 12, "asynchronous")
    times = compute_times(workers, 12, 0.1, jitter=0.3) * np.linspace(1, 3, workers)[:, None]
    pushes, log = (
        simulate_pushes(arrangement, nbytes, times, SLOW),
        by_own_text(arrangement, nbytes, times, SLOW),
    )
    np.testing.assert_array_equal(pushes.worker[0] + 1, log.worker)
    np.testing.assert_array_equal(pushes.staleness[0], log.staleness)
    np.testing.assert_allclose(pushes.seconds[0], log.seconds, rtol=1e-12)


@pytest.mark.parametrize("nbytes", [4, 1_000_000])
@pytest.mark.parametrize("workers", [1, 64, 256])
def test_throughput_stays_below_the_operational_bounds_and_meets_them_far_from_where_they_cross(
    workers, nbytes
):
    times = compute_times(workers, 60, 0.1, jitter=0.3)
    pushes = simulate_pushes(Arrangement(1, workers, 60, "asynchronous"), nbytes, times, FAST)
    most = float(updates_per_second_at_most(workers, times.mean(), nbytes, FAST))
    found = pushes.steady().updates_per_second
    assert found <= 1.05 * most  # the mean of the times in the middle is not that of all
    if nbytes == 4 or workers in (1, 256):
        assert found == pytest.approx(most, rel=0.05)


def test_equals_are_as_stale_as_there_are_others():
    times = compute_times(200, 30, 0.1, jitter=0.1)
    pushes = simulate_pushes(Arrangement(1, 200, 30, "asynchronous"), 4000, times, FAST)
    assert pushes.steady().staleness.mean() == pytest.approx(199, rel=0.02)
