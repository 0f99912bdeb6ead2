"""Ranks that are forked from a server that has imported NumPy (or PyTorch, in slow tests) behave as fresh ones do."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from conftest import MakeJob, Watch

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.processes import warm
from workshop_utils.runs import RunFailed, RunState

pytestmark = pytest.mark.usefixtures("nothing_is_left")

SAY = """
    import atexit, json, os, random, signal, subprocess, sys, threading, time
    import numpy
    from workshop_utils import place
    here = place.here()
"""


def texts(job: TrainingJob, **options: Any) -> list[str]:
    """What the workers print when they are forked."""
    run = Local(warm=True, **options).launch(job)
    assert run.warm
    return [line.text for line in run.wait(60).logs()]


# Which scripts may be forked


@pytest.mark.parametrize(
    ("script", "framework"),
    [
        ("import numpy", "numpy"),
        ("import numpy as np, os", "numpy"),
        ("from numpy.linalg import norm", "numpy"),
        ("import torch\nimport numpy", "torch"),
        ("def train():\n    import torch.nn", "torch"),
        ("import tensorflow as tf\nimport numpy", None),
        ("import horovod.torch as hvd\nimport torch", "torch"),
        ("import horovod.torch\nimport torch, mpi4py", None),
        ("import horovod.tensorflow as hvd\nimport numpy", None),
        ("import horovod\nimport torch", None),
        ("from mpi4py import MPI\nimport numpy", None),
        ("from . import numpy", None),
        ("print('numpy')", None),
        ("import numpy ???", None),
    ],
)
def test_the_imports_of_a_script_say_what_it_can_be_forked_from(
    script: str, framework: str | None, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    assert warm.framework_of(tmp_path / "train.py") == framework


@pytest.mark.parametrize(
    ("variables", "can"),
    [
        ({}, True),
        ({"COLOUR": "red"}, True),
        ({"OMP_NUM_THREADS": "1"}, True),
        ({"OMP_NUM_THREADS": "2"}, False),
        ({"PYTHONHASHSEED": "0"}, False),
        ({"LD_PRELOAD": "x.so"}, False),
        ({"MALLOC_ARENA_MAX": "1"}, False),
    ],
)
def test_a_job_whose_variables_are_read_at_import_cannot_be_forked(
    variables: dict[str, str], can: bool
) -> None:
    assert warm.can_be_forked(variables) is can


@pytest.mark.parametrize(
    "fields",
    [
        {"environment": {"OMP_NUM_THREADS": "2"}},
        {"resources": {"cpu": 2}},
        {"script": "other.py"},
    ],
    ids=["variable", "resources", "another script"],
)
def test_what_cannot_be_forked_starts_cold_and_works(fields: dict[str, Any], make_job: MakeJob) -> None:
    job = make_job(SAY, "print(os.environ['OMP_NUM_THREADS'])")
    (job.folder / "other.py").write_text("import os; print(os.environ['OMP_NUM_THREADS'])")
    run = Local(warm=True).launch(job.replace(**fields))
    assert not run.warm
    (line,) = run.wait(60).logs()
    assert line.text == ("1" if "script" in fields else "2")


# A forked rank is as a fresh one


def test_a_forked_worker_sees_what_a_cold_one_sees(make_job: MakeJob) -> None:
    job = make_job(
        SAY,
        """
    import inspect, __main__
    class Here: pass
    names = [name for name in os.environ if not name.startswith("WORKSHOP_MODEL") and name != "PYTHONPATH"]
    print(json.dumps({
        "argv": sys.argv, "name": __name__, "file": __file__, "folder": os.getcwd(), "rank": here.rank,
        "path": [f for f in sys.path if "workshop-" not in f and f], "variables": sorted(names),
        "class": Here.__module__, "main": __main__.__file__, "stdin": sys.stdin.read(),
        "source": inspect.getsource(Here), "threads": threading.active_count(),
        "daemon": threading.current_thread().daemon, "package": os.listdir(os.path.dirname(place.__file__))[:0],
        "handlers": [str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGPIPE)],
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd"))[:3],
        "mask": str(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "encoding": [sys.stdout.encoding, sys.stderr.encoding],
        "limits": sys.flags.safe_path,
    }))
    """,
        arguments={"epochs": 3},
        strategy="torch_ddp",
        workers=2,
    )
    cold, warmed = (
        {worker: json.loads(next(run.logs(worker=worker)).text) for worker in run.workers}
        for run in [Local(warm=is_warm).launch(job).wait(60) for is_warm in (False, True)]
    )
    assert warmed == cold


def test_forked_workers_hold_no_descriptor_of_another(make_job: MakeJob) -> None:
    script = (
        SAY
        + """
    links = [f"/proc/self/fd/{n}" for n in os.listdir("/proc/self/fd")]
    held = {os.readlink(link) for link in links if os.path.exists(link)}
    print(json.dumps(sorted(link for link in held if link.startswith(("pipe", "socket", "anon")))))
    """
    )
    run = Local(warm=True).launch(make_job(script, strategy="torch_ddp", workers=3)).wait(60)
    held = [json.loads(line.text) for line in run.logs()]
    assert [len(links) for links in held] == [2, 2, 2]  # standard output and standard error
    assert len({link for links in held for link in links}) == 6


def test_lines_of_a_forked_worker_come_while_it_still_runs(make_job: MakeJob) -> None:
    with Local(warm=True).launch(make_job(SAY, "print('ready'); time.sleep(1000)")) as run:
        assert next(run.logs(follow=True)).text == "ready"
        assert run.state is RunState.RUNNING


def test_two_runs_do_not_see_each_others_traces(make_job: MakeJob) -> None:
    job = make_job(
        SAY,
        """
    import builtins
    print(getattr(builtins, "trace", None), getattr(numpy, "trace_of_a_run", None), os.environ.get("TRACE"),
          sys.argv[1:], os.path.basename(os.getcwd()), "extra" in sys.path, numpy.geterr()["divide"])
    builtins.trace = numpy.trace_of_a_run = os.environ["TRACE"] = "seen"
    numpy.seterr(divide="ignore")
    sys.argv.append("more")
    sys.path.append("extra")
    os.chdir("/")
    """,
    )
    first, second = texts(job), texts(job)
    assert first == second == [f"None None None [] {job.folder.name} False warn"]


def test_random_numbers_differ_between_ranks_and_between_runs_and_a_seed_is_kept(make_job: MakeJob) -> None:
    job = make_job(
        SAY,
        """
    print(random.random(), numpy.random.rand(), numpy.random.default_rng().random())
    numpy.random.seed(7)
    print("seeded", numpy.random.rand())
    """,
        strategy="torch_ddp",
        workers=3,
    )
    printed = texts(job) + texts(job)
    drawn = [number for text in printed if "seeded" not in text for number in text.split()]
    assert len(drawn) == len(set(drawn)) == 18
    assert {text for text in printed if "seeded" in text} == {"seeded 0.07630828937395717"}


def test_a_job_gives_the_same_results_cold_and_warm(make_job: MakeJob) -> None:
    job = make_job(
        SAY,
        """
    rng = numpy.random.default_rng(here.rank)
    a = rng.normal(size=(50, 50))
    for step in range(3):
        a = a @ a.T / numpy.linalg.norm(a)
        place.report(step, loss=a.trace())
    """,
        strategy="torch_ddp",
        workers=2,
    )
    tables = [
        Local(warm=is_warm).launch(job).wait(60).metrics.sort_values(["rank", "step"])
        for is_warm in (False, True)
    ]
    assert list(tables[0]["loss"]) == list(tables[1]["loss"])
    assert len(tables[0]) == 6


# Ends


@pytest.mark.parametrize(
    ("ending", "code", "last"),
    [
        ("sys.exit(0)", None, None),
        ("sys.exit(None)", None, None),
        ("sys.exit(3)", 3, None),
        ("sys.exit(-1)", 255, None),
        ("sys.exit('no data')", 1, "no data"),
        ("raise ValueError('bad')", 1, "ValueError: bad"),
        ("os._exit(4)", 4, None),
    ],
)
def test_exit_codes_are_those_of_python(
    ending: str, code: int | None, last: str | None, make_job: MakeJob
) -> None:
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
        "def train():\n    raise ValueError('bad')\ntrain()",
        "try:\n    1 / 0\nexcept ZeroDivisionError as error:\n    raise ValueError('bad') from error",
        "import json\njson.loads('{')",
        "x = = 1",
        "import nowhere",
        "raise ExceptionGroup('two', [ValueError('a'), TypeError('b')])",
    ],
    ids=["own", "chained", "in a library", "syntax", "missing module", "group"],
)
def test_a_traceback_shows_the_learners_frames_and_nothing_of_the_server(
    script: str, make_job: MakeJob
) -> None:
    # A syntax error outside the first import is what a script with a later typo has; it starts cold.
    job = make_job(f"{script}\nimport numpy\n")
    errors = []
    for is_warm in (False, True):
        run = Local(warm=is_warm).launch(job)
        with pytest.raises(RunFailed):
            run.wait(60)
        errors.append([line.text for line in run.logs() if line.stream == "stderr"])
    assert errors[1] == errors[0]
    assert "supervisor" not in "".join(errors[1])


def test_what_is_to_run_at_exit_runs_and_threads_are_waited_for(make_job: MakeJob) -> None:
    job = make_job(
        SAY,
        """
    atexit.register(print, "at exit")
    def late():
        time.sleep(0.2)
        print("the thread is done")
    threading.Thread(target=late).start()
    threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
    print("the script is done", end="")
    """,
    )
    assert "".join(texts(job)) == "the script is donethe thread is doneat exit"


def test_a_killed_forked_worker_fails_the_run_and_what_it_started_ends(
    make_job: MakeJob, watch: Watch
) -> None:
    job = make_job(
        SAY,
        """
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("ready")
    time.sleep(1000)
    """,
        strategy="torch_ddp",
        workers=2,
    )
    run = Local(warm=True).launch(job)
    lines = run.logs(follow=True)
    assert [next(lines).text for _ in run.workers] == ["ready", "ready"]
    os.kill(run.process_ids["worker-1"], signal.SIGKILL)
    with pytest.raises(RunFailed, match=r"worker-1 \(rank 1\) was killed by SIGKILL"):
        run.wait(60)
    assert not any(map(watch.alive, run.process_ids.values()))


def test_a_killed_supervisor_of_forked_workers_takes_them_with_it(make_job: MakeJob, watch: Watch) -> None:
    job = make_job(SAY, "subprocess.Popen(['sleep', '1000']); print('ready'); time.sleep(1000)")
    run = Local(warm=True).launch(job)
    assert next(run.logs(follow=True)).text == "ready"
    os.kill(psutil.Process(run.process_ids["worker-0"]).ppid(), signal.SIGKILL)
    with pytest.raises(RunFailed, match="the process that watches over it was killed"):
        run.wait(60)
    assert watch.eventually(lambda: not watch.alive(run.process_ids["worker-0"]))


def test_a_killed_server_does_not_end_its_runs_and_is_replaced(make_job: MakeJob) -> None:
    job = make_job(SAY, "print('ready'); time.sleep(0.5)")
    run = Local(warm=True).launch(job)
    assert next(run.logs(follow=True)).text == "ready"
    server = warm.server_for("numpy")
    os.kill(server._process.pid, signal.SIGKILL)
    server._process.wait()
    assert run.wait(60).state is RunState.SUCCEEDED
    assert texts(job) == ["ready"]
    assert warm.server_for("numpy") is not server


def test_one_server_serves_many_runs_at_once(make_job: MakeJob) -> None:
    job = make_job(SAY, "print(here.rank)", strategy="torch_ddp", workers=2)
    runs = [Local(warm=True).launch(job) for _ in range(10)]
    for run in runs:
        assert sorted(line.text for line in run.wait(60).logs()) == ["0", "1"]


# The server


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`module(name, source)` can be imported by a server."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def write(name: str, source: str) -> str:
        (tmp_path / f"{name}.py").write_text(textwrap.dedent(source))
        return name

    return write


def test_a_server_whose_modules_start_a_thread_is_refused(module: Any, watch: Watch) -> None:
    before = set(watch.marked_processes())
    name = module(
        "threaded",
        "import threading, time; threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()",
    )
    with pytest.raises(
        warm.WarmServerError, match=r"importing json, threaded started 1 threads; it must start none"
    ):
        warm.WarmServer(("json", name))
    assert watch.eventually(lambda: set(watch.marked_processes()) == before)


def test_a_server_that_cannot_import_is_named(module: Any) -> None:
    name = module("broken", "import os; os._exit(1)")
    with pytest.raises(warm.WarmServerError, match="the warm server ended while importing broken"):
        warm.WarmServer((name,))


def test_a_server_that_has_got_a_second_thread_forks_no_more_and_the_run_says_so(
    module: Any, make_job: MakeJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = module(
        "late",
        """
        import signal, threading, time
        def start(*_):
            threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        signal.signal(signal.SIGUSR2, start)
        """,
    )
    server = warm.WarmServer((name,))
    monkeypatch.setattr(warm, "server_for", lambda _: server)
    try:
        job = make_job(SAY, "print('ready')")
        assert texts(job) == ["ready"]
        os.kill(server._process.pid, signal.SIGUSR2)
        time.sleep(0.2)
        with pytest.raises(RunFailed, match="could not be started: the warm server has 2 threads"):
            Local(warm=True).launch(job).wait(60)
    finally:
        server.close()


OWNER = """
    import os, sys, time
    from workshop_utils.processes import warm
    server = warm.server_for("numpy")
    if sys.argv[1] == "with a child" and os.fork() == 0:
        os.close(1)
        os.close(2)
        time.sleep(15)
        os._exit(0)
    print(server._process.pid, flush=True)
    time.sleep(1000)
"""


@pytest.mark.parametrize("case", ["alone", "with a child"])
def test_a_server_ends_with_its_owner(case: str, watch: Watch) -> None:
    before = set(watch.marked_processes())
    with subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(OWNER), case], stdout=subprocess.PIPE, text=True
    ) as owner:
        assert owner.stdout is not None
        server = int(owner.stdout.readline())
        assert watch.alive(server)
        owner.kill()
        children = set(watch.marked_processes()) - before - {server, owner.pid}
    try:
        assert watch.eventually(lambda: not watch.alive(server))
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)


def test_an_interrupt_in_the_terminal_does_not_reach_the_server(make_job: MakeJob) -> None:
    server = warm.server_for("numpy")
    os.kill(server._process.pid, signal.SIGINT)
    assert texts(make_job(SAY, "print('ready')")) == ["ready"]
    assert warm.server_for("numpy") is server


# PyTorch


@pytest.mark.slow
def test_ranks_of_torch_that_are_forked_reduce_the_same_numbers_as_cold_ones(make_job: MakeJob) -> None:
    job = make_job(
        """
    import torch
    import torch.distributed as dist
    from workshop_utils import place
    here = place.here()
    dist.init_process_group("gloo")
    torch.manual_seed(here.rank)
    values = torch.rand(1001)
    dist.all_reduce(values)
    place.report(1, loss=values.sum(), threads=torch.get_num_threads())
    dist.destroy_process_group()
    """,
        strategy="torch_ddp",
        workers=3,
    )
    cold = Local().launch(job).wait(120)
    first, second = (Local(warm=True).launch(job).wait(120) for _ in range(2))
    assert first.warm
    assert second.warm
    losses = {loss for run in (cold, first, second) for loss in run.metrics["loss"]}
    assert len(losses) == 1
    assert set(second.metrics["threads"]) == {1}
    assert second.seconds < cold.seconds
