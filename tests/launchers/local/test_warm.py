"""Ranks that are forked from a server that has imported NumPy (or PyTorch, in slow tests) behave as fresh ones do."""

import contextlib
import json
import os
import signal
import textwrap
import threading

import psutil
import pytest

from workshop_utils.launchers.local import Local, warm
from workshop_utils.runs import RunFailed, RunState

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

SAY = """
    import atexit, json, os, random, signal, subprocess, sys, threading, time
    import numpy
    from workshop_utils import place
    here = place.here()
"""


def texts(job, **options):
    """What the workers print when they are forked."""
    run = Local(warm=True, **options).launch(job)
    assert run.warm
    return [line.text for line in run.wait(60).logs()]


# Which scripts may be forked


@pytest.mark.parametrize(
    ("script", "framework"),
    [
        ("from numpy.linalg import norm", "numpy"),
        ("import torch\nimport numpy", "torch"),
        ("def train():\n    import torch.nn", "torch"),
        ("import tensorflow as tf\nimport numpy", "tensorflow"),
        ("import horovod.tensorflow.keras as hvd\nimport tensorflow", "tensorflow"),
        ("import tensorflow as tf\nimport pandas", None),
        ("import torch\nimport pandas", "torch"),
        ("import pyspark\nimport torch", None),
        ("import horovod.torch as hvd\nimport torch", "torch"),
        ("import horovod.torch\nimport torch, mpi4py", None),
        ("print('numpy')", None),
    ],
)
def test_the_imports_of_a_script_say_what_it_can_be_forked_from(script, framework, tmp_path):
    (tmp_path / "train.py").write_text(script)
    assert warm.framework_of(tmp_path / "train.py") == framework


# A forked rank is as a fresh one


def test_a_forked_worker_sees_what_a_cold_one_sees_and_holds_no_descriptor_of_another(make_job):
    job = make_job(
        SAY,
        """
    import inspect, __main__
    class Here: pass
    links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    links = [os.readlink(link) for link in links if os.path.exists(link)]
    held = [link for link in links if link.startswith(("pipe", "socket", "anon"))]
    names = [name for name in os.environ if not name.startswith("WORKSHOP_MODEL") and name != "PYTHONPATH"]
    print(json.dumps({
        "argv": sys.argv, "name": __name__, "file": __file__, "folder": os.getcwd(), "rank": here.rank,
        "path": [f for f in sys.path if "workshop-" not in f and f], "variables": sorted(names),
        "class": Here.__module__, "main": __main__.__file__, "stdin": sys.stdin.read(),
        "source": inspect.getsource(Here), "threads": threading.active_count(),
        "daemon": threading.current_thread().daemon,
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)],
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3],
        "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "encoding": [sys.stdout.encoding, sys.stderr.encoding],
        "limits": sys.flags.safe_path, "held": sorted(held),
    }))
    """,
        arguments={"epochs": 3},
        strategy="torch_ddp",
        workers=3,
    )
    cold, warmed = (
        {worker: json.loads(next(run.logs(worker=worker)).text) for worker in run.workers}
        for run in [Local(warm=is_warm).launch(job).wait(60) for is_warm in (False, True)]
    )
    for worker in cold.values():
        del worker["held"]  # one of its own may be open there
    held = [worker.pop("held") for worker in warmed.values()]
    assert [len(links) for links in held] == [2, 2, 2]  # standard output and standard error
    assert len({link for links in held for link in links}) == 6
    assert warmed == cold


@pytest.mark.parametrize(
    ("imports", "drawn", "starts"),
    [
        ("random, numpy", "numpy.random.rand(), numpy.random.default_rng().random()", (False, True, True)),
        ("random, torch", "torch.rand(()).item(), torch.nn.Linear(1, 1).bias.item()", (False, True, True)),
        (
            "random, keras, tensorflow as tf",
            "float(tf.random.uniform(())), float(keras.random.uniform(()))",
            (True, True),
        ),
    ],
)
def test_random_numbers_differ_between_ranks_and_between_runs_however_they_start(
    imports, drawn, starts, make_job
):
    job = make_job(f"import {imports}\nprint(random.random(), {drawn})", strategy="ring", workers=2)
    runs = [Local(warm=is_warm).launch(job).wait(120) for is_warm in starts]
    assert tuple(run.warm for run in runs) == starts
    numbers = [word for run in runs for line in run.logs() for word in line.text.split()]
    assert len(numbers) == len(set(numbers)) >= 3 * 2 * len(starts)


def test_a_seed_gives_what_it_gives_in_a_cold_run(make_job):
    seeded = "import numpy, torch\nnumpy.random.seed(7)\ntorch.manual_seed(7)"
    job = make_job(seeded, "print(numpy.random.rand(), torch.rand(()).item())", strategy="ring", workers=2)
    assert texts(job) == ["0.07630828937395717 0.5349225401878357"] * 2


# Ends


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("sys.exit(None)", None, None),
        ("sys.exit(-1)", 255, None),
        ("sys.exit('no data')", 1, "no data"),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("os._exit(4)", 4, None),
    ],
)
def test_exit_codes_are_those_of_python(ending, code, last, make_job):
    run = Local(warm=True).launch(make_job(SAY, ending))
    assert run.warm
    if code is None:
        run.wait(60)
    else:
        with pytest.raises(RunFailed, match=rf"worker-0 \(rank 0\) ended with exit code {code}"):
            run.wait(60)
    lines = [line for line in run.logs() if line.stream == "stderr"]
    assert (lines[-1].text if lines else None) == last


@pytest.mark.parametrize(
    "script",
    [
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('bad') from error",
        "import json\njson.loads('{')",
        "x = = 1",
    ],
    ids=["chained", "in a library", "syntax"],
)
def test_a_traceback_shows_the_learners_frames_and_nothing_of_what_started_them(script, make_job):
    # A syntax error outside the first import is what a script with a later typo has; it starts cold.
    job = make_job(f"{script}\nimport numpy\n")
    errors = []
    for options in ({}, {"warm": True}, {"emulated_device": "50ms"}):
        run = Local(**options).launch(job)
        with pytest.raises(RunFailed):
            run.wait(60)
        errors.append([line.text for line in run.logs() if line.stream == "stderr"])
    assert errors[1] == errors[2] == errors[0]


def test_what_is_to_run_at_exit_runs_and_threads_are_waited_for(make_job):
    job = make_job(SAY, """
    atexit.register(print, "at exit")
    said = threading.Event()
    def late():
        said.wait()
        print("the thread is done")
    threading.Thread(target=late).start()
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    print("the script is done", end="")
    said.set()
    """)  # fmt: skip
    assert "".join(texts(job)) == "the script is donethe thread is doneat exit"


def test_a_script_s_objects_go_as_python_ends_and_its_process_groups_stay(make_job, tmp_path):
    left_open = tmp_path / "left-open"
    job = make_job(SAY, f"""
    import torch.distributed as dist, weakref
    class Last:
        def __init__(self):
            self.itself = self  # a cycle, as most modules are
        def __del__(self):
            print("an object is gone", os.getpid() > 0)  # the names are still there
    file, last = open({str(left_open)!r}, "w"), Last()
    file.write("written")
    dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
    group = dist.group.WORLD
    dist.destroy_process_group()
    sys.told = weakref.ref(group, print)
    atexit.register(lambda: print("at exit", last is sys.modules["__main__"].last))
    """)  # fmt: skip
    assert texts(job) == ["at exit True", "an object is gone True"]
    assert left_open.read_text() == "written"


def test_pools_and_streams_that_a_script_leaves_behind_keep_no_rank_from_its_end(make_job):
    assert texts(make_job(SAY, """
    from concurrent.futures import ThreadPoolExecutor
    pool = ThreadPoolExecutor(2)
    print(pool.submit(lambda: 5).result(), __builtins__.max(1, 2))
    def second():
        time.sleep(0.3)
        print("the second thread is done")
    threading.Thread(target=lambda: threading.Thread(target=second).start()).start()
    """)) == ["5 2", "the second thread is done"]  # fmt: skip
    assert texts(make_job(SAY, "print('said')\nsys.stdout.close()")) == ["said"]


@pytest.mark.parametrize(
    "script",
    [
        "signal.signal(signal.SIGUSR1, lambda *_: None)\nfile = open(PATH, 'w')\nfile.write('written')",
        "def f():\n    file = open(PATH, 'w')\n    file.write('written')\n    raise ValueError\nf()",
        "import threading\nthreading.kept = open(PATH, 'w')\nthreading.kept.write('written')",
    ],
    ids=["a handler holds the names", "a frame that failed", "another module"],
)
def test_what_a_file_holds_back_is_written(script, make_job, tmp_path):
    path = tmp_path / "left-open"
    run = Local(warm=True).launch(make_job(SAY, script.replace("PATH", repr(str(path)))))
    with contextlib.suppress(RunFailed):
        run.wait(60)
    assert path.read_text() == "written"


def test_a_killed_server_does_not_end_its_runs_and_is_replaced(make_job):
    job = make_job(SAY, "print('ready'); time.sleep(0.5)")
    run = Local(warm=True).launch(job)
    assert next(run.logs(follow=True)).text == "ready"
    server = warm.SERVERS["numpy"]
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    assert run.wait(60).state is RunState.SUCCEEDED
    assert texts(job) == ["ready"]
    assert warm.SERVERS["numpy"] is not server


def test_a_killed_supervisor_s_folder_goes_though_something_still_writes_to_it(make_job, nothing_is_left):
    job = make_job(SAY, """
    end = time.monotonic() + 1
    if os.fork() == 0:  # as a rank that takes long to die
        while time.monotonic() < end:
            with open(f"{os.environ['WORKSHOP_MODEL']}/{time.monotonic_ns()}", "w"):
                pass
        os._exit(0)
    print("ready")
    time.sleep(1000)
    """)  # fmt: skip
    run = Local(warm=True).launch(job)
    assert next(run.logs(follow=True)).text == "ready"
    psutil.Process(run.process_ids["worker-0"]).parent().kill()
    with pytest.raises(RunFailed, match="the process that watches over it was killed"):
        run.wait(60)
    assert not list(nothing_is_left.glob("workshop-*"))


def test_a_server_that_dies_before_it_hears_of_a_run_is_replaced(make_job):
    job = make_job(SAY, "print('ready')")
    assert texts(job) == ["ready"]
    dying = warm.SERVERS["numpy"]
    os.kill(dying._process.pid, signal.SIGSTOP)  # as one that is killed, and takes long to go
    threading.Timer(0.3, dying._process.kill).start()
    assert texts(job) == ["ready"]
    assert warm.SERVERS["numpy"] is not dying


# The server


@pytest.fixture
def server_of(tmp_path, monkeypatch):
    """Makes the server that has imported a module with this source, and has jobs use it."""
    made = []

    def make(source):
        name = f"imported_{len(list(tmp_path.glob('imported_*.py')))}"
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        monkeypatch.setitem(warm.WARM_MODULES, name, (name,))
        monkeypatch.setattr(warm, "framework_for", lambda _: name)
        warm.starter(name)
        made.append(warm.SERVERS.pop(name))
        monkeypatch.setitem(warm.SERVERS, name, made[-1])

    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield make
    for server in made:
        server.close()


def test_where_a_library_starts_a_thread_when_it_is_imported_jobs_start_cold(make_job, server_of):
    server_of(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    )
    run = Local(warm=True).launch(make_job(SAY, "print('ready')")).wait(60)
    assert [line.text for line in run.logs()] == ["ready"]
    assert not run.warm


def test_what_a_library_says_when_it_is_imported_is_not_shown_but_why_that_fails_is(server_of, capfd):
    server_of("import os\nos.write(2, b'a notice')")
    assert capfd.readouterr().err == ""
    with pytest.raises(warm.WarmServerError, match=r"ended with code 1 while importing imported_.; standard"):
        server_of("raise OSError('the reason')")
    assert "OSError: the reason" in capfd.readouterr().err
