"""What a rank does with its time: compute, send, wait; reported while it trains, and drawn as a lane.

    activity = Activity(communicator)
    for step in ...:
        gradients = ...                            # computing
        activity.communicates()
        ring_all_reduce(communicator, gradients, "mean")
        activity.computes()
        place.report(step, loss=loss, **activity.seconds())

A chess clock: each call ends one activity and begins the other. Inside communication the transport itself counts the
seconds in which it had nothing left to send and nothing came: that is waiting, for slower ranks or for a core. What is
left is bytes on the move, and adding them up.
"""

from __future__ import annotations

import time

from workshop_utils.comm.communicator import Communicator


class Activity:
    """The clock of one rank; it begins computing now. Reading it takes less than a microsecond."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator
        self._communicating = False
        self._spent = {"compute_seconds": 0.0, "send_seconds": 0.0, "wait_seconds": 0.0}
        self._since, self._waited = time.perf_counter(), communicator.traffic.waited_seconds

    def computes(self) -> None:
        """From here on this rank computes."""
        self._switch(communicating=False)

    def communicates(self) -> None:
        """From here on it sends, receives and waits."""
        self._switch(communicating=True)

    def seconds(self) -> dict[str, float]:
        """`compute_seconds`, `send_seconds` and `wait_seconds` since the last call of this, or since the start.

        Together they are the time that has passed. Where the transport does not count its waiting (all but `tcp`, also
        below `stamped`), `wait_seconds` is 0, and waiting is a part of sending.
        """
        self._switch(self._communicating)
        spent, self._spent = self._spent, dict.fromkeys(self._spent, 0.0)
        return spent

    def _switch(self, communicating: bool) -> None:
        now, waited = time.perf_counter(), self._communicator.traffic.waited_seconds
        elapsed = now - self._since
        if self._communicating:
            idle = min(waited - self._waited, elapsed)
            self._spent["wait_seconds"] += idle
            self._spent["send_seconds"] += elapsed - idle
        else:
            self._spent["compute_seconds"] += elapsed
        self._since, self._waited, self._communicating = now, waited, communicating
