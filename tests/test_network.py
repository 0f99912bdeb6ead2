"""What a network may be, in words and in commands, and how it is emulated where. Only one test starts anything."""

from __future__ import annotations

import json
import subprocess
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


def test_a_rate_alone_is_a_star_with_equal_links():
    parsed = Network.parse("100Mbit")
    assert parsed == Network(bandwidth="100Mbit")
    assert parsed.bandwidth_bytes_per_second == 12.5e6
    assert str(parsed) == "100Mbit each way for each process"


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
    ("text", "message"),
    [
        ("1GBit/s", "bandwidth is '1GBit/s'; it must be a rate in bits, such as '100Mbit'"),
        ("100MB", "bandwidth is '100MB'; it must be a rate in bits"),
        ("0Mbit", "bandwidth is '0Mbit'; it must be more than zero"),
        ("", "bandwidth is ''; it must be a rate in bits"),
        ("latency=1ms", "bandwidth is missing"),
        ("100Mbit,latency=fast", "latency is 'fast'; it must be a duration"),
        ("100Mbit,latency=0", "latency is '0'; it must be more than zero"),
        ("100Mbit,topology=tree", "topology is 'tree'; it must be one of 'star' or 'ring'"),
        ("100Mbit,racks=2", "racks is 2 and spine is None; it takes both"),
        ("100Mbit,spine=1Gbit", "racks is 1 and spine is 1Gbit; it takes both"),
        ("100Mbit,racks=two,spine=1Gbit", "racks is 'two'"),
        ("100Mbit,racks=0", "racks is 0"),
        ("100Mbit,racks=2,spine=1Gbit,topology=ring", "topology is 'ring' and racks is 2"),
        ("100Mbit,worker-1=10MB", "exceptions.worker-1 is '10MB'; it must be a rate in bits"),
        (
            "100Mbit,worker-0:worker-1=10Mbit",
            "exceptions is for 'worker-0:worker-1'; it must be for a member",
        ),
        ("100Mbit,bandwith=1Mbit", "bandwith: unknown field; did you mean bandwidth?"),
        ("100Mbit,latency", "it must be a rate such as 100Mbit, or settings such as"),
        ("100Mbit,latency=", "it must be a rate such as 100Mbit, or settings such as"),
        ("100Mbit,latency=1ms,latency=2ms", "each once"),
        ("100Mbit,exceptions=worker-1", "an exception is written such as worker-1=10Mbit"),
    ],
)
def test_what_cannot_be_a_network_is_refused_by_field_value_and_what_would_be_right(text, message):
    with pytest.raises(JobError) as error:
        Network.parse(text)
    assert message in str(error.value)


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


def test_the_ends_of_a_ring_are_neighbours():
    Network.parse("1Mbit,topology=ring,worker-3:worker-0=1Mbit").check([f"worker-{i}" for i in range(4)])


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


@pytest.mark.parametrize("name", ["measure_all_reduce", "measure_parameter_server"])
def test_without_any_namespaces_the_workshop_s_own_ranks_feel_the_network_all_the_same(
    machine, nothing_is_left, name
):
    machine("none")
    servers = name == "measure_parameter_server"
    count = {"steps": 2} if servers else {"repeats": 2}
    job = TrainingJob.load(JOBS / name).replace(workers=3, arguments={"nbytes": 60_000, **count})
    run = Local(network=Network(bandwidth="10Mbit", latency="20ms")).launch(job).wait(60)
    assert run.network == (
        "10Mbit each way for each process, 20ms of latency; by stamped links: only the workshop's own message passing "
        "feels it"
    )
    if servers:  # three gradients in, three times the parameters out
        assert run.metrics["step_seconds"].max() > 2 * (0.02 + 3 * 60_000 / 1.25e6)
    else:  # 2 (N − 1) steps of a third each
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


def test_without_a_network_none_is_told_of(make_job: MakeJob):
    request = Local().render(make_job("", strategy="ring", workers=2))
    assert request.network is None
    assert "# network" not in str(request)


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


def test_without_a_network_mpirun_starts_the_ranks_itself(make_job: MakeJob):
    request = Local().render(make_job("", strategy="mpi", workers=2))
    assert [process.name for process in request.processes] == ["mpirun"]
    assert "--host" not in request.processes[0].argv
    assert not any("plm" in name or "SECRET" in name for name in request.added[0])


def test_mpi_feels_no_stamped_links(machine, make_job: MakeJob):
    machine("none")
    with pytest.raises(JobError, match="not strategy 'mpi'"):
        Local(network=Network(bandwidth="8Mbit")).render(make_job("", strategy="mpi", workers=2))


def test_a_machine_without_the_tools_has_no_namespaces_and_a_user_is_not_asked_for_root(monkeypatch):
    tried = []

    def run(command, **_):
        tried.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(network.sys, "platform", "linux")
    monkeypatch.setattr(network.subprocess, "run", run)
    monkeypatch.setattr(network.shutil, "which", lambda tool: f"/bin/{tool}")
    monkeypatch.setattr(network.os, "geteuid", lambda: 65534)
    assert network.availability.__wrapped__() == "user namespaces"
    assert all("--user" in command for command in tried)
    monkeypatch.setattr(network.shutil, "which", lambda tool: None if tool == "tc" else tool)
    assert network.availability.__wrapped__() == "none"
    monkeypatch.setattr(network.sys, "platform", "darwin")
    assert network.availability.__wrapped__() == "none"


# The commands


def words(commands):
    return [" ".join(command) for command in commands]


def test_a_star_limits_both_ends_of_each_cable():
    switch, cables = wiring.wire(
        Network.parse("8Mbit,worker-1=1Mbit"), ["worker-0", "worker-1"], as_user=False
    )
    assert words(switch.switch)[0] == "ip link add name switch0 type bridge"
    for index, (cable, rate) in enumerate(zip(cables, ("8000000bit", "1000000bit"), strict=True)):
        assert any(
            f"dev port{index} root handle 1: tbf rate {rate} burst 128k" in text for text in words(cable.plug)
        )
        assert any(
            f"dev eth0 root handle 1: tbf rate {rate} burst 128k" in text for text in words(cable.card)
        )
        assert cable.address == f"10.77.0.{index + 1}"
    assert not any("netem" in text for cable in cables for text in words([*cable.plug, *cable.card]))


def test_latency_is_added_once_on_each_way_from_one_to_another():
    _, cables = wiring.wire(Network.parse("8Mbit,latency=1.5ms"), ["worker-0", "worker-1"], as_user=False)
    delays = [text for cable in cables for text in words([*cable.plug, *cable.card]) if "netem" in text]
    assert delays == [f"tc qdisc add dev port{i} parent 1:1 handle 10: netem delay 1500us" for i in (0, 1)]


def test_racks_divide_the_members_in_order_and_their_ways_to_the_spine_are_limited():
    members = [f"worker-{i}" for i in range(5)]
    switch, cables = wiring.wire(Network.parse("8Mbit,racks=2,spine=4Mbit"), members, as_user=False)
    limited = [text for text in words(switch.switch) if "tbf rate 4000000bit" in text]
    assert [text.split()[4] for text in limited] == ["up0", "down0", "up1", "down1"]
    plugged = [text.split()[5] for cable in cables for text in words(cable.plug) if " master " in text]
    assert plugged == ["switch0", "switch0", "switch0", "switch1", "switch1"]


@pytest.mark.parametrize("size", range(2, 10))
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


def test_a_single_process_has_a_network_card_in_a_ring_too():
    _, (cable,) = wiring.wire(Network.parse("8Mbit,topology=ring"), ["worker-0"], as_user=False)
    assert "ip link set eth0 up" in words(cable.card)
