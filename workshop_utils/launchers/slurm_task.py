"""Runs one process of a job on Slurm: `python slurm_task.py COMMAND...`.

Line N of `tasks.jsonl`, beside this file, holds, as JSON, the variables that only task N of `srun` is told. A line
`null` is for a task without work: Slurm starts the same number of tasks on each node.

This process is a subreaper (prctl(2)), as the init process of a container is: what the command leaves running, even in
a session of its own, becomes its child. So Slurm finds it when it ends the job, and this program ends it after the
command. It needs the standard library alone.
"""

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
# srun ends the whole step when a task fails, and drops what it has not yet received of that task's last lines.
FLUSH_SECONDS = 1.0


def own_variables() -> dict[str, str] | None:
    """The variables of this task; none in the batch script, which is no task."""
    if "SLURM_STEP_ID" not in os.environ:
        return {}
    table = Path(__file__).with_name("tasks.jsonl").read_text(encoding="utf-8").splitlines()
    variables: dict[str, str] | None = json.loads(table[int(os.environ["SLURM_PROCID"])])
    return variables


def end_children() -> None:
    """End whatever the command has left running."""
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(FileNotFoundError, ChildProcessError):  # an old kernel; no child is left
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
    signal.signal(signal.SIGTERM, lambda *_: None)  # Slurm sends it to the command, too
    code = subprocess.Popen(sys.argv[1:], env={**os.environ, **variables}).wait()
    end_children()
    if code:
        time.sleep(FLUSH_SECONDS)
    if code < 0:  # end by the same signal, which srun then names
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)


if __name__ == "__main__":
    main()
