"""An asynchronous parameter server in virtual time, push by push, for thousands of workers.

    times = compute_times(1000, 1000, seconds=0.1, jitter=0.3)
    pushes = simulate_pushes(Arrangement(1, 1000, 1000, "asynchronous"), 100_000, times, Link.of("10Gbit", "20us"))
    pushes.updates_per_second, pushes.staleness.mean()

`simulated` runs the text of `parameter_server` itself, whose server looks at every worker at each push. For one server
that never waits, a push is five lines here, by the same physics (`topology`), so that a million take a few seconds.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heapreplace

import numpy as np

from workshop_utils.comm.parameter_server import VERSION_NBYTES, Arrangement
from workshop_utils.comm.topology import Link, Numbers, Queue

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

    def steady(self) -> Pushes:
        """Without the first and the last fifth of the pushes: all workers start together, and the last end alone."""
        count = self.worker.shape[1]
        kept = slice(count // 5, count - count // 5)
        return Pushes(self.worker[:, kept], self.seconds[:, kept], self.staleness[:, kept])


def compute_times(workers: int, steps: int, seconds: float, jitter: float = 0.0, seed: int = 0) -> np.ndarray:
    """How long each gradient takes: shape (workers, steps), in seconds; equal seeds give equal times.

    Args:
        workers, steps: how many.
        seconds: the median.
        jitter: each time is multiplied by exp(jitter · z), with z normal.
        seed: of the jitter.

    Raises:
        ValueError: if `seconds` or `jitter` is negative.
    """
    if seconds < 0 or jitter < 0:
        raise ValueError(f"seconds is {seconds} and jitter is {jitter}; both must be at least 0")
    return seconds * np.exp(jitter * np.random.default_rng(seed).standard_normal((workers, steps)))


def updates_per_second_at_most(workers: Numbers, seconds: float, nbytes: int, link: Link) -> Numbers:
    """The two lines that throughput stays below: min(W / (compute + round trip), what the server's link lets through).

    The first holds while no worker waits for another, the second once the server is never idle; between them lie the
    queues. Source: operational bounds of a closed system (Denning and Buzen 1978, section 5).

    Args:
        workers: how many, or several such numbers.
        seconds: the mean of the computing times.
        nbytes: of the parameters.
        link: of each worker and of the server.
    """
    push = nbytes / link.bandwidth_bytes_per_second
    service = push + VERSION_NBYTES / link.bandwidth_bytes_per_second
    round_trip = 2 * link.latency_seconds + push + service
    with np.errstate(divide="ignore"):
        return np.minimum(np.asarray(workers) / (seconds + round_trip), 1 / np.float64(service))


def simulate_pushes(arrangement: Arrangement, nbytes: int, compute_seconds: np.ndarray, link: Link) -> Pushes:
    """When every push is applied, and how stale it is, with the one server of `arrangement`.

    It is what `simulated.simulate` gives for `parameter_server.train`; of two pushes that begin at exactly the same
    time, either may be first.

    Args:
        arrangement: asynchronous, with one server.
        nbytes: of the parameters, float32.
        compute_seconds: shape (workers, steps), see `compute_times`.
        link: of each worker and of the server.

    Raises:
        ValueError: for another arrangement, or numbers that do not go together; the message names them.
    """
    if arrangement.consistency != "asynchronous" or arrangement.servers != 1:
        given = f"consistency is {arrangement.consistency!r} with servers {arrangement.servers}"
        raise ValueError(f"{given}; it must be 'asynchronous' with one server: `simulated` runs others")
    shape = (arrangement.workers, arrangement.steps)
    if compute_seconds.shape != shape or arrangement.steps < 1 or not (compute_seconds >= 0).all():
        right = f"{shape[0]} workers × {shape[1]} steps, at least one, and times of at least 0"
        raise ValueError(f"compute_seconds has shape {compute_seconds.shape}; it must hold {right}")
    nbytes = nbytes // ITEMSIZE * ITEMSIZE
    uplink, downlink = (Queue(link.bandwidth_bytes_per_second) for _ in range(2))  # the server's
    # Whoever has finished never comes back.
    computing = [iter([*row, np.inf]) for row in compute_seconds.tolist()]
    pulled = [0] * arrangement.workers  # the version that each worker has
    log: list[tuple[int, float, int]] = []

    def answer(worker: int) -> float:
        """Send version and parameters; when the worker's next push begins."""
        pulled[worker] = len(log)
        sent = uplink.carry(uplink.free, VERSION_NBYTES + nbytes)
        return sent + link.latency_seconds + next(computing[worker])

    pushes = [(answer(worker), worker) for worker in range(arrangement.workers)]  # the initial parameters
    heapify(pushes)
    while pushes[0][0] < np.inf:
        start, worker = pushes[0]
        arrival = downlink.carry(start + link.latency_seconds, nbytes)
        uplink.free = max(arrival, uplink.free)  # the server takes it once it has answered those before
        log.append((worker, uplink.free, len(log) - pulled[worker]))
        heapreplace(pushes, (answer(worker), worker))
    workers, seconds, staleness = (np.array([column]) for column in zip(*log, strict=True))
    return Pushes(workers, seconds, staleness)
