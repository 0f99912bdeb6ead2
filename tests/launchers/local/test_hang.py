"""A run that meets its timeout says which worker did not answer, and where the others wait.

That the frames of libraries are passed over, and equal stacks shown once, is tested with PyTorch's own:
`jobs/test_failure_jobs.py`.
"""

import re

import pytest
from conftest import failure_of

from workshop_utils.launchers.local import Local

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

SAY = """
    import os, signal, sys, time
    from workshop_utils import place
"""


def reason(make_job, *script, workers=3, strategy="torch_ddp"):
    """What is said of a run whose workers do not all end within their time limit."""
    job = make_job(SAY, *script, strategy=strategy, workers=workers, timeout="8s")
    run = Local().launch(job)
    message = failure_of(run)
    assert 1.5 < run.seconds < 15
    prefix = f"{job.name} did not end within its timeout of 8 s. "
    assert message.startswith(prefix)
    said, *stacks = message.removeprefix(prefix).split("\nThe stack of ")
    for stack in stacks:  # every worker that waits is shown with what it has called
        assert re.match(r"worker-\d(, worker-\d)*, the innermost call first:\n  [\w<>]+ \(", stack), stack
        assert stack.rpartition("\n")[2].startswith("  <module> (train.py, line "), stack
    return said


def test_a_rank_that_stands_elsewhere_is_told_from_those_that_wait_and_each_other_is_named_with_its_state(
    make_job,
):
    script = """
        def data_loader():
            time.sleep(1000)

        def barrier():
            while True:
                time.sleep(1)

        if os.environ["RANK"] == "5":  # it never asks for its place
            time.sleep(1000)
        here = place.here()
        if here.rank == 3:  # it is deaf to signals
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)
        place.report(7, loss=1.0)
        if here.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if here.rank == 4:
            sys.exit()
        if here.rank == 1:
            data_loader()
        else:
            barrier()
    """
    said = reason(make_job, script, workers=7)
    pattern = (
        r"worker-2 did not answer: its process is stopped; its last report was of step 7\. "
        r"worker-3 did not answer: its process is sleeping\. "
        r"worker-5 never reported that it had started \(`place\.here\(\)`\)\. "
        r"worker-1 waits at train\.py, line (\d+) \(in data_loader\) after step 7\. "
        r"worker-0, worker-6 wait at train\.py, line (\d+) \(in barrier\) after step 7\. "
        r"worker-4 had ended before\."
    )
    match = re.fullmatch(pattern, said)
    assert match, said
    assert int(match[2]) == int(match[1]) + 4


def test_a_hanging_rank_of_mpi_is_named(make_job):
    script = """
        from mpi4py import MPI
        def elsewhere():
            time.sleep(1000)
        if place.here().rank == 1:
            elsewhere()
        MPI.COMM_WORLD.Barrier()
    """
    said = reason(make_job, script, strategy="mpi")
    assert re.search(r"worker-1 waits at train\.py, line \d+ \(in elsewhere\)", said), said
    assert re.search(r"worker-0, worker-2 wait at train\.py, line \d+ \(in <module>\)", said), said
