"""Runs on a system that is not Linux: every process is a Python of `elsewhere.py`, from the notebook's to the ranks'.

The tests start this file as a program there, which does what the test's name says.
"""

import math
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest

from workshop_utils import count_bytes, network, on_ranks
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local, launcher
from workshop_utils.network import ports
from workshop_utils.ranks import RanksFailed
from workshop_utils.runs import RunFailed
from workshop_utils.scaling.experiment import machine
from workshop_utils.training.emulated_device import SHORTEST_WAIT_SECONDS, computing

TESTS = Path(__file__).parents[2]
JOBS = TESTS.parent / "jobs"


@pytest.fixture
def elsewhere(tmp_path, nothing_is_left):
    """`elsewhere(name)` calls that function of this file there; what it printed."""
    python, processes = tmp_path / "python", tmp_path / "processes"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{TESTS}/elsewhere.py" "$@"\n')
    python.chmod(0o755)
    processes.symlink_to("/proc")
    hidden = {"ELSEWHERE_PYTHON": str(python), "ELSEWHERE_PROC": str(processes), "OMP_NUM_THREADS": "1"}

    def call(name):
        done = subprocess.run(
            [python, __file__, name],
            env={**os.environ, **hidden},
            capture_output=True,
            cwd=tmp_path,
            text=True,
            timeout=280,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", ["jobs_train", "functions_and_cells_run", "a_hang_has_its_stacks", "a_killed_supervisor_leaves_nothing"]
)  # fmt: skip
def test_without_linux(name, elsewhere):
    assert elsewhere(name).endswith("done\n")


def run_of(name, **changes):
    return Local(warm=True).launch(TrainingJob.load(JOBS / name).replace(**{"timeout": "2min", **changes}))


def loss_falls(run):
    losses = run.wait(120).metrics["loss"].dropna()
    assert losses.iloc[-1] < losses.iloc[0]
    assert not run.warm  # a fork of a process with threads of its own may crash there


def jobs_train():
    """The workshop's own strategies, also over slow links; PyTorch's, with a trace; one that goes on where it was."""
    loss_falls(run_of("digits_ring", arguments={"epochs": 2}))
    loss_falls(run_of("digits_ring/parameter_server.yaml", arguments={"epochs": 2}))
    slow = network.Network.parse("100Mbit,latency=1ms")
    ring = TrainingJob.load(JOBS / "measure_all_reduce").replace(arguments={"nbytes": 8000, "repeats": 2})
    run = Local(network=slow).launch(ring).wait(60)
    assert "by stamped links" in run.network
    assert run.metrics["error"].max() < 1e-6
    with pytest.raises(JobError, match="no network namespaces"):
        Local(network=slow).render(TrainingJob.load(JOBS / "mnist_torch_ddp"))
    outputs = Path.cwd() / "model"
    arguments = {"epochs": 2, "profile-steps": 2}
    loss_falls(run_of("mnist_torch_ddp", arguments=arguments, outputs=str(outputs)))
    assert len(list(outputs.glob("traces/*.json.gz"))) == 2
    kept = {"checkpoints": str(Path.cwd() / "kept"), "outputs": str(outputs)}
    arguments = {"kill-rank": 1, "kill-step": 15, "steps": 20}
    with pytest.raises(RunFailed, match=r"worker-1 \(rank 1\) was killed by SIGKILL"):
        run_of("digits_resumable", arguments=arguments, **kept).wait(120)
    steps = run_of("digits_resumable", arguments={"steps": 20}, **kept).wait(120).metrics["step"]
    assert 10 <= steps.min() < steps.max() == 20


def functions_and_cells_run():
    """On the workshop's communicator messages are counted; on PyTorch's, bytes are not known."""

    def summed(communicator):
        array = np.ones(1000)
        with computing():
            pass
        ring_all_reduce(communicator, array)
        return array[0]

    def of_pytorch(dist):
        import torch

        array = torch.ones(1000)
        with count_bytes(dist.barrier) as counted:
            dist.all_reduce(array)
        return float(array[0]), math.isnan(counted.sent)

    results = on_ranks(3, summed, emulated_device="50ms")
    assert (results.values, results.warm, results[0].messages) == ([3.0] * 3, False, 4)
    assert min(each.seconds for each in results) >= 0.05
    results = on_ranks(2, of_pytorch, framework="torch")
    assert results.values == [(2.0, True)] * 2
    assert math.isnan(results[0].bytes_sent)
    assert "not known" in repr(results)
    assert (
        SHORTEST_WAIT_SECONDS > 0.001
    )  # of an emulated device: nothing says for how long a thread waits for a core
    assert machine()


def a_hang_has_its_stacks():
    """Also those of ranks that another program has started."""

    def stuck(communicator):
        if communicator.rank:
            time.sleep(1000)
        communicator.barrier()

    with pytest.raises(RanksFailed) as failure:
        on_ranks(2, stuck, timeout="12s")
    assert re.search(r"rank 1 waits at .*\(in stuck\)", str(failure.value)), failure.value
    Path("train.py").write_text(
        "import subprocess, sys, time\nfrom workshop_utils import place\n"
        "if len(sys.argv) == 1:\n    subprocess.run([sys.executable, __file__, 'below'])\n"
        "place.here()\ntime.sleep(1000)\n"
    )
    job = TrainingJob(name="below", folder=Path.cwd(), strategy="single", timeout="10s")
    with pytest.raises(
        RunFailed, match=r"(?s)worker-0 waits at train\.py, line 6 .*The stack of worker-0.*<module>"
    ):
        Local().launch(job).wait(60)


def a_killed_supervisor_leaves_nothing():
    """Its workers do not hear of it, so the notebook ends them."""
    Path("train.py").write_text("import time\nprint('ready', flush=True)\ntime.sleep(1000)\n")
    run = Local().launch(TrainingJob(name="one", folder=Path.cwd(), strategy="torch_ddp", workers=2))
    assert next(run.logs(follow=True)).text == "ready"
    workers = [psutil.Process(pid) for pid in run.process_ids.values()]
    os.kill(workers[0].ppid(), signal.SIGKILL)
    with pytest.raises(RunFailed, match="the process that watches over it was killed"):
        run.wait(60)
    assert not psutil.wait_procs(workers, 30)[1]


if __name__ == "__main__":
    assert (sys.platform, Path("/proc/self").exists(), hasattr(os, "pidfd_open")) == ("darwin", False, False)
    assert (network.availability(), launcher.LOOPBACK_INTERFACE) == ("none", "lo0")
    assert ports._first_ephemeral_port() == 49_152
    # Those of the system that this is.
    launcher.LOOPBACK_INTERFACE, ports._first_ephemeral_port = "lo", lambda: 32_768
    vars(sys.modules["__main__"])[sys.argv[1]]()
    print("done")
