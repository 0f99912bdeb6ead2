"""Runs `torchx run`, and prints the lines of each node as they come: `[node-1]<stderr>: text`.

    python -I -S follow.py FOLDER TORCHX ARGUMENT...

TorchX's scheduler `local_cwd` writes the two streams of each node to files in FOLDER (its option log_dir). TorchX also
prints both on its own standard error, where they are mixed, and a long burst of output is torn in the middle of lines.
So this program reads the files. Of what TorchX prints it passes on the handle, and after a failure the rest.
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
LOGS = "*/*/worker/*/std*.log"  # by session, application, role, node, stream


def lines(file: BinaryIO, ended: bool) -> Iterator[bytes]:
    """The lines that `file` has got since the last call; the last one is left for the next call until it is whole."""
    while line := file.readline():
        if not (ended or line.endswith(b"\n")):
            file.seek(-len(line), os.SEEK_CUR)
            return
        yield line.rstrip(b"\n")


def main(folder: str, *command: str) -> int:
    """Run the command to its end; its exit code."""
    signal.signal(
        signal.SIGTERM, lambda *_: None
    )  # TorchX gets it too, and ends; its last lines are still to come
    logs: dict[Path, BinaryIO] = {}
    with tempfile.TemporaryFile() as account:
        torchx = subprocess.Popen(command, stderr=account)
        while True:
            ended = torchx.poll() is not None  # asked first: what was written before the end is read after it
            for path in sorted(Path(folder).glob(LOGS)):
                if path not in logs:
                    logs[path] = path.open("rb")
                tag = f"[node-{path.parent.name}]<{path.stem}>: ".encode()
                for line in lines(logs[path], ended):
                    sys.stdout.buffer.write(tag + line + b"\n")
            sys.stdout.flush()
            if ended:
                break
            time.sleep(POLL_SECONDS)
        account.seek(0)
        if torchx.returncode != 0:
            said = account.read().decode(errors="replace").splitlines()
            print(*(line for line in said if not re.match(r"worker/\d+ ", line)), sep="\n", file=sys.stderr)
    return torchx.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
