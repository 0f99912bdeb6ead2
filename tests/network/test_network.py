"""What a network may be, in words, and what is done where the machine cannot emulate it in the kernel."""

from pathlib import Path

import pytest

from workshop_utils import network
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network, wiring
from workshop_utils.strategies import STRATEGIES

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.fixture
def machine(monkeypatch):
    """`machine(available, netem)` makes this machine one that can do so much."""

    def pretend(available, netem=False):
        monkeypatch.setattr(network, "availability", lambda: available)
        monkeypatch.setattr("workshop_utils.launchers.local.launcher.availability", lambda: available)
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


def test_a_network_has_room_for_250_processes(machine, make_job):
    machine("root")
    job = make_job("", strategy="ring", workers=251)
    with pytest.raises(JobError, match="has room for 250 processes, not 251"):
        Local(network=Network.parse("100Mbit")).render(job)


# How it is emulated where


@pytest.mark.parametrize(("available", "lack"), [("none", "no network namespaces"), ("root", "no netem")])
def test_where_namespaces_do_not_do_links_are_stamped_for_the_workshop_and_other_frameworks_refused(
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
    with pytest.raises(JobError, match=f"{lack}.*stamped links.* have no racks"):
        slow.model_copy(update={"racks": 2, "spine": "1Mbit"}).emulation(STRATEGIES["ring"])


@pytest.mark.parametrize(
    ("available", "netem", "latency", "share"),
    [
        ("none", False, None, 1),
        ("root", False, None, 0.956),
        ("root", False, "1ms", 1),
        ("root", True, "1ms", 0.956),
    ],
)
def test_headers_take_their_part_of_the_rate_where_the_kernel_emulates_the_link(
    machine, available, netem, latency, share
):
    machine(available, netem)
    assert Network(bandwidth="8Mbit", latency=latency).goodput == pytest.approx(share * 1e6)


@pytest.mark.processes
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
    assert run.metrics["error"].max() < 1e-6


def test_latency_is_added_once_on_each_way_from_one_to_another():
    _, cables = wiring.wire(Network.parse("8Mbit,latency=1.5ms"), ["worker-0", "worker-1"], as_user=False)
    commands = [" ".join(command) for cable in cables for command in (*cable.plug, *cable.card)]
    delays = [command for command in commands if "netem" in command]
    assert delays == [f"tc qdisc add dev port{i} parent 1:1 handle 10: netem delay 1500us" for i in (0, 1)]
