"""Commands that run as they would without the workshop: `torchrun`, `mpirun`, `python`."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from workshop_utils.benchmarks.comparison import BenchmarkError
from workshop_utils.launchers import mpirun
from workshop_utils.processes.ports import PortReservation

LAST_LINES = 8  # of a command that failed, in the message
PATIENCE_SECONDS = 120.0
GRACE_SECONDS = 5.0


def program(name: str) -> str:
    """The path of a program of this environment.

    Raises:
        BenchmarkError: if it is not there.
    """
    path = Path(sysconfig.get_path("scripts")) / name
    if not path.is_file():
        raise BenchmarkError(f"there is no {name} in this environment, {sys.prefix}")
    return str(path)


@contextmanager
def running(command: Sequence[str], environment: Mapping[str, str]) -> Iterator[None]:
    """Run `command` beside the block, and wait for its end; nothing of it is left, whatever happens.

    Raises:
        BenchmarkError: if it ends badly, or not within PATIENCE_SECONDS; the message has its last lines.
    """
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
            yield
            code = process.wait(PATIENCE_SECONDS)
        except subprocess.TimeoutExpired:
            raise BenchmarkError(
                f"{Path(command[0]).name} did not end within {PATIENCE_SECONDS:.0f} s"
            ) from None
        finally:
            _end(process)
        if code != 0:
            output.seek(0)
            lines = output.read().decode(errors="replace").splitlines()[-LAST_LINES:]
            raise BenchmarkError(
                "\n  ".join([f"{Path(command[0]).name} ended with {code}; its last lines:", *lines])
            )


def measured_among_ranks(
    script: Path,
    size: int,
    ports: int,
    options: Sequence[str] = (),
) -> Any:
    """What `script` has measured, in JSON, when mpirun starts `size` ranks of it, of one thread each.

    The script is given `--secret`, `--results`, the file that rank 0 writes, and `--ports`, as many as asked for.
    `options` are mpirun's; the ranks' temporary folder is gone afterwards.

    Raises:
        BenchmarkError: if the processes cannot be started, or fail.
    """
    as_root = ["--allow-run-as-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []
    with (
        tempfile.TemporaryDirectory(prefix="workshop-bench-") as folder,
        PortReservation(ports) as reservation,
    ):
        results = Path(folder) / "results.json"
        command = [program("mpirun"), *as_root, *mpirun.SHARING, *options]
        command += ["-n", str(size), sys.executable, str(script), "--secret", secrets.token_hex(16)]
        command += ["--results", str(results), "--ports", *map(str, reservation.ports)]
        own = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCHINDUCTOR_CACHE_DIR": folder}
        with running(command, {**os.environ, **own, **mpirun.scratch_variables(Path(folder))}):
            pass
        return json.loads(results.read_text())


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:  # launchers pass this on to their ranks, which may have groups of their own
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE_SECONDS)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
