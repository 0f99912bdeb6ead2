"""Ranks in virtual time: the same collectives among thousands of ranks, on one core, with a clock that is computed.

    def program(communicator: Communicator) -> None:
        ring_all_reduce(communicator, Shape(1_000_000))

    simulate(1024, program, Link.of("10Gbit", "20us")).seconds

Each rank is a greenlet, a function call that can be suspended and resumed, so a collective runs unchanged. The rank
whose clock is furthest behind acts next, so that links see messages in the order of virtual time; `topology` says what
a message goes through. Where only the time matters, a `Shape` replaces the array and no data is moved; ordinary arrays
are moved and reduced, so that results can be checked.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from typing import Any, Generic, NamedTuple, TypeVar

import numpy as np
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from workshop_utils.comm.communicator import (
    Array,
    CommunicationError,
    Communicator,
    Event,
    Mismatch,
    check_message,
)
from workshop_utils.comm.shape import Shape
from workshop_utils.comm.topology import Link, Queue, Topology

__all__ = ["Deadlock", "Link", "Shape", "SimulatedCommunicator", "Simulation", "Topology", "simulate"]

Result = TypeVar("Result")

IDEAL = Link()  # takes no time
MOST_WAITS = 8  # that the message of a deadlock lists


class Deadlock(CommunicationError):
    """Every rank that has not finished waits for a message; the text says which waits for which."""


@dataclass(frozen=True)
class Simulation(Generic[Result]):
    """What a simulated program did. Arrays have one entry a rank.

    Attributes:
        seconds: until the last rank finished.
        finish_seconds: until each rank finished.
        results: what each rank's program returned.
    """

    seconds: float
    finish_seconds: np.ndarray
    results: list[Result]


def simulate(
    size: int,
    program: Callable[[Communicator], Result],
    link: Link | Topology = IDEAL,
) -> Simulation[Result]:
    """Run `program(communicator)` on `size` ranks in virtual time.

    Args:
        size: how many ranks.
        program: the same function for all; it may call `communicator.sleep(seconds)` to be busy.
        link: what connects each rank with the others, or a topology of machines with several ranks each.

    Raises:
        Deadlock: if every rank that has not finished waits for a message.
        ValueError: if `size` is not positive.
        Exception: what a rank raised, with a note of its number.
    """
    if size < 1:
        raise ValueError(f"size is {size}; it must be at least 1")
    clock = _Clock(link if isinstance(link, Topology) else Topology(link), size)
    results = clock.run(program)
    finish_seconds = np.array([communicator.seconds for communicator in clock.ranks])
    return Simulation(float(finish_seconds.max()), finish_seconds, results)


class _Message(NamedTuple):
    arrival: float
    array: Array
    collective: str


class _Channel(NamedTuple):
    """The path from one rank to another."""

    up: Queue
    down: Queue
    latency_seconds: float


class _Clock:
    """Virtual time: what is due when, and what the links carry."""

    def __init__(self, topology: Topology, size: int) -> None:
        self.seconds = 0.0
        self.ranks = [SimulatedCommunicator(rank, size, self) for rank in range(size)]
        self._due: list[tuple[float, int, Callable[[], object]]] = []
        self._order = itertools.count()  # of what is due at the same time, the first one first
        self._hub = getcurrent()
        self._channels: dict[tuple[int, int], _Channel] = {}
        # By source and receiver, what has come and was not received. Empty queues would need 600 MB among 1000 ranks.
        self.messages: defaultdict[tuple[int, int], deque[_Message]] = defaultdict(deque)
        self._topology = topology
        self._queues: dict[tuple[bool, str, int], Queue] = {}  # inside a machine?, direction, rank or machine

    def run(self, program: Callable[[Communicator], Result]) -> list[Result]:
        """Run the program on every rank until all have finished."""
        results: list[Any] = [None] * len(self.ranks)

        def rank_main(communicator: SimulatedCommunicator) -> None:
            try:
                results[communicator.rank] = program(communicator)
            except Exception as failure:
                failure.add_note(f"raised on simulated rank {communicator.rank} of {communicator.size}")
                raise

        for communicator in self.ranks:
            communicator._greenlet = greenlet(rank_main)
            communicator._resume = communicator._greenlet.switch
            self.at(0.0, partial(communicator._resume, communicator))
        try:
            while self._due:
                self.seconds, _, act = heappop(self._due)
                act()
            if waiting := [communicator for communicator in self.ranks if communicator._greenlet]:
                raise Deadlock(self._who_waits(waiting))
        finally:
            for communicator in self.ranks:
                if communicator._greenlet:  # it has begun, and not ended
                    communicator._greenlet.throw()
        return results

    def at(self, seconds: float, act: Callable[[], object]) -> None:
        """Have `act` called when virtual time is `seconds`."""
        heappush(self._due, (seconds, next(self._order), act))

    def give_way(self) -> None:
        """Suspend the rank that acts, until something that is due resumes it."""
        self._hub.switch()

    def take_turn(self, communicator: SimulatedCommunicator) -> None:
        """Let whatever is due before this rank's time happen first."""
        if self._due and self._due[0][0] < communicator.seconds:
            self.at(communicator.seconds, communicator._resume)
            self.give_way()

    def channel(self, source: int, to: int) -> _Channel:
        """The way from rank `source` to rank `to`: by their machines' NICs, or inside a machine by their own links."""
        if (source, to) not in self._channels:
            machines = source // self._topology.ranks_per_machine, to // self._topology.ranks_per_machine
            is_inside = machines[0] == machines[1]
            link = self._topology.inside if is_inside else self._topology.link
            ends = zip(("out", "in"), (source, to) if is_inside else machines, strict=True)
            new = partial(Queue, link.bandwidth_bytes_per_second)
            up, down = (self._queues.setdefault((is_inside, *end), new()) for end in ends)
            self._channels[source, to] = _Channel(up, down, link.latency_seconds)
        return self._channels[source, to]

    def send(self, source: SimulatedCommunicator, to: int, array: Array) -> float:
        """Put a message on its way now; returns when its last byte has left the sender's link."""
        channel, collective = self.channel(source.rank, to), source._collective
        head = max(source.seconds, channel.up.free) + channel.latency_seconds
        left = channel.up.carry(source.seconds, array.nbytes)

        def first_byte_comes() -> None:
            arrival = channel.down.carry(head, array.nbytes)
            self.messages[source.rank, to].append(_Message(arrival, array, collective))
            self.ranks[to]._notice(source.rank, arrival)

        self.at(head, first_byte_comes)
        return left

    def _who_waits(self, waiting: Sequence[SimulatedCommunicator]) -> str:
        texts = [communicator._describe_wait() for communicator in waiting[:MOST_WAITS]]
        texts += [f"and {len(waiting) - MOST_WAITS} more"] if len(waiting) > MOST_WAITS else []
        return f"{len(waiting)} of {len(self.ranks)} ranks wait for ever: {'; '.join(texts)}"


class SimulatedCommunicator(Communicator):
    """One rank in virtual time; `simulate` makes them. `seconds` is its clock."""

    _greenlet: greenlet
    _resume: Callable[..., object]  # its greenlet, where it was suspended

    def __init__(self, rank: int, size: int, clock: _Clock) -> None:
        super().__init__(rank, size, math.inf)
        self.seconds = 0.0
        self._clock = clock
        self._waits_for: Sequence[int] = ()  # ranks from which a message would wake it
        self._left = 0.0  # when the last byte of its last message had left

    def sleep(self, seconds: float) -> None:
        """Be busy for `seconds`."""
        start = self.seconds
        self.seconds += seconds
        if self.trace is not None:
            self.trace.append(Event("compute", None, 0, start, self.seconds, self._collective))

    def now(self) -> float:
        return self.seconds

    def _first_of(self, sources: Sequence[int]) -> int:
        self._clock.take_turn(self)
        while True:
            queues = self._clock.messages
            first = [(queues[s, self.rank][0].arrival, s) for s in sources if (s, self.rank) in queues]
            arrival, source = min(first, default=(math.inf, -1))
            if arrival <= self.seconds:
                return source
            self._waits_for = sources
            if source >= 0:
                self._clock.at(arrival, self._wake)
            self._clock.give_way()

    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        self._clock.take_turn(self)
        self._left = self.seconds
        if to is not None:
            sent = outgoing if type(outgoing) is Shape else outgoing.copy()
            self._left = self._clock.send(self, to, sent)
        if source is None:
            self.seconds = self._left
            return
        queues, way = self._clock.messages, (source, self.rank)
        while way not in queues:
            self._waits_for = (source,)
            self._clock.give_way()
        message = queues[way].popleft()
        if not queues[way]:
            del queues[way]
        self.seconds = max(message.arrival, self._left)
        check_message(self, source, message.collective, message.array, incoming)
        if type(message.array) is Shape and type(incoming) is not Shape:
            raise Mismatch(f"rank {source} sent a Shape, without contents; rank {self.rank} expects an array")
        incoming[:] = message.array

    def _notice(self, source: int, arrival: float) -> None:
        """A message will have come at `arrival`: act then, if this rank waits for it."""
        if source in self._waits_for:
            self._clock.at(max(arrival, self._left), self._wake)

    def _wake(self) -> None:
        if self._waits_for:  # an earlier message may have woken it meanwhile
            self._waits_for = ()
            self.seconds = max(self.seconds, self._clock.seconds)
            self._resume()

    def _record(self, kind: str, peer: int | None, array: Array, start: float) -> None:
        """As any communicator, but what is sent has left before what is received at the same time has come."""
        if self.trace is not None:
            end = self._left if kind == "send" else self.seconds
            self.trace.append(Event(kind, peer, array.nbytes, start, end, self._collective))

    def _describe_wait(self) -> str:
        if len(self._waits_for) != 1:
            return f"rank {self.rank} waits for any of the ranks {sorted(self._waits_for)}"
        (peer,) = self._waits_for
        ended = ", which has finished" if self._clock.ranks[peer]._greenlet.dead else ""
        return f"rank {self.rank} waits for rank {peer}{ended}, in {self._collective or 'recv'}"
