import gzip
import json
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import write_idx
from hypothesis import example, given
from hypothesis import strategies as st

from workshop_utils import place

# What the SageMaker toolkit sets for three hosts with parameter servers.
SAGEMAKER_CLUSTER = {
    "master": ["algo-1:2222"],
    "ps": ["algo-1:2223", "algo-2:2223", "algo-3:2223"],
    "worker": ["algo-2:2222", "algo-3:2222"],
}


def tf_config(cluster, role, index=0):
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"})


SAGEMAKER_TF_CONFIG = tf_config(SAGEMAKER_CLUSTER, "master")
# What the real launchers set, each for one rank of several on the second of two machines.
TORCHRUN = {
    "RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "2", "ROLE_RANK": "5", "ROLE_WORLD_SIZE": "8", "MASTER_ADDR": "node-0", "MASTER_PORT": "29500",
}  # fmt: skip
# A pod of PyTorchJob with a process of its own: the operator counts pods, and knows no ranks inside them.
PYTORCHJOB = {
    "RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "job-master-0", "MASTER_PORT": "23456",
    "PET_NNODES": "2", "PET_NODE_RANK": "1",
}  # fmt: skip
# With torchrun in each pod, as nprocPerNode and TrainJob have it, torchrun's variables take the operator's place.
TRAINJOB = {**PYTORCHJOB, "PET_NPROC_PER_NODE": "4", "PET_MASTER_ADDR": "job-node-0-0", **TORCHRUN}
HOROVODRUN = {
    "HOROVOD_RANK": "6", "HOROVOD_SIZE": "8", "HOROVOD_LOCAL_RANK": "2", "HOROVOD_LOCAL_SIZE": "4",
    "HOROVOD_CROSS_RANK": "1", "HOROVOD_CROSS_SIZE": "2", "HOROVOD_HOSTNAME": "node-1",
}  # fmt: skip
# Open MPI's NODE_RANK counts the processes of a node, those of other jobs too.
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "7", "OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4", "OMPI_COMM_WORLD_NODE_RANK": "3", "OMPI_UNIVERSE_SIZE": "8",
}  # fmt: skip
MPICH = {"PMI_RANK": "5", "PMI_SIZE": "6", "MPI_LOCALRANKID": "2", "MPI_LOCALNRANKS": "3"}
SAGEMAKER_HOSTS = {"SM_HOSTS": '["algo-1", "algo-10", "algo-2"]', "SM_CURRENT_HOST": "algo-2"}
# The toolkit sets the host's variables around mpirun, and hands those of the first host to all ranks.
SAGEMAKER_MPI = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-1", **OPEN_MPI}
SAGEMAKER_TORCHRUN = {"SM_HOSTS": '["algo-1", "algo-2"]', "SM_CURRENT_HOST": "algo-2", **TORCHRUN}
SLURM_TASK = {
    "SLURM_STEP_ID": "0", "SLURM_PROCID": "3", "SLURM_STEP_NUM_TASKS": "7", "SLURM_LOCALID": "1", "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2),3",
    "SLURM_NTASKS": "8",  # of the job, which may have several steps
}  # fmt: skip
TWO_HOSTS = {"worker": ["a:1", "a:2", "b:1", "b:2"]}
WORKER_OF_TENSORFLOW = {"TF_CONFIG": tf_config(TWO_HOSTS, "worker", "3")}
CHIEF_AND_SERVER = {"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3", "a:4"]}


@pytest.fixture
def no_platform(monkeypatch):
    for name in [
        *filter(None, sum(place.RANK_VARIABLES, ())),
        "TF_CONFIG",
        "SM_HOSTS",
        "SM_CURRENT_HOST",
        "SLURM_STEP_ID",
    ]:
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("environment", "rank", "world_size", "local_rank", "local_world_size", "node_rank"),
    [
        ({}, 0, 1, 0, 1, 0),
        (TORCHRUN, 5, 8, 1, 4, 1),
        (PYTORCHJOB, 1, 2, 0, 1, 1),
        (TRAINJOB, 5, 8, 1, 4, 1),
        (HOROVODRUN, 6, 8, 2, 4, 1),
        (OPEN_MPI, 7, 8, 3, 4, 1),
        (MPICH, 5, 6, 2, 3, 1),
        (SAGEMAKER_MPI, 7, 8, 3, 4, 1),
        (SAGEMAKER_TORCHRUN, 5, 8, 1, 4, 1),
        (SAGEMAKER_HOSTS, 2, 3, 0, 1, 2),
        (WORKER_OF_TENSORFLOW, 3, 4, 1, 2, 1),
        (SLURM_TASK, 3, 7, 1, 2, 1),
        ({**SLURM_TASK, "SLURM_NODEID": "2", "SLURM_PROCID": "6", "SLURM_LOCALID": "2"}, 6, 7, 2, 3, 2),
        # The batch script is no rank.
        ({"SLURM_PROCID": "3", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, 0, 1, 0, 1, 0),
        ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"}, 1, 2, 1, 2, 0),  # as if all shared a machine
    ],
)
def test_each_platform_says_who_a_worker_is_and_where(
    environment, rank, world_size, local_rank, local_world_size, node_rank
):
    found = place.from_environment(environment)
    assert (found.role, found.name) == ("worker", f"worker-{rank}")
    assert (found.rank, found.world_size) == (rank, world_size)
    assert (found.local_rank, found.local_world_size, found.node_rank) == (
        local_rank,
        local_world_size,
        node_rank,
    )


@pytest.mark.parametrize(
    ("role", "index", "local_rank"), [("chief", 0, 0), ("ps", 0, 0), ("worker", 0, 0), ("worker", 1, 1)]
)
def test_beside_parameter_servers_only_workers_share_the_devices_of_a_machine(role, index, local_rank):
    found = place.from_environment({"TF_CONFIG": tf_config(CHIEF_AND_SERVER, role, index)})
    assert found.local_rank == local_rank
    assert found.local_world_size == (1 if role == "ps" else 2)


# Devices


@pytest.fixture
def gpus(monkeypatch):
    """Lets this process's PyTorch see so many GPUs; there are none where tests run."""
    monkeypatch.delenv("WORKSHOP_DEVICE", raising=False)

    def see(count):
        monkeypatch.setattr("torch.cuda.device_count", lambda: count)

    return see


@pytest.mark.parametrize(
    ("count", "environment", "device", "backend"),
    [
        (0, TORCHRUN, "cpu", "gloo"),
        (4, TORCHRUN, "cuda:1", "nccl"),
        (8, OPEN_MPI, "cuda:3", "nccl"),
        (1, {}, "cuda:0", "nccl"),
        (1, SLURM_TASK, "cuda:0", "nccl"),  # each task sees its own alone
        (2, {**TORCHRUN, "WORKSHOP_DEVICE": "cuda:0"}, "cuda:0", "nccl"),
        (4, {**TORCHRUN, "WORKSHOP_DEVICE": "cpu"}, "cpu", "gloo"),
        (4, {"TF_CONFIG": tf_config(CHIEF_AND_SERVER, "ps")}, "cpu", "gloo"),
    ],
)
def test_each_process_of_a_machine_has_the_gpu_of_its_local_rank(
    count, environment, device, backend, gpus, monkeypatch
):
    gpus(count)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = place.from_environment(environment)
    assert (found.device, found.backend) == (device, backend)


def test_a_gpu_that_the_framework_does_not_find_is_refused(gpus, monkeypatch):
    gpus(0)
    monkeypatch.setenv("WORKSHOP_DEVICE", "cuda:0")
    with pytest.raises(ValueError, match="WORKSHOP_DEVICE is 'cuda:0', but the framework finds no GPU"):
        _ = place.from_environment({}).device


def test_more_processes_than_gpus_on_a_machine_are_refused_on_each_of_them(gpus):
    gpus(2)
    for rank in ("0", "2"):
        ranks = {"RANK": rank, "WORLD_SIZE": "3", "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": "3"}
        with pytest.raises(ValueError, match="3 processes train on this machine and see 2 GPUs"):
            _ = place.from_environment(ranks).device


RANKS = (TORCHRUN, HOROVODRUN, MPICH, OPEN_MPI)
SAGEMAKER = {**SAGEMAKER_HOSTS, "TF_CONFIG": SAGEMAKER_TF_CONFIG}


@pytest.mark.parametrize(
    ("around", "inner"),
    [
        *((SAGEMAKER, ranks) for ranks in RANKS),
        *((mpirun, TORCHRUN) for mpirun in (OPEN_MPI, MPICH)),
        ({"PMI_RANK": "3", "PMI_SIZE": "7"}, SLURM_TASK),  # srun sets both
        *((SLURM_TASK, inner) for inner in (*RANKS, WORKER_OF_TENSORFLOW, SAGEMAKER_HOSTS)),
    ],
)
def test_what_starts_the_ranks_is_believed_before_the_platform_around_it(around, inner):
    assert place.from_environment({**around, **inner}) == place.from_environment(inner)


@pytest.mark.usefixtures("no_platform")
def test_the_master_of_sagemaker_is_the_chief_of_tensorflow(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", SAGEMAKER_TF_CONFIG)
    config = place.tf_config()
    assert config["cluster"].keys() == {"chief", "ps", "worker"}
    assert config["task"] == {"type": "chief", "index": 0}
    assert json.loads(os.environ["TF_CONFIG"]) == config  # what TensorFlow then reads
    chief = place.here()
    assert (chief.name, chief.rank, chief.world_size) == ("chief-0", 0, 3)


@pytest.mark.parametrize(
    ("kind", "index", "rank"), [("worker", 0, 1), ("worker", 1, 2), ("ps", 2, None), ("evaluator", 0, None)]
)
def test_chief_and_workers_have_ranks_and_the_others_have_none(kind, index, rank):
    found = place.from_environment({"TF_CONFIG": tf_config(SAGEMAKER_CLUSTER, kind, index)})
    assert (found.name, found.rank, found.world_size) == (f"{kind}-{index}", rank, 3)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK is 'one'"),
        ({"RANK": "0"}, "WORLD_SIZE is ''"),
        ({"TF_CONFIG": "{"}, "TF_CONFIG is '{'"),
        ({"TF_CONFIG": '{"cluster": {}}'}, 'TF_CONFIG is \'{"cluster"'),
        ({"SM_HOSTS": "algo-1", "SM_CURRENT_HOST": "algo-1"}, "SM_HOSTS is 'algo-1'"),
        ({"SM_HOSTS": '["algo-1"]', "SM_CURRENT_HOST": "algo-2"}, "SM_CURRENT_HOST is 'algo-2'"),
        (
            {**SLURM_TASK, "SLURM_STEP_TASKS_PER_NODE": "many"},
            "SLURM_STEP_TASKS_PER_NODE is 'many'; it must list node 1",
        ),
        (
            {**SLURM_TASK, "SLURM_NODEID": "3"},
            "SLURM_STEP_TASKS_PER_NODE is '2(x2),3'; it must list node 3",
        ),
    ],
)
def test_a_place_that_cannot_be_read_is_answered_with_the_variable(environment, named):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 (the start of the message is compared below)
        place.from_environment(environment)
    assert str(caught.value).startswith(named)


def test_folders_are_sagemakers_where_it_sets_them_and_the_launchers_otherwise():
    own = {"WORKSHOP_DATA": "/d", "WORKSHOP_MODEL": "/m"}
    sagemaker = {"SM_CHANNEL_TRAINING": "/opt/ml/data", "SM_MODEL_DIR": "/opt/ml/model"}
    found = [place.from_environment(variables) for variables in ({}, own, {**own, **sagemaker})]
    assert [str(each.data_folder) for each in found] == ["data", "/d", "/opt/ml/data"]
    assert [str(each.model_folder) for each in found] == ["model", "/m", "/opt/ml/model"]


# Reports


@pytest.mark.usefixtures("no_platform")
def test_a_report_is_one_line_of_strict_json(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = time.time()
    place.report(10, loss=0.5, accuracy=math.nan, samples_per_second=math.inf, epoch=2)
    line = capsys.readouterr().out
    assert line.count("\n") == 1
    record = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert before - 1 < record.pop("time") < time.time() + 1
    whose = {"workshop": "metric", "worker": "worker-1", "rank": 1, "step": 10}
    assert record == {**whose, "loss": 0.5, "accuracy": None, "samples_per_second": None, "epoch": 2}


def test_a_script_that_asks_for_its_place_says_once_that_it_started_and_answers_where_it_stands():
    script = "from workshop_utils import place; place.here(); place.here(); input()"
    with subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, "RANK": "1", "WORLD_SIZE": "2"},
        text=True,
    ) as process:
        start = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGUSR1)
        stack = list(iter(process.stderr.readline, '  File "<string>", line 1 in <module>\n'))
        rest, _ = process.communicate("\n", timeout=30)
    del start["time"]
    assert start == {"workshop": "start", "worker": "worker-1", "rank": 1, "pid": process.pid}
    assert stack[0].startswith("Stack (most recent call first)")
    assert rest == ""
    assert process.returncode == 0


def test_place_needs_the_standard_library_alone():
    script = f"import sys; sys.path.insert(0, {str(Path(place.__file__).parent)!r}); import place"
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True, timeout=60)


# Data


def test_a_missing_file_is_named_with_its_folder_and_the_variable_that_says_it(tmp_path):
    with pytest.raises(
        FileNotFoundError, match=rf"train-images-idx3-ubyte is not in {tmp_path} .*WORKSHOP_DATA"
    ):
        place.load("train", tmp_path)


def test_images_without_as_many_labels_are_refused(tmp_path):
    write_idx(tmp_path / "train-images-idx3-ubyte", (3, 1, 1), bytes(3))
    write_idx(tmp_path / "train-labels-idx1-ubyte", (2,), bytes(2))
    with pytest.raises(ValueError, match="holds 3 train images but 2 labels"):
        place.load("train", tmp_path)


# Two rows of three bytes.
WHOLE = b"\0\0\x08\x02" + b"\0\0\0\x02" + b"\0\0\0\x03" + bytes(range(6))


@example(WHOLE[:3], False)
@example(WHOLE[:10], False)
@example(WHOLE[:-1], False)
@example(WHOLE + b"x", False)
@example(gzip.compress(WHOLE)[:12], True)
@example(gzip.compress(WHOLE)[:-1], True)
@given(st.binary(max_size=60) | st.binary(max_size=20).map(lambda tail: WHOLE[:4] + tail), st.booleans())
def test_any_bytes_are_a_whole_idx_file_or_a_value_error(tmp_path_factory, content, packed):
    file = tmp_path_factory.getbasetemp() / ("any.gz" if packed else "any")
    file.write_bytes(content)
    try:
        shape, values = place.read_idx(file)
    except ValueError:
        return
    assert math.prod(shape) == len(values)


# Waiting for the chief


def chief_at(port, monkeypatch):
    cluster = {"chief": [f"127.0.0.1:{port}"], "ps": ["127.0.0.1:1"]}
    monkeypatch.setenv("TF_CONFIG", tf_config(cluster, "ps"))


def test_a_server_serves_until_the_chief_that_it_has_seen_leaves(monkeypatch):
    with socket.socket() as chief:
        chief.bind(("127.0.0.1", 0))
        chief_at(chief.getsockname()[1], monkeypatch)
        serving = threading.Thread(target=place.serve_until_chief_leaves, args=(0.02, 30), daemon=True)
        serving.start()
        serving.join(0.2)
        assert serving.is_alive(), "it left before the chief had come"
        chief.listen()
        chief.accept()[0].close()
        serving.join(0.2)
        assert serving.is_alive(), "it left while the chief was there"
    serving.join(10)
    assert not serving.is_alive()


def test_a_chief_that_never_comes_is_named(monkeypatch):
    chief_at(1, monkeypatch)
    with pytest.raises(TimeoutError, match=r"the chief at 127\.0\.0\.1:1 did not answer within 0 s"):
        place.serve_until_chief_leaves(0.01, 0.1)


def test_the_first_task_leaves_when_the_other_workers_have_left_and_these_at_once(monkeypatch):
    with socket.socket() as worker:
        worker.bind(("127.0.0.1", 0))
        worker.listen()
        cluster = {"worker": ["127.0.0.1:1", f"127.0.0.1:{worker.getsockname()[1]}"]}
        for index in (1, 0):
            monkeypatch.setenv("TF_CONFIG", tf_config(cluster, "worker", index))
            leaving = threading.Thread(target=place.leave_last, args=(0.02, 30), daemon=True)
            leaving.start()
            leaving.join(0.5 if index == 0 else 10)
            assert leaving.is_alive() == (index == 0)
    leaving.join(10)
    assert not leaving.is_alive()


# Failures and what outlives them


def test_a_job_learns_how_often_it_was_restarted(monkeypatch):
    for name in ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"):
        monkeypatch.delenv(name, raising=False)
    assert place.restart_count() == 0
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert place.restart_count() == 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "2")
    assert place.restart_count() == 2
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "twice")
    with pytest.raises(ValueError, match="TORCHELASTIC_RESTART_COUNT is 'twice'"):
        place.restart_count()


@pytest.mark.usefixtures("no_platform")
def test_checkpoints_are_where_the_platform_keeps_them(monkeypatch):
    monkeypatch.delenv("WORKSHOP_CHECKPOINTS", raising=False)
    monkeypatch.setenv("WORKSHOP_MODEL", "/somewhere/model")
    assert place.checkpoint_folder() is None
    monkeypatch.setenv("SM_MODEL_DIR", "/opt/ml/model")
    assert place.checkpoint_folder() == Path("/opt/ml/checkpoints")
    monkeypatch.setenv("WORKSHOP_CHECKPOINTS", "/kept")
    assert place.checkpoint_folder() == Path("/kept")


@pytest.fixture
def rank_1_of_4(no_platform, monkeypatch, tmp_path):
    """The folder in which this process, which takes itself for a rank, leaves its trace."""
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "4",
        "WORKSHOP_MODEL": tmp_path,
        "KINETO_LOG_LEVEL": "6",
    }.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("WORKSHOP_TRACE", raising=False)
    return tmp_path / "traces"


def recorded_steps(folder):
    """The names of the complete steps in this rank's trace."""
    assert [path.name for path in folder.iterdir()] == ["trace-rank-0001.json.gz"]
    trace = json.loads(gzip.decompress((folder / "trace-rank-0001.json.gz").read_bytes()))
    assert trace["workshop"] == {"rank": 1, "world_size": 4}
    assert any(event["name"] == "aten::ones" for event in trace["traceEvents"])
    names = [event["name"] for event in trace["traceEvents"] if event["name"].startswith("ProfilerStep")]
    return sorted(names)[: trace.get("complete_steps")]


def take_steps(profiler, count):
    import torch

    for _ in range(count):
        torch.ones(2)
        profiler.step()


@pytest.mark.slow
def test_a_profile_records_steps_after_the_warm_up_and_is_written_once_they_are_over(rank_1_of_4):
    with place.profile(steps=2) as profiler:
        take_steps(profiler, place.WARM_UP_STEPS + 1)
        assert not rank_1_of_4.exists()
        take_steps(profiler, 1)
        assert recorded_steps(rank_1_of_4) == ["ProfilerStep#3", "ProfilerStep#4"]
        take_steps(profiler, 5)
    assert recorded_steps(rank_1_of_4) == ["ProfilerStep#3", "ProfilerStep#4"]


@pytest.mark.slow
def test_a_profile_that_an_error_ends_has_the_steps_before_it(rank_1_of_4):
    def fail():
        with place.profile(steps=100) as profiler:
            take_steps(profiler, place.WARM_UP_STEPS + 2)
            raise RuntimeError("the loss is not finite")

    with pytest.raises(RuntimeError, match="the loss is not finite"):
        fail()
    assert recorded_steps(rank_1_of_4) == ["ProfilerStep#3", "ProfilerStep#4"]


@pytest.mark.slow
def test_a_profile_that_ends_within_its_warm_up_says_so(rank_1_of_4, capsys):
    with place.profile(steps=2) as profiler:
        take_steps(profiler, place.WARM_UP_STEPS)
    assert "no trace: the first 3 steps are warm-up" in capsys.readouterr().err
    assert not rank_1_of_4.exists()


@pytest.mark.slow
def test_a_profile_goes_to_the_folder_that_workshop_trace_names(rank_1_of_4, monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_TRACE", str(tmp_path / "elsewhere"))
    with place.profile(steps=1) as profiler:
        take_steps(profiler, 10)
    assert recorded_steps(tmp_path / "elsewhere") == ["ProfilerStep#3"]
    assert not rank_1_of_4.exists()


def test_without_steps_a_profile_costs_nothing(tmp_path):
    program = (
        "import sys; from workshop_utils import place\n"
        "with place.profile() as profiler: profiler.step()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path, timeout=60)
    assert not list(tmp_path.iterdir())


def test_a_negative_number_of_steps_to_profile_is_refused():
    with (
        pytest.raises(ValueError, match="steps is -1; it must be 0, to record nothing, or more"),
        place.profile(-1),
    ):
        pass
