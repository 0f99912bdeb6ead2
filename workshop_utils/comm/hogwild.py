"""Hogwild!: workers of one machine change shared parameters themselves, with a lock, or with none at all.

A parameter server applies one gradient after the other, since it is one process. Here each server only keeps its part
in memory that the workers map too; a worker's pull is a copy out of it, and its push is `update` on it, in place:

| locking | pull and push |
| --- | --- |
| lock | one at a time: every update counts, and every pull is of one version |
| none | at any time: of two updates of an element at one moment one may be lost, and a pull may mix versions |

Source: Recht, Ré, Wright and Niu (2011), algorithm 1, with the whole gradient as its edge.

In place is what makes `none` bearable: the time between reading an element and writing it is that of one instruction or
two. A worker that wrote back a copy would undo all that others did since it was taken.

The memory has no name (`memfd`), so nothing is left of it when processes die; a lock is freed with its process.
Counters beside the parameters tell staleness and overlaps. They rely on one processor's stores being seen in their
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
from typing import Literal

import numpy as np

from workshop_utils.comm.communicator import (
    Array,
    CommunicationError,
    Communicator,
    PeerSilent,
    inside,
    now,
)
from workshop_utils.comm.parameter_server import Arrangement, ServerLog, Update

Locking = Literal["none", "lock"]

_LINE = 8  # counters of two workers are so many int64 apart: no two in one line of a cache


@dataclass
class HogwildLog(ServerLog):
    """A `ServerLog` in the order in which pushes were made, and for each whether its pull `overlapped` an update."""

    overlapped: list[bool] = field(default_factory=list)


class SharedPart:
    """One server's part of the parameters, as this process maps it. `create` on the server, `open` on workers.

    Attributes:
        parameters: the part itself, in the memory that all share.
    """

    def __init__(self, descriptor: int, workers: int, size: int, dtype: np.dtype, locking: Locking) -> None:
        self._descriptor, self._locks = descriptor, locking == "lock"
        memory = np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), np.uint8)
        counters = memory[: _head_nbytes(workers)].view(np.int64)
        self._token = counters[:1]
        # Each worker has two counters that only it changes: updates begun, and updates ended.
        self._begun, self._ended = counters[_LINE:].reshape(2, workers, _LINE)[:, :, 0]
        self.parameters = memory[_head_nbytes(workers) :][: size * dtype.itemsize].view(dtype)

    @classmethod
    def create(
        cls, communicator: Communicator, arrangement: Arrangement, part: Array, locking: Locking
    ) -> SharedPart:
        """Put `part` into shared memory, and tell the workers where it is."""
        descriptor = os.memfd_create("workshop")
        os.ftruncate(descriptor, _head_nbytes(arrangement.workers) + max(part.nbytes, 1))
        shared = cls(descriptor, arrangement.workers, part.size, part.dtype, locking)
        shared.parameters[:] = part
        shared._token[0] = secrets.randbits(62)
        place = np.array([os.getpid(), descriptor, shared._token[0]], np.int64)
        for worker in arrangement.worker_ranks:
            communicator.send(worker, place)
        return shared

    @classmethod
    def open(
        cls, communicator: Communicator, arrangement: Arrangement, server: int, part: Array, locking: Locking
    ) -> SharedPart:
        """Map the part of `server`, which is as large as `part`.

        Raises:
            CommunicationError: if the server's memory cannot be reached from here.
        """
        place = np.empty(3, np.int64)
        communicator.recv(server, place)
        path = f"/proc/{place[0]}/fd/{place[1]}"
        try:
            # Opened once more, since a lock belongs to an open file, not to a mapping.
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise _unreachable(server, str(error)) from error
        needed = _head_nbytes(arrangement.workers) + max(part.nbytes, 1)
        if os.fstat(descriptor).st_size != needed:
            os.close(descriptor)
            raise _unreachable(server, f"{path} is something else here")
        shared = cls(descriptor, arrangement.workers, part.size, part.dtype, locking)
        if shared._token[0] != place[2]:
            shared.close()
            raise _unreachable(server, f"{path} is another memory here")
        return shared

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
    if communicator.size != arrangement.size:
        raise ValueError(
            f"the communicator has {communicator.size} ranks; the arrangement {arrangement.size}"
        )
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
    shared = SharedPart.create(communicator, arrangement, part, locking)
    pushes: list[tuple[float, int, int, bool]] = []
    report = np.empty(3 * arrangement.steps)
    try:
        _wait_for_all(shared, arrangement.workers * arrangement.steps, communicator.timeout_seconds)
        part[:] = shared.parameters
        for worker in arrangement.worker_ranks:
            communicator.recv(worker, report)
            pushes += [
                (seconds, worker, int(staleness), bool(overlapped))
                for seconds, staleness, overlapped in report.reshape(-1, 3).tolist()
            ]
    finally:
        shared.close()  # not before all workers have opened it
    log = HogwildLog(version=len(pushes), dropped=[False] * len(pushes))
    for seconds, worker, staleness, overlapped in sorted(pushes):
        log.worker.append(worker)
        log.seconds.append(seconds)
        log.staleness.append(staleness)
        log.overlapped.append(overlapped)
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
            shared.append(SharedPart.open(communicator, arrangement, server, part, locking))
        for step in range(arrangement.steps):
            pulls = [memory.pull(part) for memory, part in zip(shared, parts, strict=True)]
            gradient = gradient_of(parameters, step)
            for server, (version, overlapped) in enumerate(pulls):
                its_part = arrangement.part(gradient, server)
                staleness = shared[server].push(worker, its_part, update, version)
                reports[server, step] = now(communicator), staleness, overlapped
        for server, (memory, part) in enumerate(zip(shared, parts, strict=True)):
            _wait_for_all(memory, arrangement.workers * arrangement.steps, communicator.timeout_seconds)
            memory.pull(part)
            communicator.send(server, reports[server].reshape(-1))
    finally:
        for memory in shared:
            memory.close()


def _wait_for_all(shared: SharedPart, updates: int, timeout_seconds: float) -> None:
    """Return once so many updates have been made: whoever is first would take half-trained parameters home."""
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


def _head_nbytes(workers: int) -> int:
    """Bytes before the parameters: a token, and two counters a worker."""
    return (1 + 2 * workers) * _LINE * 8


def _unreachable(server: int, why: str) -> CommunicationError:
    return CommunicationError(
        f"the memory of server {server} cannot be mapped ({why}); workers that share parameters must run on the "
        "server's machine, under the same user: elsewhere, leave locking at 'server'"
    )
