"""Hogwild!: workers of one machine change shared parameters themselves, with a lock, or with none at all.

A parameter server is one process, so it applies one gradient after the other. Here each server only keeps its part in
memory that the workers map too; a worker's pull copies from it, and its push is `update` on it, in place:

| locking | pull and push |
| --- | --- |
| lock | one at a time: every update counts, and every pull is of one version |
| none | at any time: of two updates of an element at one moment one may be lost, and a pull may mix versions |

Source: Recht, Ré, Wright and Niu (2011), algorithm 1, with the whole gradient as its edge.

Updating in place makes `none` bearable: only an instruction or two lie between reading an element and writing it. A
worker that wrote back a copy would undo everything that others did since it took the copy.

The memory has no name (`memfd`), so nothing is left of it when processes die; a lock is freed with its process.
Counters beside the parameters measure staleness and overlaps. They rely on one processor's stores being seen in their
order, as on x86; elsewhere, without a lock, they are estimates.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from workshop_utils.comm.communicator import Array, CommunicationError, Communicator, PeerSilent, inside, now
from workshop_utils.comm.parameter_server import Arrangement, ServerLog, Update

Locking = Literal["none", "lock"]

_LINE = 8  # int64 between the counters of two workers: no two share a line of a cache


@dataclass
class HogwildLog(ServerLog):
    """A `ServerLog` in the order in which pushes were made, and for each whether its pull `overlapped` an update."""

    overlapped: list[bool] = field(default_factory=list)


class SharedPart:
    """One server's part of the parameters, in memory that this process shares: created on `server`, opened on workers.

    Attributes:
        parameters: the part itself; `part` has its size and, on the server, its initial values.

    Raises:
        CommunicationError: if a worker cannot reach the server's memory.
    """

    def __init__(
        self, communicator: Communicator, arrangement: Arrangement, server: int, part: Array, locking: Locking
    ) -> None:
        self._locks, is_server = locking == "lock", communicator.rank == server
        head = (1 + 2 * arrangement.workers) * _LINE * 8  # a token, and two counters a worker
        nbytes = head + max(part.nbytes, 1)
        address = np.empty(3, np.int64)  # process, descriptor, token
        if is_server:
            self._descriptor = os.memfd_create("workshop")
            os.ftruncate(self._descriptor, nbytes)
            address[:] = os.getpid(), self._descriptor, secrets.randbits(62)
        else:
            communicator.recv(server, address)
            path = f"/proc/{address[0]}/fd/{address[1]}"
            try:  # a descriptor of its own, since a lock belongs to an open file, not to a mapping
                self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            except OSError as error:
                raise _unreachable(server, str(error)) from error
            if os.fstat(self._descriptor).st_size != nbytes:
                self.close()
                raise _unreachable(server, f"{path} is something else here")
        memory = np.frombuffer(mmap.mmap(self._descriptor, nbytes), np.uint8)
        counters = memory[:head].view(np.int64)
        # Each worker has two counters that only it changes: updates begun, and updates ended.
        self._begun, self._ended = counters[_LINE:].reshape(2, arrangement.workers, _LINE)[:, :, 0]
        self.parameters = memory[head:][: part.nbytes].view(part.dtype)
        if is_server:
            counters[0], self.parameters[:] = address[2], part
            for worker in arrangement.worker_ranks:
                communicator.send(worker, address)
        elif counters[0] != address[2]:
            self.close()
            raise _unreachable(server, f"{path} is another memory here")

    def pull(self, into: Array) -> tuple[int, bool]:
        """Copy the parameters; how many updates they had seen, and whether another one was going on meanwhile."""
        with self._alone():
            version = self.updates
            into[:] = self.parameters
            return version, int(self._begun.sum()) != version

    def push(self, worker: int, gradient: Array, update: Update, pulled: int) -> int:
        """Have `update` change the parameters in place, for worker number `worker`; its staleness since `pulled`."""
        with self._alone():
            staleness = self.updates - pulled
            self._begun[worker] += 1
            update(self.parameters, gradient)
            self._ended[worker] += 1
        return staleness

    @property
    def updates(self) -> int:
        """How many have ended, of all workers."""
        return int(self._ended.sum())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._locks:
            yield
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the descriptor; the memory goes when no process maps it any more."""
        os.close(self._descriptor)


def train(
    communicator: Communicator,
    arrangement: Arrangement,
    parameters: Array,
    gradient_of: Callable[[Array, int], Array],
    update: Update,
    locking: Locking,
) -> HogwildLog | None:
    """`parameter_server.train`, asynchronous, with the parameters in memory that all ranks share.

    Arguments and results are those of `parameter_server.train`, but `update` is called on workers, and these return
    together, with the parameters as they are after all updates.

    Raises:
        ValueError: if the arrangement is not asynchronous, or the communicator has not its size.
        CommunicationError: if the ranks are not on one machine with Linux, under one user.
        PeerSilent: if for the communicator's time-out no worker has made an update.
    """
    if arrangement.consistency != "asynchronous":
        raise ValueError(
            f"consistency is {arrangement.consistency!r}; workers that share memory are 'asynchronous'"
        )
    arrangement.check(communicator)
    if not hasattr(os, "memfd_create"):
        raise CommunicationError("shared parameters need Linux: this system has no memory without a name")
    with inside(communicator, "hogwild"):
        if communicator.rank < arrangement.servers:
            part = arrangement.part(parameters, communicator.rank)
            return _serve(communicator, arrangement, part, locking)
        _work(communicator, arrangement, parameters, gradient_of, update, locking)
    return None


def _serve(communicator: Communicator, arrangement: Arrangement, part: Array, locking: Locking) -> HogwildLog:
    """Keep the memory until all updates are made, and collect the workers' reports; `part` is then the result."""
    shared = SharedPart(communicator, arrangement, communicator.rank, part, locking)
    pushes: list[tuple[Any, ...]] = []  # seconds, worker, staleness, overlapped
    report = np.empty(3 * arrangement.steps)
    try:
        _wait_for_all(shared, arrangement.workers * arrangement.steps, communicator.timeout_seconds)
        part[:] = shared.parameters
        for worker in arrangement.worker_ranks:
            communicator.recv(worker, report)
            pushes += [(seconds, worker, *rest) for seconds, *rest in report.reshape(-1, 3).tolist()]
    finally:
        shared.close()  # not before all workers have opened it
    log = HogwildLog(version=len(pushes), dropped=[False] * len(pushes))
    for seconds, worker, staleness, overlapped in sorted(pushes):
        log.seconds.append(seconds)
        log.worker.append(worker)
        log.staleness.append(int(staleness))
        log.overlapped.append(bool(overlapped))
    return log


def _work(
    communicator: Communicator,
    arrangement: Arrangement,
    parameters: Array,
    gradient_of: Callable[[Array, int], Array],
    update: Update,
    locking: Locking,
) -> None:
    """Pull, compute, push, on the memory of all servers; then tell each of them of the pushes to its part."""
    worker = communicator.rank - arrangement.servers
    parts = [arrangement.part(parameters, server) for server in range(arrangement.servers)]
    reports = np.empty((arrangement.servers, arrangement.steps, 3))  # seconds, staleness, overlapped
    shared: list[SharedPart] = []
    try:
        for server, part in enumerate(parts):
            shared.append(SharedPart(communicator, arrangement, server, part, locking))
        for step in range(arrangement.steps):
            pulls = [memory.pull(part) for memory, part in zip(shared, parts, strict=True)]
            gradient = gradient_of(parameters, step)
            for server, (version, overlapped) in enumerate(pulls):
                staleness = shared[server].push(worker, arrangement.part(gradient, server), update, version)
                reports[server, step] = now(communicator), staleness, overlapped
        for server, (memory, part) in enumerate(zip(shared, parts, strict=True)):
            _wait_for_all(memory, arrangement.workers * arrangement.steps, communicator.timeout_seconds)
            memory.pull(part)
            communicator.send(server, reports[server].reshape(-1))
    finally:
        for memory in shared:
            memory.close()


def _wait_for_all(shared: SharedPart, updates: int, timeout_seconds: float) -> None:
    """Return once so many updates have been made; otherwise the first worker would return half-trained parameters."""
    seen, changed = -1, time.monotonic()
    while seen < updates:
        if shared.updates > seen:
            seen, changed = shared.updates, time.monotonic()
        elif time.monotonic() - changed > timeout_seconds:
            raise PeerSilent(
                f"{seen} of {updates} updates have been made, and none in the last {timeout_seconds:g} s"
            )
        else:
            time.sleep(0.002)


def _unreachable(server: int, why: str) -> CommunicationError:
    return CommunicationError(
        f"the memory of server {server} cannot be mapped ({why}); workers that share parameters must run on the "
        "server's machine, under the same user: elsewhere, leave locking at 'server'"
    )
