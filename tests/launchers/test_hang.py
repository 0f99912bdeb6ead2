"""A run that meets its timeout says which worker did not answer, and where the others wait."""

import json
import re

import pytest
from conftest import MakeJob

from workshop_utils.launchers.hang import diagnosis, shown_stacks, stacks
from workshop_utils.launchers.local import Local
from workshop_utils.runs import Run, RunFailed

SAY = """
    import os, signal, subprocess, sys, threading, time
    from workshop_utils import place
    here = place.here()
"""


def reason(make_job: MakeJob, *script: str, warm: bool = False, timeout: str = "4s", workers: int = 3) -> str:
    """What is said of three workers of which not all end within four seconds."""
    strategy = "torch_ddp" if workers > 1 else "single"
    job = make_job(*script, strategy=strategy, workers=workers, timeout=timeout)
    run = Local(warm=warm).launch(job)
    assert not warm or run.warm
    with pytest.raises(RunFailed) as failure:
        run.wait(60)
    assert 1.5 < run.seconds < 15
    message = str(failure.value)
    prefix = f"{job.name} did not end within its timeout of {timeout}. "
    assert message.startswith(prefix)
    said, *stacks = message.removeprefix(prefix).split("\nThe stack of ")
    for stack in stacks:  # every worker that waits is shown with what it has called
        assert re.match(r"worker-\d(, worker-\d)*, the innermost call first:\n  [\w<>]+ \(", stack), stack
        assert stack.rpartition("\n")[2].startswith("  <module> (train.py, line "), stack
    return said


@pytest.fixture(autouse=True)
def _leaves_nothing(nothing_is_left: None) -> None:
    pass


@pytest.mark.parametrize("warm", [False, True])
def test_a_rank_that_stands_elsewhere_is_told_from_those_that_wait(warm: bool, make_job: MakeJob) -> None:
    said = reason(
        make_job,
        "import numpy" if warm else "",
        SAY,
        """
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
        """,
        warm=warm,
    )
    pattern = (
        r"worker-1 waits at train\.py, line (\d+) \(in data_loader\) after step 7\. "
        r"worker-0, worker-2 wait at train\.py, line (\d+) \(in barrier\) after step 7\."
    )
    match = re.fullmatch(pattern, said)
    assert match, said
    assert int(match[2]) == int(match[1]) + 4


def test_a_stopped_rank_is_named_with_its_state_and_its_last_step(make_job: MakeJob) -> None:
    said = reason(
        make_job,
        SAY,
        """
        for step in range(3):
            place.report(step)
        if here.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(1000)
        """,
    )
    assert said.startswith(
        "worker-2 did not answer: its process is stopped; its last report was of step 2. worker-0, worker-1 wait at "
    )


def test_a_rank_that_never_asked_for_its_place_is_named(make_job: MakeJob) -> None:
    said = reason(
        make_job,
        """
        import os, time
        if os.environ["RANK"] == "0":
            time.sleep(1000)
        from workshop_utils import place
        place.here()
        time.sleep(1000)
        """,
    )
    assert said.startswith(
        "worker-0 never said that it had started (`place.here()`). worker-1, worker-2 wait at "
    )


def test_ranks_that_have_ended_are_not_said_to_hang(make_job: MakeJob) -> None:
    said = reason(make_job, SAY, "if here.rank == 1: time.sleep(1000)")
    assert said == "worker-1 waits at train.py, line 6 (in <module>). worker-0, worker-2 had ended before."


def test_a_rank_that_ignores_every_signal_is_ended_at_its_timeout(make_job: MakeJob) -> None:
    said = reason(
        make_job,
        SAY,
        """
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        time.sleep(1000)
        """,
        workers=1,
    )
    assert said == "worker-0 did not answer: its process is sleeping."


@pytest.mark.slow
def test_a_hanging_rank_of_mpi_is_named(make_job: MakeJob) -> None:
    job = make_job(
        """
        import time
        from workshop_utils import place
        here = place.here()
        from mpi4py import MPI
        def elsewhere():
            time.sleep(1000)
        if here.rank == 1:
            elsewhere()
        MPI.COMM_WORLD.Barrier()
        """,
        strategy="mpi",
        workers=2,
        timeout="6s",
    )
    with pytest.raises(RunFailed) as failure:
        Local().launch(job).wait(60)
    message = str(failure.value)
    assert re.search(r"worker-1 waits at train\.py, line \d+ \(in elsewhere\)", message), message
    assert re.search(r"worker-0 waits at train\.py, line \d+ \(in <module>\)", message), message


# The diagnosis itself, on what such a run has printed


class RunByHand(Run):
    print = Run._receive_line

    def _request_stop(self) -> None:
        raise AssertionError("nobody asked for it")


def start(worker: int) -> str:
    return json.dumps(
        {"workshop": "start", "worker": f"worker-{worker}", "rank": worker, "time": 1.0, "pid": 100 + worker}
    )


def stack(run: RunByHand, worker: str, *frames: str) -> None:
    for text in ("Stack (most recent call first):", *frames):
        run.print(worker, text, "stderr")


def test_frames_of_libraries_are_passed_over_and_the_innermost_is_named() -> None:
    run = RunByHand("job", ("worker-0",))
    run.print("worker-0", start(0))
    stack(run, "worker-0", '  File "/x/site-packages/torch/c10d.py", line 9 in all_reduce',
          '  File "/usr/lib/python3.11/threading.py", line 2 in wait', '  File "/x/train.py", line 12 in step',
          '  File "/x/train.py", line 40 in <module>')  # fmt: skip
    assert diagnosis(run, {100: "S (sleeping)"}) == "worker-0 waits at train.py, line 12 (in all_reduce)."


def test_workers_with_the_same_stack_are_shown_together_without_the_machines_folders() -> None:
    run = RunByHand("job", ("worker-0", "worker-1", "worker-2", "worker-3"))
    for rank in (0, 1, 3):
        inner = "/x/lib/python3.11/site-packages/torch/c10d.py" if rank else "/usr/lib/python3.11/queue.py"
        stack(
            run,
            f"worker-{rank}",
            f'  File "{inner}", line 9 in wait',
            '  File "/x/train.py", line 4 in <module>',
        )
    assert stacks(run)["worker-3"] == ["wait (torch/c10d.py, line 9)", "<module> (train.py, line 4)"]
    assert "worker-2" not in stacks(run)
    assert shown_stacks(run) == (
        "\nThe stack of worker-0, the innermost call first:\n  wait (queue.py, line 9)\n  <module> (train.py, line 4)"
        "\nThe stack of worker-1, worker-3, the innermost call first:\n  wait (torch/c10d.py, line 9)\n"
        "  <module> (train.py, line 4)"
    )
