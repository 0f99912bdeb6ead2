"""Emulated devices: what a person may write, who can have one, and what a run with them says."""

from pathlib import Path

import pytest

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network.devices import EmulatedDevice, host_remark
from workshop_utils.ranks import on_ranks
from workshop_utils.scaling.scale_model import JOB

JOBS = Path(__file__).parents[2] / "jobs"
pytestmark = pytest.mark.usefixtures("nothing_is_left")


def test_settings_are_read_by_name():
    parsed = EmulatedDevice.parse("seconds=400ms, worker-1=3")
    assert parsed == EmulatedDevice(seconds="400ms", slower={"worker-1": 3})
    assert str(parsed) == "emulated devices, 400ms a step, worker-1 3 times as slow"
    assert EmulatedDevice.parse("1s") == EmulatedDevice(seconds="1s")


@pytest.mark.processes
@pytest.mark.parametrize("strategy", ["ring", "workshop_parameter_server", "torch_ddp"])
def test_each_worker_computes_as_long_as_its_device_and_the_slow_one_longer(strategy):
    job = TrainingJob.load(JOB).replace(strategy=strategy, arguments={"steps": 4})
    run = Local(warm=True, emulated_device="100ms,worker-1=2").launch(job).wait(60)
    steps = run.metrics.dropna(subset=["step_seconds"]).query("step > 1")
    fastest = steps.groupby("worker")["compute_seconds"].min()
    # DDP sends its first buckets, and so meets the slow worker, during the backward pass.
    assert fastest["worker-0"] >= 0.1
    assert fastest["worker-1"] >= 0.2
    # A step waits for the slowest; where a busy machine lets the fast one start late, by a little less.
    assert steps.groupby("worker")["step_seconds"].max()["worker-0"] >= 0.15
    assert {"worker-0", "worker-1"} <= {device["worker"] for device in run.devices}
    assert "worker" not in run.remark  # all have used their devices, and said so


@pytest.mark.processes
@pytest.mark.horovod
def test_ranks_of_horovod_compute_on_their_devices():
    job = TrainingJob.load(JOBS / "mnist_horovod").replace(arguments={"epochs": 1})
    run = Local(warm=True, emulated_device="50ms").launch(job).wait(120)
    assert {device["worker"] for device in run.devices} == set(run.workers)
    assert all(device["passes"] > 2 for device in run.devices)


@pytest.mark.processes
def test_a_function_without_pytorch_says_what_its_device_computes():
    def program(communicator):
        import time

        from workshop_utils.training.emulated_device import computing

        started = time.perf_counter()
        for _ in range(3):
            with computing():
                sum(range(1000))
        return time.perf_counter() - started

    results = on_ranks(2, program, emulated_device="50ms")
    assert min(results.values) >= 0.15
    assert "emulated devices, 50ms a step" in repr(results)
    assert "rank" not in results.remark  # both have used their devices, and said so


@pytest.mark.processes
def test_a_run_that_kept_the_host_busy_says_so():
    def program(communicator):
        import time

        from workshop_utils.training.emulated_device import computing

        for _ in range(4):
            with computing():
                until = time.process_time() + 0.04
                while time.process_time() < until:
                    pass

    remark = on_ranks(2, program, emulated_device="60ms").remark
    # Where others keep the cores busy, too, these two have less of them.
    assert "this measured the machine, too" in remark or "this machine was busy with other work" in remark


def test_the_remark_says_how_much_slower_the_device_would_have_to_be():
    names = [f"worker-{rank}" for rank in range(4)]
    devices = [{"worker": name, "passes": 5, "host_share": 0.2, "late_share": 0.0} for name in names]
    assert host_remark(devices[:1], names[:1], cores=2) == ""
    assert "worker-2, worker-3 reported nothing" in host_remark(devices[:2], names, cores=2)
    assert "up to 5% late" in host_remark([devices[0] | {"late_share": 0.05}], names[:1], cores=2)
    server = devices[1] | {"worker": "server-0", "passes": 0}
    assert host_remark([devices[0], server], names[:1], cores=4) == ""
    unused = [device | {"passes": 0} for device in reversed(devices[:2])]
    assert host_remark(unused, names[:2], cores=2).startswith("worker-0, worker-1 did not use")
    remark = host_remark(devices, names, cores=2)
    assert "kept 40.0% of its 2 cores busy" in remark
    assert "4.0 times as slow" in remark
