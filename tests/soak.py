"""A thousand launches over all strategies, and 500 calls of `on_ranks`, most of which do not end by themselves.

    python tests/soak.py --launches 1000 --calls 500 --seed 0

Each has a fate: it runs to its end, is stopped, loses a process to SIGKILL, or its owner (for a launch a `workshop
launch` in a process of its own) is interrupted or killed. After each, nothing of it may be left: no process, no port,
no network namespace, no shared memory, no folder; and none may take longer than its time-out. It stops at the first
that leaves something.
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
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
from conftest import eventually, marked_processes, network_namespaces, reserved_ports, shared_memory

from workshop_utils import on_ranks
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local, warm
from workshop_utils.network import Network
from workshop_utils.ranks import RanksFailed
from workshop_utils.runs import RunState

JOBS = Path(__file__).parents[1] / "jobs"
WORKSHOP = Path(sys.executable).with_name("workshop")
TIMEOUT_SECONDS = 60
ENDING_SECONDS = 15.0  # that a machine full of work may take to end what is to be ended
NETWORK = Network(bandwidth="1Gbit")


# Jobs to launch, and about how many seconds a whole run of each takes.
KINDS = {
    "mnist_torch_ddp": 2.0,
    "digits_ring": 1.5,
    "digits_ring/parameter_server.yaml": 1.5,
    "digits_ring/mpi.yaml": 3.0,
    "mnist_horovod": 5.0,
    "digits_horovod_elastic": 6.0,
    "mnist_tensorflow": 8.0,
    "mnist_tensorflow/parameter_server.yaml": 8.0,
}
NETWORKED = ("mnist_torch_ddp", "digits_ring")
# Fates of a launch, in the last two of which the owner is another process, and of a call of `on_ranks`.
LAUNCHES = ("end", "stop", "process killed", "owner interrupted", "owner killed")
CALLS = ("end", "process killed", "interrupted")


class Left(Exception):
    """Something of a run is still there, or it was not as its fate says."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance, began = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        root = Path(folder)
        before = what_is_there(root)
        for number in range(given.launches + given.calls):
            subject, fate, act = drawn(chance, is_launch=number < given.launches)
            try:
                act()
                look(root, before)
            except Left as left:
                sys.exit(f"number {number}, {subject}, {fate}: {left}")
            print(".", end="", flush=True)
    print(
        f"\n{given.launches} launches, {given.calls} calls, {time.monotonic() - began:.0f} s: nothing was left"
    )


def drawn(chance: random.Random, is_launch: bool) -> tuple[str, str, Callable[[], None]]:
    """What is done next, its fate, and how."""
    fate = chance.choice(LAUNCHES if is_launch else CALLS)
    if is_launch:
        name = chance.choice(list(KINDS))
        launch = launch_elsewhere if fate.startswith("owner ") else launch_here
        return name, fate, lambda: launch(name, fate, chance)
    framework = "torch" if chance.random() < 0.2 else None
    network = "1Gbit" if chance.random() < 0.3 else None
    return f"on_ranks, {framework}", fate, lambda: call(fate, framework, network, chance)


def call(fate: str, framework: str | None, network: str | None, chance: random.Random) -> None:
    """A call of `on_ranks` whose ranks reduce arrays, and which a thread disturbs at some moment."""

    def program(group):  # type: ignore[no-untyped-def]
        for _ in range(3 if fate == "end" else 100):
            if framework:
                import torch

                group.all_reduce(torch.ones(1000))
            else:
                ring_all_reduce(group, np.ones(1000))
            time.sleep(0.01)

    disturbances: dict[str, Callable[[], None]] = {
        "process killed": lambda: kill_a_process(chance),
        "interrupted": lambda: os.kill(os.getpid(), signal.SIGINT),
    }
    disturbance = threading.Timer(chance.uniform(0, 0.4), disturbances.get(fate, lambda: None))
    ranks, timeout = chance.randint(1, 4), f"{TIMEOUT_SECONDS}s"
    try:
        disturbance.start()
        try:
            on_ranks(ranks, program, network=network, framework=framework, timeout=timeout)
        finally:
            disturbance.join()
    except KeyboardInterrupt:
        if fate != "interrupted":
            raise
    except (RanksFailed, warm.WarmServerError) as error:
        if fate != "process killed":
            raise Left(f"its end was not as its fate: {error}") from None


def kill_a_process(chance: random.Random) -> None:
    """End a rank, its supervisor, or the warm server that both were forked from."""
    with contextlib.suppress(psutil.NoSuchProcess, IndexError):  # there is none yet
        chance.choice(psutil.Process().children(recursive=True)).kill()


def launch_here(name: str, fate: str, chance: random.Random) -> None:
    arguments = {} if name == "digits_horovod_elastic" else {"epochs": 1}
    fields = {"workers": chance.randint(2, 3), "arguments": arguments, "timeout": f"{TIMEOUT_SECONDS}s"}
    network = NETWORK if name in NETWORKED and chance.random() < 0.2 else None
    began = time.monotonic()
    launcher = Local(warm=chance.random() < 0.7, network=network)
    with launcher.launch(TrainingJob.load(JOBS / name).replace(**fields)) as run:
        if fate != "end":
            time.sleep(chance.uniform(0, KINDS[name]))
            run.stop() if fate == "stop" else kill_a_process(chance)
        if not eventually(lambda: run.state is not RunState.RUNNING, TIMEOUT_SECONDS + ENDING_SECONDS):
            raise Left(f"it still runs {time.monotonic() - began:.0f} s after its launch, past its time-out")
    if fate == "end" and run.state is not RunState.SUCCEEDED:
        raise Left(f"nobody hurt it, and it {run.state}: {run.reason}")
    if run.state is RunState.FAILED and not run.reason:
        raise Left("it failed and does not say why")


def launch_elsewhere(name: str, fate: str, chance: random.Random) -> None:
    command = [str(WORKSHOP), "launch", str(JOBS / name), "--workers", "2", "--timeout", "1min"]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    owner = subprocess.Popen(command, cwd=Path(__file__).parent, **quiet)
    time.sleep(chance.uniform(0.2, 1.5 + KINDS[name]))
    owner.send_signal(signal.SIGINT if fate == "owner interrupted" else signal.SIGKILL)
    try:
        owner.wait(TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        owner.kill()
        owner.wait()
        raise Left("the owner did not end when it was interrupted") from None


def what_is_there(root: Path) -> dict[str, set[object]]:
    """All that a run could leave."""
    processes = marked_processes()
    return {
        "processes": set(processes),
        "ports": set(reserved_ports()),
        "shared memory": shared_memory(),
        "network namespaces": {*network_namespaces(), *map(network_namespace, processes)} - {""},
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


if __name__ == "__main__":
    main()
