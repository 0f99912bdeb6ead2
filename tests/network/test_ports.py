import functools
import socket
import subprocess
import sys

import pytest
from conftest import on_another_machine

from workshop_utils.network import ports
from workshop_utils.network.ports import PortReservation


def only(monkeypatch, count):
    """Leave so many candidates, which are free just now."""
    with PortReservation(1) as probe:
        first = probe.ports[0]
    while True:
        monkeypatch.setattr(ports, "LOWEST", first)
        monkeypatch.setattr(ports, "_first_ephemeral_port", functools.partial(int, first + count))
        try:
            PortReservation(count).release()
        except OSError:
            first += count
        else:
            return list(range(first, first + count))


def in_another_process(candidates, count):
    """Whether another process can reserve so many of the candidates, and a listener then binds each of them."""
    program = f"""
import socket
from workshop_utils.network import ports
ports.LOWEST, ports._first_ephemeral_port = {candidates[0]}, lambda: {candidates[-1] + 1}
with ports.PortReservation({count}) as reservation:
    for port in reservation.ports:
        socket.create_server(("127.0.0.1", port)).close()
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0 or f"there are not {count} free ports" in done.stderr
    return done.returncode == 0


@pytest.mark.processes
def test_two_reservations_never_share_a_port_until_one_lets_go(monkeypatch):
    candidates = only(monkeypatch, 3)
    with PortReservation(2) as first:
        with PortReservation(1) as second:
            assert sorted(first.ports + second.ports) == candidates
        with pytest.raises(OSError, match="there are not 2 free ports"):
            PortReservation(2)
        PortReservation(1).release()  # the attempt that failed has kept none
        assert in_another_process(candidates, 1)
        assert not in_another_process(candidates, 2)
    assert in_another_process(candidates, 3)


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_a_port_on_which_somebody_listens_is_not_reserved(host, monkeypatch):
    candidates = only(monkeypatch, 2)
    with socket.create_server((host, candidates[0])), PortReservation(1) as reservation:
        assert reservation.ports == [candidates[1]]


@pytest.mark.processes
def test_a_machine_without_an_address_of_ipv4_is_told_so():
    script = """
from workshop_utils.jobs import JobError
from workshop_utils.network.ports import PortReservation
try:
    PortReservation(1)
except JobError as error:
    print(error)
"""
    of_ipv6 = 'ip link set lo up && ip address del 127.0.0.1/8 dev lo && exec "$@"'
    said = on_another_machine(f"set -- unshare --net sh -c '{of_ipv6}' sh \"$@\"", script)
    assert said.startswith("this machine has no address 127.0.0.1, ")
