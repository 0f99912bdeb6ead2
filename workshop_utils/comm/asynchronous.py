"""Asynchronous and stale synchronous parameter servers in virtual time, push by push, for thousands of workers.

    times = compute_times(1000, 1000, seconds=0.1, jitter=0.3)
    pushes = simulate_pushes(Arrangement(1, 1000, 1000, "asynchronous"), 100_000, times, Link.of("10Gbit", "20us"))
    pushes.updates_per_second, pushes.staleness.mean()

`simulated` runs the text of `parameter_server` itself, at some microseconds a message, and its server looks at every
worker at each push. Here a push is a few additions, those that the text comes to on the simulated clock:

    head    = start + overhead + latency            the worker's gradient leaves at `start`
    arrival = max(head, downlink free) + part/bandwidth                    the server's downlink, in order of heads
    applied = max(arrival, server free) + update                           what the server's log says
    server free = applied + 2 overheads + (8 bytes + part)/bandwidth       its uplink: version, parameters
    start of the next push = server free + latency + the worker's computing

Two kernels do this, chosen by measuring them on the example above, 10⁶ pushes, processor seconds of one x86 core,
Python 3.11, on a busy machine, so that only their ratios mean something:

| kernel | s | knows |
| --- | --- | --- |
| a heap of pushes, one by one (`_one_by_one`) | 5.0 | several servers, bounds |
| the same, stripped down to one server without a bound | 0.9 | |
| all pushes that nobody can overtake at once, in NumPy (`_in_batches`) | 0.2 | one server without a bound |

The second knows nothing that the third does not, so only the first and the third are here. With fewer than a dozen
workers batches are small, and the heap is faster.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from typing import NamedTuple

import numpy as np

from workshop_utils.comm.cluster import Link
from workshop_utils.comm.communicator import chunk_nbytes
from workshop_utils.comm.parameter_server import VERSION_NBYTES, Arrangement

BATCHES_FROM = 12  # workers from which on batches are faster than a heap
ITEMSIZE = 4  # bytes of a parameter: float32


@dataclass(frozen=True)
class Pushes:
    """What each server's log says (`parameter_server.ServerLog`): arrays of shape (servers, pushes), in its order.

    Attributes:
        worker: whose gradient it was, from 0.
        seconds: when it was applied, in virtual time.
        staleness: updates by others since that worker had been answered.
    """

    worker: np.ndarray
    seconds: np.ndarray
    staleness: np.ndarray

    @property
    def updates_per_second(self) -> float:
        """From the first push to the last, of the slowest server; NaN for a single push."""
        spans = self.seconds[:, -1] - self.seconds[:, 0]
        with np.errstate(divide="ignore", invalid="ignore"):
            return float((self.worker.shape[1] - 1) / spans.max())

    def steady(self, skip: float = 0.2) -> Pushes:
        """Without the first and the last `skip` of the pushes: all workers start together, and the last end alone."""
        count = self.worker.shape[1]
        kept = slice(int(skip * count), count - int(skip * count))
        return Pushes(self.worker[:, kept], self.seconds[:, kept], self.staleness[:, kept])


def compute_times(
    workers: int,
    steps: int,
    seconds: float,
    jitter: float = 0.0,
    slowness: Sequence[float] | None = None,
    seed: int = 0,
) -> np.ndarray:
    """How long each gradient takes: shape (workers, steps), in seconds; equal seeds give equal times.

    Args:
        workers, steps: how many.
        seconds: the median of a worker whose slowness is 1.
        jitter: each time is multiplied by exp(jitter · z), with z normal.
        slowness: by what each worker's times are multiplied, 1 for all by default; a straggler's is more.
        seed: of the jitter.

    Raises:
        ValueError: if `seconds` or `jitter` is negative, or `slowness` has not one entry a worker.
    """
    if seconds < 0 or jitter < 0:
        raise ValueError(f"seconds is {seconds} and jitter is {jitter}; both must be at least 0")
    times = seconds * np.exp(jitter * np.random.default_rng(seed).standard_normal((workers, steps)))
    if slowness is None:
        return times
    if len(slowness) != workers:
        raise ValueError(
            f"slowness has {len(slowness)} entries; it must have one for each of {workers} workers"
        )
    return times * np.asarray(slowness, dtype=float)[:, None]


def updates_per_second_at_most(
    workers: int | np.ndarray, seconds: float, nbytes: int, link: Link, servers: int = 1
) -> float | np.ndarray:
    """The two lines that throughput stays below: min(W / (compute + round trip), what a server's link lets through).

    The first holds while no worker waits for another, the second once the server is never idle; between them lie the
    queues. Source: operational bounds of a closed system (Denning and Buzen 1978, section 5).

    Args:
        workers: how many, or several such numbers.
        seconds: the mean of the computing times.
        nbytes: of the parameters, which `servers` share.
        link: of each worker and each server.
    """
    part = nbytes / servers
    service = 2 * link.overhead_seconds + (VERSION_NBYTES + part) / link.bandwidth_bytes_per_second
    push = link.overhead_seconds + part / link.bandwidth_bytes_per_second
    round_trip = 2 * link.latency_seconds + push + service
    # A worker's own link carries the servers' parts one after the other.
    round_trip += (servers - 1) * (push + service)
    with np.errstate(divide="ignore"):
        return np.minimum(np.asarray(workers) / (seconds + round_trip), 1 / np.float64(service))


def simulate_pushes(
    arrangement: Arrangement,
    nbytes: int,
    compute_seconds: np.ndarray,
    link: Link = Link(),  # noqa: B008 - it is frozen
    *,
    server_link: Link | None = None,
    update_seconds: float = 0.0,
) -> Pushes:
    """When every push is applied, and how stale it is, with the servers of `arrangement`.

    It is what `simulated.simulate` gives for `parameter_server.train`; of two pushes that begin at exactly the same
    time, either may be first.

    Args:
        arrangement: asynchronous, or stale_synchronous with its bound.
        nbytes: of the parameters, float32.
        compute_seconds: shape (workers, steps), see `compute_times`.
        link: of each worker.
        server_link: of each server, where it is another one; of two latencies the longer counts.
        update_seconds: what a server takes to apply one gradient.

    Raises:
        ValueError: for a synchronous arrangement, or numbers that do not go together; the message names them.
    """
    expected = (arrangement.workers, arrangement.steps)
    if arrangement.consistency == "synchronous":
        raise ValueError(
            "consistency is 'synchronous'; the kernel knows 'asynchronous' and 'stale_synchronous': "
            "synchronous steps have a closed form, and `simulated` runs them"
        )
    if compute_seconds.shape != expected or arrangement.steps < 1:
        raise ValueError(
            f"compute_seconds has shape {compute_seconds.shape}; it must have one time for each of "
            f"{expected[0]} workers and {expected[1]} steps, at least one"
        )
    if not (compute_seconds >= 0).all() or update_seconds < 0:
        raise ValueError("compute_seconds and update_seconds must be at least 0")
    path = _Path.of(link, server_link or link, update_seconds)
    plain = arrangement.servers == 1 and arrangement.consistency == "asynchronous" and path.is_symmetric
    if plain and arrangement.workers >= BATCHES_FROM:
        return _in_batches(nbytes // ITEMSIZE * ITEMSIZE, compute_seconds, path)
    return _one_by_one(arrangement, nbytes, compute_seconds, path)


class _Path(NamedTuple):
    """What messages go through between a worker and a server: seconds, and seconds per byte of either's link."""

    latency: float
    worker_overhead: float
    worker_per_byte: float
    server_overhead: float
    server_per_byte: float
    update: float

    @classmethod
    def of(cls, worker: Link, server: Link, update_seconds: float) -> _Path:
        return cls(
            max(worker.latency_seconds, server.latency_seconds),
            worker.overhead_seconds,
            1 / worker.bandwidth_bytes_per_second,
            server.overhead_seconds,
            1 / server.bandwidth_bytes_per_second,
            update_seconds,
        )

    @property
    def is_symmetric(self) -> bool:
        return self.worker_per_byte == self.server_per_byte

    def ready(self, answers: list[tuple[float, int]]) -> float:
        """When a worker has all `answers`, (start, bytes) of each message, through the one downlink it has."""
        answers.sort()
        free = 0.0
        for start, nbytes in answers:
            head = start + self.server_overhead + self.latency
            through = (head if head > free else free) + nbytes * self.worker_per_byte
            free = max(through, head + nbytes * self.server_per_byte)  # the slower link decides
        return free


class _Server:
    """One server's side of the kernel: when its link is free, and how far each worker has come."""

    def __init__(self, arrangement: Arrangement, index: int, nbytes: int, path: _Path) -> None:
        self.nbytes = chunk_nbytes(nbytes, ITEMSIZE, index, arrangement.servers)
        self.steps = arrangement.steps
        self.bound = (
            arrangement.bound if arrangement.consistency == "stale_synchronous" else arrangement.steps
        )
        self.path = path
        self.free = self.downlink_free = 0.0
        self.version = 0
        self.made = [0] * arrangement.workers
        self.at = [0] * (arrangement.steps + 1)  # how many workers have made so many pushes
        self.at[0] = arrangement.workers
        self.slowest = 0
        self.pulled = [0] * arrangement.workers
        self.waiting: list[int] = []
        self.log: list[tuple[int, float, int]] = []

    def take(self, worker: int, start: float) -> list[int]:
        """A gradient that leaves its worker at `start` comes in and is applied. Who is answered now, in order."""
        path, nbytes = self.path, self.nbytes
        head = start + path.worker_overhead + path.latency
        down = self.downlink_free
        through = (head if head > down else down) + nbytes * path.server_per_byte
        arrival = self.downlink_free = max(through, head + nbytes * path.worker_per_byte)
        self.free = (arrival if arrival > self.free else self.free) + path.update
        self.log.append((worker, self.free, self.version - self.pulled[worker]))
        self.version += 1
        return self._go_on(worker)

    def _go_on(self, worker: int) -> list[int]:
        """`Server._may_go_on` of `parameter_server`, without looking at every worker each time."""
        made, at = self.made[worker], self.at
        self.made[worker] = made + 1
        at[made] -= 1
        at[made + 1] += 1
        slowest = self.slowest
        while slowest < self.steps and not at[slowest]:
            slowest += 1
        if slowest == self.slowest and not self.waiting and made + 1 - slowest <= self.bound:
            return [worker]
        self.slowest = slowest
        self.waiting.append(worker)
        answered = [rank for rank in self.waiting if self.made[rank] - slowest <= self.bound]
        self.waiting = [rank for rank in self.waiting if self.made[rank] - slowest > self.bound]
        return answered

    def answer(self, worker: int) -> tuple[tuple[float, int], tuple[float, int]]:
        """Send version and parameters: when each begins, and its bytes."""
        overhead, per_byte = self.path.server_overhead, self.path.server_per_byte
        start = self.free
        then = start + overhead + VERSION_NBYTES * per_byte
        self.free = then + overhead + self.nbytes * per_byte
        self.pulled[worker] = self.version
        return (start, VERSION_NBYTES), (then, self.nbytes)


def _one_by_one(arrangement: Arrangement, nbytes: int, compute_seconds: np.ndarray, path: _Path) -> Pushes:
    """A heap of pushes by when they leave their worker: (start, worker, place of the server in the worker's order)."""
    count, workers = arrangement.servers, range(arrangement.workers)
    servers = [_Server(arrangement, index, nbytes, path) for index in range(count)]
    computing = [iter(row) for row in compute_seconds.tolist()]
    inboxes: list[list[tuple[float, int]]] = [[] for _ in workers]
    for server in servers:
        for worker in workers:
            inboxes[worker] += server.answer(worker)  # the initial parameters
    pushes = [(path.ready(inboxes[worker]) + next(computing[worker]), worker, 0) for worker in workers]
    heapify(pushes)
    inboxes = [[] for _ in workers]
    while pushes:
        start, pusher, place = heappop(pushes)
        server = servers[(pusher + place) % count]  # as `Worker._order` has it
        if place + 1 < count:
            sent = start + path.worker_overhead + server.nbytes * path.worker_per_byte
            heappush(pushes, (sent, pusher, place + 1))
        for worker in server.take(pusher, start):
            inboxes[worker] += server.answer(worker)
            if len(inboxes[worker]) == 2 * count:
                pulled, inboxes[worker] = path.ready(inboxes[worker]), []
                seconds = next(computing[worker], None)
                if seconds is not None:
                    heappush(pushes, (pulled + seconds, worker, 0))
    logs = [list(zip(*server.log, strict=True)) for server in servers]
    return Pushes(
        np.array([worker for worker, _, _ in logs]),
        np.array([seconds for _, seconds, _ in logs]),
        np.array([staleness for _, _, staleness in logs]),
    )


def _in_batches(nbytes: int, compute_seconds: np.ndarray, path: _Path) -> Pushes:
    """One server without a bound: a batch is all pushes up to the first that a worker who comes back can overtake.

    Both queues, the server's downlink and the server itself, are Lindley's recursion (1952), f = max(x, f) + s. Over
    a batch it is a running maximum: f after push k is (k + 1) s + max over j ≤ k of (x of j − j s).
    """
    workers, steps = compute_seconds.shape
    seconds = np.hstack(
        [compute_seconds, np.full((workers, 1), np.inf)]
    ).ravel()  # who has finished never comes back
    following = np.arange(workers) * (steps + 1) + 1  # where in it each worker's next time stands
    sending = nbytes * path.server_per_byte
    answering = 2 * path.server_overhead + VERSION_NBYTES * path.server_per_byte + sending
    serving = path.update + answering
    answered = np.arange(1, workers + 1) * answering  # the initial parameters
    starts = answered + path.latency + compute_seconds[:, 0]
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    downlink_free, free, pulled = 0.0, float(answered[-1]), np.zeros(workers, np.int64)
    ramp = np.arange(workers + 1)
    log = Pushes(*(np.empty((1, workers * steps), kind) for kind in (np.int64, np.float64, np.int64)))
    done = 0
    while done < workers * steps:
        live = len(starts)
        heads = starts + (path.worker_overhead + path.latency)
        arrivals = _lindley(heads, downlink_free, sending, ramp[: live + 1])
        served = _lindley(arrivals, free, serving, ramp[: live + 1])
        coming = served + path.latency + seconds[following[order]]
        overtaken = np.minimum.accumulate(coming)[:-1] < starts[1:]
        size = 1 + int(overtaken.argmax()) if overtaken.any() else live
        batch = order[:size]
        version = np.arange(done, done + size)
        log.worker[0, done : done + size] = batch
        log.seconds[0, done : done + size] = served[:size] - answering
        log.staleness[0, done : done + size] = version - pulled[batch]
        pulled[batch] = version + 1
        following[batch] += 1
        done += size
        downlink_free, free = float(arrivals[size - 1]), float(served[size - 1])
        starts[:size] = coming[:size]
        again = np.argsort(starts, kind="stable")
        starts, order = starts[again], order[again]
        finished = int(np.searchsorted(starts, np.inf))
        starts, order = starts[:finished], order[:finished]
    return log


def _lindley(ready: np.ndarray, free: float, service: float, ramp: np.ndarray) -> np.ndarray:
    """When each of a queue's customers has been served, if they come at `ready`, in order, and it is `free` first."""
    ahead = ready - service * ramp[:-1]
    ahead[0] = max(ahead[0], free)
    return np.maximum.accumulate(ahead, out=ahead) + service * ramp[1:]
