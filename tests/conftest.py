"""What tests share: tiny jobs, and the proof that nothing of a run is left behind."""

from __future__ import annotations

import contextlib
import importlib.util
import multiprocessing
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import resource_tracker
from pathlib import Path

import hypothesis
import psutil
import pytest
import yaml
from real_ranks import MOST_RANKS, Ranks
from xdist.scheduler import LoadFileScheduling

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import warm
from workshop_utils.runs import Run, RunFailed, RunState


class Lenient(yaml.SafeLoader):
    """Reads CloudFormation's `!Sub text` as the text."""


Lenient.add_multi_constructor("!", lambda loader, _, node: loader.construct_scalar(node))

# Every process that a test starts inherits this variable, so even a daemon that has left its session is found.
MARK = "WORKSHOP_TESTS"

# A shell starts what runs in the background with interrupts ignored, nohup ignores hang-ups, and a child inherits
# both: give them back, so that the tests of signals mean the same wherever they run.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)
os.environ[MARK] = uuid.uuid4().hex

# How long an example takes says more of the machine than of the code.
hypothesis.settings.register_profile("workshop", deadline=None)
hypothesis.settings.load_profile("workshop")

PATIENCE_SECONDS = 120.0  # far more than a busy machine takes

PROXIES = {
    spelling: "http://127.0.0.1:9"  # where nobody listens
    for name in ("http_proxy", "https_proxy", "all_proxy", "grpc_proxy")
    for spelling in (name, name.upper())
}


def write_idx(path: Path, shape: tuple[int, ...], content: bytes) -> None:
    """An idx file of unsigned bytes, written by hand so that reading is tested against the format itself."""
    header = b"\0\0\x08" + bytes([len(shape)]) + struct.pack(f">{len(shape)}I", *shape)
    path.write_bytes(header + content)


class ByFile(LoadFileScheduling):
    """pytest-xdist's `--dist loadfile`, which keeps a file's tests on one worker, but for the longest file."""

    def _split_scope(self, nodeid):
        file, _, test = nodeid.partition("::")
        lesson = test.partition("[")[2][:2]
        return f"{file} {lesson}" if file.endswith("test_wrong_answers.py") else file


# What `make check` does without: their import alone takes seconds.
FRAMEWORKS = {"torch", "tensorflow", "jax", "horovod", "pyspark", "transformers", "keras", "elephas"}
STARTS = {"subprocess.Popen", "os.fork", "os.forkpty", "os.posix_spawn", "os.exec", "os.system"}
_light_test: str | None = None  # the test that runs under --light


def pytest_addoption(parser):
    parser.addoption(
        "--light",
        action="store_true",
        help="only tests without the mark `processes`; one that starts a process or imports a framework fails",
    )


def pytest_ignore_collect(collection_path, config):
    """Files whose tests all start processes may import a framework, so they are not even imported."""
    if config.getoption("light") and collection_path.suffix == ".py":
        marks = (
            collection_path.read_text(encoding="utf-8").partition("\npytestmark = ")[2].partition("\n\n")[0]
        )
        return True if "mark.processes" in marks else None
    return None


def _refuse_in_light_tests(event, arguments):
    if _light_test and (event in STARTS or (event == "import" and arguments[0] in FRAMEWORKS)):
        pytest.fail(f"{_light_test} needs pytest.mark.processes: {event} of {arguments[0]}")


def with_horovod(*values, **options):
    """`values` as a parameter of a test, which is skipped without Horovod if the first is called after it."""
    return pytest.param(*values, **options, marks=pytest.mark.horovod if "horovod" in values[0] else ())


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("horovod") and importlib.util.find_spec("horovod") is None:
        pytest.skip("Horovod is not installed: `workshop install horovod` compiles it")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    global _light_test
    _light_test = item.nodeid if item.config.getoption("light") else None
    try:
        return (yield)
    finally:
        _light_test = None


def pytest_configure(config):
    if config.getoption("light"):
        sys.addaudithook(_refuse_in_light_tests)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Wrong answers to different lessons are refused side by side, as `make processes` runs them."""
    return ByFile(config, log) if config.getoption("dist") == "loadfile" else None


def pytest_collection_modifyitems(config, items):
    """The folders whose files take longest come first, or one of those files would run alone at the end."""
    slow = ("tests/launchers", "tests/jobs", "tests/guards")
    items.sort(key=lambda item: not item.nodeid.startswith(slow))
    if config.getoption("light"):
        heavy = [item for item in items if item.get_closest_marker("processes")]
        items[:] = [item for item in items if item not in heavy]
        config.hook.pytest_deselected(items=heavy)


@pytest.fixture(autouse=True, scope="session")
def _logs_of_runs_go_elsewhere(tmp_path_factory):
    os.environ["WORKSHOP_STATE"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True)
def _no_figure_is_left():
    yield
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session")
def data_folder(tmp_path_factory):
    """Three training and two test images of 2 × 2 pixels: data for scripts that do not look at it."""
    folder = tmp_path_factory.mktemp("data")
    for prefix, count in (("train", 3), ("t10k", 2)):
        write_idx(folder / f"{prefix}-images-idx3-ubyte", (count, 2, 2), bytes(range(4 * count)))
        write_idx(folder / f"{prefix}-labels-idx1-ubyte", (count,), bytes(range(count)))
    return folder


@pytest.fixture
def make_job(tmp_path, data_folder):
    """`make_job(script, ..., **fields)` is a job of strategy `single` in a folder of its own.

    The script may come in several pieces, each indented as its test is.
    """
    count = 0

    def make(*script, **fields):
        nonlocal count
        count += 1
        folder = tmp_path / f"job-{count}"
        folder.mkdir()
        (folder / "train.py").write_text("\n".join(map(textwrap.dedent, script)), encoding="utf-8")
        values = {"name": f"job-{count}", "folder": folder, "data": str(data_folder), "timeout": "5min"}
        return TrainingJob(**{**values, **fields})

    return make


def save(job):
    """Write the job.yaml of `job` into its folder."""
    values = job.model_dump(mode="json", exclude_defaults=True)
    (job.folder / "job.yaml").write_text(yaml.safe_dump(values, sort_keys=False), encoding="utf-8")


def marked_processes() -> dict[int, str]:
    """The command by process id of everything alive that the tests of this process have started.

    Warm servers, this process's Spark and Python's own resource tracker are not among them: they stay from one test
    to the next.
    """
    mark = f"{MARK}={os.environ[MARK]}".encode()
    staying = {server._process.pid for server in warm.SERVERS.values()}
    staying.add(resource_tracker._resource_tracker._pid)  # type: ignore[attr-defined]  # no public name for it
    below = set[int]()
    if "pyspark" in sys.modules and (gateway := sys.modules["pyspark"].SparkContext._gateway):
        staying.add(gateway.proc.pid)
        below = {child.pid for child in psutil.Process(gateway.proc.pid).children(recursive=True)}
    found = {}
    for process in psutil.process_iter():
        if process.pid in staying:
            continue
        try:
            if mark not in Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0"):
                continue
            command = " ".join(process.cmdline())
            # Of what is below Spark, executors and their daemons stay; the rest a task has left.
            if process.pid not in below or not re.search(r"CoarseGrained|-m pyspark\.daemon$", command):
                found[process.pid] = command
        except (OSError, psutil.Error):
            continue  # it has just ended, or belongs to somebody else
    return found


def alive(pid: int) -> bool:
    """Whether process `pid` runs; a zombie does not."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def eventually(condition: Callable[[], object], seconds: float = PATIENCE_SECONDS) -> bool:
    """Whether `condition` becomes true within `seconds`."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


class RunByHand(Run):
    """A run whose lines and end come from the test."""

    print = Run._receive_line
    end = Run._finish

    def __init__(self, *workers: str, outputs: str | None = None) -> None:
        super().__init__("job", workers or ("worker-0", "worker-1"), outputs)
        self.stops = 0

    def _request_stop(self) -> None:
        self.stops += 1
        self._finish(RunState.STOPPED)


def failure_of(run: Run, seconds: float = 60) -> str:
    """What is said of a run that must fail within `seconds`."""
    with pytest.raises(RunFailed) as failure:
        run.wait(seconds)
    return str(failure.value)


def reserved_ports() -> list[int]:
    """The UDP ports on loopback that this process holds."""
    return [
        connection.laddr.port
        for connection in psutil.Process().net_connections("udp4")
        if connection.laddr and connection.laddr.ip == "127.0.0.1"
    ]


def shared_memory() -> set[str]:
    """The names in /dev/shm that no living process has mapped."""
    mapped: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to somebody else
            mapped.update(re.findall(r"/dev/shm/([^ /\n]+)", maps.read_text(errors="replace")))
    return {path.name for path in Path("/dev/shm").iterdir()} - mapped


def network_namespaces() -> set[str]:
    """Those with a name, as `ip netns list` has them, and the links that a namespace's cable would have here."""
    return {path.name for folder in ("/run/netns", "/sys/class/net") for path in Path(folder).glob("*")}


@pytest.fixture
def nothing_is_left(monkeypatch, tmp_path_factory):
    """After the test there is no process, no scratch folder, no port and no thread of any run; the scratch root."""
    if sys.platform != "linux":
        pytest.skip("process tables are read from /proc")
    tmp_path_factory.getbasetemp()  # pytest's own folder is made before its place is changed
    root = Path(tempfile.mkdtemp(prefix="test-"))  # short, since Open MPI puts sockets below it
    monkeypatch.setattr(tempfile, "tempdir", str(root))
    monkeypatch.setenv("TMPDIR", str(root))
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # whoever runs the tests may have set it
    before, reserved = set(marked_processes()), set(reserved_ports())

    def left():
        return {pid: words for pid, words in marked_processes().items() if pid not in before}

    yield root
    try:
        eventually(lambda: not left())
        processes = left()
        for pid in processes:
            psutil.Process(pid).kill()
        assert not processes
        assert eventually(lambda: not list(root.glob("workshop-*"))), list(root.iterdir())
        assert eventually(lambda: set(reserved_ports()) <= reserved)
        assert eventually(lambda: not [t for t in threading.enumerate() if t.name == "workshop-run"])
    finally:
        shutil.rmtree(root, ignore_errors=True)


@pytest.fixture
def dead_proxy(monkeypatch):
    """Every program is told to use a proxy that is not there."""
    for name, address in PROXIES.items():
        monkeypatch.setenv(name, address)


def on_another_machine(prepare: str, script: str, **environment: str) -> str:
    """What the Python `script` prints where the shell commands `prepare` have changed mounts and the host's name."""
    command = ["unshare", "--mount", "--uts", "--map-root-user", "sh", "-c"]
    trial = 'mount -t tmpfs none /mnt && hostname another && exec "$@"'
    try:
        subprocess.run([*command, trial, "sh", "true"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("nobody may make namespaces here")
    program = ["sh", sys.executable, "-c", script]
    changed = [*command, f'{prepare} && exec "$@"', *program]
    done = subprocess.run(changed, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def watch():
    """This module, whose functions say whether processes live, and whether something becomes true."""
    return sys.modules[__name__]


@pytest.fixture(scope="module")
def ranks():
    """Nine processes; each program runs in as many of them as it asks for."""
    with ProcessPoolExecutor(MOST_RANKS, multiprocessing.get_context("spawn")) as pool:
        yield Ranks(pool)
