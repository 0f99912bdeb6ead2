"""Runs in an emulated network: everybody feels it, and nothing of it is left."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import marked_processes, with_horovod

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network, availability, has_netem
from workshop_utils.ranks import on_ranks
from workshop_utils.runs import RunFailed, RunState

pytestmark = [
    pytest.mark.processes,
    pytest.mark.usefixtures("nothing_is_left"),
    pytest.mark.skipif(availability() == "none", reason="this machine makes no network namespaces"),
]

JOBS = Path(__file__).parents[3] / "jobs"
NBYTES = 500_000

# Of the link's rate, payload has 0.956. A bucket of 16 KB lets a first part through at full speed: the first 3 % of
# what is sent here. A busy machine is late, never early: the shortest of three times is compared with the rate above.
EARLIEST, LATEST = 0.9, 3.0


def to_rank_0(communicator):
    """The shortest of three transfers of each rank to rank 0, one after the other; known to rank 0."""
    seconds, array = {}, np.zeros(NBYTES, np.uint8)
    for rank in [rank for rank in range(1, communicator.size) for _ in range(3)]:
        communicator.barrier()
        began = time.perf_counter()
        if communicator.rank == 0:
            communicator.recv(rank, array)
            seconds[rank] = min(seconds.get(rank, np.inf), time.perf_counter() - began)
        elif communicator.rank == rank:
            communicator.send(0, array)
    return seconds


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


def test_a_star_lets_through_its_bandwidth_and_less_where_a_worker_is_slower():
    results = on_ranks(3, to_rank_0, network="20Mbit,worker-2=5Mbit")
    seconds = results.values[0]
    assert results.network == (
        "20Mbit each way for each process, but 5Mbit for worker-2; in network namespaces: every framework feels it; "
        "processes that a worker starts share its place"
    )
    assert EARLIEST < seconds[1] / theory(2.5e6) < LATEST
    assert EARLIEST < seconds[2] / theory(0.625e6) < LATEST
    assert seconds[2] > 2 * seconds[1]


def test_a_short_exchange_on_an_idle_link_gets_no_more_than_a_small_burst_for_nothing():
    def exchange(communicator):
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
    seconds = min(map(max, *results.values))
    assert seconds > EARLIEST * (60_000 - 16_000) / (0.956 * 2.5e6)


def test_between_racks_the_spine_decides_and_within_a_rack_it_does_not():
    seconds = on_ranks(4, to_rank_0, network="40Mbit,racks=2,spine=5Mbit").values[0]
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
def test_a_user_without_privileges_can_make_one_too(nothing_is_left):
    nobody = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
    # The shell has none of root's rights left when it looks for a program.
    nobody += ["sh", "-c", 'exec "$0" "$@"']
    path = os.pathsep.join([str(JOBS.parent), *filter(None, sys.path)])
    environment = {**os.environ, "WORKSHOP_CACHE": str(nothing_is_left), "PYTHONPATH": path}
    probe = "from workshop_utils.network import availability; exit(availability() != 'user namespaces')"
    # This Python may lie in a folder that is root's alone; the system's may do for the same packages.
    for python in (sys.executable, "/usr/bin/python3"):
        if subprocess.run([*nobody, python, "-c", probe], env=environment, check=False).returncode == 0:
            break
    else:
        pytest.skip("no user may make namespaces here, or read a Python with the packages")
    subprocess.run(["chmod", "a+rwx", nothing_is_left], check=True)
    script = """
import time
import numpy as np
from workshop_utils import on_ranks
def exchange(communicator):
    began, other = time.perf_counter(), 1 - communicator.rank
    communicator.send_recv(other, np.zeros(500_000, np.uint8), other, np.empty(500_000, np.uint8))
    return time.perf_counter() - began
print(on_ranks(2, exchange, network="20Mbit").values[0])
"""
    done = subprocess.run([*nobody, python, "-c", script], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > EARLIEST * theory(2.5e6)


def test_the_workshop_s_own_ranks_feel_it_and_stamped_links_where_there_is_no_netem():
    job = TrainingJob.load(JOBS / "measure_all_reduce")
    job = job.replace(workers=3, arguments={"nbytes": 300_000, "repeats": 1})
    delayed = Local(network=Network(bandwidth="10Mbit", latency="50ms")).launch(job).wait(60)
    assert ("network namespaces" if has_netem() else "stamped links") in delayed.network
    assert delayed.metrics["all_reduce_seconds"].max() > EARLIEST * 4 / 3 * 300_000 / 1.25e6 + 4 * 0.05
    assert delayed.metrics["error"].max() == 0
    assert set(delayed.metrics["bytes_sent"]) == {400_000}


def test_the_table_of_pytorch_s_all_reduce_shows_the_link_s_rate():
    job = TrainingJob.load(JOBS / "measure_all_reduce/torch.yaml")
    arguments = {"maxbytes": 131_072, "repeats": 3, "datatype": "bfloat16"}
    run = Local(network=Network(bandwidth="40Mbit")).launch(job.replace(workers=3, arguments=arguments))
    with run.wait(120):
        lines = [line.text for line in run.logs(worker="worker-0")]
    rows = [line.split() for line in lines if line and not line.startswith("#")]
    assert [row[:2] + row[-1:] for row in rows] == [[f"{2**n}", f"{2**n // 2}", "0"] for n in range(3, 18)]
    *_, microseconds, algorithm, bus, _ = map(float, rows[-1][:2] + rows[-1][4:])
    assert 1e3 * algorithm == pytest.approx(131_072 / microseconds, rel=0.02)
    assert bus < 0.956 * 5e-3 / EARLIEST
    assert bus == pytest.approx(4 / 3 * algorithm, rel=0.02)
    assert "as lesson 15 fits it" in lines[-1]


def test_ranks_that_mpirun_starts_cannot_have_networks_of_their_own(make_job):
    job = make_job("", strategy="mpi", workers=2)
    with pytest.raises(JobError, match=r"mpirun starts the workers .*; leave the network out, or use"):
        Local(network=Network(bandwidth="100Mbit")).render(job)


def test_a_run_that_meets_at_an_address_of_its_own_host_says_so_when_it_ends(make_job):
    script = """
    import os, socket
    if os.environ["RANK"] == "0":
        socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))).accept()
    else:
        x = f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"
        socket.create_connection(x.removeprefix("tcp://").split(":"), 1)
    """
    run = Local(network=Network(bandwidth="100Mbit")).launch(
        make_job(script, strategy="torch_ddp", workers=2)
    )
    with pytest.raises(
        RunFailed, match=r"(?s)Connection refused.*train.py, line \d+: an address of a process's own"
    ):
        run.wait(60)


@pytest.mark.parametrize(
    "name",
    [
        "mnist_torch_ddp",
        with_horovod("mnist_horovod"),
        "mnist_tensorflow",
        "mnist_tensorflow/parameter_server.yaml",
    ],
)
@pytest.mark.usefixtures("dead_proxy")
def test_every_framework_trains_in_it(name):
    job = TrainingJob.load(JOBS / name).replace(workers=2, arguments={"epochs": 1}, timeout="4min")
    run = Local(network=Network.parse("100Mbit"), warm=True).launch(job).wait()
    assert run.state is RunState.SUCCEEDED
    assert run.metrics["loss"].notna().any()
