"""Parameter servers that survive crashes, one at a time: each key range has a replica on the next server.

    parameters = np.zeros((servers, 50))                              # a row is a key range
    if communicator.rank < servers:
        serve(Server(communicator, parameters, apply), push, keep)    # apply(row, mean gradient) changes the row
    else:
        work(communicator, parameters, gradient_of, steps=100)

Ranks 0 to k - 1 are servers, on a ring; server r holds range r, and its successor a copy. `Communicator.may_die` names
those that may crash. All workers push to a range, it is updated, copied with its version, and only then do they get
their answers: Li et al., "Scaling Distributed Machine Learning with the Parameter Server", OSDI 2014, section 4.4, with
one replica, and replication after aggregation. A worker whose server has died pushes again, to the next one.

A message is [range, version, values ...] in float64; a copy is acknowledged by an empty one. All servers but one may
die, if between two deaths each range is updated once, since that makes the next copy. Two neighbours that die at once
take a range with them; the next server says so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import numpy as np

from workshop_utils.comm.communicator import CommunicationError, Communicator, PeerDied

STOP = -1.0  # as a range: the worker is done


class Server:
    """What a server has, and what it can do with a range; `push` and `keep` say when.

    Attributes:
        ranges: of shape (servers, values); rows that are neither held nor copied keep their initial values.
        versions: of each range, how many updates it has had.
        pushed: of each range, the gradients that are waiting for the next update, by worker.
        workers: their ranks.
    """

    def __init__(
        self,
        communicator: Communicator,
        parameters: np.ndarray,
        apply: Callable[[np.ndarray, np.ndarray], None],
    ) -> None:
        servers = len(parameters)
        self.communicator, self._apply = communicator, apply
        self.ranges = np.array(parameters, np.float64)
        self.versions = [0] * servers
        self.pushed: list[dict[int, np.ndarray]] = [{} for _ in range(servers)]
        self.workers = range(servers, communicator.size)
        self._successor = (communicator.rank + 1) % servers

    def update(self, r: int) -> None:
        """Change range `r` by the mean of the gradients that have been pushed: its next version."""
        gradients = [self.pushed[r][worker] for worker in sorted(self.pushed[r])]
        self._apply(self.ranges[r], np.mean(gradients, axis=0))
        self.pushed[r] = {}
        self.versions[r] += 1

    def copy(self, r: int) -> None:
        """Send range `r` to the next server that lives, and return once that has it."""
        while self._successor != self.communicator.rank:
            try:
                self._tell(self._successor, r)
                self.communicator.recv(self._successor, np.empty(0))
                return
            except PeerDied:
                self._successor = (self._successor + 1) % len(self.ranges)

    def answer(self, worker: int, r: int) -> None:
        """Send range `r` to a worker."""
        self._tell(worker, r)

    def _tell(self, to: int, r: int) -> None:
        self.communicator.send(to, np.concatenate([[r, self.versions[r]], self.ranges[r]]))


Push = Callable[[Server, int, int, int, np.ndarray], None]  # server, worker, range, version, gradient
Keep = Callable[[Server, int, int, np.ndarray], None]  # server, range, version, values


def push(server: Server, worker: int, r: int, version: int, gradient: np.ndarray) -> None:
    """`worker` has pushed the gradient of range `r` at `version`.

    Raises:
        CommunicationError: if the range is lost.
    """
    if version > server.versions[r]:
        raise CommunicationError(
            f"range {r} is lost: its server and the one with its copy died before version {version}"
        )
    if version < server.versions[r]:  # that update had been copied before its server died
        server.answer(worker, r)
        return
    server.pushed[r][worker] = gradient
    if len(server.pushed[r]) == len(server.workers):
        server.update(r)
        server.copy(r)
        for each in server.workers:
            server.answer(each, r)


def keep(server: Server, r: int, version: int, values: np.ndarray) -> None:
    """Another server has sent its range `r`, perhaps after workers that saw it die have pushed to this one."""
    if version <= server.versions[r]:  # this one has made that update itself
        return
    server.versions[r], server.ranges[r] = version, values
    for worker in server.pushed[r]:  # the copy contains these gradients
        server.answer(worker, r)
    server.pushed[r] = {}


def serve(server: Server, push: Push, keep: Keep) -> None:
    """Serve until all workers are done."""
    communicator, message = server.communicator, np.empty(2 + server.ranges.shape[1])
    active, peers = {*server.workers}, {*range(communicator.size)} - {communicator.rank}
    while active:
        try:
            source = communicator.recv(peers, message)
        except PeerDied as death:
            peers.remove(death.rank)
            continue
        r, version, values = int(message[0]), int(message[1]), message[2:].copy()
        if r == STOP:
            active.remove(source)
            peers.remove(source)
        elif source in server.workers:
            push(server, source, r, version, values)
        else:
            keep(server, r, version, values)
            communicator.send(source, np.empty(0))


def work(
    communicator: Communicator,
    parameters: np.ndarray,
    gradient_of: Callable[[np.ndarray], np.ndarray],
    steps: int,
) -> None:
    """Push and pull each range of `parameters`, in float64, `steps` times; both arrays have shape (servers, values).

    All workers take one range after another, in the same order. Pushed all at once, ranges would be copied all at once,
    and each server would wait in `copy` for a successor that waits, too.
    """
    holders, answer = [*range(len(parameters))], np.empty(2 + parameters.shape[1])
    for version in range(steps):
        gradient = gradient_of(parameters)
        for r in range(len(parameters)):
            while True:
                try:
                    communicator.send(holders[r], np.concatenate([[r, version], gradient[r]]))
                    communicator.recv(holders[r], answer)
                    break
                except PeerDied:
                    holders[r] = (holders[r] + 1) % len(parameters)
            parameters[r] = answer[2:]
    for server in {*holders}:
        with contextlib.suppress(PeerDied):  # it has died since its last answer
            communicator.send(server, np.full_like(answer, STOP))
