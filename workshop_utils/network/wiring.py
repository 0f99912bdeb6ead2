"""The commands (`ip`, `tc`) that wire up an emulated network: switches, cables, and what each lets through.

A star's switch is a bridge in the supervisor's own namespace, a rack one such bridge each, the spine another. In a
ring there is no switch: cables go from namespace to namespace, and each namespace forwards what is not for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from workshop_utils.network import BURST, INTERFACE, QUEUE, Network
from workshop_utils.quantities import bytes_per_second_of

Command = tuple[str, ...]

OTHER_INTERFACE = "eth1"  # in a ring, towards the neighbour before


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


def wire(network: Network, members: Sequence[str], as_user: bool) -> tuple[Switch, list[Cable]]:
    """What joins the processes of a job, by their names in the order in which they are started.

    `as_user` has the namespaces made by a user who is not root.
    """
    ring = network.topology == "ring" and len(members) > 1
    commands, cables = (_ring if ring else _star)(network, members)
    return Switch(commands, as_user), cables


def _star(network: Network, members: Sequence[str]) -> tuple[list[Command], list[Cable]]:
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
    return switch, [_star_cable(network, members, index) for index in range(len(members))]


def _star_cable(network: Network, members: Sequence[str], index: int) -> Cable:
    port, rate = f"port{index}", network.bandwidth_of(members[index])
    rack = index * network.racks // len(members)
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
            _limit(INTERFACE, rate),
        ],
        address=network.address(index),
    )


def _ring(network: Network, members: Sequence[str]) -> tuple[list[Command], list[Cable]]:
    size = len(members)
    links = size if size > 2 else 1  # two have one link between them, not two
    # The ends of the links are made here, and moved to the processes as these come.
    ends = [
        _command(f"ip link add name after{link} type veth peer name before{link}") for link in range(links)
    ]
    return ends, [_ring_cable(network, members, index) for index in range(size)]


def _ring_cable(network: Network, members: Sequence[str], index: int) -> Cable:
    size, address = len(members), network.address(index)
    after, before = (index + 1) % size, (index - 1) % size
    ends = {INTERFACE: (f"after{index}", after), OTHER_INTERFACE: (f"before{before}", before)}
    if size == 2:
        ends = {INTERFACE: ("before0" if index else "after0", after)}
    plug, card = [], [_command("ip link set lo up")]
    for interface, (end, neighbour) in ends.items():
        rate = network.bandwidth_between(members[index], members[neighbour])
        plug.append(_command(f"ip link set dev {end} netns {{pid}} name {interface}"))
        card += [
            _command(f"ip address add {address}/32 dev {interface}"),
            _command(f"ip link set {interface} up"),
            _limit(interface, rate),
            *_delay(interface, network),
        ]
    card.append(("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward"))
    for other in set(range(size)) - {index}:
        forward = size == 2 or _goes_forward(index, other, size)
        interface = INTERFACE if forward else OTHER_INTERFACE
        neighbour = ends[interface][1]
        # A neighbour's address is in no subnet of this card, hence `onlink`.
        via = "" if other == neighbour else f"via {network.address(neighbour)} onlink"
        card.append(_command(f"ip route add {network.address(other)}/32 {via} dev {interface} src {address}"))
    return Cable(plug, card, address)


def _goes_forward(index: int, other: int, size: int) -> bool:
    """Whether the shorter way from one to the other goes forward; of two equal ways, both take the same."""
    forward = (other - index) % size
    return forward < size - forward or (forward == size - forward and index < other)


def _bridge(name: str) -> list[Command]:
    return [_command(f"ip link add name {name} type bridge"), _command(f"ip link set {name} up")]


def _limit(device: str, bytes_per_second: float) -> Command:
    rate = round(bytes_per_second * 8)
    return _command(
        f"tc qdisc add dev {device} root handle 1: tbf rate {rate}bit burst {BURST} latency {QUEUE}"
    )


def _delay(device: str, network: Network) -> list[Command]:
    """What holds packets up before the bucket of `_limit` lets them through (tc-netem(8), "Rate control")."""
    if network.latency is None:
        return []
    delay = round(network.latency_seconds * 1e6)
    return [_command(f"tc qdisc add dev {device} parent 1:1 handle 10: netem delay {delay}us")]


def _command(text: str) -> Command:
    return tuple(text.split())
