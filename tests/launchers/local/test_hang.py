"""A run that meets its timeout says which worker did not answer, and where the others wait.

That the frames of libraries are passed over, and equal stacks shown once, is tested with PyTorch's own:
`jobs/test_failure_jobs.py`.
"""

import re

import pytest
from conftest import failure_of

from workshop_utils.launchers.local import Local

pytestmark = pytest.mark.usefixtures("nothing_is_left")

SAY = """
    import os, signal, subprocess, sys, threading, time
    from workshop_utils import place
    here = place.here()
"""


def reason(make_job, *script, warm=False, strategy="torch_ddp"):
    """What is said of three workers of which not all end within their time limit."""
    timeout = "6s" if strategy == "mpi" else "4s"
    job = make_job(*script, strategy=strategy, workers=3, timeout=timeout)
    run = Local(warm=warm).launch(job)
    assert run.warm is warm
    message = failure_of(run)
    assert 1.5 < run.seconds < 15
    prefix = f"{job.name} did not end within its timeout of {timeout.removesuffix('s')} s. "
    assert message.startswith(prefix)
    said, *stacks = message.removeprefix(prefix).split("\nThe stack of ")
    for stack in stacks:  # every worker that waits is shown with what it has called
        assert re.match(r"worker-\d(, worker-\d)*, the innermost call first:\n  [\w<>]+ \(", stack), stack
        assert stack.rpartition("\n")[2].startswith("  <module> (train.py, line "), stack
    return said


@pytest.mark.parametrize("warm", [False, True])
def test_a_rank_that_stands_elsewhere_is_told_from_those_that_wait(warm, make_job):
    script = """
        def data_loader():
            time.sleep(1000)

        def barrier():
            while True:
                time.sleep(1)

        place.report(7, loss=1.0)
        if here.rank == 1:
            data_loader()
        else:
            barrier()
    """
    said = reason(make_job, "import numpy" if warm else "", SAY, script, warm=warm)
    pattern = (
        r"worker-1 waits at train\.py, line (\d+) \(in data_loader\) after step 7\. "
        r"worker-0, worker-2 wait at train\.py, line (\d+) \(in barrier\) after step 7\."
    )
    match = re.fullmatch(pattern, said)
    assert match, said
    assert int(match[2]) == int(match[1]) + 4


STOPPED = """
    place.report(2)
    if here.rank == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(1000)
"""
LATE = """
    import os, time
    if os.environ["RANK"] == "0":
        time.sleep(1000)
    from workshop_utils import place
    place.here()
    time.sleep(1000)
"""
DEAF = """
    if here.rank == 2:
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
    time.sleep(1000)
"""


@pytest.mark.parametrize(
    ("script", "pattern"),
    [
        (
            (SAY, STOPPED),
            r"worker-2 did not answer: its process is stopped; its last report was of step 2\. worker-0, .*",
        ),
        ((SAY, DEAF), r"worker-2 did not answer: its process is sleeping\. worker-0, worker-1 wait at .*"),
        (
            (LATE,),
            r"worker-0 never reported that it had started \(`place\.here\(\)`\)\. worker-1, worker-2 wait at .*",
        ),
        (
            (SAY, "if here.rank == 1: time.sleep(1000)"),
            r"worker-1 waits at train\.py, line \d+ \(in <module>\)\. worker-0, worker-2 had ended before\.",
        ),
    ],
    ids=["stopped", "deaf to signals", "not there yet", "ended"],
)
def test_each_rank_is_named_with_its_state(script, pattern, make_job):
    said = reason(make_job, *script)
    assert re.fullmatch(pattern, said), said


@pytest.mark.slow
def test_a_hanging_rank_of_mpi_is_named(make_job):
    script = """
        from mpi4py import MPI
        def elsewhere():
            time.sleep(1000)
        if here.rank == 1:
            elsewhere()
        MPI.COMM_WORLD.Barrier()
    """
    said = reason(make_job, SAY, script, strategy="mpi")
    assert re.search(r"worker-1 waits at train\.py, line \d+ \(in elsewhere\)", said), said
    assert re.search(r"worker-0, worker-2 wait at train\.py, line \d+ \(in <module>\)", said), said
