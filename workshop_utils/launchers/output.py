"""What processes print and how they end, in words: the same for every run.

mpirun, an elastic driver and Spark's driver print the lines of the processes that they start, each with a tag.
`attributed` gives such a line back to its worker.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Iterator, Sequence

# Names of variables and properties whose values are not shown.
SECRET = re.compile(r"(?i)secret|token(?!iz)|password|key$|access[._]?key")
LAST_LINES = 12  # of a worker that failed, in the message

# Rank 1 under `mpirun --tag-output` (Open MPI 4 and 5) is [1,1]<stdout>: and [1,mpirank:1,algo-1]<stdout>: on
# SageMaker; under our own drivers it is [worker-1]<stdout>:
_TAG = re.compile(
    r"\[(?:[^\],]*,(?:mpirank:)?(?P<rank>\d+)(?:,algo-\d+)?|(?P<name>worker-\d+))\]"
    r"<(?P<stream>stdout|stderr)>: ?(?P<text>.*)"
)
# mpirun and its child both put the child into a process group; the second one is refused, and prints this. And PyTorch
# looks for names of the addresses in a network namespace, where nobody has one.
_NOISE = re.compile(
    r"\[\S+\] plm:ssh: Warning: setpgid\(|.*\[c10d\] The hostname of the client socket cannot be retrieved"
)
_ABORT_NOTICE = re.compile(r"-{70,}\nMPI_ABORT was .*?\n-{70,}\n", re.DOTALL)  # of a rank that fails
_CULPRIT = re.compile(r"(?:process|invoked on) rank (\d+)\b|Process name: \[[^\]]*,(\d+)\]")
_SIGNAL = re.compile(r"exited on\s+signal (\d+)")


def attributed(name: str, text: str, stream: str) -> Iterator[tuple[str, str, str]]:
    """Worker, text and stream of what a line of the process `name` holds: usually itself, or a tagged worker's.

    Where a rank's output ends, Open MPI writes a zero and no new line; then one line holds several ranks' output.
    """
    *ended, last = text.split("\0")
    for part in (*ended, last):
        tagged = _TAG.match(part)
        if tagged:
            name = tagged["name"] or f"worker-{tagged['rank']}"
            part, stream = tagged["text"], tagged["stream"]
        if (part or not ended) and not _NOISE.match(part):
            yield name, part, stream


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
