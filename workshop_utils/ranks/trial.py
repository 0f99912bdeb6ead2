"""Two ranks of each installed framework, tried: by `workshop doctor --try`, and in the background of `workshop lab`.

What a machine lacks is known without a trial (`setup.doctor`); what a firewall, a broken package or an odd network
does to ranks is not.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from workshop_utils import network
from workshop_utils.cache import cache_folder
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.local.launcher import start
from workshop_utils.launchers.local.run import ProcessRun
from workshop_utils.ranks import on_ranks
from workshop_utils.setup.doctor import Finding, is_installed
from workshop_utils.setup.install import end_with

SLOW = "100Mbit"
HELD_UP = "a firewall, a VPN or another filter may hold up what this machine sends itself"
OTHERWISE = '"When something is wrong" in docs/setup.md may know it'
MPI = "from mpi4py import MPI\nprint(MPI.COMM_WORLD.allreduce(1.0))\n"


def _ring(communicator: Any) -> float:
    array = np.ones(1000)
    ring_all_reduce(communicator, array)
    return float(array[0])


def _torch(dist: Any) -> float:
    import torch

    tensor = torch.ones(1000)
    dist.all_reduce(tensor)
    return float(tensor[0])


def _horovod(hvd: Any) -> float:
    import torch

    return float(hvd.allreduce(torch.ones(1000), op=hvd.Sum)[0])


def _tensorflow(strategy: Any) -> float:
    import tensorflow as tf

    def replica() -> Any:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.ones(1000))

    return float(tf.function(lambda: strategy.run(replica))()[0])


# By framework ("ranks" is none): how it adds up a one of each rank, and which lessons do not work without.
TRIALS: dict[str, tuple[Callable[[Any], float] | None, str]] = {
    "ranks": (_ring, "00, 02 to 04, 10, 14, 15"),
    "torch": (_torch, "01, 02, 05, 07 to 10, 14"),
    "tensorflow": (_tensorflow, "06, 11, 12"),
    "horovod": (_horovod, "05, 11"),
    "mpi": (None, "12"),
}


class _QuietRun(ProcessRun):
    keeps_logs = False


def results(timeout: str = "60s") -> Iterator[Finding]:
    """What became of two ranks of each framework that is installed, also over slow links where there are any."""
    for name in TRIALS:
        if name == "ranks" or is_installed(name):
            yield _result(name, timeout)


def _result(name: str, timeout: str) -> Finding:
    is_slowed = name == "ranks" or (name != "mpi" and network.availability() != "none")
    for link in (None, SLOW) if is_slowed else (None,):
        try:
            sums = _sums(name, link, timeout)
            if sums == [2.0, 2.0]:
                continue
            reason = f"the sum of their two ones is {sums}"
        except (ValueError, RuntimeError, OSError) as error:
            reason = str(error)
        where, parts = (" over slow links", "parts of ") if link else ("", "")
        hints = output.hints(reason)
        first, *rest = [
            line.strip() for line in reason.splitlines() if line not in hints and line.strip(" -")
        ]
        cause = (
            f"{first} {rest[-1]}" if first.endswith(":") and rest else first
        )  # with the end of the traceback
        remedy = " ".join(hints) or (HELD_UP if "did not end within" in first else OTHERWISE)
        lessons = f"{parts}lessons {TRIALS[name][1]}"
        return Finding(name, "missing", f"two ranks{where} fail, as would {lessons}: {cause}", remedy)
    return Finding(name, "good", f"two ranks work together{', also over slow links' if is_slowed else ''}")


def _sums(name: str, link: str | None, timeout: str) -> list[float]:
    program, _ = TRIALS[name]
    if program is not None:
        return on_ranks(2, program, None, link, None if name == "ranks" else name, timeout).values
    with tempfile.TemporaryDirectory(prefix="workshop-trial-") as folder:
        Path(folder, "train.py").write_text(MPI)
        job = TrainingJob(name="trial", folder=Path(folder), strategy="mpi", workers=2, timeout=timeout)
        run = start(Local().reserve(job), _QuietRun, {}, None)
        return [float(line.text) for line in run.wait().logs()]


def in_background() -> None:
    """Try everything once while this process lives, and print what fails; the environment that passed is remembered."""
    subprocess.Popen(
        [sys.executable, "-m", __name__, str(os.getpid())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )


def main(parent: int) -> None:
    """The background process of `parent`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a server that is importing is then ended, too
    end_with(parent)
    versions = sorted(f"{each.name} {each.version}" for each in metadata.distributions())
    machine = [*versions, sys.prefix, platform.platform(), network.availability()]
    passed = cache_folder() / "trials" / hashlib.sha256("\n".join(machine).encode()).hexdigest()[:12]
    if passed.exists():
        return
    failures = [
        finding for finding in results("10min") if finding.state != "good"
    ]  # the learner's cells come first
    for finding in failures:
        print(finding, file=sys.stderr)
    if failures:
        print("`workshop doctor --try` tries it again.", file=sys.stderr)
        return
    with contextlib.suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


if __name__ == "__main__":
    main(int(sys.argv[1]))
