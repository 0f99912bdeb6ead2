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
    assert communication.measure(TrainingJob.load(JOBS / "measure_gloo"), SLOW).empty


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [*communication.ALL_REDUCES, "horovod", "mpi4py"])
def test_every_all_reduce_gives_the_mean_between_processes_and_is_timed_for_each_size(algorithm):
    workers, ours = 3, algorithm in communication.ALL_REDUCES
    arguments = {"nbytes": "4,4004", "calls": 2, "repeats": 2} | ({"algorithm": algorithm} if ours else {})
    if not ours:
        pytest.importorskip(algorithm)
    name = {"horovod": "measure_horovod", "mpi4py": "measure_mpi"}.get(algorithm, "measure_all_reduce")
    job = TrainingJob.load(JOBS / name).replace(workers=workers, arguments=arguments)
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


def test_traces_of_real_ranks_have_every_message_of_the_last_repeat_on_one_clock():
    job = TrainingJob.load(JOBS / "measure_all_reduce").replace(
        workers=3, arguments={"nbytes": 1200, "repeats": 2, "trace": 1}
    )
    run = Local(warm=True).launch(job).wait(60)
    traces = communication.traces(run)
    for rank, events in enumerate(traces):
        assert [event.peer for event in events if event.kind == "send"] == [(rank + 1) % 3] * 4
        assert [event.peer for event in events if event.kind == "recv"] == [(rank - 1) % 3] * 4
        assert {event.nbytes for event in events} == {400}
    assert min(event.start for events in traces for event in events) == 0
    # One clock: nothing is received before it was sent.
    for rank, events in enumerate(traces):
        received = [event.end for event in events if event.kind == "recv"]
        sent = [event.start for event in traces[(rank - 1) % 3] if event.kind == "send"]
        assert all(end >= start for end, start in zip(received, sent, strict=True))
    assert len(communication.seconds_by_repeat(run)) == 2  # what was measured is found beside it


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("measure_all_reduce", "numpy"),
        ("measure_gloo", "torch"),
        ("measure_horovod", "horovod"),
        ("measure_parameter_server", "numpy"),
    ],
)
def test_a_slow_network_is_felt(name, package):
    pytest.importorskip(package)
    if network.availability() == "none":
        pytest.skip("no network can be emulated here")
    job = TrainingJob.load(JOBS / name).replace(arguments={"nbytes": 1_000_000})
    table = communication.measure(job, SLOW)
    assert list(table["how"]) == ["network namespaces"]
    # Two ranks all-reduce 1 MB at 12.5 MB/s, less a burst of 62 kB; the server takes and gives 2 MB.
    assert table["seconds"][0] > (0.2 if name == "measure_parameter_server" else 0.06)
