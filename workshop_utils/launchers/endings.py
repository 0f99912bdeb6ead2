"""How processes end, in words: the same in the message of every failed run."""

from __future__ import annotations

import signal
from collections.abc import Sequence

LAST_LINES = 12  # of a worker that failed, in the message


def how(code: int) -> str:
    """How a process with this exit code ended; a negative one is that of a signal, as in `subprocess`."""
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def not_started(name: str, reason: str) -> str:
    """What is said of a run whose processes could not be started."""
    return f"{name} could not be started: {reason}"


def unwatched(name: str) -> str:
    """What is said of a run whose supervisor has died: nobody knows how its workers would have ended."""
    return f"{name} failed: the process that watches over it was killed; its workers were ended with it"


def last_lines(texts: Sequence[str]) -> str:
    """The last of what a worker printed."""
    return "Its last lines:\n  " + "\n  ".join(texts[-LAST_LINES:]) if texts else "It had printed nothing."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
