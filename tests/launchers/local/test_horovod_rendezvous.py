import http.client
import signal
import subprocess
import sys
import time

import pytest
from conftest import eventually, on_another_machine

from workshop_utils import on_ranks
from workshop_utils.launchers.local.environment import PROGRAMS
from workshop_utils.network.ports import PortReservation

pytestmark = [pytest.mark.processes, pytest.mark.horovod]


@pytest.fixture(scope="module")
def port():
    """The port of a server that runs as a launcher runs it."""
    with PortReservation(1) as reservation:
        (number,) = reservation.ports
        command = [sys.executable, "-I", str(PROGRAMS / "horovod_rendezvous.py"), "127.0.0.1", str(number)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as server:
            assert eventually(lambda: ask(number, "GET", "/up/0")[0] == 404)
            yield number
            server.terminate()
            said, _ = server.communicate(timeout=30)
        assert said.decode() == ""
        assert server.returncode == -signal.SIGTERM


def ask(port, method, path, body=None, **headers):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        connection.request(method, path, body, headers)
        response = connection.getresponse()
        return response.status, response.read()
    except ConnectionRefusedError:
        return 0, b""
    finally:
        connection.close()


def test_a_value_is_not_there_until_it_is_put_and_stays_for_slower_ranks_when_one_leaves(port):
    value = bytes(range(256))
    assert ask(port, "GET", "/global/0") == (404, b"")
    assert ask(port, "PUT", "/global/0", value) == (200, b"")
    assert ask(port, "DELETE", "/global/0") == (200, b"")
    assert ask(port, "GET", "/global/0") == (200, value)
    assert ask(port, "GET", "/local/0") == (404, b"")


def test_it_is_reached_through_loopback_alone(port):
    listening = [line.split() for line in open("/proc/net/tcp").readlines()[1:]]  # noqa: SIM115, PTH123
    addresses = {words[1] for words in listening if words[1].endswith(f":{port:04X}") and words[3] == "0A"}
    assert addresses == {f"0100007F:{port:04X}"}


def test_ranks_meet_where_the_host_s_name_has_no_address():
    script = """
from workshop_utils import on_ranks
def program(hvd):
    import socket, torch
    return hvd.allreduce(torch.ones(1), op=hvd.Sum).item(), socket.gethostname()
print(on_ranks(2, program, framework="horovod", timeout="2min").values)
"""
    nowhere = "hostname another && for file in hosts resolv.conf; do mount --bind /dev/null /etc/$file; done"
    assert on_another_machine(nowhere, script) == "[(2.0, '127.0.0.1'), (2.0, '127.0.0.1')]\n"


def test_a_rank_that_still_sends_learns_that_another_has_left():
    def program(hvd):
        import torch

        hvd.barrier()
        if hvd.rank() == 1:
            time.sleep(0.02)
            return "left"
        try:
            for number in range(1_000_000):
                hvd.allreduce_async(torch.ones(1), name=str(number))
        except hvd.HorovodInternalError as error:
            return str(error).partition(". ")[0]

    told = ["Horovod has been shut down", "left"]
    for _ in range(3):  # a rank that is not told waits for ever, in every second call or so
        assert on_ranks(2, program, framework="horovod", timeout="2min").values == told


def test_a_rank_that_leaves_closes_its_connections():
    def program(hvd):
        from pathlib import Path

        hvd.shutdown()
        names = [str(each.readlink()) for each in Path("/proc/self/fd").iterdir() if each.is_symlink()]
        return [name for name in names if name.startswith("socket:")]

    assert on_ranks(2, program, framework="horovod", timeout="2min").values == [[], []]
