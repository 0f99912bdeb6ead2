"""A thousand launches over all strategies, 500 calls of `on_ranks`, and 300 cells on ranks that stay.

    python tests/soak.py --launches 1000 --calls 500 --cells 300 --seed 0

Most do not end by themselves. Each has a fate: it runs to its end, is stopped, loses a process to SIGKILL, or its owner
(perhaps in a process of its own) is interrupted or killed. After each, nothing of it may be left: no process, no port,
no network namespace, no shared memory, no folder; and none may take longer than its time-out. Ranks that stay must
still have what their cells have left in them. It stops at the first for which this does not hold.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from conftest import eventually, marked_processes, network_namespaces, reserved_ports, shared_memory

from workshop_utils import on_ranks, place
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local, warm
from workshop_utils.network import Network
from workshop_utils.ranks import RankGroup, RanksFailed
from workshop_utils.runs import RunState

JOBS = Path(__file__).parents[1] / "jobs"
WORKSHOP = Path(sys.executable).with_name("workshop")
TIMEOUT_SECONDS = 180  # that a launch may take on a machine full of work
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
# Fates of a launch, of a call of `on_ranks`, and of a cell on ranks that stay; "owner ..." is of another process.
LAUNCHES = ("end", "stop", "process killed", "owner interrupted", "owner killed")
CALLS = ("end", "process killed", "interrupted")
ENDS = {
    "rank killed": "killed by SIGKILL|could not be started",  # slow links may not find its network any more
    "rank killed before": "killed by SIGKILL",
    "supervisor killed": "the process that watches over it was killed",
    "time-out": "did not end within",
    "at the time-out": "did not end within",
}  # of ranks that stay, and what is said of them
CELLS = ("end",) * 8 + (
    *ENDS,
    "stop",
    "interrupted",
    "interrupted thrice",
    "owner interrupted",
    "owner killed",
)
GROUPS = 4  # that live at the same time

OWNER = """
from workshop_utils import rank_group

def program(communicator):
    global count
    count = globals().get("count", 0) + 1
    communicator.barrier()
    return count

with rank_group(2) as group:
    for count in range(1, 1_000_000):
        assert group.run(program).values == [count, count]
"""


@dataclass
class Staying:
    """Ranks that stay: the numbers that their cells have left in them, and what there is of them."""

    group: RankGroup
    numbers: list[int] = field(default_factory=list)
    things: set[tuple[str, object]] = field(default_factory=set)

    def killed(self, chance: random.Random, is_rank: bool) -> bool:
        """Kill a rank, or the supervisor of all; whether there was one."""
        try:
            rank = psutil.Process(chance.choice([*self.group._run.process_ids.values()]))  # type: ignore[union-attr]
            (rank if is_rank else rank.parent()).kill()  # type: ignore[union-attr]
        except (psutil.NoSuchProcess, IndexError, AttributeError):
            return False  # it has not started
        return True


class Left(Exception):
    """Something of a run is still there, or it was not as its fate says."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--launches", type=int, default=1000)
    parser.add_argument("--calls", type=int, default=500)
    parser.add_argument("--cells", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    chance, began = random.Random(given.seed), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-", ignore_cleanup_errors=True) as folder:
        tempfile.tempdir = os.environ["TMPDIR"] = folder
        before = what_is_there()
        staying = [Staying(drawn_group(chance)) for _ in range(GROUPS)]
        subjects = [
            *(given.launches * [drawn_launch]),
            *(given.calls * [drawn_call]),
            *(given.cells * [lambda chance: drawn_cell(staying, chance)]),
        ]
        for number, drawn in enumerate([*subjects, lambda _: ("all groups", "stop", lambda: stop(staying))]):
            subject, fate, act = drawn(chance)
            faulthandler.dump_traceback_later(TIMEOUT_SECONDS + 4 * ENDING_SECONDS, exit=True)
            try:
                act()
                look(before.union(*(each.things for each in staying)))
            except Left as left:
                sys.exit(f"number {number}, {subject}, {fate}: {left}")
            print(".", end="", flush=True)
        faulthandler.cancel_dump_traceback_later()
    counts = f"{given.launches} launches, {given.calls} calls, {given.cells} cells"
    print(f"\n{counts}, {time.monotonic() - began:.0f} s: nothing was left")


Drawn = tuple[str, str, Callable[[], None]]  # what is done next, its fate, and how


def drawn_launch(chance: random.Random) -> Drawn:
    fate, name = chance.choice(LAUNCHES), chance.choice(list(KINDS))
    launch = launch_elsewhere if fate.startswith("owner ") else launch_here
    return name, fate, lambda: launch(name, fate, chance)


def drawn_call(chance: random.Random) -> Drawn:
    framework = "torch" if chance.random() < 0.2 else None
    network = "1Gbit" if chance.random() < 0.3 else None
    fate = chance.choice(CALLS)
    return f"on_ranks, {framework}", fate, lambda: call(fate, framework, network, chance)


def drawn_cell(staying: list[Staying], chance: random.Random) -> Drawn:
    fate, each = chance.choice(CELLS), chance.choice(staying)
    if fate.startswith("owner "):
        command = [sys.executable, "-c", OWNER]
        return "rank_group", fate, lambda: disturb_owner(command, fate, chance.uniform(0.2, 3))
    return f"cell, {each.group.options}", fate, lambda: cell(fate, each, staying, chance)


def drawn_group(chance: random.Random) -> RankGroup:
    framework = chance.choices([None, "torch", "horovod"], [7, 2, 1])[0]
    return RankGroup(chance.randint(1, 4), "1Gbit" if chance.random() < 0.3 else None, framework, None)


def reduce(group: Any, framework: str | None, array: np.ndarray[Any, Any]) -> None:
    if framework is None:
        ring_all_reduce(group, array)
        return
    import torch

    if framework == "torch":
        group.all_reduce(torch.from_numpy(array))
    else:
        group.allreduce_(torch.from_numpy(array), op=group.Sum)


def call(fate: str, framework: str | None, network: str | None, chance: random.Random) -> None:
    """A call of `on_ranks` whose ranks reduce arrays, and which a thread disturbs at some moment."""

    def program(group: Any) -> None:
        for _ in range(3 if fate == "end" else 100):
            reduce(group, framework, np.ones(1000))
            time.sleep(0.01)

    disturbances: dict[str, Callable[[], object]] = {
        "process killed": lambda: kill_a_process(chance),
        "interrupted": interrupt,
    }
    ranks, timeout = chance.randint(1, 4), f"{TIMEOUT_SECONDS}s"
    error = error_of(
        lambda: on_ranks(ranks, program, network=network, framework=framework, timeout=timeout),
        *(disturbances.get(fate), chance.uniform(0, 0.4)),
    )
    if error and fate != {KeyboardInterrupt: "interrupted"}.get(type(error), "process killed"):
        raise Left(f"its end was not as its fate: {error}")


def cell(fate: str, each: Staying, staying: list[Staying], chance: random.Random) -> None:
    """A cell on ranks that stay, which adds a number to those that are there, and reduces."""
    ranks, _, framework, _ = each.group.options
    rounds = {"end": 3, "time-out": 10**9, "at the time-out": chance.randint(50, 150)}.get(fate, 100)
    absent = chance.randrange(ranks) if fate == "time-out" else None

    def program(group: Any, number: int) -> tuple[list[int], float]:
        numbers = vars(sys.modules["__main__"]).setdefault("numbers", [])
        numbers.append(number)
        if place.here().rank == absent:
            time.sleep(1000)
        for _ in range(rounds):
            array = np.full(1000, float(number))
            reduce(group, framework, array)
            time.sleep(0.01)
        return [*numbers], array[0]

    if fate == "stop":
        each.group.stop()
        staying[staying.index(each)] = Staying(drawn_group(chance))
        return
    if fate == "rank killed before":
        if not each.killed(chance, is_rank=True):
            return
        time.sleep(chance.choice([0, chance.uniform(0, 0.2)]))
    disturbances: dict[str, Callable[[], object]] = {
        "rank killed": lambda: each.killed(chance, is_rank=True),
        "supervisor killed": lambda: each.killed(chance, is_rank=False),
        "interrupted": interrupt,
        "interrupted thrice": lambda: [(interrupt(), time.sleep(0.08)) for _ in range(3)],
    }
    number, timeout = chance.randint(1, 1000), 1 if "time-out" in fate else TIMEOUT_SECONDS
    moment, began, results = chance.uniform(0, 0.6), time.monotonic(), []
    error = error_of(
        lambda: results.append(each.group.run(program, {"number": number}, f"{timeout}s")),
        *(disturbances.get(fate), moment),
    )
    seconds = time.monotonic() - began - (timeout if "time-out" in fate else moment)
    if error is None:
        each.numbers.append(number)
        if results[0].values != ranks * [(each.numbers, float(ranks * number))]:
            raise Left(f"its ranks have {results[0].values} after {each.numbers}")
        if fate in ("rank killed before", "time-out", "interrupted", "interrupted thrice"):
            raise Left("it ended well, which was not its fate")
        others = [other.things for other in staying if other is not each]
        each.things = each.things or what_is_there().difference(*others)
        return
    is_as_told = fate.startswith("interrupted") if isinstance(error, KeyboardInterrupt) else fate in ENDS
    if not is_as_told or not re.search(ENDS.get(fate, ""), str(error)):
        raise Left(f"its end was not as its fate: {error}")
    # A first cell may have to wait until a framework has been imported.
    if each.group.has_ranks or seconds > (ENDING_SECONDS if each.numbers else TIMEOUT_SECONDS):
        raise Left(f"its ranks took {seconds:.0f} s to end")
    each.numbers, each.things = [], set()


def stop(staying: list[Staying]) -> None:
    for each in staying:
        each.group.stop()
    staying.clear()


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def error_of(
    act: Callable[[], object], disturbance: Callable[[], object] | None, seconds: float
) -> BaseException | None:
    """Do `act`, which a thread disturbs after `seconds`; how it has failed, once nothing disturbs any more."""
    error: BaseException | None = None
    is_over = threading.Event()  # a thread whose `join` was interrupted counts as ended

    def disturb() -> None:
        if disturbance:
            disturbance()
        is_over.set()

    try:
        threading.Timer(seconds, disturb).start()
        act()
    except (KeyboardInterrupt, RanksFailed, warm.WarmServerError) as raised:
        error = raised.with_traceback(None)  # whose frames hold what they have reserved
    while not is_over.is_set():
        with contextlib.suppress(KeyboardInterrupt):
            is_over.wait()
    return error


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
    command = [
        str(WORKSHOP),
        "launch",
        str(JOBS / name),
        "--workers",
        "2",
        "--timeout",
        f"{TIMEOUT_SECONDS}s",
    ]
    disturb_owner(command, fate, chance.uniform(0.2, 1.5 + KINDS[name]))


def disturb_owner(command: list[str], fate: str, seconds: float) -> None:
    """Start a process that owns others, and after `seconds` interrupt or kill it."""
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


def what_is_there() -> set[tuple[str, object]]:
    """All that a run could leave, each with what it is."""
    processes, ours = marked_processes(), {"", network_namespace(os.getpid())}
    folders = [path.name for path in Path(tempfile.gettempdir()).iterdir()]
    found: dict[str, Iterable[object]] = {
        "process": processes,
        "port": reserved_ports(),
        "shared memory": shared_memory(),
        "network namespace": {*network_namespaces(), *map(network_namespace, processes)} - ours,
        # PyTorch keeps one cache a user in the temporary folder, empty here, and no run of ours ends it.
        "folder": [name for name in folders if not name.startswith("torchinductor_")],
    }
    return {(what, thing) for what, things in found.items() for thing in things}


def network_namespace(pid: int) -> str:
    try:
        return str(Path(f"/proc/{pid}/ns/net").readlink())
    except OSError:
        return ""  # the process has ended


def look(before: set[tuple[str, object]]) -> None:
    """Raise Left for what is there and was not `before`, once it has had time to go."""
    if not eventually(lambda: what_is_there() <= before, ENDING_SECONDS):
        left = what_is_there() - before
        raise Left(f"left behind: {left}, among the processes {marked_processes()}")


if __name__ == "__main__":
    main()
