"""Which devices TensorFlow's job takes, on machines whose GPUs are made up: there are none where tests run."""

import importlib.util
import json
import sys
from unittest.mock import Mock

import pytest
from launching import JOBS

from workshop_utils import place

pytestmark = pytest.mark.processes

MIRRORED = {"worker": ["a:1", "a:2", "b:1", "b:2"]}
SERVERS = {"chief": ["a:1"], "ps": ["a:2"], "worker": ["a:3", "a:4"]}


@pytest.fixture
def script(monkeypatch):
    """The module of the job, which trains only when it is called."""
    for name in ("TF_CPP_MIN_LOG_LEVEL", "TF_ENABLE_ONEDNN_OPTS", "TF_USE_LEGACY_KERAS"):
        monkeypatch.setenv(name, "1")  # the module would set them for the tests that follow
    monkeypatch.delenv("WORKSHOP_DEVICE", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)  # a job of TensorFlow's has not imported it
    specification = importlib.util.spec_from_file_location("job", JOBS / "mnist_tensorflow" / "train.py")
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


@pytest.fixture
def machine(monkeypatch):
    """`machine(n)` lets TensorFlow see n GPUs, and returns its configuration, which records what it is told."""
    tensorflow = pytest.importorskip("tensorflow")

    def build(count):
        devices = {"GPU": [f"gpu-{index}" for index in range(count)], "CPU": ["processor"]}
        config = Mock(**{"list_physical_devices.side_effect": devices.get})
        monkeypatch.setattr(tensorflow, "config", config)
        return config

    return build


def task(cluster, role, index):
    config = {"cluster": cluster, "task": {"type": role, "index": index}}
    return place.from_environment({"TF_CONFIG": json.dumps(config)})


def test_a_mirrored_worker_takes_the_gpu_of_its_local_rank_and_nccl(script, machine):
    config = machine(2)
    assert script.choose_device(task(MIRRORED, "worker", 3)).name == "NCCL"
    config.set_visible_devices.assert_called_once_with("gpu-1", "GPU")
    config.experimental.set_memory_growth.assert_called_once_with("gpu-1", True)
    # On a machine with GPUs the processor is not what workers share.
    config.threading.set_intra_op_parallelism_threads.assert_not_called()


def test_beside_parameter_servers_each_worker_has_a_gpu_of_its_own_and_nobody_else_has_any(script, machine):
    machine(2)
    for index in (0, 1):
        options = script.server_options(task(SERVERS, "worker", index))
        assert options.gpu_options.visible_device_list == str(index)
        assert options.gpu_options.allow_growth
        assert "GPU" not in options.device_count
    for role in ("chief", "ps"):
        assert script.server_options(task(SERVERS, role, 0)).device_count["GPU"] == 0


def test_a_worker_that_was_given_a_gpu_and_finds_none_does_not_train_on_the_processor(
    script, machine, monkeypatch
):
    machine(0)
    monkeypatch.setenv("WORKSHOP_DEVICE", "cuda:0")
    for choose, cluster in ((script.server_options, SERVERS), (script.choose_device, MIRRORED)):
        with pytest.raises(ValueError, match="the framework finds no GPU"):
            choose(task(cluster, "worker", 0))
