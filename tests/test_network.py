"""What a network may be, in words and in commands, and how it is emulated where. Only one test starts anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from workshop_utils import network, wiring
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
from workshop_utils.strategies import STRATEGIES

if TYPE_CHECKING:
    from conftest import MakeJob

JOBS = Path(__file__).parents[1] / "jobs"


@pytest.fixture
def machine(monkeypatch):
    """`machine(available, netem)` makes this machine one that can do so much."""

    def pretend(available, netem=False):
        monkeypatch.setattr(network, "availability", lambda: available)
        monkeypatch.setattr("workshop_utils.launchers.local.availability", lambda: available)
        monkeypatch.setattr(network, "has_netem", lambda: netem)

    return pretend


# What a person writes


def test_settings_are_read_by_name():
    parsed = Network.parse("bandwidth=100Mbit, latency=1ms, racks=2, spine=200Mbit, worker-1=10Mbit")
    assert parsed == Network(
        bandwidth="100Mbit", latency="1ms", racks=2, spine="200Mbit", exceptions={"worker-1": "10Mbit"}
    )
    assert parsed.latency_seconds == 1e-3
    assert parsed.bandwidth_of("worker-1") == 1.25e6
    assert parsed.bandwidth_of("worker-0") == 12.5e6
    assert str(parsed) == (
        "100Mbit each way for each process, but 10Mbit for worker-1, in 2 racks with 200Mbit each way between rack "
        "and spine, 1ms of latency"
    )


def test_a_link_of_a_ring_is_as_fast_as_its_slower_end_unless_it_is_named():
    ring = Network.parse("100Mbit,topology=ring,worker-1=10Mbit,worker-1:worker-2=20Mbit")
    assert ring.bandwidth_between("worker-0", "worker-1") == 1.25e6
    assert ring.bandwidth_between("worker-2", "worker-1") == 2.5e6
    assert ring.bandwidth_between("worker-2", "worker-0") == 12.5e6
    assert str(ring).startswith("a ring of links of 100Mbit each way between neighbours, but ")


@pytest.mark.parametrize(
    ("text", "members", "message"),
    [
        ("100Mbit", 251, "has room for 250 processes, not 251"),
        ("100Mbit,racks=4,spine=1Gbit", 3, "racks is 4; the job has only 3 processes"),
        (
            "100Mbit,worker-3=1Mbit",
            3,
            "there is no worker-3 in this job; its members are worker-0, worker-1, worker-2",
        ),
        ("100Mbit,topology=ring,worker-0:worker-2=1Mbit", 4, "worker-0 and worker-2 are not neighbours"),
    ],
)
def test_a_network_that_does_not_fit_the_job_is_refused(machine, make_job: MakeJob, text, members, message):
    machine("root")
    job = make_job("", strategy="ring", workers=members)
    with pytest.raises(JobError, match=message):
        Local(network=Network.parse(text)).render(job)


# How it is emulated where


def test_namespaces_are_used_wherever_they_can_do_all_that_is_asked(machine):
    for available in ("root", "user namespaces"):
        machine(available)
        for strategy in STRATEGIES.values():
            assert Network(bandwidth="1Mbit").emulation(strategy) == "network namespaces"
        machine(available, netem=True)
        assert (
            Network(bandwidth="1Mbit", latency="1ms").emulation(STRATEGIES["horovod"]) == "network namespaces"
        )


@pytest.mark.parametrize(("available", "lack"), [("none", "no network namespaces"), ("root", "no netem")])
def test_otherwise_links_are_stamped_for_the_workshop_and_other_frameworks_are_refused(
    machine, available, lack
):
    machine(available)
    slow = Network(bandwidth="1Mbit", latency="1ms")
    for strategy in STRATEGIES.values():
        if strategy.uses_comm:
            assert slow.emulation(strategy) == "stamped links"
        else:
            with pytest.raises(JobError, match=f"{lack}.*not strategy '{strategy.name}'"):
                slow.emulation(strategy)
    for more in ({"topology": "ring"}, {"racks": 2, "spine": "1Mbit"}):
        with pytest.raises(JobError, match=f"{lack}.*stamped links.*know no (racks|a ring)"):
            slow.model_copy(update=more).emulation(STRATEGIES["ring"])


def test_stamped_links_are_told_to_every_rank_and_leave_it_on_loopback(machine, make_job: MakeJob):
    machine("none")
    job = make_job("", strategy="workshop_parameter_server", workers=2)
    request = Local(network=Network.parse("8Mbit,latency=2ms,worker-1=4Mbit")).render(job)
    assert request.network is not None
    assert request.network.endswith("by stamped links: only the workshop's own message passing feels it")
    assert request.switch is None
    for process, added in zip(request.processes, request.added, strict=True):
        assert process.network is None
        assert added["MASTER_ADDR"] == "127.0.0.1"
        assert json.loads(added["WORKSHOP_LINK"]) == {
            "bandwidths": [1e6, 1e6, 0.5e6],  # of server-0, worker-0 and worker-1, which are ranks 0, 1 and 2
            "latency_seconds": 2e-3,
        }


def test_without_any_namespaces_the_workshop_s_own_ranks_feel_the_network_all_the_same(
    machine, nothing_is_left
):
    machine("none")
    job = TrainingJob.load(JOBS / "measure_all_reduce")
    job = job.replace(workers=3, arguments={"nbytes": 60_000, "repeats": 2})
    run = Local(network=Network(bandwidth="10Mbit", latency="20ms")).launch(job).wait(60)
    assert run.network == (
        "10Mbit each way for each process, 20ms of latency; by stamped links: only the workshop's own message passing "
        "feels it"
    )
    # 2 (N − 1) steps of a third each.
    assert run.metrics["all_reduce_seconds"].max() > 4 * (0.02 + 20_000 / 1.25e6)


def test_in_namespaces_nothing_is_stamped_and_the_rendering_says_what_is_emulated(machine, make_job: MakeJob):
    machine("user namespaces")
    request = Local(network=Network(bandwidth="8Mbit")).render(make_job("", strategy="torch_ddp", workers=2))
    assert request.switch is not None
    assert request.switch.as_user
    assert str(request).startswith(
        "# network: 8Mbit each way for each process; in network namespaces: every framework feels it\n"
    )
    for added in request.added:
        assert "WORKSHOP_LINK" not in added
        assert added["MASTER_ADDR"] == "10.77.0.1"
        assert added["GLOO_SOCKET_IFNAME"] == "eth0"


def test_in_namespaces_each_rank_of_mpi_has_a_host_and_nothing_but_tcp(machine, make_job: MakeJob):
    machine("root")
    network = Network.parse("8Mbit,worker-1=1Mbit")
    request = Local(network=network).render(make_job("", strategy="mpi", workers=2))
    assert [process.name for process in request.processes] == ["mpirun", "worker-0", "worker-1"]
    assert [process.awaited for process in request.processes] == [True, False, False]
    cables = [process.network for process in request.processes]
    assert [cable.address for cable in cables if cable] == ["10.77.0.1", "10.77.0.2", "10.77.0.3"]
    rates = ["1000000bit" if process.name == "worker-1" else "8000000bit" for process in request.processes]
    for cable, rate in zip(cables, rates, strict=True):
        assert cable is not None
        assert any(rate in text for text in words(cable.card))
    mpirun = " ".join(request.processes[0].argv)
    assert "--host 10.77.0.2:1,10.77.0.3:1 " in mpirun
    assert "--mca pml ob1 --mca btl tcp,self " in mpirun
    assert "****" in str(request)
    assert request.added[0]["WORKSHOP_SECRET"] not in str(request)


# The commands


def words(commands):
    return [" ".join(command) for command in commands]


def test_latency_is_added_once_on_each_way_from_one_to_another():
    _, cables = wiring.wire(Network.parse("8Mbit,latency=1.5ms"), ["worker-0", "worker-1"], as_user=False)
    delays = [text for cable in cables for text in words([*cable.plug, *cable.card]) if "netem" in text]
    assert delays == [f"tc qdisc add dev port{i} parent 1:1 handle 10: netem delay 1500us" for i in (0, 1)]


@pytest.mark.parametrize("size", [2, 3, 6, 9])
def test_in_a_ring_routes_are_as_short_as_can_be_and_the_same_in_both_directions(size):
    members = [f"worker-{i}" for i in range(size)]
    _, cables = wiring.wire(Network.parse("8Mbit,topology=ring"), members, as_user=False)
    next_hop = {}
    for index, cable in enumerate(cables):
        for text in words(cable.card):
            if text.startswith("ip route add"):
                parts = text.split()
                other = int(parts[3].split("/")[0].rpartition(".")[2]) - 1
                via = int(parts[5].rpartition(".")[2]) - 1 if parts[4] == "via" else other
                next_hop[index, other] = via

    def path(start, end):
        hops = [start]
        while hops[-1] != end:
            hops.append(next_hop[hops[-1], end])
            assert len(hops) <= size
        return hops

    for start in range(size):
        for end in range(size):
            if start != end:
                there = path(start, end)
                assert len(there) - 1 == min((end - start) % size, (start - end) % size)
                assert path(end, start) == there[::-1]
