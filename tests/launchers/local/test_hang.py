"""A run that meets its timeout says which worker did not answer, and where the others wait.

That the frames of libraries are passed over, and equal stacks shown once, is tested with PyTorch's own:
`jobs/test_failure_jobs.py`.
"""

import itertools
import re
import time

import pytest
from conftest import failure_of

from workshop_utils.launchers.kubernetes import EmulatedKubernetes
from workshop_utils.launchers.local import Local, hang
from workshop_utils.launchers.sagemaker import EmulatedSageMaker

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
    assert run.seconds >= 8
    prefix = f"{job.name} did not end within its timeout of 8 s. "
    assert message.startswith(prefix)
    message, _, logs = message.removeprefix(prefix).partition("\nThe whole logs are in ")
    assert logs == str(run.log_folder)
    said, *stacks = message.split("\nThe stack of ")
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
            print("one", "two", "three", "10%\\r20%", sep="\\n", end="", flush=True)
            data_loader()
        here = place.here()
        if here.rank == 3:  # it is deaf to signals
            for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
            time.sleep(1000)
        place.report(7, loss=1.0)
        if here.rank == 8:
            signal.signal(signal.SIGUSR1, lambda *_: None)
        if here.rank == 2:
            os.kill(os.getpid(), signal.SIGSTOP)
        if here.rank == 4:
            sys.exit()
        if here.rank == 1:
            data_loader()
        else:
            barrier()
    """
    said = reason(make_job, script, workers=9)
    pattern = (
        r"worker-2 did not answer: its process is stopped; its last report was of step 7\. "
        r"worker-3 did not answer: its process is sleeping\. "
        r"worker-8 did not answer: its process is sleeping, and its script may handle SIGUSR1 itself; "
        r"its last report was of step 7\. "
        r"worker-1, worker-5 wait at train\.py, line (\d+) \(in data_loader\) after step 7\. "
        r"worker-0, worker-6, worker-7 wait at train\.py, line (\d+) \(in barrier\) after step 7\. "
        r"worker-4 had ended before\."
        r"\nworker-5 printed last:\n  two\n  three\n  20%"
    )
    match = re.fullmatch(pattern, said)
    assert match, said
    assert int(match[2]) == int(match[1]) + 4


def test_processes_that_a_worker_has_started_answer_as_well_and_the_environment_s_own_start_is_kept(
    make_job, tmp_path
):
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.own_start = True\n")
    script = """
        import multiprocessing
        def child():
            print(sys.own_start, any("at_start" in folder for folder in sys.path), flush=True)
            time.sleep(1000)
        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                multiprocessing.get_context(method).Process(target=child).start()
            time.sleep(1000)
    """
    job = make_job(SAY, script, timeout="8s", environment={"PYTHONPATH": str(tmp_path)})
    said = failure_of(Local().launch(job))
    assert "worker-0 waits at train.py, line " in said
    assert re.search(
        r"process \d+ of worker-0, process \d+ of worker-0 wait at train\.py, line \d+ \(in child\)", said
    ), said
    assert "printed last:\n  True False\n  True False\n" in said
    assert len(re.findall(r"child \(train\.py, line \d+\)", said)) == 2, said


def test_ranks_that_share_an_output_are_asked_first_and_each_that_does_not_answer_is_named(
    make_job, monkeypatch
):
    monkeypatch.setattr(
        hang, "ANSWERING_SECONDS", hang.ASKING_SECONDS
    )  # so one that is deaf takes all that is left
    script = """
        import subprocess
        rank = int(os.environ.get("RANK", -1))
        if rank < 0:  # as torchrun does
            for number in range(5):
                subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "RANK": str(number)})
        if rank in range(2):
            os.kill(os.getpid(), signal.SIGSTOP)
        if rank == 3:
            signal.signal(signal.SIGUSR1, lambda *_: None)
        time.sleep(1000)
    """
    said = failure_of(Local().launch(make_job(SAY, script, timeout="12s")))
    ranks = [rf"process \d+ \(rank {rank}\) of worker-0" for rank in range(5)]
    pattern = "".join(rf"{rank} did not answer: it is stopped\. " for rank in ranks[:2])
    pattern += (
        rf"{ranks[3]} did not answer: it is sleeping, and it may handle SIGUSR1 itself, or print elsewhere\. "
    )
    pattern += rf"{ranks[2]} waits at train\.py, line \d+ \(in <module>\)\. "
    assert re.search(rf"{pattern}{ranks[4]}, worker-0 were not asked: 5 s had passed\.\n", said), said


ONE_STANDS_ELSEWHERE = """
    import os, time
    def elsewhere():
        time.sleep(1000)
    def barrier():
        time.sleep(1000)
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")
    print("epoch 1\\n", end="", flush=True)  # in one piece, since ranks share an output
    elsewhere() if "1" in map(os.environ.get, names) else barrier()
"""
NODE = {"nodes": 1, "processes_per_node": 2}


def test_a_script_that_never_asks_for_its_place_shows_where_each_rank_stands_on_every_emulator(make_job):
    targets = [
        ("mpi", Local(), {"workers": 2}, "did not end within its timeout of 40 s"),
        ("torch_ddp", EmulatedSageMaker(), NODE, "MaxRuntimeExceeded"),
        ("torch_ddp", EmulatedKubernetes(kind="TrainJob"), NODE, "activeDeadlineSeconds"),
        ("torch_ddp", EmulatedKubernetes(), {"workers": 2}, "activeDeadlineSeconds"),
    ]
    runs = [
        target.launch(make_job(ONE_STANDS_ELSEWHERE, strategy=strategy, timeout="40s", **layout))
        for strategy, target, layout, _ in targets
    ]
    for run, (*_, headline) in zip(runs, targets, strict=True):
        said = failure_of(run)
        assert headline in said
        rank = r"worker-1|process \d+ \(rank 1\) of (node-0|algo-1)"
        assert re.search(rf"({rank}) waits at train\.py, line 4 \(in elsewhere\)\.", said), said
        assert re.search(r" waits at train\.py, line 6 \(in barrier\)\.", said), said
        assert " printed last:\n" in said
        assert "\n  epoch 1\n" in said
        assert said.count("The stack of ") == 2, said


def test_pods_that_meet_the_deadline_together_all_show_their_stacks_even_if_one_has_ended_before_another_is_asked(
    make_job, monkeypatch
):
    ask, calls = hang.Hang.ask, itertools.count()

    def late(self, run, supervisor):
        time.sleep(2 * next(calls))
        ask(self, run, supervisor)

    monkeypatch.setattr(hang.Hang, "ask", late)
    job = make_job(ONE_STANDS_ELSEWHERE, strategy="torch_ddp", workers=2, timeout="8s")
    said = failure_of(EmulatedKubernetes().launch(job))
    assert "worker-0 waits at train.py, line 6 (in barrier)." in said
    assert "worker-1 waits at train.py, line 4 (in elsewhere)." in said
    assert said.count("The stack of ") == 2, said
