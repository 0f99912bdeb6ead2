"""Measured and simulated times of collectives, and the jobs that measure them."""

from pathlib import Path

import pytest

from workshop_utils import network
from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.scaling import communication

JOBS = Path(__file__).parents[2] / "jobs"
SLOW = Network(bandwidth="100Mbit")


@pytest.fixture
def no_namespaces(monkeypatch):
    monkeypatch.setattr(network, "availability", lambda: "none")


def test_without_namespaces_the_workshop_s_own_all_reduce_is_measured_behind_stamped_links(no_namespaces):
    job = TrainingJob.load(JOBS / "measure_all_reduce").replace(arguments={"nbytes": 200_000, "repeats": 1})
    table = communication.measure(job, Network(bandwidth="10Mbit"))
    assert list(table["how"]) == ["stamped links"]
    assert table["seconds"][0] > 200_000 / 1.25e6


def test_without_namespaces_other_frameworks_feel_nothing_so_their_table_is_empty(no_namespaces):
    assert communication.measure(TrainingJob.load(JOBS / "digits_torch_ddp"), SLOW).empty


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", communication.ALL_REDUCES)
def test_every_all_reduce_gives_the_mean_between_processes_and_is_timed_for_each_size(algorithm):
    workers = 3
    arguments = {"nbytes": "4,4004", "calls": 2, "repeats": 2, "algorithm": algorithm}
    job = TrainingJob.load(JOBS / "measure_all_reduce").replace(workers=workers, arguments=arguments)
    run = Local(warm=True).launch(job).wait(60)
    assert len(run.metrics) == workers * 2 * 2
    assert run.metrics["error"].max() < 1e-6
    assert set(communication.seconds_by_nbytes(job, run)) == {4, 4004}
    assert len(communication.seconds_by_repeat(run)) == 4
    if algorithm == "ring":
        sent = run.metrics.groupby("nbytes")["bytes_sent"].sum() / (2 * 2)
        assert sent[4004] == pytest.approx(workers * ring_bytes_sent(workers, 4004))
    if algorithm == "central":
        by_root = run.metrics[(run.metrics["rank"] == 0) & (run.metrics["nbytes"] == 4004)]["bytes_sent"]
        assert set(by_root) == {2 * (workers - 1) * 4004}  # of two calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ["measure_all_reduce", "measure_parameter_server"])
def test_a_slow_network_is_felt(name):
    if network.availability() == "none":
        pytest.skip("no network can be emulated here")
    job = TrainingJob.load(JOBS / name).replace(arguments={"nbytes": 1_000_000})
    table = communication.measure(job, SLOW)
    assert list(table["how"]) == ["network namespaces"]
    # Two ranks all-reduce 1 MB at 12.5 MB/s, less a burst of 62 kB; the server takes and gives 2 MB.
    assert table["seconds"][0] > (0.2 if name == "measure_parameter_server" else 0.06)
