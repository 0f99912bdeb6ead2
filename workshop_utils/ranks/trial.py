"""Two ranks of each installed framework, tried: by `workshop doctor --try`, and in the background of `workshop lab`."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from workshop_utils import network
from workshop_utils.cache import cache_folder
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.local.launcher import start
from workshop_utils.launchers.local.run import ProcessRun
from workshop_utils.ranks import on_ranks
from workshop_utils.setup.doctor import Finding, is_installed
from workshop_utils.setup.install import end_with

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


def in_background() -> None:
    """Try everything while this process lives, and print what fails, until all has worked in such an environment."""
    command = [sys.executable, "-m", __name__, str(os.getpid())]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)


def main(parent: int) -> None:
    """The background process of `parent`."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # a server that is importing is then ended, too
    end_with(parent)
    versions = sorted(f"{each.name} {each.version}" for each in metadata.distributions())
    key = hashlib.sha256("\n".join([sys.prefix, *versions]).encode()).hexdigest()
    passed = cache_folder() / f"tried-{key[:12]}"
    if passed.exists():
        return
    # Ten minutes each, since the learner's cells come first.
    failures = [str(each) for each in results("10min") if each.state != "good"]
    if failures:
        print(*failures, "`workshop doctor --try` tries it again.", sep="\n", file=sys.stderr)
        return
    with contextlib.suppress(OSError):
        passed.parent.mkdir(parents=True, exist_ok=True)
        passed.touch()


if __name__ == "__main__":
    main(int(sys.argv[1]))
