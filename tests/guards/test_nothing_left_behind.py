"""However a `workshop launch` ends, nothing of it stays: no process, no file, no shared memory, no network namespace.

Real commands, jobs of this repository, and real signals. A variable that every descendant inherits tells their
processes from all others on the machine.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import psutil
import pytest
from adapter import LAUNCH_IN_A_CELL, ROOT
from conftest import eventually, mapped_shared_memory
from jupyter_client.manager import KernelManager

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are told apart by /proc")

WORKSHOP = Path(sys.executable).with_name("workshop")
# Jobs that end by themselves, and jobs that go on until they are ended: these communicate, but few load an optimizer.
SHORT = {
    "ring": ("jobs/digits_ring", "-a", "epochs=1"),
    "torch_ddp": ("jobs/digits_torch_ddp",),
    "horovod": ("jobs/horovod_fusion",),
    "mpi": ("jobs/mnist_mpi", "-a", "epochs=1"),
}
ENDLESS = {
    "ring": ("jobs/digits_ring", "-a", "epochs=1000000", "--timeout", "5min"),
    "torch_ddp": ("jobs/digits_torch_ddp", "-a", "steps=100000000", "--timeout", "5min"),
    "horovod": ("jobs/horovod_fusion", "-a", "repeats=100000000", "--timeout", "5min"),
    "mpi": ("jobs/mnist_mpi", "-a", "epochs=1000000", "--timeout", "5min"),
}
START_SECONDS = 90.0  # in which a busy machine starts every worker
ENDING_SECONDS = 30.0  # in which a busy machine ends what is to be ended
RANKS = ("RANK", "HOROVOD_RANK", "OMPI_COMM_WORLD_RANK")


SLEEP = """
import os, pathlib, time
print("ready", flush=True)
pathlib.Path(__file__).with_name("ready-" + os.environ["RANK"]).touch()
time.sleep(600)
"""


class Trace:
    """What all processes of one test inherit, and what else of them can be seen on this machine."""

    def __init__(self, scratch):
        self.scratch = scratch
        self.mark = uuid.uuid4().hex
        self.environment = {**os.environ, "WORKSHOP_GUARD": self.mark, "TMPDIR": str(scratch)}
        self.environment.pop("PYTHONUNBUFFERED", None)
        self._memory, self._spaces = set(shared_memory()), network_namespaces()

    def processes(self):
        """The variables, by process id, of everything alive that carries the mark; zombies have none."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                words = (process / "environ").read_bytes().decode(errors="replace").split("\0")
            except OSError:
                continue  # it has just ended, or belongs to somebody else
            variables = dict(word.split("=", 1) for word in words if "=" in word)
            if variables.get("WORKSHOP_GUARD") == self.mark:
                found[int(process.name)] = variables
        return found

    def ranks(self):
        """The process of each rank that runs a job's script."""
        found = {}
        for pid, variables in self.processes().items():
            rank = next((variables[name] for name in RANKS if name in variables), None)
            try:
                command = psutil.Process(pid).cmdline()
            except psutil.Error:
                continue
            if (
                rank is not None
                and any(word.endswith("/train.py") for word in command)
                and "mpirun" not in command[0]
            ):
                found[int(rank)] = pid
        return found

    def left(self):
        """Everything that is there and should not be."""
        held = set(mapped_shared_memory())
        there = {
            "processes": {
                pid: psutil.Process(pid).cmdline() for pid in self.processes() if psutil.pid_exists(pid)
            },
            # PyTorch keeps one cache a user in the temporary folder, and no run of ours ends it.
            "files": [
                path.name for path in self.scratch.iterdir() if not path.name.startswith("torchinductor_")
            ],
            # Of other runs on this machine, which have theirs mapped while they live.
            "shared memory": sorted(set(shared_memory()) - self._memory - held),
            "network namespaces": sorted(network_namespaces() - self._spaces),
        }
        return {what: things for what, things in there.items() if things}

    def assert_nothing_is_left(self):
        def gone():
            try:
                return not self.left()
            except psutil.NoSuchProcess:
                return False

        assert eventually(gone, ENDING_SECONDS), f"left behind: {self.left()}"


def shared_memory():
    return [path.name for path in Path("/dev/shm").iterdir()]


def network_namespaces():
    """Those with a name, as `ip netns list` has them, and the links that a namespace's cable would have here."""
    named = {path.name for path in Path("/run/netns").glob("*")}
    return named | {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.fixture
def trace():
    """Fails the test that leaves something; ends it, so that the next test is judged by itself."""
    scratch = Path(
        tempfile.mkdtemp(prefix="guard-", dir="/tmp")
    )  # short, since Open MPI puts sockets below it
    trace = Trace(scratch)
    try:
        yield trace
        trace.assert_nothing_is_left()
    finally:
        for pid in trace.processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(scratch, ignore_errors=True)


def sleeping_job(folder):
    """A job of two workers that say that they are ready, leave a file that says so, too, and then do nothing."""
    job = folder / "sleeps"
    job.mkdir()
    (job / "job.yaml").write_text("name: sleeps\nstrategy: torch_ddp\nworkers: 2\n")
    (job / "train.py").write_text(SLEEP)
    return job


class Command:
    """`workshop launch` in a process of its own; what it says goes to files, so that nobody has to read along."""

    def __init__(self, trace, folder, job, *options):
        self.trace, self.out, self.err = trace, folder / "out", folder / "err"
        words = [str(WORKSHOP), "launch", job, "--workers", "2", *options]
        with self.out.open("w") as out, self.err.open("w") as err:
            self.process = subprocess.Popen(
                words, cwd=ROOT, env=trace.environment, stdin=subprocess.DEVNULL, stdout=out, stderr=err
            )

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
        ranks = self.trace.ranks()
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


@pytest.mark.parametrize("strategy", SHORT)
def test_a_run_that_ends_leaves_nothing(strategy, trace, tmp_path):
    command = Command(trace, tmp_path, *SHORT[strategy])
    assert command.process.wait(START_SECONDS) == 0, command.said()
    assert "succeeded" in command.out.read_text()


@pytest.mark.parametrize("strategy", SHORT)
def test_a_killed_rank_is_named_and_takes_all_others_with_it(strategy, trace, tmp_path):
    command = Command(trace, tmp_path, *ENDLESS[strategy])
    os.kill(command.wait_until_it_trains()[1], signal.SIGKILL)
    assert command.end() == 1
    said = command.err.read_text()
    assert "worker-1" in said.splitlines()[0], said
    assert "SIGKILL" in said.splitlines()[0], said
    assert "Traceback" not in said.splitlines()[0]


NETWORK = (
    "--network",
    "100Mbit",
)  # where the machine makes no namespaces, links are slow in the message passing


@pytest.mark.parametrize(
    ("strategy", "sent", "network"),
    [
        *((strategy, signal.SIGKILL, ()) for strategy in ENDLESS),
        ("ring", signal.SIGTERM, ()),
        *((strategy, signal.SIGINT, ()) for strategy in ("ring", "mpi")),
        *(("ring", sent, NETWORK) for sent in (signal.SIGINT, signal.SIGKILL)),
    ],
)
def test_a_command_that_a_signal_ends_leaves_nothing(strategy, sent, network, trace, tmp_path):
    command = Command(trace, tmp_path, *ENDLESS[strategy], *network)
    command.wait_until_it_trains()
    assert ("network: 100Mbit" in command.out.read_text()) == bool(network)
    command.process.send_signal(sent)
    code = command.end()
    assert code != 0
    assert code == {signal.SIGINT: 130, signal.SIGKILL: -signal.SIGKILL}.get(sent, code), command.said()
    if sent == signal.SIGINT:
        assert "nothing is left running" in command.err.read_text()


@pytest.mark.parametrize("alone", [True, False], ids=["alone", "with the command"])
def test_what_started_the_ranks_takes_them_along_when_it_is_killed(alone, trace, tmp_path):
    """Ranks that only sleep: others might end of themselves, when nobody takes what they print."""
    job = sleeping_job(tmp_path)
    command = Command(trace, tmp_path, str(job))
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
    assert eventually(lambda: not trace.processes(), ENDING_SECONDS), trace.left()
    for path in trace.scratch.iterdir():  # nobody is left who could remove the run's folder
        shutil.rmtree(path)


def test_a_killed_notebook_kernel_leaves_nothing(trace, tmp_path):
    folder = sleeping_job(tmp_path)
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(env=trace.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = manager.client()
    try:
        client.start_channels()
        client.wait_for_ready(timeout=START_SECONDS)
        said = []
        client.execute_interactive(
            LAUNCH_IN_A_CELL.format(folder=str(folder)),
            timeout=START_SECONDS,
            output_hook=lambda message: said.append(str(message["content"])),
        )
        assert "all started" in "".join(said), said
        assert len(trace.processes()) >= 3, "the kernel and both workers"
        os.kill(manager.provisioner.pid, signal.SIGKILL)
        assert eventually(lambda: not trace.processes(), ENDING_SECONDS), trace.left()
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
