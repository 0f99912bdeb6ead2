"""Commands that run as they would without the workshop: `torchrun`, `horovodrun`, `mpirun`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from comparison import BenchmarkError

from workshop_utils.training import data

LAST_LINES = 8  # of a command that failed, in the message
PATIENCE_SECONDS = 120.0
JOBS = Path(__file__).parents[2] / "jobs"


def program(name: str) -> str:
    """The path of a program of this environment.

    Raises:
        BenchmarkError: if it is not there.
    """
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.is_file():
        raise BenchmarkError(f"there is no {name} in this environment, {sys.prefix}")
    return str(path)


def run(command: Sequence[str], environment: Mapping[str, str]) -> None:
    """Run `command` to its end; nothing of it is left, whatever happens.

    Raises:
        BenchmarkError: if it ends badly, or not within PATIENCE_SECONDS; the message has its last lines.
    """
    name = Path(command[0]).name
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(f"{name} did not end within {PATIENCE_SECONDS:.0f} s") from None
        finally:
            process.terminate()  # which launchers pass on to their ranks, which may have groups of their own
            with suppress(subprocess.TimeoutExpired):
                process.wait(5.0)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if code != 0:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
            raise BenchmarkError("\n  ".join([f"{name} ended with {code}; its last lines:", *lines]))


def environment(folder: Path) -> dict[str, str]:
    """What a launched job finds too, as far as it changes how a script starts."""
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "TMPDIR": str(folder),  # where torchrun leaves a folder of logs
        "WORKSHOP_DATA": str(data.prepare("digits")),
        "WORKSHOP_MODEL": str(folder / "model"),
        "WORKSHOP_CHECKPOINTS": tempfile.mkdtemp(dir=folder),  # a run would go on from that of another
    }
