"""What a network may be, in words, and what is done where the machine cannot emulate it in the kernel."""

import re
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


# What it does not slow, or cuts off


HERE = 'dist.init_process_group("gloo", init_method="tcp://127.0.0.1:29577")'
STAND_INS = (
    'x = os.environ.get("MASTER_ADDR", "127.0.0.1")',
    'os.environ.setdefault("MASTER_ADDR", "localhost")',
    'if "MASTER_ADDR" not in os.environ:\n    os.environ["MASTER_ADDR"] = "localhost"',
    'x = os.environ.get("MASTER_ADDR") or "127.0.0.1"',
    'x = "env://" if "MASTER_ADDR" in os.environ else "tcp://localhost:29500"',
    'try:\n    x = os.environ["MASTER_ADDR"]\nexcept KeyError:\n    master_addr = "localhost"',
    "x = f\"tcp://{os.getenv('MASTER_ADDR', 'localhost')}:29500\"",
    'if not os.environ.get("TF_CONFIG"):\n    workers = ["localhost:12345"]',
    '"""Run it as train.py --dist-url tcp://127.0.0.1:23456"""',
    'print("see http://localhost:6006")',
)


@pytest.mark.parametrize(
    ("script", "fields", "named"),
    [
        (HERE, {}, r"train.py, line 1: an address .* MASTER_ADDR and MASTER_PORT \("),
        ('\nx = f"tcp://localhost:{port}"', {}, "train.py, line 2:"),
        ('os.environ["MASTER_ADDR"] = "localhost"', {}, "train.py, line 1:"),
        ('store = TCPStore("localhost", 1234, 2)', {}, "train.py, line 1:"),
        ('x = ["localhost:12345"]', {"strategy": "multi_worker_mirrored"}, "train.py, line 1: .* TF_CONFIG$"),
        ("from lib import meet", {}, "meet.py, line 1:"),
        ("", {"arguments": ["--dist-url=tcp://127.0.0.1:1"]}, "'--dist-url=tcp://127.0.0.1:1':"),
        ("", {"environment": {"STORE": "localhost:2379"}}, "'STORE=localhost:2379':"),
        ('parser.add_argument("--url", default="tcp://localhost:1")', {}, "train.py, line 1:"),
        ('parser.add_argument("--url", default="tcp://localhost:1")', {"arguments": ["--url=env://"]}, None),
        ("", {"workers": 1}, "this run has one worker, so it uses no link"),
        *((script, {}, None) for script in STAND_INS),
    ],
)
def test_an_address_of_a_process_s_own_host_is_named_before_the_start(
    script, fields, named, machine, make_job
):
    machine("root")
    job = make_job(script, **{"strategy": "torch_ddp", "workers": 2, **fields})
    (job.folder / "lib").mkdir()
    (job.folder / "lib/meet.py").write_text(f"{HERE}\n")
    request = Local(network=Network.parse("100Mbit")).render(job)
    assert re.match(named, request.warning) if named else request.warning == ""
    assert Local().render(job).warning == ""


def test_one_process_alone_has_no_link_to_be_slowed(machine, make_job):
    machine("root")
    with pytest.raises(JobError, match=r"'single' has one process, and a link joins two; .* leave it out"):
        Local(network=Network.parse("100Mbit")).render(make_job("import torch"))


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
