"""Be one rank of a job on Spark: run its script, and say which rank printed what.

    python rank.py SCRIPT ARGUMENT...

TorchDistributor starts it as torchrun's script, and what torchrun's children print comes home as one stream. So each
line gets a tag, `[worker-1]<stdout>: text`, and the last says how the script ended: `[worker-1]<exited>: 0`. The
script itself is a process of its own, started as `python SCRIPT` starts it anywhere. Standard library alone, for it
travels to the executors.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import IO

PR_SET_PDEATHSIG = 1
PATIENCE_SECONDS = 5.0  # with what the script has left running, which may hold its pipes


def die_with_parent() -> None:
    """Have the kernel end this process when the one that started it ends (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def say(tag: str, text: str) -> None:
    """One write for the whole line, so that ranks that share a pipe do not tear each other's."""
    os.write(1, f"{tag}{text}\n".encode())


def pass_on(pipe: IO[str], tag: str) -> None:
    """Say each line of `pipe`, until it ends."""
    for line in pipe:
        say(tag, line.rstrip("\n"))


def main() -> int:
    """Run the script; its exit code, or 1 where a signal ended it."""
    die_with_parent()
    name = f"worker-{os.environ['RANK']}"
    # torchrun counts its own restarts, of which there are none: the driver's are what count.
    variables = {"TORCHELASTIC_RESTART_COUNT": os.environ.get("WORKSHOP_RESTARTS", "0")}
    # Spark makes two lines of the first one: it connects only then, and prints until it has.
    say(f"[{name}]<started>: ", "")
    process = subprocess.Popen(
        [sys.executable, *sys.argv[1:]],
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        preexec_fn=die_with_parent,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    threads = [
        threading.Thread(target=pass_on, args=(pipe, f"[{name}]<{stream}>: "), daemon=True)
        for pipe, stream in ((process.stdout, "stdout"), (process.stderr, "stderr"))
    ]
    for thread in threads:
        thread.start()
    code = process.wait()
    for thread in threads:
        thread.join(PATIENCE_SECONDS)
    say(f"[{name}]<exited>: ", str(code))
    Path(os.environ["WORKSHOP_EXITS"], name).write_text(
        str(code)
    )  # torchrun's exit code gets lost on its way
    return code if code >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
