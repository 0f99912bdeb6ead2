"""Ranks in virtual time: the same collectives among thousands of ranks, on one core, with a clock that is computed.

    def program(communicator: Communicator) -> None:
        ring_all_reduce(communicator, Shape(1_000_000))

    simulate(1024, program, Link.of("10Gbit", "20us")).seconds

Each rank is a greenlet, a function call that can be left in the middle and taken up again, so that a collective's
text runs as it is. The rank that acts next is the one whose clock is behind all others', so that links see messages
in the order of virtual time. Where only time is asked, a `Shape` stands for the array and no data is moved; ordinary
arrays are moved and reduced, so that results can be checked.

The engine was chosen by measuring it: processor time a message of a ring, µs, 64 and 256 ranks, Python 3.11, x86:

| engine | 64 | 256 | runs a collective's text as it is |
| --- | --- | --- | --- |
| greenlet 3.5 and the heap below, with all counting and the ring's own text | 2.6 | 2.5 | yes |
| one thread a rank, only passing the turn on by locks | 10.2 | 10.5 | yes |
| SimPy 4.1, generators, only its stores and time-outs | 5.1 | 5.9 | no: every call would have to be a `yield from` |

With 1,024 ranks a message takes 3 to 5 µs, since the ranks' frames no longer fit into the processor's cache.

What a message goes through, where every rank has a link of its own (`Cluster` can do more):

    head    = start + overhead                      the first byte leaves; the sender goes on at head + size/bandwidth
    arrival = max(head + latency, downlink free) + size/bandwidth
    downlink free = arrival

A link has one queue in each direction, served in the order in which first bytes come; on a shared one, head waits
for the uplink too. A spine's two queues stand between the uplink and the latency, and are served in the order in
which first bytes leave the NIC. All links of a path carry a message at once (cut-through), so the slowest decides.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Generic, TypeVar

import numpy as np
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from workshop_utils.comm.cluster import Cluster, Link
from workshop_utils.comm.communicator import (
    _COMBINE,
    Array,
    CommunicationError,
    Communicator,
    Event,
    Mismatch,
    Operation,
    Traffic,
)
from workshop_utils.comm.shape import Shape

__all__ = ["Cluster", "Deadlock", "Link", "Shape", "SimulatedCommunicator", "Simulation", "simulate"]

Result = TypeVar("Result")


class Deadlock(CommunicationError):
    """Every rank that has not finished waits for a message; the text says who waits for whom."""


@dataclass(frozen=True)
class Simulation(Generic[Result]):
    """What a simulated program did. Arrays have one entry a rank.

    Attributes:
        seconds: until the last rank finished.
        finish_seconds: until each rank finished.
        results: what each rank's program returned.
        messages_sent, bytes_sent, messages_received, bytes_received: counts of each rank.
        traces: each rank's events, where they were asked for.
    """

    seconds: float
    finish_seconds: np.ndarray
    results: list[Result]
    messages_sent: np.ndarray
    bytes_sent: np.ndarray
    messages_received: np.ndarray
    bytes_received: np.ndarray
    traces: list[list[Event]] | None


def simulate(
    size: int,
    program: Callable[[Communicator], Result],
    link: Link | Cluster = Link(),  # noqa: B008 - it is frozen
    *,
    slowness: Sequence[float] | None = None,
    combine_bytes_per_second: float = math.inf,
    jitter: float = 0.0,
    seed: int = 0,
    trace: bool = False,
) -> Simulation[Result]:
    """Run `program(communicator)` on `size` ranks in virtual time.

    Args:
        size: how many ranks.
        program: the same function for all; it may call `communicator.compute(seconds)` to be busy.
        link: what connects each rank with the others, or a whole cluster.
        slowness: by what each rank's computing time is multiplied, 1 for all by default.
        combine_bytes_per_second: how fast `combine` reduces; by default it takes no time.
        jitter: each message's latency is multiplied by exp(jitter · z), with z normal.
        seed: of the jitter; equal seeds give equal times.
        trace: whether to record what each rank did when.

    Raises:
        Deadlock: if every rank that has not finished waits for a message.
        ValueError: if `size` is not positive or `slowness` has not one entry a rank.
        Exception: what a rank raised, with a note of its number.
    """
    if size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    if slowness is not None and len(slowness) != size:
        raise ValueError(f"slowness has {len(slowness)} entries; it must have one for each of {size} ranks")
    clock = _Clock(link if isinstance(link, Cluster) else Cluster(link), size, jitter, seed)
    for rank in range(size):
        factor = 1.0 if slowness is None else slowness[rank]
        communicator = SimulatedCommunicator(rank, size, clock, factor, combine_bytes_per_second)
        communicator.trace = [] if trace else None
        clock.ranks.append(communicator)
    results = clock.run(program)
    counts = np.array([_totals(communicator) for communicator in clock.ranks], dtype=np.int64)
    finish_seconds = np.array([communicator.seconds for communicator in clock.ranks])
    return Simulation(
        seconds=float(finish_seconds.max()),
        finish_seconds=finish_seconds,
        results=results,
        messages_sent=counts[:, 0],
        bytes_sent=counts[:, 1],
        messages_received=counts[:, 2],
        bytes_received=counts[:, 3],
        traces=[communicator.trace or [] for communicator in clock.ranks] if trace else None,
    )


def latency_factors(random: np.random.Generator, size: int, jitter: float) -> np.ndarray:
    """By what the latencies of every rank's next message are multiplied. Shape (size,), float32, median 1."""
    factors = random.standard_normal(size, dtype=np.float32)
    factors *= np.float32(jitter)
    return np.exp(factors, out=factors)


def _totals(communicator: SimulatedCommunicator) -> tuple[int, int, int, int]:
    sent, received = (counts.values() for counts in communicator.counts())
    return (
        sum(messages for messages, _ in sent),
        sum(nbytes for _, nbytes in sent),
        sum(messages for messages, _ in received),
        sum(nbytes for _, nbytes in received),
    )


class _Queue:
    """One direction of a link: when it is free again, and how long it takes over a byte."""

    __slots__ = ("free", "seconds_per_byte")

    def __init__(self, link: Link) -> None:
        self.free = 0.0
        self.seconds_per_byte = 1 / link.bandwidth_bytes_per_second


class _Channel:
    """What one rank sends to one other: counted, and kept until it is received."""

    __slots__ = (
        "down",
        "latency",
        "latest_head",
        "messages",
        "nbytes",
        "overhead",
        "receiver",
        "sent",
        "source",
        "spine",
        "up",
    )

    def __init__(self, source: SimulatedCommunicator, receiver: SimulatedCommunicator) -> None:
        self.source, self.receiver = source, receiver
        self.messages = self.nbytes = 0
        self.sent: list[tuple[float, Array, str]] = []  # (arrival, array, collective)
        self.latest_head = 0.0  # messages of one channel do not overtake each other
        self.latency = self.overhead = 0.0
        self.up: _Queue
        self.spine: tuple[_Queue, ...] = ()
        self.down: _Queue


_Act = Callable[[], Any]
_Counts = dict[int, tuple[int, int]]  # (messages, bytes) by peer
_SWITCH: type = type(greenlet().switch)


class _Clock:
    """Virtual time: what is due when, and what the links are doing."""

    def __init__(self, cluster: Cluster, size: int, jitter: float, seed: int) -> None:
        self.ranks: list[SimulatedCommunicator] = []
        self.cluster = cluster
        # With one latency for all, first bytes come in the order in which they leave: queues are known at once.
        self.is_plain = cluster.is_plain and jitter == 0
        # A heap of times, and for each what is due. Ranks that do the same thing do it at the same time, so that
        # there are far fewer times than messages.
        self.times: list[float] = []
        self.due: dict[float, deque[_Act]] = {}
        self._hub = getcurrent()
        self._jitter, self._random = jitter, np.random.default_rng(seed)
        self._factors: list[memoryview] = []
        machines = -(-size // cluster.ranks_per_machine)
        racks = -(-machines // cluster.machines_per_rack) if cluster.machines_per_rack else 1
        nics = [cluster.nic(machine) for machine in range(machines)]
        self._up, self._down = list(map(_Queue, nics)), list(map(_Queue, nics))
        self._inside_up, self._inside_down = ([_Queue(cluster.inside) for _ in range(size)] for _ in range(2))
        self._spine_up, self._spine_down = ([_Queue(cluster.spine) for _ in range(racks)] for _ in range(2))

    def run(self, program: Callable[[Communicator], Result]) -> list[Result]:
        """Run the program on every rank until all have finished."""
        results: list[Any] = [None] * len(self.ranks)

        def rank_main(communicator: SimulatedCommunicator) -> None:
            self._hub.switch()
            try:
                results[communicator.rank] = program(communicator)
            except Exception as failure:
                failure.add_note(f"raised on simulated rank {communicator.rank} of {communicator.size}")
                raise
            communicator.finished = True

        greenlets = [greenlet(rank_main) for _ in self.ranks]
        try:
            for communicator, its_greenlet in zip(self.ranks, greenlets, strict=True):
                communicator.resume = its_greenlet.switch
                # Started from here, since a rank started by another would inherit its depth of recursion.
                its_greenlet.switch(communicator)
                self.at(0.0, communicator.resume)
            while self.times:  # here whenever a rank has finished, or nothing is due
                self.give_way()
            if not all(communicator.finished for communicator in self.ranks):
                raise Deadlock(self._who_waits())
        finally:
            self.times.clear()
            self.due.clear()
            for its_greenlet in greenlets:
                if its_greenlet:
                    its_greenlet.throw()
        return results

    def at(self, seconds: float, act: _Act) -> None:
        """Have `act` called when virtual time is `seconds`."""
        waiting = self.due.get(seconds)
        if waiting is None:
            self.due[seconds] = deque((act,))
            heappush(self.times, seconds)
        else:
            waiting.append(act)

    def give_way(self) -> None:
        """Let act who is due; returns when it is this greenlet's turn again."""
        times, due = self.times, self.due
        while times:
            waiting = due[times[0]]
            act = waiting.popleft()
            if not waiting:
                del due[heappop(times)]
            act()
            if type(act) is _SWITCH:
                return
        self._hub.switch()

    def connect(self, channel: _Channel) -> None:
        """Find the queues that messages from one rank to another go through."""
        cluster, source, to = self.cluster, channel.source.rank, channel.receiver.rank
        here, there = source // cluster.ranks_per_machine, to // cluster.ranks_per_machine
        if here == there:
            channel.up, channel.down = self._inside_up[source], self._inside_down[to]
            channel.latency, channel.overhead = (
                cluster.inside.latency_seconds,
                cluster.inside.overhead_seconds,
            )
            return
        channel.up, channel.down = self._up[here], self._down[there]
        channel.latency = max(cluster.nic(here).latency_seconds, cluster.nic(there).latency_seconds)
        channel.overhead = cluster.nic(here).overhead_seconds
        if cluster.machines_per_rack:
            here, there = here // cluster.machines_per_rack, there // cluster.machines_per_rack
            if here != there:
                channel.spine = (self._spine_up[here], self._spine_down[there])
                channel.latency += cluster.spine.latency_seconds

    def send(self, channel: _Channel, start: float, array: Array, collective: str) -> float:
        """Put a message on its way; returns when its last byte has left the sender's NIC."""
        nbytes = array.nbytes
        head = max(start + channel.overhead, channel.up.free)
        left = tail = channel.up.free = head + nbytes * channel.up.seconds_per_byte
        for queue in channel.spine:
            head = max(head, queue.free)
            tail = queue.free = max(head + nbytes * queue.seconds_per_byte, tail)
        latency = channel.latency * (self._factor(channel.source) if self._jitter else 1.0)
        head = channel.latest_head = max(head + latency, channel.latest_head)
        tail += latency

        def first_byte_comes() -> None:
            down = channel.down
            arrival = down.free = max(max(head, down.free) + nbytes * down.seconds_per_byte, tail)
            channel.sent.append((arrival, array, collective))
            channel.receiver.notice(channel, arrival)

        self.at(head, first_byte_comes)
        return left

    def _factor(self, source: SimulatedCommunicator) -> float:
        """Message k of rank r gets entry r of row k, whoever asks first."""
        if source.jittered == len(self._factors):
            row = latency_factors(self._random, len(self.ranks), self._jitter)
            self._factors.append(row.data)
        factor = self._factors[source.jittered][source.rank]
        source.jittered += 1
        return factor

    def _who_waits(self, most: int = 8) -> str:
        waiting = [communicator for communicator in self.ranks if not communicator.finished]
        told = "; ".join(communicator.what_it_waits_for() for communicator in waiting[:most])
        rest = f"; and {len(waiting) - most} more" if len(waiting) > most else ""
        return f"{len(waiting)} of {len(self.ranks)} ranks wait for ever: {told}{rest}"


class SimulatedCommunicator(Communicator):
    """One rank in virtual time; `simulate` makes them. `seconds` is its clock."""

    def __init__(
        self, rank: int, size: int, clock: _Clock, slowness: float, combine_bytes_per_second: float
    ) -> None:
        # Without the base's __init__, whose counters have an entry a peer: 3 GB among 10,000 ranks.
        self.rank, self.size, self.timeout_seconds = rank, size, math.inf
        self.collective, self.trace = "", None
        self._scratch = {}
        self.seconds = 0.0
        self.finished = False
        self.jittered = 0  # messages that have been given a latency of their own
        self.resume: _Act
        self._clock, self._times = clock, clock.times
        self._slowness = slowness
        self._combine_seconds_per_byte = slowness / combine_bytes_per_second
        self._to: dict[int, _Channel] = {}
        self._from: dict[int, _Channel] = {}
        self._waits_for: _Channel | None = None
        self._left = 0.0  # when the last byte of its message had left, of a rank that waits for another
        self._listens_to: frozenset[int] = frozenset()
        self.counted_before: tuple[_Counts, _Counts] = ({}, {})  # at the last reset
        self._is_plain = clock.is_plain
        link = clock.cluster.link
        self._latency, self._overhead = link.latency_seconds, link.overhead_seconds
        self._seconds_per_byte = 1 / link.bandwidth_bytes_per_second
        self._downlink_free = 0.0

    def now(self) -> float:
        """Virtual seconds."""
        return self.seconds

    def compute(self, seconds: float) -> None:
        """Be busy for `seconds`, times this rank's slowness."""
        start = self.seconds
        self.seconds += seconds * self._slowness
        if self.trace is not None:
            self.trace.append(Event("compute", None, 0, start, self.seconds, self.collective))

    def combine(self, accumulator: Array, incoming: Array, operation: Operation = "sum") -> None:
        start = self.seconds
        self.seconds += accumulator.nbytes * self._combine_seconds_per_byte
        if type(accumulator) is not Shape:
            _COMBINE[operation](accumulator, incoming, out=accumulator)
        if self.trace is not None:
            self._record("combine", None, accumulator, start)

    def scratch(self, like: Array, purpose: str = "incoming") -> Array:
        return like if type(like) is Shape else super().scratch(like, purpose)

    def wait_any(self, sources: Sequence[int]) -> int:
        self._take_turn()
        while True:
            waiting = [(self._from[source].sent[0][0], source) for source in sources if self._has(source)]
            arrival, source = min(waiting, default=(math.inf, -1))
            if arrival <= self.seconds:
                return source
            self._listens_to = frozenset(sources)
            if waiting:
                self._hear_at(arrival)
            self._clock.give_way()

    def _has(self, source: int) -> bool:
        return source in self._from and bool(self._from[source].sent)

    def _transfer(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        """Send and receive. In one piece, since a ring of 1,024 ranks comes through here two million times."""
        started, times = self.seconds, self._times
        if times and times[0] < started:
            self._take_turn()
        left = started
        if to is not None:
            channel = self._to.get(to) or self._open(to)
            array = outgoing if type(outgoing) is Shape else outgoing.copy()
            nbytes = array.nbytes
            channel.messages += 1
            channel.nbytes += nbytes
            if self._is_plain:
                receiver = channel.receiver
                head = started + self._overhead
                sending_seconds = nbytes * self._seconds_per_byte
                left = head + sending_seconds
                head += self._latency
                if head < receiver._downlink_free:
                    head = receiver._downlink_free
                receiver._downlink_free = arrival = head + sending_seconds
                channel.sent.append((arrival, array, self.collective))
                if receiver._waits_for is channel or receiver._listens_to:
                    receiver.notice(channel, arrival)
            else:
                left = self._clock.send(channel, started, array, self.collective)
        if source is None:
            self.seconds = left
        else:
            channel = self._from.get(source) or self._open_from(source)
            sent = channel.sent
            if not sent:
                self._waits_for, self._left = channel, left
                self._clock.give_way()
            arrival, array, collective = sent.pop(0)
            self.seconds = arrival if arrival > left else left
            if (
                array.nbytes != incoming.nbytes
                or array.dtype != incoming.dtype
                or collective != self.collective
            ):
                self._complain(source, array, collective, incoming)
            if type(incoming) is not Shape:
                self._store(source, array, incoming)
        if self.trace is not None:
            self._record_transfer(to, outgoing, source, incoming, started, left)
        if times and times[0] < self.seconds:
            self._take_turn()

    send_recv = _transfer  # a call less for each message

    def send_recv_combine(
        self,
        to: int | None,
        outgoing: Array,
        source: int | None,
        accumulator: Array,
        operation: Operation = "sum",
    ) -> None:
        if source is None:
            self._transfer(to, outgoing, None, None)
            return
        incoming = accumulator if type(accumulator) is Shape else self.scratch(accumulator)
        self._transfer(to, outgoing, source, incoming)
        self.combine(accumulator, incoming, operation)

    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        self._transfer(to, outgoing, source, incoming)

    def _take_turn(self) -> None:
        """Let those act whose clocks are behind this rank's."""
        if self._times and self._times[0] < self.seconds:
            self._clock.at(self.seconds, self.resume)
            self._clock.give_way()

    def notice(self, channel: _Channel, arrival: float) -> None:
        """A message will have come at `arrival`: act then, if this rank waits for it."""
        if self._waits_for is channel:
            self._waits_for = None
            self._clock.at(arrival if arrival > self._left else self._left, self.resume)
        elif channel.source.rank in self._listens_to:
            self._hear_at(arrival)

    def _hear_at(self, seconds: float) -> None:
        def hear() -> None:
            if self._listens_to:  # it may have heard of an earlier message meanwhile
                self._listens_to = frozenset()
                self.seconds = max(self.seconds, seconds)
                self._clock.at(self.seconds, self.resume)

        self._clock.at(seconds, hear)

    def _open(self, to: int) -> _Channel:
        self._check(to, None)
        receiver = self._clock.ranks[to]
        channel = self._to[to] = receiver._from[self.rank] = _Channel(self, receiver)
        self._clock.connect(channel)
        return channel

    def _open_from(self, source: int) -> _Channel:
        self._check(None, source)
        return self._clock.ranks[source]._open(self.rank)

    def _complain(self, source: int, array: Array, collective: str, incoming: Array) -> None:
        here = self.collective or "recv"
        if collective != self.collective:
            raise Mismatch(f"rank {source} is in {collective or 'send'} while rank {self.rank} is in {here}")
        raise Mismatch(
            f"rank {source} sent {array.size} × {array.dtype} where rank {self.rank} expects "
            f"{incoming.size} × {incoming.dtype}, in {here}"
        )

    def _store(self, source: int, array: Array, incoming: Array) -> None:
        if type(array) is Shape:
            raise Mismatch(
                f"rank {source} sent a Shape, which has no contents, where rank {self.rank} expects an array"
            )
        incoming[:] = array

    def _record_transfer(
        self, to: int | None, outgoing: Array, source: int | None, incoming: Array, start: float, left: float
    ) -> None:
        assert self.trace is not None
        if to is not None:
            self.trace.append(Event("send", to, outgoing.nbytes, start, left, self.collective))
        if source is not None:
            self.trace.append(Event("recv", source, incoming.nbytes, start, self.seconds, self.collective))

    def what_it_waits_for(self) -> str:
        """For people, of a rank that waits."""
        if self._listens_to:
            return f"rank {self.rank} waits for any of the ranks {sorted(self._listens_to)}"
        assert self._waits_for is not None
        peer = self._waits_for.source
        ended = ", which has finished" if peer.finished else ""
        return f"rank {self.rank} waits for rank {peer.rank}{ended}, in {self.collective or 'recv'}"

    def counts(self) -> tuple[_Counts, _Counts]:
        """Messages and bytes in all, sent by receiver, and received by source."""
        sent = {to: (channel.messages, channel.nbytes) for to, channel in self._to.items()}
        received = {
            source: (
                channel.messages - len(channel.sent),
                channel.nbytes - sum(array.nbytes for _, array, _ in channel.sent),
            )
            for source, channel in self._from.items()
        }
        return sent, received

    @property
    def traffic(self) -> Traffic:  # type: ignore[override]
        """Messages and bytes by peer, from the last `traffic.reset()` until now."""
        return _Counted(self)


class _Counted(Traffic):
    """A rank's traffic, put together from what its channels have counted."""

    __slots__ = ("_communicator",)

    def __init__(self, communicator: SimulatedCommunicator) -> None:
        super().__init__(communicator.size)
        self._communicator = communicator
        counters = (self.messages_sent, self.bytes_sent), (self.messages_received, self.bytes_received)
        for (messages, nbytes), counts, before in zip(
            counters, communicator.counts(), communicator.counted_before, strict=True
        ):
            for peer, (all_messages, all_nbytes) in counts.items():
                messages_before, nbytes_before = before.get(peer, (0, 0))
                messages[peer] = all_messages - messages_before
                nbytes[peer] = all_nbytes - nbytes_before

    def reset(self) -> None:
        self._communicator.counted_before = self._communicator.counts()
        super().reset()
