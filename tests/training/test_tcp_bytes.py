"""Bytes that the kernel has counted, compared with what was really sent."""

import math
import os
import socket
import subprocess
import sys
import threading

import pytest

from workshop_utils import count_bytes, on_ranks
from workshop_utils.launchers.local.environment import mpirun_program
from workshop_utils.network import availability
from workshop_utils.strategies import MPI_FOLDERS, MPI_ON_ONE_MACHINE, mpi_options

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux counts them")


@pytest.fixture
def connect():
    """`connect()` is the two ends of a TCP connection on loopback: who connected, and who accepted."""
    opened = []

    def ends(host="127.0.0.1", family=socket.AF_INET):
        with socket.create_server((host, 0), family=family) as server:
            first = socket.create_connection(server.getsockname()[:2])
            second, _ = server.accept()
        opened.extend((first, second))
        return first, second

    yield ends
    for each in opened:
        each.close()


def transfer(source, to, nbytes):
    """Send so many bytes, and return once all have arrived."""
    sender = threading.Thread(target=source.sendall, args=(bytes(nbytes),))
    sender.start()
    while nbytes:
        nbytes -= len(to.recv(nbytes))
    sender.join()


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
@pytest.mark.parametrize("nbytes", [0, 1, 5_000_003])
def test_both_ends_of_a_connection_count_every_byte_once(nbytes, host, connect):
    try:
        first, second = connect(host, socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError:
        pytest.skip("there is no IPv6 here")
    transfer(first, second, 17)  # which is not in the block
    with count_bytes() as counted:
        transfer(first, second, nbytes)
        assert counted.sent == nbytes  # up to now
        transfer(second, first, 3)
        transfer(*connect(), 5)  # a new one counts from its first byte
        first.shutdown(socket.SHUT_WR)  # an end is no byte
    transfer(second, first, 17)
    assert counted.sent == nbytes + 8  # this process has both ends


def test_bytes_are_told_apart_by_the_two_ends_of_a_connection(connect):
    pairs = [connect(), connect()]
    with count_bytes() as counted:
        for nbytes, (first, second) in enumerate(pairs, 3):
            transfer(first, second, nbytes)
    links = {
        (first.getsockname(), second.getsockname()): nbytes for nbytes, (first, second) in enumerate(pairs, 3)
    }
    assert {link: nbytes for link, nbytes in counted.by_link.items() if nbytes} == links
    assert sum(counted.by_link.values()) == counted.sent == 7


def test_a_count_is_not_a_number_once_a_connection_is_closed_that_was_there(connect):
    first, second = connect()
    with count_bytes() as counted:
        transfer(first, second, 3)
        assert counted.sent == 3
        second.close()
    assert math.isnan(counted.sent)


def test_what_is_no_connection_does_not_count():
    server, datagrams = socket.create_server(("127.0.0.1", 0)), socket.socket(type=socket.SOCK_DGRAM)
    first, second = socket.socketpair()
    with count_bytes() as counted, first, second, datagrams, server:  # all are closed in the block
        transfer(first, second, 100)
        datagrams.sendto(b"text", server.getsockname())
    assert counted.sent == 0


def test_the_barrier_comes_before_and_after_and_not_where_the_block_failed(connect):
    first, second = connect()

    def barrier():
        transfer(first, second, 10)
        order.append("barrier")

    order = []
    with count_bytes(barrier) as counted:
        order.append("block")
        transfer(first, second, 1)
    assert (counted.sent, order) == (1, ["barrier", "block", "barrier"])
    with pytest.raises(KeyError), count_bytes(barrier):
        raise KeyError
    assert order[3:] == ["barrier"]


# A link that drops what its queue cannot hold, in a network of its own.
LOSSY = """
ip link set lo up mtu 1500 && tc qdisc add dev lo root tbf rate 20mbit burst 20000 limit 8000 || exit 77
exec "$0" -c '
import socket, struct, threading
from workshop_utils.training.tcp_bytes import count_bytes

server = socket.create_server(("127.0.0.1", 0))
first = socket.create_connection(server.getsockname())
second, _ = server.accept()
with count_bytes() as counted:
    threading.Thread(target=first.sendall, args=(bytes(300_000),)).start()
    left = 300_000
    while left:
        left -= len(second.recv(left))
(again,) = struct.unpack_from("Q", first.getsockopt(6, socket.TCP_INFO, 256), 208)
print(again, counted.sent)
'
"""


@pytest.mark.processes
def test_bytes_that_are_sent_again_count_once():
    command = ["unshare", "--net", "--map-root-user", "bash", "-c", LOSSY, sys.executable]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip("there is no unshare here")
    if answer.returncode:
        pytest.skip(f"no network of our own: {answer.stderr}")
    again, sent = map(int, answer.stdout.split())
    assert again > 0
    assert sent == 300_000


# Frameworks

SIZES = (1, 1000, 12_345, 250_000)  # numbers of four bytes


def gloo(dist, pause):
    """Bytes sent in a block without an all-reduce, and in each with one."""
    import time

    import torch

    counts = []
    for size in (0, *SIZES, SIZES[-1]):
        numbers = torch.zeros(size)
        dist.barrier()
        time.sleep(pause)  # the last message of another rank's barrier has come
        with count_bytes() as counted:
            time.sleep(pause)  # all have begun
            if size:
                dist.all_reduce(numbers)
            time.sleep(pause)
        time.sleep(pause)  # no other rank's next barrier has begun
        counts.append(counted.sent)
    return counts


@pytest.mark.processes
@pytest.mark.parametrize("network", [None, "100Mbit"])
def test_gloo_sends_what_the_formula_says_and_less_than_two_kilobytes_of_headers(network):
    if network and availability() == "none":
        pytest.skip("no network namespaces here")
    size = 3
    ranks = on_ranks(size, gloo, {"pause": 0.1}, network=network, framework="torch").values
    for place, elements in enumerate((0, *SIZES, SIZES[-1])):
        sent = sum(counts[place] for counts in ranks)
        headers = sent - 2 * (size - 1) * 4 * elements  # Patarasuk and Yuan (2009)
        assert headers == 0 if not elements else 0 < headers < 2000 * size
    assert all(counts[-1] == counts[-2] for counts in ranks)


@pytest.mark.processes
@pytest.mark.horovod
def test_horovods_bytes_hold_the_tensor_s():
    def program(hvd):
        import torch

        hvd.allreduce(torch.zeros(4))
        # Between barriers, so that no rank leaves, and closes its connections, too early.
        with count_bytes(hvd.barrier) as counted:
            hvd.allreduce(torch.zeros(250_000))
        return counted.sent

    for sent in on_ranks(2, program, framework="horovod").values:
        assert 1_000_000 < sent < 1_100_000  # its negotiation goes on all the time


MPI = """
from mpi4py import MPI
import numpy as np
from workshop_utils.training.tcp_bytes import count_bytes

world = MPI.COMM_WORLD
outgoing, incoming = np.zeros(1_000_003, np.uint8), np.empty(1_000_003, np.uint8)
world.Allreduce(np.zeros(4), np.zeros(4))
with count_bytes(world.Barrier) as counted:
    world.Sendrecv(outgoing, 1 - world.rank, 0, incoming, 1 - world.rank)
print(counted.sent)
"""


@pytest.mark.processes
@pytest.mark.parametrize(
    ("transport", "least", "most"), [((), 0, 0), (("btl", "tcp,self"), 1_000_003, 1_001_000)]
)
def test_mpis_bytes_are_seen_where_they_go_over_tcp(transport, least, most, tmp_path):
    choice = ["--mca", *transport, "--mca", "pml", "ob1"] if transport else mpi_options(MPI_ON_ONE_MACHINE)
    options = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", *choice, "-n", "2"]
    answer = subprocess.run(
        [mpirun_program("the test"), *options, sys.executable, "-c", MPI],
        env={**os.environ, **dict.fromkeys(MPI_FOLDERS, str(tmp_path))},
        check=True, capture_output=True, text=True, timeout=30,
    )  # fmt: skip
    counts = [int(line) for line in answer.stdout.split()]
    assert len(counts) == 2
    assert all(least <= count <= most for count in counts)
