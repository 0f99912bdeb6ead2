"""Parameter servers: some ranks keep the parameters; the others compute gradients, push them and pull the result.

The first `servers` ranks of the communicator serve, each a part of the parameters; the rest work. A worker's step is
`push` (its gradient) and `pull` (the parameters as they are when its server answers). All servers run the same loop,
`serve`; the consistency models differ in a `Mode`, that is in how many gradients an update takes and in the rule by
which a push is answered:

| consistency | gradients of an update | the server answers a push | source |
| --- | --- | --- | --- |
| synchronous | all of a step | after the update | Li et al. 2014 |
| ... with b backup workers | all but b; later ones are dropped | after the update | Chen et al. 2016 |
| stale_synchronous | one | unless the worker is more than `bound` pushes ahead | Ho et al. 2013 |
| asynchronous | one | at once | Dean et al. 2012 (Downpour SGD) |

A server is busy until its answer is received, and a worker until its push is. A server among several could thus answer
a worker that still pushes to the next one, which answers a worker that still pushes to the first: all would wait for
ever. So a worker that has pushed to all of several servers asks each for its answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import numpy as np

from workshop_utils.comm.communicator import Array, Communicator, chunk, inside

Consistency = Literal["synchronous", "stale_synchronous", "asynchronous"]
Update = Callable[[Array, Array], None]  # (parameters, gradient): change the parameters in place

STOP = -1  # instead of how many updates the parameters have seen, which is sent before each answer
REQUEST_NBYTES = 8  # of a worker's question for its answer, where there are several servers


@dataclass(frozen=True)
class Arrangement:
    """Which ranks serve and which work, and how far workers may drift apart.

    `steps` is how many updates synchronous servers make; of others, how often each worker pushes. `bound` matters to
    stale_synchronous, `backup_workers` to synchronous.

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

    @property
    def mode(self) -> Mode:
        """The mode of its servers."""
        if self.consistency == "synchronous":
            return Mode(has_newer, self.workers - self.backup_workers, lambda *now: not has_newer(*now))
        if self.consistency == "asynchronous":
            return Mode(always)
        return Mode(lambda state, worker: state.ahead(worker) <= self.bound)

    def is_done(self, state: State, worker: int) -> bool:
        """Whether the run is over for `worker`."""
        made = state.version if self.consistency == "synchronous" else state.pushes[worker]
        return made >= self.steps

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
    """What one server saw, an entry a push: the worker's rank, when it came (seconds on the server's clock), its
    staleness (updates between the worker's pull and its push) and whether it was dropped; and `version`, the number of
    its updates."""

    worker: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    dropped: list[bool] = field(default_factory=list)
    version: int = 0


class State:
    """What a server knows, for `workers`, and what rules may ask.

    Attributes:
        version: how many updates the parameters have seen.
        has: the version that each worker computes with; -1 before its first pull.
        pushes: how many gradients each worker has pushed.
        active: the workers that have not been told to stop.
    """

    def __init__(self, workers: range) -> None:
        self.version = 0
        self.has, self.pushes = dict.fromkeys(workers, -1), dict.fromkeys(workers, 0)
        self.active = set(workers)

    def ahead(self, worker: int) -> int:
        """How many more gradients `worker` has pushed than the slowest that is active."""
        return self.pushes[worker] - min(self.pushes[each] for each in self.active)


Rule = Callable[[State, int], bool]  # (state, worker)


def has_newer(state: State, worker: int) -> bool:
    """Whether there has been an update since `worker` pulled."""
    return state.version > state.has[worker]


def always(*_: object) -> bool:
    """Whatever the state and the worker."""
    return True


class Mode(NamedTuple):
    """How consistent servers are: may a worker that has pushed be answered, how many gradients make an update (by their
    mean), and does the gradient that a worker pushes count?"""

    may_answer: Rule
    needed: int = 1
    counts: Rule = always


def serve(
    communicator: Communicator,
    workers: range,
    parameters: Array,
    update: Update,
    mode: Mode,
    is_done: Rule,
    is_asked: bool = False,
) -> ServerLog:
    """Answer pushes until every worker has been told to stop; `parameters` are changed in place.

    A server among several `is_asked`: it answers a push only once the worker asks for the answer.
    """
    state, log = State(workers), ServerLog()
    gradient, total, count = np.empty_like(parameters), np.zeros_like(parameters), 0
    request = np.empty(REQUEST_NBYTES, np.uint8)
    # The initial parameters are answers, too. What comes next from a worker that does not wait:
    waiting = [] if is_asked else list(workers)
    expected = dict.fromkeys(workers, request) if is_asked else {}
    while state.active:
        if ready := [worker for worker in waiting if mode.may_answer(state, worker)]:
            worker, stop = ready[0], is_done(state, ready[0])
            waiting.remove(worker)
            state.has[worker] = state.version
            communicator.send(worker, np.array([STOP if stop else state.version], np.int64))
            communicator.send(worker, parameters)
            state.active -= {worker} if stop else set()
            expected |= {} if stop else {worker: gradient}
            continue
        worker = communicator.recv(expected)
        if expected.pop(worker) is request:
            waiting.append(worker)
            continue
        counts = mode.counts(state, worker)
        log.worker.append(worker)
        log.seconds.append(communicator.now())
        log.staleness.append(state.version - state.has[worker])
        log.dropped.append(not counts)
        state.pushes[worker] += 1
        if is_asked:
            expected[worker] = request
        else:
            waiting.append(worker)
        if counts:
            total += gradient
            count += 1
        if count == mode.needed:
            total /= count
            update(parameters, total)
            total[:], count = 0, 0
            state.version += 1
    log.version = state.version
    return log


def pull(communicator: Communicator, servers: Sequence[int], parts: Sequence[Array]) -> list[int]:
    """Receive `parts` of the parameters from `servers`; returns which of them go on.

    Of several servers each is asked, the next one while the last one answers.
    """
    version, request, going_on = np.empty(1, np.int64), np.zeros(REQUEST_NBYTES, np.uint8), []
    is_asked = len(parts) > 1
    if is_asked:
        communicator.send(servers[0], request)
    for server, after in zip(servers, [*servers[1:], None], strict=True):
        communicator.recv(server, version)
        communicator.send_recv(after if is_asked else None, request, server, parts[server])
        going_on += [server] if version[0] != STOP else []
    return going_on


def work(
    communicator: Communicator, parts: Sequence[Array], gradient_of: Callable[[int], Sequence[Array]]
) -> None:
    """Pull `parts` of the parameters, by server, and push the parts of `gradient_of(step)`, until all servers stop."""
    # Each worker starts with a different server, so that no server's link idles.
    count, step = len(parts), 0
    servers = [(communicator.rank + place) % count for place in range(count)]
    # Servers may drop different workers' gradients, so that one has finished before another.
    while servers := pull(communicator, servers, parts):
        gradient = gradient_of(step)
        for server in servers:
            communicator.send(server, gradient[server])
        step += 1


def train(
    communicator: Communicator,
    arrangement: Arrangement,
    parameters: Array,
    gradient_of: Callable[[Array, int], Array],
    update: Update,
) -> ServerLog | None:
    """Play this rank's part until `arrangement.steps` are done: serve, or pull, compute and push.

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
        ValueError: if the communicator does not have `arrangement.size` ranks.
    """
    arrangement.check(communicator)
    workers = arrangement.worker_ranks

    def parts(whole: Array) -> list[Array]:
        return [arrangement.part(whole, server) for server in range(arrangement.servers)]

    with inside(communicator, "parameter_server"):
        if communicator.rank in workers:
            work(communicator, parts(parameters), lambda step: parts(gradient_of(parameters, step)))
            return None
        part = arrangement.part(parameters, communicator.rank)
        is_asked = arrangement.servers > 1
        return serve(communicator, workers, part, update, arrangement.mode, arrangement.is_done, is_asked)
