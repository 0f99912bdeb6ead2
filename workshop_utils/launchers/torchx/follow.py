"""Runs `torchx run`, and prints the lines of each node as they come: `[node-1]<stderr>: text`.

    python -I -S follow.py FOLDER TORCHX ARGUMENT...

TorchX's scheduler `local_cwd` writes the two streams of each node to files in FOLDER (its option log_dir). TorchX also
prints both on its own standard error, but mixes them and tears lines in a long burst of output. So this program reads
the files. Of what TorchX prints it passes on the handle, and after a failure the rest.

TorchX waits for the last node, and a node that waits for its dead peer would never end. So once torchrun has reported a
failure, the others get a moment to fail by themselves, and then this program ends TorchX.
"""

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

POLL_SECONDS = 0.1
FAILURE_SECONDS = 3.0  # for the other nodes to fail by themselves, and say why
FAILURE = re.compile(rb"\s+exitcode\s+: ")  # the last line of torchrun's report
LOGS = "*/*/worker/*/std*.log"  # by session, application, role, node, stream


def lines(file: BinaryIO, ended: bool) -> Iterator[bytes]:
    """The lines that `file` has got since the last call; the last one is left for the next call until it is whole."""
    while line := file.readline():
        if not (ended or line.endswith(b"\n")):
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line.rstrip(b"\n")


def main(folder: str, *command: str) -> int:
    """Run the command to its end; its exit code, or 1 after a node's failure."""
    # TorchX gets the signal too, and ends; its last lines are still to come.
    signal.signal(signal.SIGTERM, lambda *_: None)
    logs: dict[Path, BinaryIO] = {}
    deadline, failed = float("inf"), False
    with tempfile.TemporaryFile() as messages:
        torchx = subprocess.Popen(command, stderr=messages)
        while True:
            ended = torchx.poll() is not None  # asked first: what was written before the end is read after it
            for path in sorted(Path(folder).glob(LOGS)):
                if path not in logs:
                    logs[path] = path.open("rb")
                for line in lines(logs[path], ended):
                    sys.stdout.buffer.write(
                        f"[node-{path.parent.name}]<{path.stem}>: ".encode() + line + b"\n"
                    )
                    if not failed and FAILURE.match(line):
                        deadline, failed = time.monotonic() + FAILURE_SECONDS, True
            sys.stdout.flush()
            if ended:
                break
            if time.monotonic() > deadline:
                torchx.terminate()
                deadline = float("inf")
            time.sleep(POLL_SECONDS)
        messages.seek(0)
        if torchx.returncode != 0:
            texts = messages.read().decode(errors="replace").splitlines()
            print(*(text for text in texts if not re.match(r"worker/\d+ ", text)), sep="\n", file=sys.stderr)
    return torchx.returncode or int(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
