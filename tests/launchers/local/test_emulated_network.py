"""Runs in an emulated network: everybody feels it, and nothing of it is left."""

import os
import shutil
import statistics
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from conftest import marked_processes

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network, availability, has_netem
from workshop_utils.ranks import on_ranks
from workshop_utils.runs import RunState

pytestmark = [
    pytest.mark.usefixtures("nothing_is_left"),
    pytest.mark.skipif(availability() == "none", reason="this machine makes no network namespaces"),
]

JOBS = Path(__file__).parents[3] / "jobs"
NBYTES = 500_000

# Of the link's rate, payload has 0.956. A bucket of 16 KB lets a first part through at full speed: the first 3 % of
# what is sent here. A busy machine is late, never early.
EARLIEST, LATEST = 0.9, 3.0

# One rank after the other sends to rank 0, which reports how long it took.
TAKE_TURNS = f"""
    import os, socket, time
    from workshop_utils import place
    here = place.here()
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    if here.rank == 0:
        links = {{}}
        with socket.create_server(address) as listener:
            while len(links) < here.world_size - 1:
                link, _ = listener.accept()
                links[link.recv(1)[0]] = link
        for rank, link in sorted(links.items()):
            start = time.perf_counter()
            link.sendall(b"!")
            left = {NBYTES}
            while left:
                left -= len(link.recv(min(left, 1 << 16)))
            place.report(step=rank, transfer_seconds=time.perf_counter() - start)
            link.sendall(b"!")
    else:
        while True:
            try:
                link = socket.create_connection(address)
                break
            except OSError:
                time.sleep(0.05)
        link.sendall(bytes([here.rank]))
        link.recv(1)
        link.sendall(bytes({NBYTES}))
        link.recv(1)
"""


def transfer_seconds(run):
    """How long each rank's transfer to rank 0 took."""
    return {int(record["step"]): record["transfer_seconds"] for record in run.wait(90).records}


def theory(bytes_per_second):
    return NBYTES / (0.956 * bytes_per_second)


def network_interfaces():
    """Of this process's own network."""
    return "".join(line.partition(":")[0] for line in Path("/proc/net/dev").read_text().splitlines()[2:])


def networks():
    """The network namespaces in which this process or one that it started is, or that one of them holds open.

    Not those of the whole machine: other test files make networks of their own at the same time.
    """
    found = set()
    for process in (Path(f"/proc/{pid}") for pid in (os.getpid(), *marked_processes())):
        try:
            found |= {str(link.readlink()) for link in (process / "ns/net", *(process / "fd").iterdir())}
        except OSError:
            continue
    return {name for name in found if name.startswith("net:")}


def test_a_star_lets_through_its_bandwidth_and_less_where_a_worker_is_slower(make_job):
    job = make_job(TAKE_TURNS, strategy="torch_ddp", workers=3)
    run = Local(network=Network.parse("20Mbit,worker-2=5Mbit")).launch(job)
    seconds = transfer_seconds(run)
    assert run.network == (
        "20Mbit each way for each process, but 5Mbit for worker-2; in network namespaces: every framework feels it"
    )
    assert EARLIEST < seconds[1] / theory(2.5e6) < LATEST
    assert EARLIEST < seconds[2] / theory(0.625e6) < LATEST
    assert seconds[2] > 2 * seconds[1]


def test_a_short_exchange_on_an_idle_link_gets_no_more_than_a_small_burst_for_nothing():
    def exchange(communicator):
        import time

        import numpy as np

        taken, array = [], np.zeros(60_000, np.uint8)
        for _ in range(5):
            time.sleep(0.05)  # until the link could let a whole burst through
            communicator.barrier()
            started = time.perf_counter()
            communicator.send_recv(1 - communicator.rank, array, 1 - communicator.rank, np.empty_like(array))
            taken.append(time.perf_counter() - started)
        return taken

    results = on_ranks(2, exchange, network="20Mbit")
    assert results.warm  # forked ranks have the network, too
    seconds = statistics.median(map(max, *results.values))
    assert EARLIEST < seconds / ((60_000 - 16_000) / (0.956 * 2.5e6)) < 1.5


def test_between_racks_the_spine_decides_and_within_a_rack_it_does_not(make_job):
    job = make_job(TAKE_TURNS, strategy="torch_ddp", workers=4)
    seconds = transfer_seconds(Local(network=Network.parse("40Mbit,racks=2,spine=5Mbit")).launch(job))
    for rank in (2, 3):
        assert EARLIEST < seconds[rank] / theory(0.625e6) < LATEST
        assert seconds[rank] > 2 * seconds[1]


def test_every_process_has_a_network_and_a_host_of_its_own_and_nothing_of_them_is_left(make_job, watch):
    job = make_job("""
    import os, socket, time
    from workshop_utils import place
    place.here()
    print(os.readlink("/proc/self/ns/net"), sorted(name for _, name in socket.if_nameindex()),
          socket.gethostbyname(socket.gethostname()), flush=True)
    time.sleep(1000)
    """, strategy="torch_ddp", workers=3)  # fmt: skip
    interfaces, before = network_interfaces(), networks()
    with Local(network=Network(bandwidth="100Mbit", racks=2, spine="50Mbit")).launch(job) as run:
        lines = []
        for line in run.logs(follow=True):
            lines.append(line.text.split(maxsplit=1))
            if len(lines) == 3:
                break
        assert len({namespace for namespace, _ in lines}) == 3
        assert sorted(rest for _, rest in lines) == [f"['eth0', 'lo'] 10.77.0.{i}" for i in (1, 2, 3)]
        assert network_interfaces() == interfaces
        assert len(networks() - before) >= 4  # with the supervisor's
    assert run.state is RunState.STOPPED
    assert network_interfaces() == interfaces
    assert watch.eventually(lambda: networks() <= before)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="there is no one else to be")
def test_a_user_without_privileges_can_make_one_too(nothing_is_left, data_folder):
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    # The shell has none of root's rights left when it looks for a program.
    nobody += ["sh", "-c", 'exec "$0" "$@"']
    environment = {**os.environ, "HOME": "/nonexistent", "PYTHONPATH": ":".join(filter(None, sys.path))}
    probe = "from workshop_utils.network import availability; exit(availability() != 'user namespaces')"
    # This Python may lie in a folder that is root's alone; the system's may do for the same packages.
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([*nobody, python, "-c", probe], env=environment, check=False).returncode == 0:
            break
    else:
        pytest.skip("no user may make namespaces here, or read a Python with the packages")
    folder = nothing_is_left / "job"
    shutil.copytree(data_folder, folder)
    (folder / "train.py").write_text(textwrap.dedent(TAKE_TURNS))
    subprocess.run(["chmod", "--recursive", "a+rwX", nothing_is_left], check=True)
    script = f"""
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network
job = TrainingJob(name="job", folder="{folder}", strategy="torch_ddp", workers=3, data="{folder}")
run = Local(network=Network.parse("20Mbit")).launch(job).wait()
print(run.records[0]["transfer_seconds"])
"""
    done = subprocess.run(
        [*nobody, python, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert EARLIEST < float(done.stdout) / theory(2.5e6) < LATEST


def test_the_workshop_s_own_ranks_feel_it_and_stamped_links_where_there_is_no_netem():
    job = TrainingJob.load(JOBS / "measure_all_reduce")
    job = job.replace(workers=3, arguments={"nbytes": 300_000, "repeats": 1})
    delayed = Local(network=Network(bandwidth="10Mbit", latency="50ms")).launch(job).wait(60)
    assert ("network namespaces" if has_netem() else "stamped links") in delayed.network
    assert delayed.metrics["all_reduce_seconds"].max() > EARLIEST * 4 / 3 * 300_000 / 1.25e6 + 4 * 0.05
    assert delayed.metrics["error"].max() == 0
    assert set(delayed.metrics["bytes_sent"]) == {400_000}


def test_ranks_that_mpirun_starts_cannot_have_networks_of_their_own(make_job):
    job = make_job("", strategy="mpi", workers=2)
    with pytest.raises(JobError, match=r"mpirun starts the workers .*; leave the network out, or use"):
        Local(network=Network(bandwidth="100Mbit")).render(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "package"),
    [
        ("mnist_torch_ddp", "torch"),
        ("mnist_horovod", "horovod"),
        ("mnist_multi_worker_mirrored", "tensorflow"),
        ("mnist_parameter_server", "tensorflow"),
    ],
)
def test_every_framework_trains_in_it(name, package):
    pytest.importorskip(package)
    job = TrainingJob.load(JOBS / name).replace(workers=2, arguments={"epochs": 1}, timeout="4min")
    run = Local(network=Network.parse("100Mbit"), warm=True).launch(job).wait()
    assert run.state is RunState.SUCCEEDED
    assert run.metrics["loss"].notna().any()
