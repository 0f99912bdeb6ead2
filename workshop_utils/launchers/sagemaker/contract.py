"""What a training container finds: the variables, files and arguments that the toolkit gives to a script.

Emulated instances keep it. Sources: AWS, "SageMaker training storage folders" and "Environment variables" of the
SageMaker training toolkit (ENVIRONMENT_VARIABLES.md); sagemaker-training-toolkit, environment.py and mapping.py;
sagemaker-tensorflow-training-toolkit, training.py; compared with what version 5.1.4 gives, November 2026.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workshop_utils.launchers.sagemaker.request import Plan

# Ports at which the processes of the classic mode meet.
MASTER_PORT, SERVER_PORT = 2222, 2223  # parameter servers: the master's and workers', and the servers'
MIRRORED_PORT = 8890  # MultiWorkerMirroredStrategy
TORCH_PORT = 7777  # torchrun's rendezvous

# How emulated instances differ from real ones.
EXCEPTIONS = {
    "root": "folders lie below a root of the run's own, in place of /opt/ml",
    "addresses": "outside network namespaces, each host:port is a loopback port of its own",
    "interface": "outside network namespaces the interface is lo",
    "processors": "the processors are this machine's, and all hosts share them",
    "mpi": "all MPI ranks are started by the first host's mpirun, without sshd",
    "threads": "one for each process, unless the job says more",
    "python": "Python and its packages are this environment's",
    "drivers": "the driver is started directly, without the SDK's sm_train.sh",
    "left out": "variables about groups of instances, and about libraries that only AWS's images have",
}


def container(plan: Plan, host: str, root: str, interface: str) -> tuple[dict[str, str], dict[str, str]]:
    """What the container of `host` finds below `root`: the files of `input/config`, and its variables."""
    hosts, instance_type = list(plan.hosts), plan.settings.instance_type
    group = {"instance_group_name": "homogeneousCluster", "instance_type": instance_type, "hosts": hosts}
    resources = {
        "current_host": host,
        "current_instance_type": instance_type,
        "current_group_name": group["instance_group_name"],
        "hosts": hosts,  # sorted as text: algo-10 before algo-2
        "instance_groups": [group],
        "network_interface_name": interface,
    }
    inputs = {
        "training": {
            "TrainingInputMode": plan.settings.input_mode,
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        }
    }
    files = {
        "resourceconfig.json": json.dumps(resources),
        "inputdataconfig.json": json.dumps(inputs),
        "hyperparameters.json": json.dumps(plan.hyperparameters),
    }
    named = {
        f"SM_{name.upper()}": as_text(value) for name, value in _named(plan, resources, inputs, root).items()
    }
    return files, {**named, "TRAINING_JOB_NAME": plan.name, "CURRENT_HOST": host}


def _named(plan: Plan, resources: Mapping[str, Any], inputs: Mapping[str, Any], root: str) -> dict[str, Any]:
    """The values of variables that begin with SM_, by the rest of their names in small letters."""
    own = dict(plan.job.arguments)
    toolkit = {name: json.loads(text) for name, text in plan.hyperparameters.items() if name not in own}
    about_framework = {
        name: value for name, value in toolkit.items() if name.endswith(("_enabled", "_per_host", "_type"))
    }
    channels = {name: f"{root}/input/data/{name}" for name in inputs}
    common: dict[str, Any] = {
        "current_host": resources["current_host"],
        "current_instance_type": resources["current_instance_type"],
        "hosts": resources["hosts"],
        "input_config_dir": f"{root}/input/config",
        "input_data_config": inputs,
        "input_dir": f"{root}/input",
        "log_level": toolkit.get("sagemaker_container_log_level", 20),
        "model_dir": f"{root}/model",
        "module_dir": toolkit.get("sagemaker_submit_directory", f"{root}/input/data/code"),
        "module_name": plan.job.script.removesuffix(".py"),
        "network_interface_name": resources["network_interface_name"],
        "num_cpus": os.cpu_count() or 1,
        "num_gpus": _count("nvidia"),
        "num_neurons": _count("neuron"),
        "output_data_dir": f"{root}/output/data",
        "output_dir": f"{root}/output",
        "output_intermediate_dir": f"{root}/output/intermediate",
        "resource_config": resources,
        "user_entry_point": plan.job.script,
    }
    training_env = {
        **common,
        "additional_framework_parameters": about_framework,
        "channel_input_dirs": channels,
        "hyperparameters": own,
        "is_master": resources["current_host"] == resources["hosts"][0],
        "job_name": plan.name,
        "master_hostname": resources["hosts"][0],
    }
    return {
        **common,
        "channels": sorted(channels),
        "framework_params": about_framework,
        "hps": own,
        "training_env": training_env,
        "user_args": arguments(own),
        **{f"channel_{name}": path for name, path in channels.items()},
        **{f"hp_{name}": value for name, value in own.items()},
    }


def arguments(own: Mapping[str, Any]) -> list[str]:
    """The script's command line: `--key value` (`-k value` for a single letter), sorted by key."""
    words: list[str] = []
    for name in sorted(own):
        words += [f"--{name}" if len(name) > 1 else f"-{name}", str(own[name])]
    return words


def as_text(value: Any) -> str:
    """A variable's text: as it is, empty for None, and JSON without spaces for the rest."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))


def parameter_server_cluster(hosts: Sequence[str]) -> dict[str, list[str]]:
    """The cluster of the classic mode: N hosts are one master, N − 1 workers and N servers beside them."""
    return {
        "master": [f"{hosts[0]}:{MASTER_PORT}"],
        "ps": [f"{host}:{SERVER_PORT}" for host in hosts],
        "worker": [f"{host}:{MASTER_PORT}" for host in hosts[1:]],
    }


def parameter_server_config(hosts: Sequence[str], current: str, server: bool = False) -> dict[str, Any]:
    """TF_CONFIG of the script on the host `current`, or of the server beside it."""
    if server:
        task = {"index": hosts.index(current), "type": "ps"}
    elif current == hosts[0]:
        task = {"index": 0, "type": "master"}
    else:
        task = {"index": hosts.index(current) - 1, "type": "worker"}
    return {"cluster": parameter_server_cluster(hosts), "environment": "cloud", "task": task}


def mirrored_config(hosts: Sequence[str], current: str) -> dict[str, Any]:
    """TF_CONFIG for MultiWorkerMirroredStrategy on the host `current`: workers alone."""
    cluster = {"worker": [f"{host}:{MIRRORED_PORT}" for host in hosts]}
    return {
        "cluster": cluster,
        "environment": "cloud",
        "task": {"index": hosts.index(current), "type": "worker"},
    }


def torchrun(hosts: Sequence[str], current: str, per_host: int, meeting: str | None = None) -> list[str]:
    """torchrun's own arguments on the host `current`; one host alone gets no rendezvous.

    The hosts meet at the first one's port, or at `meeting`, where that has another name.
    """
    words = ["--nnodes", str(len(hosts)), "--nproc_per_node", str(per_host)]
    if len(hosts) > 1:
        address, _, port = (meeting or f"{hosts[0]}:{TORCH_PORT}").rpartition(":")
        words += ["--master_addr", address, "--master_port", port]
        words += ["--node_rank", str(hosts.index(current))]
    return words


def _count(kind: str) -> int:
    """How many accelerators there are, by their device files; asking their tools may take seconds."""
    return sum(1 for _ in Path("/dev").glob(f"{kind}[0-9]*"))
