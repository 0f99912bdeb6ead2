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

import contextlib
import fcntl
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal

import numpy as np

from workshop_utils.comm.communicator import Array, CommunicationError, Communicator, PeerSilent, inside
from workshop_utils.comm.parameter_server import Arrangement, ServerLog, Update

Locking = Literal["none", "lock"]

_LINE = 8  # int64 between the counters of two workers: no two share a line of a cache


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
            os.pwrite(self._descriptor, address[2:].tobytes(), 0)
        else:
            communicator.recv(server, address)
            self._descriptor = _opened(server, address, nbytes)
        memory = np.frombuffer(mmap.mmap(self._descriptor, nbytes), np.uint8)
        # Each worker has two counters that only it changes: updates begun, and updates ended.
        counters = memory[:head].view(np.int64)[_LINE:].reshape(2, arrangement.workers, _LINE)
        self._begun, self._ended = counters[:, :, 0]
        self.parameters = memory[head:][: part.nbytes].view(part.dtype)
        if is_server:
            self.parameters[:] = part
            for worker in arrangement.worker_ranks:
                communicator.send(worker, address)

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

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._locks:
            yield
            return
        fcntl.flock(self._descriptor, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    def wait_for(self, updates: int, timeout_seconds: float) -> None:
        """Return once so many updates have been made; without it the first worker would return half-trained parameters.

        Raises:
            PeerSilent: if for so long nobody has made one.
        """
        seen, changed = -1, time.monotonic()
        while seen < updates:
            if self.updates > seen:
                seen, changed = self.updates, time.monotonic()
            elif time.monotonic() - changed > timeout_seconds:
                raise PeerSilent(f"{seen} of {updates} updates came, and none in {timeout_seconds:g} s")
            else:
                time.sleep(0.002)

    def close(self) -> None:
        """Let go of the descriptor; the memory goes when no process maps it any more."""
        os.close(self._descriptor)


def _opened(server: int, address: Array, nbytes: int) -> int:
    """A worker's own descriptor of the server's memory, since a lock belongs to an open file, not to a mapping."""
    path = f"/proc/{address[0]}/fd/{address[1]}"
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        if os.fstat(descriptor).st_size == nbytes and os.pread(descriptor, 8, 0) == address[2:].tobytes():
            return descriptor
        os.close(descriptor)
        why = f"{path} is something else here"
    except OSError as error:
        why = str(error)
    raise CommunicationError(
        f"the memory of server {server} cannot be mapped ({why}); workers that share parameters must run on the "
        "server's machine, under the same user: elsewhere, leave locking at 'server'"
    )


def train(
    communicator: Communicator,
    arrangement: Arrangement,
    parameters: Array,
    gradient_of: Callable[[Array, int], Array],
    update: Update,
    locking: Locking,
) -> ServerLog | None:
    """`parameter_server.train`, asynchronous, with the parameters in memory that all ranks share.

    Arguments and results are those of `parameter_server.train`, but `update` is called on workers, and these return
    together, with the parameters as they are after all updates. A log is in the order in which pushes were made.

    Raises:
        ValueError: if the arrangement is not asynchronous, or the communicator has not its size.
        CommunicationError: if the ranks are not on one machine with Linux, under one user.
        PeerSilent: if for the communicator's time-out no worker has made an update.
    """
    if arrangement.consistency != "asynchronous":
        raise ValueError(f"consistency is {arrangement.consistency!r}; here it must be 'asynchronous'")
    arrangement.check(communicator)
    if not hasattr(os, "memfd_create"):
        raise CommunicationError("shared parameters need Linux: this system has no memory without a name")
    worker = communicator.rank - arrangement.servers
    servers = range(arrangement.servers) if worker >= 0 else (communicator.rank,)
    parts = [arrangement.part(parameters, server) for server in servers]
    reports = np.empty((arrangement.servers, arrangement.steps, 3))  # seconds, staleness, overlapped
    shared: list[SharedPart] = []
    with inside(communicator, "hogwild"), contextlib.ExitStack() as opened:
        for server, part in zip(servers, parts, strict=True):
            shared.append(SharedPart(communicator, arrangement, server, part, locking))
            opened.callback(shared[-1].close)
        for step in range(arrangement.steps if worker >= 0 else 0):
            pulls = [memory.pull(part) for memory, part in zip(shared, parts, strict=True)]
            gradient = gradient_of(parameters, step)
            for server, (version, overlapped) in enumerate(pulls):
                staleness = shared[server].push(worker, arrangement.part(gradient, server), update, version)
                reports[server, step] = communicator.now(), staleness, overlapped
        for server, memory, part in zip(servers, shared, parts, strict=True):
            memory.wait_for(arrangement.workers * arrangement.steps, communicator.timeout_seconds)
            memory.pull(part)
            if worker >= 0:
                communicator.send(server, reports[server].reshape(-1))
        return None if worker >= 0 else _log(communicator, arrangement)


def _log(communicator: Communicator, arrangement: Arrangement) -> ServerLog:
    """What the workers report, in the order of time."""
    pushes: list[tuple[Any, ...]] = []  # seconds, worker, staleness, overlapped
    report = np.empty(3 * arrangement.steps)
    for worker in arrangement.worker_ranks:
        communicator.recv(worker, report)
        pushes += [(seconds, worker, *rest) for seconds, *rest in report.reshape(-1, 3).tolist()]
    log = ServerLog(version=len(pushes), dropped=[False] * len(pushes))
    for seconds, worker, staleness, overlapped in sorted(pushes):
        log.seconds.append(seconds)
        log.worker.append(worker)
        log.staleness.append(int(staleness))
        log.overlapped.append(bool(overlapped))
    return log
