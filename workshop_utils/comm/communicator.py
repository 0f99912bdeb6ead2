"""Message passing reduced to what the lessons need: one protocol, under which the transports plug in.

A collective is written once, against this protocol, and then runs between processes (`tcp`), between threads
(`threads`), and in simulated time among thousands of ranks (`simulated`):

    @collective
    def shift(communicator: Communicator, array: Array) -> None:
        right, left = (communicator.rank + 1) % communicator.size, (communicator.rank - 1) % communicator.size
        incoming = communicator.scratch(array)
        communicator.send_recv(right, array, left, incoming)
        array[:] = incoming

Names are those of the MPI standard and of Hockney (1994) where it has none.
"""

from __future__ import annotations

import functools
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import numpy as np

from workshop_utils.comm.adapters import as_array

# A NumPy array, or what stands for one where only time is asked (`simulated.Shape`): it has `dtype`, `size`,
# `nbytes`, `reshape(-1)` and slices.
Array = Any
Operation = Literal["sum", "mean", "max", "min"]

_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,  # divided once, at the end, by who asked for the mean
    "max": np.maximum,
    "min": np.minimum,
}


class CommunicationError(RuntimeError):
    """Message passing that cannot go on; the message names the ranks."""


class PeerDied(CommunicationError):
    """A rank has ended, or its link has broken, while others still needed it. `rank` is the dead one."""

    def __init__(self, rank: int, where: str = "") -> None:
        self.rank, self.where = rank, where
        super().__init__(
            f"rank {rank} has died{f' during {where}' if where else ''}; the others cannot go on"
        )

    def __reduce__(self) -> tuple[Any, ...]:  # so that it can come back from another process
        return type(self), (self.rank, self.where)


class Mismatch(CommunicationError):
    """Two ranks do not call the same thing: another collective, another size, another dtype."""


class PeerSilent(CommunicationError):
    """A rank did not send, or did not take, a message within the time-out."""


class FrameError(CommunicationError):
    """What came is not a message of this run."""


@dataclass(frozen=True)
class Event:
    """One entry of a trace: what this rank did from `start` to `end` (seconds on the communicator's clock).

    `kind` is "send", "recv" or "combine"; `peer` is the other rank, None for "combine".
    """

    kind: str
    peer: int | None
    nbytes: int
    start: float
    end: float
    collective: str


class Traffic:
    """Messages and bytes of payload, by peer: arrays of length `size` that count since the last `reset`."""

    def __init__(self, size: int) -> None:
        self.messages_sent = np.zeros(size, dtype=np.int64)
        self.bytes_sent = np.zeros(size, dtype=np.int64)
        self.messages_received = np.zeros(size, dtype=np.int64)
        self.bytes_received = np.zeros(size, dtype=np.int64)

    def count_sent(self, to: int, nbytes: int) -> None:
        """Count a message to rank `to`."""
        self.messages_sent[to] += 1
        self.bytes_sent[to] += nbytes

    def count_received(self, source: int, nbytes: int) -> None:
        """Count a message from rank `source`."""
        self.messages_received[source] += 1
        self.bytes_received[source] += nbytes

    def reset(self) -> None:
        """Count from zero again."""
        for counter in (self.messages_sent, self.bytes_sent, self.messages_received, self.bytes_received):
            counter[:] = 0


class Communicator(ABC):
    """`size` ranks that can send each other arrays; this one is `rank`.

    Args:
        rank: this process's number, 0 to size - 1.
        size: how many ranks there are.
        timeout_seconds: how long one message may take before PeerSilent is raised.
    """

    # Seconds in which all was sent and nothing came; only `tcp` counts them: see `activity`.
    waited_seconds = 0.0

    def __init__(self, rank: int, size: int, timeout_seconds: float = 60.0) -> None:
        self.rank, self.size = rank, size
        self.timeout_seconds = timeout_seconds
        self.traffic = Traffic(size)
        self.trace: list[Event] | None = None  # set to [] to have events recorded
        self.collective = ""  # the outermost collective that runs now
        self._scratch: dict[str, Any] = {}

    # What a transport must do.

    @abstractmethod
    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        """Send `outgoing` to `to` and receive `incoming` from `source`, both at once; None leaves one out.

        Arrays are one-dimensional and contiguous. Raises the errors of this module.
        """

    @abstractmethod
    def wait_any(self, sources: Sequence[int]) -> int:
        """A rank among `sources` whose message has come, once there is one; receive it next.

        Raises:
            PeerSilent: if none sends within the time-out.
        """

    def now(self) -> float:
        """Seconds on this communicator's clock."""
        return time.perf_counter()

    def close(self) -> None:
        """Let go of links and memory. Safe to call twice."""
        self._scratch.clear()

    # What collectives are written with.

    def send(self, to: int, array: Array) -> None:
        """Send `array` to rank `to`."""
        self._transfer(to, array, None, None)

    def recv(self, source: int, into: Array) -> None:
        """Receive from rank `source` into `into`, whose size and dtype must be those that were sent."""
        self._transfer(None, None, source, into)

    def send_recv(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        """Send to one rank while receiving from another (or the same): no order of calls can deadlock.

        None for a rank leaves its side out, like MPI_PROC_NULL.
        """
        self._transfer(to, outgoing, source, incoming)

    def recv_combine(self, source: int, accumulator: Array, operation: Operation = "sum") -> None:
        """`accumulator ⊕=` what rank `source` sends: `recv` and `combine` at once."""
        self.send_recv_combine(None, None, source, accumulator, operation)

    def send_recv_combine(
        self,
        to: int | None,
        outgoing: Array,
        source: int | None,
        accumulator: Array,
        operation: Operation = "sum",
    ) -> None:
        """Send to one rank while doing `recv_combine` from another. The two arrays must not overlap.

        None for a rank leaves its side out, as in `send_recv`.
        """
        if source is None:
            self._transfer(to, outgoing, None, None)
            return
        incoming = self.scratch(accumulator)
        self._transfer(to, outgoing, source, incoming)
        self.combine(accumulator, incoming, operation)

    def combine(self, accumulator: Array, incoming: Array, operation: Operation = "sum") -> None:
        """`accumulator ⊕= incoming`, the one place where a collective reduces. Mean adds, see `finish`."""
        start = 0.0 if self.trace is None else self.now()
        _COMBINE[operation](accumulator, incoming, out=accumulator)
        if self.trace is not None:
            self._record("combine", None, accumulator, start)

    def finish(self, array: Array, operation: Operation) -> None:
        """Turn the sum that ranks have added up into their mean, where the mean was asked for."""
        if operation == "mean":
            np.divide(array, self.size, out=array, casting="unsafe")

    def barrier(self) -> None:
        """Return once every rank has called this: the dissemination barrier (Hensgen, Finkel, Manber 1988)."""
        token, answer = np.zeros(1, np.uint8), np.empty(1, np.uint8)
        with self.inside("barrier"):
            distance = 1
            while distance < self.size:
                to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
                self.send_recv(to, token, source, answer)
                distance *= 2

    def scratch(self, like: Array, purpose: str = "incoming") -> Array:
        """An array of `like`'s size and dtype to receive into; kept, since allocating one a call is slow.

        Two calls with the same `purpose` may give the same memory.
        """
        held = self._scratch.get(purpose)
        if held is None or held.nbytes < like.nbytes:
            held = self._scratch[purpose] = np.empty(max(like.nbytes, 64), np.uint8)
        return held[: like.nbytes].view(like.dtype)

    @contextmanager
    def inside(self, name: str) -> Iterator[None]:
        """Messages in this block belong to the collective `name`, unless a larger one is running already."""
        outermost = not self.collective
        if outermost:
            self.collective = name
        try:
            yield
        finally:
            if outermost:
                self.collective = ""

    # The bookkeeping that every message goes through.

    def _transfer(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        if to is None and source is None:
            return
        self._check(to, source)
        start = self.now()
        self._exchange(to, outgoing, source, incoming)
        self._count(to, outgoing, source, incoming, start)

    def _check(self, to: int | None, source: int | None) -> None:
        for peer in (to, source):
            if peer is not None and (peer == self.rank or not 0 <= peer < self.size):
                raise ValueError(
                    f"peer is {peer}; rank {self.rank} of {self.size} can reach the other ranks only"
                )

    def _count(
        self, to: int | None, outgoing: Array, source: int | None, incoming: Array, start: float
    ) -> None:
        if to is not None:
            self.traffic.count_sent(to, outgoing.nbytes)
        if source is not None:
            self.traffic.count_received(source, incoming.nbytes)
        if self.trace is not None:
            if to is not None:
                self._record("send", to, outgoing, start)
            if source is not None:
                self._record("recv", source, incoming, start)

    def _record(self, kind: str, peer: int | None, array: Array, start: float) -> None:
        if self.trace is not None:
            self.trace.append(Event(kind, peer, int(array.nbytes), start, self.now(), self.collective))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


# Collectives by the number that a message's header carries, so that a mismatch can be told by name.
COLLECTIVES: dict[int, str] = {}

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Algorithm = Callable[Concatenate[Communicator, Arguments], Result]


def number_of(name: str) -> int:
    """The number, 0 to 65535, by which a message's header says to which collective it belongs."""
    return zlib.crc32(name.encode()) & 0xFFFF if name else 0


def collective(function: Algorithm[Arguments, Result]) -> Algorithm[Arguments, Result]:
    """Mark a function of (communicator, ...) as a collective: its messages carry its name.

    If its first other argument is a tensor of PyTorch, the function sees an array: see `adapters`.
    """
    COLLECTIVES[number_of(function.__name__)] = function.__name__
    call_with: Callable[..., Result] = function

    @functools.wraps(function)
    def call(communicator: Communicator, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with communicator.inside(function.__name__):
            return call_with(communicator, *map(as_array, args[:1]), *args[1:], **kwargs)

    return call


def flat(array: Array) -> Array:
    """`array` as one dimension, sharing its memory.

    Raises:
        ValueError: if it is not contiguous.
    """
    if isinstance(array, np.ndarray) and not array.flags.c_contiguous:
        raise ValueError(
            f"the array of shape {array.shape} is not contiguous, so it cannot be reduced in place; "
            "pass numpy.ascontiguousarray(array)"
        )
    return array if array.ndim == 1 else array.reshape(-1)


def chunk(array: Array, index: int, count: int) -> Array:
    """Part `index` of a one-dimensional `array` cut into `count` parts that differ by one element at most.

    The ends are at floor(index · size / count): every rank computes the same ones, whatever the size.
    """
    index %= count
    return array[index * array.size // count : (index + 1) * array.size // count]


def chunk_nbytes(nbytes: int, itemsize: int, index: int, count: int) -> int:
    """Bytes in part `index` of `count` of an array of `nbytes` bytes whose elements have `itemsize`: see `chunk`."""
    elements, index = nbytes // itemsize, index % count
    return ((index + 1) * elements // count - index * elements // count) * itemsize
