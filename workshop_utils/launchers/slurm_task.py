"""Runs one process of a job on Slurm: `python slurm_task.py COMMAND...`.

This process is a subreaper (prctl(2)), as the init process of a container is: what the command leaves running, even in
a session of its own, becomes its child. So Slurm finds it when it ends the job, and this program ends it after the
command. It needs the standard library alone.
"""

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

if __name__ == "__main__":
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER
    signal.signal(signal.SIGTERM, lambda *_: None)  # Slurm sends it to the command, too
    code = subprocess.Popen(sys.argv[1:]).wait()
    left = Path(f"/proc/self/task/{os.getpid()}/children")
    with contextlib.suppress(FileNotFoundError, ChildProcessError):  # an old kernel; no child is left
        while True:
            for pid in left.read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            os.wait()
    if code:
        time.sleep(1)  # srun drops what has not yet arrived of the task's last lines when it ends the step
    if code < 0:  # end by the same signal, which srun then names
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    sys.exit(code)
