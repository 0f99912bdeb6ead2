"""Message passing reduced to what the lessons need: one interface, which each transport implements.

A collective is written once, against this interface, and then runs between processes (`tcp`), between threads
(`threads`), and in simulated time among thousands of ranks (`simulated`):

    @collective
    def shift(communicator: Communicator, array: Array) -> None:
        right, left = (communicator.rank + 1) % communicator.size, (communicator.rank - 1) % communicator.size
        incoming = buffer(communicator, array)
        communicator.send_recv(right, array, left, incoming)
        array[:] = incoming

Names are those of the MPI standard, or of Hockney (1994) where it has none.
"""

from __future__ import annotations

import functools
import reprlib
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Concatenate, Literal, ParamSpec, Self, TypeVar

import numpy as np

# A NumPy array, or a `Shape` where only the time matters.
Array = Any
Operation = Literal["sum", "mean", "max", "min"]

_COMBINE: dict[str, Callable[..., Any]] = {
    "sum": np.add,
    "mean": np.add,  # the collective divides once, at the end: see `finish`
    "max": np.maximum,
    "min": np.minimum,
}


class CommunicationError(RuntimeError):
    """Message passing cannot go on; the message names the ranks."""


class PeerDied(CommunicationError):
    """A rank ended, or its link broke, while others still needed it. `rank` is the dead one."""

    def __init__(self, rank: int, where: str = "") -> None:
        self.rank, self.where = rank, where
        during = f" during {where}" if where else ""
        super().__init__(f"rank {rank} has died{during}")

    def __reduce__(self) -> tuple[Any, ...]:  # so that another process can send it back
        return type(self), (self.rank, self.where)


class PeerLeft(PeerDied):
    """A rank has left the `with` block of its communicator while others still waited for it. `rank` is that one."""

    def __init__(self, rank: int, where: str = "") -> None:
        super().__init__(rank, where)
        during = f" in {where}" if where else ""
        self.args = (f"rank {rank} has already left; others still waited for it{during}",)


class Mismatch(CommunicationError):
    """Two ranks disagree about the collective, the size or the dtype."""


class PeerSilent(CommunicationError):
    """A rank did not send or receive a message within the time-out."""


class FrameError(CommunicationError):
    """The bytes received are not a message of this run."""


@dataclass(frozen=True)
class Event:
    """One entry of a trace: what this rank did from `start` to `end` (seconds on the communicator's clock).

    `kind` is "send", "recv", "combine", or in virtual time "compute"; `peer` is the other rank of a message, otherwise
    None; `collective` is the outermost collective that was running, or "".
    """

    kind: str
    peer: int | None
    nbytes: int
    start: float
    end: float
    collective: str


class Traffic:
    """Messages and bytes of payload by peer, and time spent waiting, since the last `reset`.

    Counts are arrays of length `size`, made when asked for; only peers with messages take memory, since arrays of all
    peers would need 2.4 GB among 10,000 simulated ranks.

    Attributes:
        waited_seconds: while everything was sent and nothing came; only `tcp` measures it, also below `stamped`.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self.reset()

    def reset(self) -> None:
        """Count from zero again."""
        self.waited_seconds = 0.0
        self._messages_sent, self._bytes_sent, self._bytes_received = (Counter[int]() for _ in range(3))

    def count(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        """Count a message to rank `to` and one from rank `source`; None skips a side."""
        if to is not None:
            self._messages_sent[to] += 1
            self._bytes_sent[to] += outgoing.nbytes
        if source is not None:
            self._bytes_received[source] += incoming.nbytes

    @property
    def messages_sent(self) -> np.ndarray:
        """To each rank."""
        return self._by_rank(self._messages_sent)

    @property
    def bytes_sent(self) -> np.ndarray:
        """To each rank."""
        return self._by_rank(self._bytes_sent)

    @property
    def bytes_received(self) -> np.ndarray:
        """From each rank."""
        return self._by_rank(self._bytes_received)

    def _by_rank(self, counts: Counter[int]) -> np.ndarray:
        return np.array([counts[rank] for rank in range(self._size)], np.int64)


class Communicator(ABC):
    """`size` ranks that can send each other arrays; this one is `rank`.

    A message to or from a rank that does not exist, or is this one, raises ValueError; one that cannot be sent or
    received raises a CommunicationError.

    Attributes:
        rank: this process's number, 0 to size - 1.
        size: how many ranks there are.
        timeout_seconds: how long a message may make no progress before PeerSilent is raised.
        may_die: ranks, set on every rank, whose sudden death is no failure of the others. A `recv` from a dead one, or
            from several of which it is one, raises PeerDied each time. So does a `send` to it, but the kernel may still
            take the first and lose it: wait for an answer. All else goes on, as with MPI's User-Level Failure
            Mitigation (MPI_ERR_PROC_FAILED). What has two peers at once, as collectives do, fails on all ranks all the
            same: half a message may have left. Only processes can die so (`tcp`, `stamped`).
        traffic: what this rank has sent and received.
        trace: set to [] to record events.
        ranks: their numbers in the whole communicator, if this is one of some of its ranks.
        shares_links: whether messages of others, such as neighbouring groups, go over the same links.
    """

    def __init__(self, rank: int, size: int, timeout_seconds: float = 60.0) -> None:
        self.rank, self.size, self.timeout_seconds = rank, size, timeout_seconds
        self.may_die: Collection[int] = ()
        self.traffic = Traffic(size)
        self.trace: list[Event] | None = None
        self.ranks: Sequence[int] = range(size)
        self.shares_links = False
        self._collective = ""  # the outermost collective that is running: see `inside`
        self._scratch: dict[str, Any] = {}

    def send(self, to: int, array: Array) -> None:
        """Send `array` to rank `to`."""
        self._transfer(to, array, None, None)

    def recv(
        self, source: int | Sequence[int] | Set[int] | Mapping[int, Array], into: Array | None = None
    ) -> int:
        """Receive from rank `source`, or from whichever of several ranks sends first; returns the rank.

        `into` must have the size and dtype that were sent. Where ranks send different things, `source` is a mapping
        from each rank to its own `into`.

        Raises:
            CommunicationError: if there is no rank to receive from.
            ValueError: if there is no array to receive into, or it is not contiguous.
        """
        if not isinstance(source, Sequence | Mapping | Set):
            sender = source
        elif not source:
            raise CommunicationError(
                f"rank {self.rank} would wait for ever: it receives from the first of no ranks"
            )
        else:
            sender = self._first_of(list(source))
            into = source[sender] if isinstance(source, Mapping) else into
        if into is None:
            raise ValueError(f"rank {self.rank} receives from rank {sender} into nothing; give recv an array")
        self._transfer(None, None, sender, into)
        return sender

    def send_recv(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        """Send to one rank while receiving from another (or the same): no order of calls can deadlock.

        A rank of None, like MPI_PROC_NULL, skips that side.
        """
        self._transfer(to, outgoing, source, incoming)

    def combine(self, accumulator: Array, incoming: Array, operation: Operation = "sum") -> None:
        """`accumulator ⊕= incoming`, the one place where a collective reduces. A mean adds: see `finish`."""
        start = self.now()
        _COMBINE[operation](accumulator, incoming, out=accumulator)
        self._record("combine", None, accumulator, start)

    def barrier(self) -> None:
        """Return once every rank has called this: the dissemination barrier (Hensgen, Finkel, Manber 1988)."""
        token, answer = np.zeros(1, np.uint8), np.empty(1, np.uint8)
        with inside(self, "barrier"):
            distance = 1
            while distance < self.size:
                to, source = (self.rank + distance) % self.size, (self.rank - distance) % self.size
                self.send_recv(to, token, source, answer)
                distance *= 2

    @property
    def waits_for(self) -> int | None:
        """The rank for which this one waits at this moment, as a signal handler or another thread may ask."""
        return None

    def now(self) -> float:
        """Seconds on this communicator's clock, as in its trace; virtual seconds where time is simulated."""
        return time.perf_counter()

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass on this communicator's clock."""
        time.sleep(seconds)

    def close(self) -> None:
        """Release links and memory; leaving the `with` block does so too. Safe to call twice."""
        self._scratch.clear()

    def __deepcopy__(self, _memo: object) -> Self:
        """Itself: a copy of what holds it, such as a model, talks to the same ranks."""
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # What a transport implements.

    @abstractmethod
    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        """Send `outgoing` to `to` and receive `incoming` from `source`, both at once; None skips a side.

        Arrays have one dimension and are contiguous. Raises the errors of this module.
        """

    @abstractmethod
    def _first_of(self, sources: Sequence[int]) -> int:
        """Wait until one of `sources` has sent a message, and return its rank without receiving the message.

        Raises:
            PeerSilent: if none sends within the time-out.
        """

    # The bookkeeping of every message.

    def _transfer(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        size = self.size
        for peer in (to, source):
            if peer is not None and (peer == self.rank or not 0 <= peer < size):
                others = f"rank {self.rank} of {size} can reach others only, of 0 to {size - 1}"
                raise ValueError(f"peer is {peer}; {others}")
        if to is None and source is None:
            return
        if to is not None:
            outgoing = _row(outgoing, may_copy=True)
        if source is not None:
            incoming = _row(incoming, may_copy=False)
        start = self.now()
        self._exchange(to, outgoing, source, incoming)
        self.traffic.count(to, outgoing, source, incoming)
        if to is not None:
            self._record("send", to, outgoing, start)
        if source is not None:
            self._record("recv", source, incoming, start)

    def _record(self, kind: str, peer: int | None, array: Array, start: float) -> None:
        if self.trace is not None:
            self.trace.append(Event(kind, peer, int(array.nbytes), start, self.now(), self._collective))


def _row(array: Array, may_copy: bool) -> Array:
    """`array` with one dimension: a view, or where that is allowed a copy.

    Raises:
        TypeError: if it is no array.
        ValueError: if it is not contiguous and may not be copied.
    """
    if not isinstance(array, np.ndarray | np.generic):
        raise TypeError(
            f"messages are NumPy arrays, such as np.array([1.0]), and this is {reprlib.repr(array)}"
        )
    if array.ndim == 1 and array.size != 1 and array.flags.c_contiguous:
        return array
    row = array.reshape(()).reshape(-1) if array.size == 1 else array.reshape(-1)
    if row.strides == (row.itemsize,) and (may_copy or array.flags.c_contiguous):
        return row
    if not may_copy:
        raise ValueError(
            "the array to receive into is not contiguous; receive into np.empty(...), then copy from it"
        )
    return row.copy()


Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")
Algorithm = Callable[Concatenate[Communicator, Arguments], Result]


def collective(function: Algorithm[Arguments, Result]) -> Algorithm[Arguments, Result]:
    """Mark a function of (communicator, ...) as a collective: its messages carry its name.

    Its first other argument may have any shape, or be a PyTorch tensor (see `as_array`): the function receives an array
    of one dimension that shares its memory.
    """
    call_with: Callable[..., Result] = function

    @functools.wraps(function)
    def call(communicator: Communicator, *args: Arguments.args, **kwargs: Arguments.kwargs) -> Result:
        with inside(communicator, function.__name__):
            return call_with(communicator, *map(flat, args[:1]), *args[1:], **kwargs)

    return call


@contextmanager
def inside(communicator: Communicator, name: str) -> Iterator[None]:
    """Messages in this block belong to the collective `name`, unless it is part of another one."""
    outermost = not communicator._collective
    if outermost:
        communicator._collective = name
    try:
        yield
    finally:
        if outermost:
            communicator._collective = ""


def buffer(communicator: Communicator, like: Array, purpose: str = "incoming") -> Array:
    """An array of the size and dtype of `like` to receive into.

    The communicator keeps the memory, since allocating it in every call is slow: two calls with the same `purpose` may
    return the same memory.
    """
    if type(like) is not np.ndarray:  # a Shape
        return np.empty_like(like)
    memory = communicator._scratch.get(purpose)
    if memory is None or memory.nbytes < like.nbytes:
        memory = communicator._scratch[purpose] = np.empty(max(like.nbytes, 64), np.uint8)
    return memory[: like.nbytes].view(like.dtype)


def finish(array: Array, operation: Operation, size: int) -> None:
    """Divide what `size` ranks have added up by their number, where the operation is the mean."""
    if operation == "mean":
        np.divide(array, size, out=array, casting="unsafe")


def check_message(
    receiver: Communicator, source: int, collective: str, array: Array, incoming: Array
) -> None:
    """Whether `array`, which rank `source` sent in `collective`, is the message that this rank expects.

    Raises:
        Mismatch: if not; the message says what was sent and what was expected.
    """
    here = receiver._collective
    if collective != here or array.nbytes != incoming.nbytes or array.dtype != incoming.dtype:
        sent, expected = (f"{each.size} × {each.dtype}" for each in (array, incoming))
        raise mismatch(receiver.rank, here, expected, source, collective, sent)


def mismatch(rank: int, here: str, expected: str, source: int, there: str, sent: str) -> Mismatch:
    """The error where `rank`, in the collective `here`, expects another message than `source` sent, `there`."""
    here, there = here or "send or recv", there or "send or recv"
    if here != there:
        return Mismatch(f"rank {source} is in {there} while rank {rank} is in {here}")
    return Mismatch(f"rank {source} sent {sent} where rank {rank} expects {expected}, in {here}")


def flat(tensor: Any) -> Array:
    """An array, or a tensor of PyTorch, as an array of one dimension that shares its memory.

    Raises:
        TypeError: if NumPy cannot see that memory (`as_array`).
        ValueError: if it is not contiguous.
    """
    array = as_array(tensor)
    if not array.flags.c_contiguous:
        why = f"the array of shape {array.shape} is not contiguous, so it cannot be reduced in place"
        raise ValueError(f"{why}; pass numpy.ascontiguousarray(array)")
    return array if array.ndim == 1 else array.reshape(-1)


def as_array(tensor: Any) -> np.ndarray:
    """`tensor`, also a parameter or a gradient, as an array that shares its memory; an array is returned as it is.

    PyTorch is not imported.

    Raises:
        TypeError: if NumPy cannot see that memory, or has no such dtype; the message says what would do.
    """
    if isinstance(tensor, np.ndarray):
        return tensor
    if type(tensor).__module__.partition(".")[0] != "torch":
        advice = "pass an array, such as numpy.array(...), and use it afterwards"
        raise TypeError(
            f"a {type(tensor).__name__} is neither a NumPy array nor a tensor of PyTorch; {advice}"
        )
    if tensor.device.type != "cpu":
        raise TypeError(f"the tensor is on {tensor.device}; move it to the CPU first: tensor.cpu()")
    try:
        array: np.ndarray = tensor.detach().numpy()
    except (TypeError, RuntimeError) as failure:  # such as a bfloat16 or a sparse tensor
        what = f"a {tensor.layout} tensor of {tensor.dtype}"
        raise TypeError(f"NumPy has no array like {what}; convert it first: tensor.float()") from failure
    return array


def chunk(array: Array, index: int, count: int) -> Array:
    """Part `index` of a one-dimensional `array`, or tensor, cut into `count` parts that differ by one element at most.

    The ends are at floor(index · size / count): every rank computes the same ones, whatever the size.
    """
    index %= count
    return array[index * len(array) // count : (index + 1) * len(array) // count]
