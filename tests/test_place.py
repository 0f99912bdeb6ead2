import gzip
import json
import math
import os
import re
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import yaml
from conftest import write_idx
from hypothesis import example, given
from hypothesis import strategies as st

from workshop_utils import idx, place
from workshop_utils.training import profiler, tf_cluster

PLATFORMS = yaml.safe_load(Path(__file__).with_name("platforms.yaml").read_text(encoding="utf-8"))
VARIABLES = {name: entry["variables"] for name, entry in PLATFORMS["places"].items()}
TORCHRUN, OPEN_MPI, SLURM_TASK = (VARIABLES[name] for name in ("torchrun", "Open MPI", "Slurm"))


def tf_config(cluster, role, index=0):
    return json.dumps({"cluster": cluster, "task": {"type": role, "index": index}, "environment": "cloud"})


@pytest.fixture
def no_platform(monkeypatch):
    of_ranks = filter(None, sum(place.RANK_VARIABLES, ()))
    for name in (*of_ranks, "TF_CONFIG", "SM_HOSTS", "SM_CURRENT_HOST", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize("name", VARIABLES)
def test_each_platform_says_who_a_process_is_and_where(name):
    found = place.from_environment(VARIABLES[name])
    expected = PLATFORMS["places"][name]["place"]
    assert {key: getattr(found, key) for key in expected} == expected
    assert f"{found.role}-{found.index}" == found.name


@pytest.mark.parametrize("entry", PLATFORMS["wrong"], ids=lambda entry: entry["says"])
def test_a_place_that_cannot_be_read_is_answered_with_the_variable(entry):
    with pytest.raises(ValueError, match=f"^{re.escape(entry['says'])}"):
        place.from_environment(entry["variables"])


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
        (4, VARIABLES["ps 0 of parameter servers on one machine"], "cpu", "gloo"),
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


THREE_RANKS = {"WORLD_SIZE": "3", "LOCAL_WORLD_SIZE": "3"}
TOO_MANY = "3 processes train on this machine and see 2 GPUs"


@pytest.mark.parametrize(
    ("count", "environment", "message"),
    [
        (0, {"WORKSHOP_DEVICE": "cuda:0"}, "WORKSHOP_DEVICE is 'cuda:0', but the framework finds no GPU"),
        *((2, {**THREE_RANKS, "RANK": rank, "LOCAL_RANK": rank}, TOO_MANY) for rank in "02"),
    ],
)
def test_gpus_that_are_not_there_are_refused_on_each_process(count, environment, message, gpus, monkeypatch):
    gpus(count)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        _ = place.from_environment(environment).device


RANKS = (TORCHRUN, VARIABLES["horovodrun"], OPEN_MPI)
CHIEF_OF_SAGEMAKER = VARIABLES["master of parameter servers on SageMaker"]
SAGEMAKER = {**VARIABLES["SageMaker"], **CHIEF_OF_SAGEMAKER}


@pytest.mark.parametrize(
    ("around", "inner"),
    [
        *((SAGEMAKER, ranks) for ranks in RANKS),
        (OPEN_MPI, TORCHRUN),
        *((SLURM_TASK, inner) for inner in (*RANKS, VARIABLES["TensorFlow"], VARIABLES["SageMaker"])),
    ],
)
def test_what_starts_the_ranks_is_believed_before_the_platform_around_it(around, inner):
    assert place.from_environment({**around, **inner}) == place.from_environment(inner)


@pytest.mark.usefixtures("no_platform")
def test_the_master_of_sagemaker_is_the_chief_of_tensorflow(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", CHIEF_OF_SAGEMAKER["TF_CONFIG"])
    config = place.tf_config()
    assert config["cluster"].keys() == {"chief", "ps", "worker"}
    assert config["task"] == {"type": "chief", "index": 0}
    assert json.loads(os.environ["TF_CONFIG"]) == config  # what TensorFlow then reads
    chief = place.here()
    assert (chief.name, chief.rank, chief.world_size) == ("chief-0", 0, 3)


def test_folders_are_those_that_the_launcher_names_and_sagemakers_otherwise():
    own = {"WORKSHOP_DATA": "/d", "WORKSHOP_MODEL": "/m"}
    sagemaker = {"SM_CHANNEL_TRAINING": "/opt/ml/data", "SM_MODEL_DIR": "/opt/ml/model"}
    found = [place.from_environment(variables) for variables in ({}, sagemaker, {**own, **sagemaker})]
    assert [str(each.data_folder) for each in found] == ["data", "/opt/ml/data", "/d"]
    assert [str(each.model_folder) for each in found] == ["model", "/opt/ml/model", "/m"]


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


@pytest.mark.processes
def test_a_script_that_asks_for_its_place_says_once_that_it_started():
    script = "from workshop_utils import place; place.here(); place.here()"
    environment = {**os.environ, "RANK": "1", "WORLD_SIZE": "2"}
    words = [sys.executable, "-c", script]
    start = json.loads(subprocess.run(words, env=environment, check=True, capture_output=True).stdout)
    del start["time"], start["pid"]
    assert start == {"workshop": "start", "worker": "worker-1", "rank": 1}


@pytest.mark.processes
def test_place_and_a_profile_without_steps_need_the_standard_library_alone(tmp_path):
    script = f"""
import sys; sys.path.insert(0, {str(Path(place.__file__).parents[1])!r})
from workshop_utils import place
from workshop_utils.training.profiler import profile
with profile() as profiler: profiler.step()
assert 'torch' not in sys.modules
"""
    subprocess.run([sys.executable, "-I", "-S", "-c", script], check=True, cwd=tmp_path, timeout=60)
    assert not list(tmp_path.iterdir())


# Data


def test_a_missing_file_is_named_with_its_folder_and_the_variable_that_says_it(tmp_path):
    message = rf"train-images-idx3-ubyte is not in {tmp_path} .*WORKSHOP_DATA"
    with pytest.raises(FileNotFoundError, match=message):
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
        shape, values = idx.read(file)
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
        serving = threading.Thread(target=tf_cluster.serve_until_chief_leaves, args=(0.02, 30), daemon=True)
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
        tf_cluster.serve_until_chief_leaves(0.01, 0.1)


def test_the_first_task_leaves_when_the_other_workers_have_left_and_these_at_once(monkeypatch):
    with socket.socket() as worker:
        worker.bind(("127.0.0.1", 0))
        worker.listen()
        cluster = {"worker": ["127.0.0.1:1", f"127.0.0.1:{worker.getsockname()[1]}"]}
        for index in (1, 0):
            monkeypatch.setenv("TF_CONFIG", tf_config(cluster, "worker", index))
            leaving = threading.Thread(target=tf_cluster.leave_last, args=(0.02, 30), daemon=True)
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
    for name, count in (("SLURM_RESTART_COUNT", 1), ("TORCHELASTIC_RESTART_COUNT", 2)):
        monkeypatch.setenv(name, str(count))
        assert place.restart_count() == count
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


def test_a_negative_number_of_steps_to_profile_is_refused():
    message = "steps is -1; it must be 0, to record nothing, or more"
    with pytest.raises(ValueError, match=message), profiler.profile(-1):
        pass
