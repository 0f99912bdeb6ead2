"""The commands (`ip`, `tc`) that wire up an emulated network: switches, cables, and what each lets through.

The switch is a bridge in the supervisor's own namespace; with racks, each rack has such a bridge, and the spine is
another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workshop_utils.jobs.quantities import bytes_per_second_of
from workshop_utils.network import INTERFACE, SUBNET, Network

# What a full link holds back before it drops more, whichever is longer: where many senders fill a server's link, TCP
# notices the loss of a message's end only after 0.2 s.
QUEUE_SECONDS, QUEUE_NBYTES = 0.05, 8_000_000

Command = tuple[str, ...]


Commands = Sequence[Sequence[str]]


@dataclass(frozen=True)
class Cable:
    """What connects a process to the group's network: commands run outside, and inside its own namespace.

    `address` is the name of its host, too.
    """

    plug: Commands
    card: Commands
    address: str


@dataclass(frozen=True)
class Switch:
    """The network namespace in which the cables of a group meet."""

    switch: Commands
    as_user: bool


def wire(network: Network, names: Sequence[str], as_user: bool) -> tuple[Switch, list[Cable]]:
    """What joins the processes of a job, by their names in the order in which they are started.

    With `as_user` a user who is not root makes the namespaces.
    """
    racks = range(network.racks)
    switch = [command for rack in racks for command in _bridge(f"switch{rack}")]
    if network.spine is not None:
        rate = bytes_per_second_of(network.spine)
        switch += _bridge("spine")
        for rack in racks:
            up, down = f"up{rack}", f"down{rack}"
            switch += [
                _command(f"ip link add name {up} type veth peer name {down}"),
                _command(f"ip link set {up} master switch{rack} up"),
                _command(f"ip link set {down} master spine up"),
                _limit(up, rate),
                _limit(down, rate),
            ]
    return Switch(switch, as_user), [_cable(network, names, index) for index in range(len(names))]


def _cable(network: Network, names: Sequence[str], index: int) -> Cable:
    port, rate = f"port{index}", network.bandwidth_of(names[index])
    rack = index * network.racks // len(names)
    piece = burst_nbytes(min(map(network.bandwidth_of, names))) // 2
    return Cable(
        plug=[
            _command(f"ip link add name {port} type veth peer name {INTERFACE} netns {{pid}}"),
            _command(f"ip link set {port} master switch{rack} up"),
            _limit(port, rate),
            *_delay(port, network),  # here alone, so that each way from one to another has it once
        ],
        card=[
            _command("ip link set lo up"),
            _command(f"ip address add {network.address(index)}/24 dev {INTERFACE}"),
            _command(f"ip link set {INTERFACE} up"),
            # BBR, which some systems use, would take the first burst for the link's rate, and pause to look again.
            _command(
                f"ip route change {SUBNET}.0/24 dev {INTERFACE} src {network.address(index)} congctl reno"
            ),
            # TCP hands its data down in pieces of up to 64 KB, which the bucket of a slow link would have to cut up.
            _command(f"ip link set dev {INTERFACE} gso_max_size {piece} gso_max_segs {piece // 1448}"),
            _limit(INTERFACE, rate),
        ],
        address=network.address(index),
    )


def _bridge(name: str) -> list[Command]:
    return [_command(f"ip link add name {name} type bridge"), _command(f"ip link set {name} up")]


def burst_nbytes(bytes_per_second: float) -> int:
    """What an idle link lets through at once, which costs no time: 5 ms at its rate, from 16 to 128 kB.

    Smaller bursts come closer to a real link, and cost the kernel more: it forwards smaller pieces.
    """
    return round(min(max(0.005 * bytes_per_second, 16_000), 128_000))


def _limit(device: str, bytes_per_second: float) -> Command:
    rate, burst = round(bytes_per_second * 8), burst_nbytes(bytes_per_second)
    queue = round(max(QUEUE_SECONDS * bytes_per_second, QUEUE_NBYTES)) + burst
    return _command(
        f"tc qdisc add dev {device} root handle 1: tbf rate {rate}bit burst {burst} limit {queue}"
    )


def _delay(device: str, network: Network) -> list[Command]:
    """What holds packets up before the bucket of `_limit` lets them through (tc-netem(8), "Rate control")."""
    if network.latency is None:
        return []
    delay = round(network.latency_seconds * 1e6)
    return [_command(f"tc qdisc add dev {device} parent 1:1 handle 10: netem delay {delay}us")]


def _command(text: str) -> Command:
    return tuple(text.split())
