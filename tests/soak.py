"""A thousand launches over all strategies, and 500 calls of `on_ranks`, most of which do not end by themselves.

    python tests/soak.py --launches 1000 --calls 500 --seed 0

Each has a fate: it runs to its end, is stopped, meets its time limit, loses a process to SIGKILL, or its owner (for a
launch a `workshop launch` in a process of its own) is interrupted or killed. After each, nothing of it may be left: no
process, no port, no network namespace, no shared memory, no folder; and none may take longer than its time-out. Ends
with 1 where something was.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
from conftest import eventually, mapped_shared_memory, marked_processes, reserved_ports

from workshop_utils import on_ranks
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local, warm
from workshop_utils.network import Network
from workshop_utils.ranks import RanksFailed
from workshop_utils.runs import Run, RunState

JOBS = Path(__file__).parents[1] / "jobs"
WORKSHOP = Path(sys.executable).with_name("workshop")
TIMEOUT_SECONDS = 60
ENDING_SECONDS = 15.0  # that a machine full of work may take to end what is to be ended
NETWORK = Network(bandwidth="1Gbit")


@dataclass(frozen=True)
class Kind:
    """A job to launch; `weight` is how often, `seconds` about how long a whole run of it takes."""

    job: str
    weight: int
    seconds: float
    workers: tuple[int, ...] = (2, 3)
    arguments: tuple[tuple[str, int], ...] = ()
    networked: bool = False


KINDS = (
    Kind("mnist_single", 15, 1.0, (1,), (("epochs", 1),)),
    Kind("digits_ring", 25, 1.5, (2, 3, 4), (("epochs", 1),), networked=True),
    Kind("digits_parameter_server", 20, 1.5, (1, 2, 3), (("epochs", 1),), networked=True),
    Kind("mnist_torch_ddp", 15, 2.0, (2, 3), (("epochs", 1),), networked=True),
    Kind("mnist_mpi", 8, 3.0, (2, 3), (("epochs", 1),)),
    Kind("mnist_horovod", 6, 5.0, (2,), (("epochs", 1),)),
    Kind("digits_horovod_elastic", 3, 6.0, (2,)),
    Kind("mnist_multi_worker_mirrored", 4, 8.0, (2,), (("epochs", 1),)),
    Kind("mnist_parameter_server", 4, 8.0, (2,), (("epochs", 1),)),
)
# Fates of a run that this process owns, and of one whose owner is another process.
HERE = {"end": 40, "stop": 15, "worker killed": 20, "supervisor killed": 10}
ELSEWHERE = {"owner interrupted": 8, "owner killed": 7}
# Fates of a call of `on_ranks`; the last two are those of a process that does nothing but call.
CALLS = {
    **{"end": 20, "error": 10, "time limit": 10, "process killed": 20, "interrupted": 20},
    **{"owner interrupted": 10, "owner killed": 10},
}
OWNER = """
import sys
from soak import call
call(3, "for ever", network=sys.argv[1] or None, framework=sys.argv[2] or None)
"""


class Left(Exception):
    """Something of a run is still there, or it was not as its fate says."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance = random.Random(given.seed)
    counted: Counter[tuple[str, str]] = Counter()
    misses = []
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        root = Path(folder)
        before = what_is_there(root)
        for number in range(given.launches + given.calls):
            subject, fate, act = drawn(chance, is_launch=number < given.launches)
            try:
                act()
                counted[subject, fate] += 1
                print(".", end="", flush=True)
                look(root, before)
            except Left as left:
                misses.append(f"number {number}, {subject}, {fate}: {left}")
                print(f"\n{misses[-1]}", flush=True)
                clear(before)
    print()
    for (subject, fate), count in sorted(counted.items()):
        print(f"{subject:<30} {fate:<20} {count:4}")
    seconds = time.monotonic() - began
    print(
        f"{given.launches} launches, {given.calls} calls, {seconds:.0f} s; {len(misses)} left something or hung"
    )
    return 1 if misses or not counted else 0


def drawn(chance: random.Random, is_launch: bool) -> tuple[str, str, Callable[[], None]]:
    """What is done next, its fate, and how."""
    fates = HERE | ELSEWHERE if is_launch else CALLS
    (fate,) = chance.choices(list(fates), list(fates.values()))
    if is_launch:
        (kind,) = chance.choices(KINDS, [kind.weight for kind in KINDS])
        launch = launch_elsewhere if fate in ELSEWHERE else launch_here
        return kind.job, fate, lambda: launch(kind, fate, chance)
    framework = "torch" if chance.random() < 0.2 else None
    network = "1Gbit" if chance.random() < 0.3 else None
    make = call_elsewhere if fate in ELSEWHERE else call_here
    return f"on_ranks, {framework}", fate, lambda: make(fate, framework, network, chance)


def call_here(fate: str, framework: str | None, network: str | None, chance: random.Random) -> None:
    """A call of `on_ranks` of this process, which a thread disturbs at some moment."""
    ranks, disturbance = chance.randint(1, 4), None
    if fate == "process killed":
        disturbance = threading.Timer(chance.uniform(0, 0.4), kill_a_rank, (chance,))
    elif fate == "interrupted":
        disturbance = threading.Timer(chance.uniform(0, 0.4), os.kill, (os.getpid(), signal.SIGINT))
    reason = ""
    try:
        if disturbance is not None:
            disturbance.start()
        try:
            call(ranks, fate if disturbance is None else "a second", network=network, framework=framework)
        finally:
            if disturbance is not None:
                disturbance.join()
    except KeyboardInterrupt:
        if fate != "interrupted":
            raise
    except RanksFailed as error:
        reason = str(error)
    expected = {
        "end": not reason,
        "error": reason.startswith("rank 0 of"),
        "time limit": reason.startswith("the program did not end"),
        "interrupted": not reason,
    }
    if not expected.get(fate, True):
        raise Left(f"its end was not as its fate: {reason or 'nothing was raised'}")


def call(ranks: int, what: str, network: str | None, framework: str | None) -> None:
    """Ranks that reduce arrays until `what` is to happen to them."""

    def program(group):  # type: ignore[no-untyped-def]
        rank = group.get_rank() if framework else group.rank
        for step in range({"end": 3, "a second": 100}.get(what, 10**9)):
            if what == "error" and rank == 0 and step == 3:
                raise ValueError("as it is to be")
            if framework:
                import torch

                group.all_reduce(torch.ones(1000))
            else:
                ring_all_reduce(group, np.ones(1000))
            time.sleep(0.01)

    timeout = "200ms" if what == "time limit" else f"{TIMEOUT_SECONDS}s"
    on_ranks(ranks, program, network=network, framework=framework, timeout=timeout)


def kill_a_rank(chance: random.Random) -> None:
    """End a rank, its supervisor, or the warm server that both were forked from."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # there is none yet
        servers = [psutil.Process(server._process.pid) for server in [*warm.SERVERS.values()]]
        processes = [each for server in servers for each in (server, *server.children(recursive=True))]
        chance.choice(processes).kill()


def call_elsewhere(fate: str, framework: str | None, network: str | None, chance: random.Random) -> None:
    command = [sys.executable, "-c", OWNER, network or "", framework or ""]
    folder = Path(__file__).parent
    end(subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL), fate, chance.uniform(0.5, 3.0))


def launch_here(kind: Kind, fate: str, chance: random.Random) -> None:
    job = described(kind, chance)
    network = NETWORK if kind.networked and chance.random() < 0.2 else None
    began = time.monotonic()
    with Local(warm=chance.random() < 0.7, network=network).launch(job) as run:
        if fate != "end":
            time.sleep(chance.uniform(0, kind.seconds))
        if fate == "stop":
            run.stop()
        elif fate != "end":
            kill(run, fate, chance)
        if not eventually(lambda: run.state is not RunState.RUNNING, TIMEOUT_SECONDS + ENDING_SECONDS):
            raise Left(f"it still runs {time.monotonic() - began:.0f} s after its launch, past its time-out")
    if fate == "end" and run.state is not RunState.SUCCEEDED:
        raise Left(f"nobody hurt it, and it {run.state}: {run.reason}")
    if run.state is RunState.FAILED and not run.reason:
        raise Left("it failed and does not say why")


def kill(run: Run, victim: str, chance: random.Random) -> None:
    """End one process of `run` without asking; where none has started yet, there is nothing to end."""
    pids = [start["pid"] for start in run.starts]
    if not pids:
        return
    with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
        process = psutil.Process(chance.choice(pids))
        if victim == "supervisor killed":
            process = process.parent() or process
            if process.pid == os.getpid():
                return
        process.kill()


def launch_elsewhere(kind: Kind, fate: str, chance: random.Random) -> None:
    workers = chance.choice(kind.workers)
    command = [str(WORKSHOP), "launch", str(JOBS / kind.job), "--workers", str(workers), "--timeout", "1min"]
    command += [part for name, value in kind.arguments for part in ("-a", f"{name}={value}")]
    owner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    end(owner, fate, chance.uniform(0.2, 1.5 + kind.seconds))


def end(owner: subprocess.Popen[bytes], fate: str, seconds: float) -> None:
    """Interrupt or kill `owner` after `seconds`."""
    time.sleep(seconds)
    owner.send_signal(signal.SIGINT if fate == "owner interrupted" else signal.SIGKILL)
    try:
        owner.wait(TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        owner.kill()
        owner.wait()
        raise Left("the owner did not end when it was interrupted") from None


def described(kind: Kind, chance: random.Random) -> TrainingJob:
    job = TrainingJob.load(JOBS / kind.job)
    return job.replace(
        workers=chance.choice(kind.workers), arguments=dict(kind.arguments), timeout=f"{TIMEOUT_SECONDS}s"
    )


def what_is_there(root: Path) -> dict[str, set[object]]:
    """All that a run could leave."""
    processes = marked_processes()
    return {
        "processes": set(processes),
        "ports": set(reserved_ports()),
        # Less what other runs on this machine have mapped.
        "shared memory": {path.name for path in Path("/dev/shm").iterdir()} - set(mapped_shared_memory()),
        "network namespaces": {space for pid in processes if (space := network_namespace(pid))}
        | {path.name for path in Path("/run/netns").glob("*")},
        # PyTorch keeps one cache a user in the temporary folder, empty here, and no run of ours ends it.
        "folders": {path.name for path in root.iterdir() if not path.name.startswith("torchinductor_")},
    }


def network_namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""  # the process has ended


def look(root: Path, before: dict[str, set[object]]) -> None:
    """Raise Left for what is there and was not `before`, once it has had time to go."""

    def left() -> dict[str, set[object]]:
        found = {what: things - before[what] for what, things in what_is_there(root).items()}
        return {what: things for what, things in found.items() if things}

    if not eventually(lambda: not left(), ENDING_SECONDS):
        raise Left(f"left behind: {left()}, among the processes {marked_processes()}")


def clear(before: dict[str, set[object]]) -> None:
    """End what was left, so that the next launch is judged by itself."""
    for pid in set(marked_processes()) - before["processes"]:
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(int(pid)).kill()


if __name__ == "__main__":
    sys.exit(main())
