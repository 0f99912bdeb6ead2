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
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

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


class Kind(NamedTuple):
    """A job to launch: how often, and about how many seconds a whole run of it takes."""

    weight: int
    seconds: float
    workers: tuple[int, ...] = (2,)
    arguments: Mapping[str, int] = {"epochs": 1}
    networked: bool = False


KINDS = {
    "mnist_torch_ddp/single.yaml": Kind(15, 1.0, (1,)),
    "digits_ring": Kind(25, 1.5, (2, 3, 4), networked=True),
    "digits_ring/parameter_server.yaml": Kind(20, 1.5, (1, 2, 3), networked=True),
    "mnist_torch_ddp": Kind(15, 2.0, (2, 3), networked=True),
    "digits_ring/mpi.yaml": Kind(8, 3.0, (2, 3)),
    "mnist_horovod": Kind(6, 5.0),
    "digits_horovod_elastic": Kind(3, 6.0, arguments={}),
    "mnist_tensorflow": Kind(4, 8.0),
    "mnist_tensorflow/parameter_server.yaml": Kind(4, 8.0),
}
# Fates of a launch, in the last two of which the owner is another process, and of a call of `on_ranks`.
LAUNCHES = {"end": 40, "stop": 15, "process killed": 30, "owner interrupted": 8, "owner killed": 7}
CALLS = {"end": 20, "process killed": 40, "interrupted": 40}


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
    fates = LAUNCHES if is_launch else CALLS
    (fate,) = chance.choices(list(fates), list(fates.values()))
    if is_launch:
        (name,) = chance.choices(list(KINDS), [kind.weight for kind in KINDS.values()])
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
    kind = KINDS[name]
    fields = {"workers": chance.choice(kind.workers), "arguments": kind.arguments}
    job = TrainingJob.load(JOBS / name).replace(timeout=f"{TIMEOUT_SECONDS}s", **fields)
    network = NETWORK if kind.networked and chance.random() < 0.2 else None
    began = time.monotonic()
    with Local(warm=chance.random() < 0.7, network=network).launch(job) as run:
        if fate != "end":
            time.sleep(chance.uniform(0, kind.seconds))
            run.stop() if fate == "stop" else kill_a_process(chance)
        if not eventually(lambda: run.state is not RunState.RUNNING, TIMEOUT_SECONDS + ENDING_SECONDS):
            raise Left(f"it still runs {time.monotonic() - began:.0f} s after its launch, past its time-out")
    if fate == "end" and run.state is not RunState.SUCCEEDED:
        raise Left(f"nobody hurt it, and it {run.state}: {run.reason}")
    if run.state is RunState.FAILED and not run.reason:
        raise Left("it failed and does not say why")


def launch_elsewhere(name: str, fate: str, chance: random.Random) -> None:
    kind = KINDS[name]
    command = [str(WORKSHOP), "launch", str(JOBS / name), "--workers", str(chance.choice(kind.workers))]
    command += ["--timeout", "1min"]
    command += [part for name, value in kind.arguments.items() for part in ("-a", f"{name}={value}")]
    end(command, fate, chance.uniform(0.2, 1.5 + kind.seconds))


def end(command: list[str], fate: str, seconds: float) -> None:
    """Start `command`, and interrupt or kill it after `seconds`."""
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    owner = subprocess.Popen(command, cwd=Path(__file__).parent, **quiet)
    time.sleep(seconds)
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
