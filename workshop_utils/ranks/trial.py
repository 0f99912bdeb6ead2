"""Two ranks of each installed framework, tried: `workshop doctor --try`."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

from workshop_utils import network
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.local.launcher import start
from workshop_utils.launchers.local.run import ProcessRun
from workshop_utils.ranks import on_ranks
from workshop_utils.setup.doctor import Finding, is_installed

# Which lessons do not work without a framework; "ranks" have none.
LESSONS = {
    "ranks": "00, 02 to 04, 10, 14, 15",
    "torch": "00 to 02, 05, 07 to 10, 14, 16",
    "tensorflow": "06, 11, 12",
    "horovod": "05, 11",
    "mpi": "12",
}
HELD_UP = "a firewall, a VPN or another filter may hold up what this machine sends itself"
OTHERWISE = '"When something is wrong" in docs/setup.md may know it'


class _QuietRun(ProcessRun):
    keeps_logs = False


def results(timeout: str = "60s") -> Iterator[Finding]:
    """What became of two ranks of each framework that is installed, also over slow links where there are any."""
    for name, lessons in LESSONS.items():
        if name != "ranks" and not is_installed(name):
            continue
        is_slowed = name == "ranks" or (name != "mpi" and network.availability() != "none")
        where, finding = "", Finding(name, "good", f"two ranks meet{', also over slow links' * is_slowed}")
        try:
            _meet(name, None, timeout)
            if is_slowed:
                where, lessons = " over slow links", f"{lessons} in part"
                _meet(name, "100Mbit", timeout)
        except (ValueError, RuntimeError, OSError) as error:
            hints, lines = output.hints(str(error)), map(str.strip, str(error).splitlines())
            first, *rest = [line for line in lines if line not in hints and line.strip("-")]
            cause = f"{first} {rest[-1]}" if first.endswith(":") and rest else first  # with a traceback's end
            remedy = " ".join(hints) or (HELD_UP if "did not end within" in first else OTHERWISE)
            text = f"two ranks fail{where}, as would lessons {lessons}: {cause}"
            finding = Finding(name, "missing", text, remedy)
        yield finding


def _meet(name: str, link: str | None, timeout: str) -> None:
    """Start two ranks that form a group, meet at its barrier, and leave it."""
    if name != "mpi":
        on_ranks(2, _program, None, link, None if name == "ranks" else name, timeout)
        return
    with tempfile.TemporaryDirectory(prefix="workshop-trial-") as folder:
        Path(folder, "train.py").write_text("from mpi4py import MPI\nMPI.COMM_WORLD.barrier()\n")
        job = TrainingJob(name="trial", folder=Path(folder), strategy="mpi", workers=2, timeout=timeout)
        start(Local().reserve(job), _QuietRun, {}, None).wait()


def _program(_: object) -> None:
    """Nothing: ranks meet before they call it."""
