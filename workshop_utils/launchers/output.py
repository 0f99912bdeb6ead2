"""How processes end and what they print last, in words: the same for every run."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Sequence

# Names of variables and properties whose values are not shown.
SECRET = re.compile(r"(?i)secret|token(?!iz)|password|key$|access[._]?key")
LAST_LINES = 12  # of a worker that failed, in the message

_ABORT_NOTICE = re.compile(r"-{70,}\nMPI_ABORT was .*?\n-{70,}\n", re.DOTALL)  # of a rank that fails
_CULPRIT = re.compile(r"(?:process|invoked on) rank (\d+)\b|Process name: \[[^\]]*,(\d+)\]")
_SIGNAL = re.compile(r"exited on\s+signal (\d+)")


def culprit(texts: Iterable[str]) -> tuple[str | None, int | None]:
    """Which worker failed first according to mpirun's own lines, and the exit code if a signal killed it."""
    text = "\n".join(texts)
    rank, killed = _CULPRIT.search(text), _SIGNAL.search(text)
    return rank and f"worker-{rank[1] or rank[2]}", killed and -int(killed[1])


def how(code: int) -> str:
    """How a process with this exit code ended; a negative one is that of a signal, as in `subprocess`."""
    # A real-time signal has no name.
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    return f"was killed by {name}" if code < 0 else f"ended with exit code {code}"


def last_lines(texts: Sequence[str]) -> str:
    """The last of what a worker printed."""
    lines = _ABORT_NOTICE.sub("", "".join(f"{text}\n" for text in texts)).splitlines()
    return "Its last lines:\n  " + "\n  ".join(lines[-LAST_LINES:]) if lines else "It had printed nothing."
