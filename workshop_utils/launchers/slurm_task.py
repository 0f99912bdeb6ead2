"""Runs one process of a job on Slurm: `python slurm_task.py COMMAND...`.

In a task of `srun` it first sets what differs from task to task: line N of `tasks.jsonl`, beside this file, holds the
variables of task N, with `{node0}` and `{port0}` for what only the started job knows. A line `null` is a task too many,
since Slurm starts the same number on each node.

It is a subreaper (prctl(2)), as the init process of a container is: what the command leaves running, even in a session
of its own, becomes its child. So Slurm finds it when it ends the job, and this program ends it after the command. It
needs the standard library alone.
"""

import contextlib
import ctypes
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36


def own_variables() -> dict[str, str] | None:
    """What this task alone is told; nothing in the batch shell, which is no task; None where there is no work."""
    if "SLURM_STEP_ID" not in os.environ:
        return {}
    table = Path(__file__).with_name("tasks.jsonl").read_text(encoding="utf-8").splitlines()
    variables = json.loads(table[int(os.environ["SLURM_PROCID"])])
    if variables is None:
        return None
    nodes, port = os.environ["NODES"].split(), int(os.environ["PORT"])

    def fill(word: re.Match[str]) -> str:
        return nodes[int(word[2])] if word[1] == "node" else str(port + int(word[2]))

    return {name: re.sub(r"\{(node|port)(\d+)\}", fill, value) for name, value in variables.items()}


def end_children() -> None:
    """End whatever the command has left running."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(FileNotFoundError, ChildProcessError):
        while True:
            for pid in children.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            os.wait()


def main() -> None:
    """Run the command, and end as it does."""
    variables = own_variables()
    if variables is None:
        return
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda *_: None)  # Slurm sends it to the command as well, which decides
    code = subprocess.Popen(sys.argv[1:], env={**os.environ, **variables}).wait()
    end_children()
    if code < 0:  # by the same signal, so that srun tells it
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
