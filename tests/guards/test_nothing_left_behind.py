"""However a `workshop launch` ends, nothing of it stays: no process, no file, no shared memory, no network namespace.

Real commands, jobs of this repository, and real signals; the fixture `nothing_is_left` looks for what stays.
"""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from adapter import ROOT
from conftest import eventually, marked_processes, network_namespaces, shared_memory, with_horovod

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="processes are told apart by /proc"),
]

WORKSHOP = Path(sys.executable).with_name("workshop")
# Jobs that end by themselves, and jobs that go on until they are ended: these communicate, but few load an optimizer.
SHORT = {
    "ring": ("jobs/digits_ring", "-a", "epochs=1"),
    "torch_ddp": ("jobs/mnist_torch_ddp", "-a", "epochs=1"),
    "horovod": ("jobs/horovod_fusion",),
    "mpi": ("jobs/digits_ring/mpi.yaml", "-a", "epochs=1"),
}
ENDLESS = {
    "ring": ("jobs/digits_ring", "-a", "epochs=1000000", "--timeout", "5min"),
    "torch_ddp": ("jobs/mnist_torch_ddp", "-a", "epochs=1000000", "--timeout", "5min"),
    "horovod": ("jobs/horovod_fusion", "-a", "repeats=100000000", "--timeout", "5min"),
    "mpi": ("jobs/digits_ring/mpi.yaml", "-a", "epochs=1000000", "--timeout", "5min"),
}
START_SECONDS = 90.0  # in which a busy machine starts every worker
ENDING_SECONDS = 90.0  # in which a busy machine ends what is to be ended
RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")


SLEEP = """
import os, pathlib, time
print("ready", flush=True)
pathlib.Path(__file__).with_name("ready-" + os.environ["RANK"]).touch()
time.sleep(600)
"""


@pytest.fixture(autouse=True)
def _nothing_else_is_left(nothing_is_left):
    """Fails the test that leaves a file, shared memory or a network; PyTorch keeps a cache for each user."""
    before = shared_memory() | network_namespaces()

    def left():
        files = [each.name for each in nothing_is_left.iterdir() if "torchinductor_" not in each.name]
        return [*files, *((shared_memory() | network_namespaces()) - before), *marked_processes().values()]

    yield
    assert eventually(lambda: not left(), ENDING_SECONDS), left()


def none_lives():
    """Whether nothing is alive any more that a test has started; it gets time for its end."""
    return eventually(lambda: not marked_processes(), ENDING_SECONDS)


def ranks_below(process):
    """The process of each rank below `process` that runs a job's script."""
    found = {}
    for each in psutil.Process(process.pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            variables, command = each.environ(), each.cmdline()
            rank = next((variables[name] for name in RANKS if name in variables), None)
            runs_script = any(word.endswith("/train.py") for word in command) and "mpirun" not in command[0]
            if rank is not None and runs_script:
                found[int(rank)] = each.pid
    return found


def sleeping_job(folder):
    """A job of two workers that say that they are ready, leave a file that says so, too, and then do nothing."""
    job = folder / "sleeps"
    job.mkdir()
    (job / "job.yaml").write_text("name: sleeps\nstrategy: torch_ddp\nworkers: 2\n")
    (job / "train.py").write_text(SLEEP)
    return job


class Command:
    """`workshop launch` in a process of its own; what it says goes to files, so that nobody has to read along."""

    def __init__(self, folder, job, *options):
        self.out, self.err = folder / "out", folder / "err"
        words = [str(WORKSHOP), "launch", job, "--workers", "2", *options]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(words, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=out, stderr=err)

    def wait_until_it_trains(self):
        """Wait until a step of each worker has been reported; the processes by rank."""
        return self.wait_until(
            lambda: all(re.search(rf"\[worker-{rank}\] .*step", self.out.read_text()) for rank in (0, 1))
        )

    def wait_until(self, condition):
        """Wait until both workers have got as far as `condition` says; the processes by rank."""
        if not eventually(lambda: self.process.poll() is not None or condition(), START_SECONDS):
            self.process.kill()
            self.process.wait()
            pytest.fail(f"the workers do not start: {self.said()}")
        assert self.process.poll() is None, f"it has ended: {self.said()}"
        ranks = ranks_below(self.process)
        assert sorted(ranks) == [0, 1]
        return ranks

    def end(self):
        """Its exit code, once it has ended."""
        try:
            return self.process.wait(ENDING_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            pytest.fail(f"it did not end: {self.said()}")

    def said(self):
        return f"{self.out.read_text()[-2000:]}\n{self.err.read_text()[-2000:]}"


@pytest.mark.parametrize("strategy", [*map(with_horovod, SHORT)])
def test_a_run_that_ends_leaves_nothing(strategy, tmp_path):
    command = Command(tmp_path, *SHORT[strategy])
    assert command.process.wait(START_SECONDS) == 0, command.said()
    assert "succeeded" in command.out.read_text()


@pytest.mark.parametrize("strategy", [*map(with_horovod, SHORT)])
def test_a_killed_rank_is_named_and_takes_all_others_with_it(strategy, tmp_path):
    command = Command(tmp_path, *ENDLESS[strategy])
    os.kill(command.wait_until_it_trains()[1], signal.SIGKILL)
    assert command.end() == 1
    said = command.err.read_text()
    assert "worker-1" in said.splitlines()[0], said
    assert "SIGKILL" in said.splitlines()[0], said
    assert "Traceback" not in said.splitlines()[0]


# Where the machine makes no namespaces, links are slow in the message passing.
NETWORK = ("--network", "100Mbit")


@pytest.mark.parametrize(
    ("strategy", "sent", "network"),
    [
        *(with_horovod(strategy, signal.SIGKILL, ()) for strategy in ENDLESS),
        ("ring", signal.SIGTERM, ()),
        *((strategy, signal.SIGINT, ()) for strategy in ("ring", "mpi")),
        *(("ring", sent, NETWORK) for sent in (signal.SIGINT, signal.SIGKILL)),
    ],
)
def test_a_command_that_a_signal_ends_leaves_nothing(strategy, sent, network, tmp_path):
    command = Command(tmp_path, *ENDLESS[strategy], *network)
    command.wait_until_it_trains()
    assert ("network: 100Mbit" in command.out.read_text()) == bool(network)
    command.process.send_signal(sent)
    code = command.end()
    assert code != 0
    assert code == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}.get(sent, code), command.said()
    if sent == signal.SIGINT:
        assert "nothing is left running" in command.err.read_text()


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with the command"])
def test_what_started_the_ranks_takes_them_along_when_it_is_killed(alone, tmp_path, nothing_is_left):
    """Ranks that only sleep: others might end of themselves, when nobody takes what they print."""
    job = sleeping_job(tmp_path)
    command = Command(tmp_path, str(job))
    parent = psutil.Process(command.wait_until(lambda: len(list(job.glob("ready-*"))) == 2)[0]).parent()
    assert parent.pid != command.process.pid, (
        "the command starts ranks itself: then another test has this case"
    )
    if alone:
        parent.kill()
        assert command.end() == 1, command.said()
        assert "the process that watches over it was killed" in command.said()
        return
    for process in (command.process.pid, parent.pid):  # neither may see the other die
        os.kill(process, signal.SIGSTOP)
    for process in (command.process.pid, parent.pid):
        os.kill(process, signal.SIGKILL)
    command.process.wait()
    assert none_lives(), marked_processes()
    for path in nothing_is_left.iterdir():  # nobody is left who could remove the run's folder
        shutil.rmtree(path)
