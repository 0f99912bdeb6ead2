"""Parameter servers: some ranks keep the parameters; the others compute gradients, push them and pull the result.

The first `servers` ranks of the communicator serve, each a part of the parameters; the rest work. A worker's step is
`push` (its gradient) and `pull` (the parameters as they are when its server answers). The
consistency models differ only in when the server answers:

| consistency | the server answers a push | source |
| --- | --- | --- |
| synchronous | when all workers' gradients of this step are in, and applied as one mean | Li et al. 2014 |
| ... with b backup workers | when all but b are in; later ones are dropped | Chen et al. 2016 |
| stale_synchronous | at once, unless the worker is more than `bound` steps ahead of the slowest | Ho et al. 2013 |
| asynchronous | at once | Dean et al. 2012 (Downpour SGD) |

`asynchronous` simulates thousands of workers with the last one. In `hogwild`, workers of one machine apply their
gradients themselves, in shared memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from workshop_utils.comm.communicator import Array, Communicator, chunk, inside

Consistency = Literal["synchronous", "stale_synchronous", "asynchronous"]
Update = Callable[[Array, Array], None]  # (parameters, gradient): change the parameters in place

VERSION_NBYTES = 8  # sent before each answer: how many updates the parameters have seen


@dataclass(frozen=True)
class Arrangement:
    """Which ranks serve and which work, and how far workers may drift apart.

    `steps` is how many times each worker pushes. `bound` matters to stale_synchronous, `backup_workers` to
    synchronous.

    Raises:
        ValueError: if the numbers contradict each other; the message names the field.
    """

    servers: int
    workers: int
    steps: int
    consistency: Consistency = "synchronous"
    bound: int = 0
    backup_workers: int = 0

    def __post_init__(self) -> None:
        if self.servers < 1 or self.workers < 1 or self.steps < 0:
            raise ValueError("servers and workers must be at least 1, steps at least 0")
        if not 0 <= self.backup_workers < self.workers:
            raise ValueError(
                f"backup_workers is {self.backup_workers}; it must be at least 0 and less than {self.workers} workers"
            )
        if self.bound < 0:
            raise ValueError(f"bound is {self.bound}; it must be at least 0")

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self.servers + self.workers

    @property
    def worker_ranks(self) -> range:
        """The ranks that compute."""
        return range(self.servers, self.size)

    def check(self, communicator: Communicator) -> None:
        """Raise ValueError unless the communicator has as many ranks as the arrangement."""
        if communicator.size != self.size:
            raise ValueError(
                f"the communicator has {communicator.size} ranks; {self.servers} servers and {self.workers} workers "
                f"are {self.size}"
            )

    def part(self, whole: Array, server: int) -> Array:
        """The part of the one-dimensional `whole` that `server` keeps."""
        return chunk(whole, server, self.servers)


@dataclass
class ServerLog:
    """What one server saw, an entry a push: the worker's rank, when it was answered (seconds on the server's
    clock), its staleness (updates by others between the worker's pull and its push) and whether it was dropped.

    In shared memory (`hogwild`) also whether another update `overlapped` the pull.
    """

    worker: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    dropped: list[bool] = field(default_factory=list)
    overlapped: list[bool] = field(default_factory=list)
    version: int = 0


class Server:
    """One server: `parameters` is its part, changed in place by `update(parameters, gradient)`."""

    def __init__(
        self, communicator: Communicator, arrangement: Arrangement, parameters: Array, update: Update
    ) -> None:
        self._communicator, self._arrangement = communicator, arrangement
        self._parameters, self._update = parameters, update
        self._gradient = np.empty_like(parameters)
        self._sum = np.zeros_like(parameters)
        self._in_sum = 0
        self._waiting: list[int] = []  # workers whose push is not answered yet
        self._pulled = dict.fromkeys(arrangement.worker_ranks, 0)  # the version that each worker has
        self._pushes = dict.fromkeys(arrangement.worker_ranks, 0)
        self.log = ServerLog()

    def serve(self) -> ServerLog:
        """Answer pushes until every worker has made all its steps (synchronous: until it has the last update)."""
        for worker in self._arrangement.worker_ranks:
            self._answer(worker)  # the initial parameters
        while active := self._active():
            worker = self._communicator.recv(active, self._gradient)
            self._take(worker)
            for waiting in [rank for rank in self._waiting if self._may_go_on(rank)]:
                self._waiting.remove(waiting)
                self._answer(waiting)
        return self.log

    def _active(self) -> list[int]:
        """Workers that still have something to push and are not waiting for an answer."""
        made = self._pulled if self._arrangement.consistency == "synchronous" else self._pushes
        steps = self._arrangement.steps
        return [rank for rank, count in made.items() if count < steps and rank not in self._waiting]

    def _take(self, worker: int) -> None:
        stale = self.log.version - self._pulled[worker]
        synchronous = self._arrangement.consistency == "synchronous"
        late = synchronous and stale > 0  # its step has finished without it
        self._pushes[worker] += 1
        if not synchronous:
            self._apply(self._gradient)
        elif not late:
            self._add(self._gradient)
        self.log.worker.append(worker)
        self.log.seconds.append(self._communicator.now())
        self.log.staleness.append(stale)
        self.log.dropped.append(late)
        self._waiting.append(worker)

    def _add(self, gradient: Array) -> None:
        """Synchronous: one more gradient of this step; with the last one needed, update by their mean."""
        self._sum += gradient
        self._in_sum += 1
        if self._in_sum == self._arrangement.workers - self._arrangement.backup_workers:
            self._sum /= self._in_sum
            self._apply(self._sum)
            self._sum[:] = 0
            self._in_sum = 0

    def _apply(self, gradient: Array) -> None:
        self._update(self._parameters, gradient)
        self.log.version += 1

    def _may_go_on(self, worker: int) -> bool:
        if self._arrangement.consistency == "asynchronous":
            return True
        if self._arrangement.consistency == "synchronous":
            return self.log.version > self._pulled[worker]
        slowest = min(self._pushes.values())  # those that have finished have made all steps
        return self._pushes[worker] - slowest <= self._arrangement.bound

    def _answer(self, worker: int) -> None:
        self._pulled[worker] = self.log.version
        self._communicator.send(worker, np.array([self.log.version], np.int64))
        self._communicator.send(worker, self._parameters)


def train(
    communicator: Communicator,
    arrangement: Arrangement,
    parameters: Array,
    gradient_of: Callable[[Array, int], Array],
    update: Update,
) -> ServerLog | None:
    """Play this rank's part: serve, or pull, compute and push `arrangement.steps` times.

    Args:
        communicator: of `arrangement.size` ranks.
        arrangement: who does what.
        parameters: the whole, one-dimensional, the same on every rank at the start; on return the trained ones
            on workers, this server's part on servers (the rest unchanged).
        gradient_of: (parameters, step) to gradient, called on workers only.
        update: (part of the parameters, its gradient), in place, called on servers only.

    Returns:
        A server's log; None on a worker.

    Raises:
        ValueError: if the communicator has not `arrangement.size` ranks.
    """
    arrangement.check(communicator)
    with inside(communicator, "parameter_server"):
        if communicator.rank < arrangement.servers:
            part = arrangement.part(parameters, communicator.rank)
            return Server(communicator, arrangement, part, update).serve()
        _work(communicator, arrangement, parameters, gradient_of)
    return None


def _work(
    communicator: Communicator,
    arrangement: Arrangement,
    parameters: Array,
    gradient_of: Callable[[Array, int], Array],
) -> None:
    """Pull, compute and push; every server that it has pushed to owes it an answer, at the start all do."""
    synchronous, count = arrangement.consistency == "synchronous", arrangement.servers
    # Each worker starts with a different server, so that no server's link idles.
    servers = [(communicator.rank + place) % count for place in range(count)]
    versions, version = [0] * count, np.empty(1, np.int64)
    awaited, step = servers, 0
    while awaited:
        for server in awaited:  # pull
            communicator.recv(server, version)
            versions[server] = int(version[0])
            communicator.recv(server, arrangement.part(parameters, server))
        # A worker whose gradients were dropped has made fewer pushes than a server has made steps; and servers may drop
        # different workers' gradients, so that one of them has finished before another.
        awaited = [each for each in servers if (versions[each] if synchronous else step) < arrangement.steps]
        if awaited:
            gradient = gradient_of(parameters, step)
        for server in awaited:  # push
            communicator.send(server, arrangement.part(gradient, server))
        step += 1


def server_bytes_received(workers: int, nbytes: int, servers: int = 1) -> float:
    """Bytes that each server receives in one step of all workers: W · K / k.

    Exact where k divides the number of elements. Source: Li et al. (2014), section 3.
    """
    return workers * nbytes / servers
