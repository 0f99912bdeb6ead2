"""What a training container finds: the variables, files and arguments that the toolkit gives to a script.

Standard library alone: it travels into containers, where own drivers use it, and it is what the local stand-in for
instances is held to. Sources: AWS, "SageMaker training storage folders" and "Environment variables" of the SageMaker
training toolkit (ENVIRONMENT_VARIABLES.md); sagemaker-training-toolkit, environment.py and mapping.py;
sagemaker-tensorflow-training-toolkit, training.py; compared with what version 5.1.4 gives, November 2026.
"""

import json
import os
from pathlib import Path
from typing import Any

OPT_ML = "/opt/ml"

# Ports at which the processes of the classic mode meet.
MASTER_PORT, SERVER_PORT = 2222, 2223  # parameter servers: the master's and workers', and the servers'
MIRRORED_PORT = 8890  # MultiWorkerMirroredStrategy
TORCH_PORT = 7777  # torchrun's rendezvous

# Of the hyperparameters that begin with `sagemaker_`, these are about every script; the rest are about a framework.
COMMON = {
    "sagemaker_program",
    "sagemaker_submit_directory",
    "sagemaker_region",
    "sagemaker_container_log_level",
    "sagemaker_job_name",
}

# In what the local stand-in for instances differs from them, as a test finds it, field by field.
EXCEPTIONS = {
    "root": "folders lie below a root of the run's own, in place of /opt/ml",
    "addresses": "outside network namespaces, each host:port is a loopback port of its own",
    "interface": "outside network namespaces the interface is lo",
    "processors": "the processors are this machine's, and all hosts share them",
    "mpi": "all MPI ranks are started by the first host's mpirun, without sshd",
    "python": "Python and its packages are this environment's",
}


def resource_config(hosts: list[str], current: str, instance_type: str, interface: str) -> dict[str, Any]:
    """`input/config/resourceconfig.json` of the host `current`."""
    return {
        "current_host": current,
        "current_instance_type": instance_type,
        "current_group_name": "homogeneousCluster",
        "hosts": sorted(hosts),  # as text: algo-10 before algo-2
        "instance_groups": [
            {
                "instance_group_name": "homogeneousCluster",
                "instance_type": instance_type,
                "hosts": sorted(hosts),
            }
        ],
        "network_interface_name": interface,
    }


def input_data_config(channels: dict[str, str]) -> dict[str, Any]:
    """`input/config/inputdataconfig.json` for channels by name, each with its input mode."""
    return {
        name: {
            "TrainingInputMode": mode,
            "S3DistributionType": "FullyReplicated",
            "RecordWrapperType": "None",
        }
        for name, mode in sorted(channels.items())
    }


def decoded(hyperparameters: dict[str, str]) -> dict[str, Any]:
    """Hyperparameters as the toolkit reads them: as JSON where they are JSON, as text otherwise."""
    values: dict[str, Any] = {}
    for name, text in hyperparameters.items():
        try:
            values[name] = json.loads(text)
        except ValueError:
            values[name] = text
    return values


def split(hyperparameters: dict[str, str]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The script's own hyperparameters, and those of the toolkit."""
    values = decoded(hyperparameters)
    own = {name: value for name, value in values.items() if not name.startswith("sagemaker_")}
    return own, {name: value for name, value in values.items() if name not in own}


def arguments(own: dict[str, Any]) -> list[str]:
    """The script's command line: `--key value` (`-k value` for a single letter), sorted by key."""
    words: list[str] = []
    for name in sorted(own):
        words += [f"--{name}" if len(name) > 1 else f"-{name}", str(own[name])]
    return words


def environment(
    root: str,
    resources: dict[str, Any],
    inputs: dict[str, Any],
    hyperparameters: dict[str, str],
    job_name: str,
    code: str,
) -> dict[str, str]:
    """The variables that every process of the script finds, in the container whose folders lie below `root`."""
    own, toolkit = split(hyperparameters)
    script = str(toolkit.get("sagemaker_program", "train.py"))
    group = resources["instance_groups"][0]
    enabled = any(name.endswith("_enabled") and value is True for name, value in toolkit.items())
    channels = {name: f"{root}/input/data/{name}" for name in inputs}
    values: dict[str, Any] = {
        "hosts": resources["hosts"],
        "network_interface_name": resources["network_interface_name"],
        "hps": own,
        "user_entry_point": script,
        "framework_params": {name: value for name, value in toolkit.items() if name not in COMMON},
        "resource_config": resources,
        "input_data_config": inputs,
        "output_data_dir": f"{root}/output/data",
        "output_intermediate_dir": f"{root}/output/intermediate",
        "output_dir": f"{root}/output",
        "channels": sorted(channels),
        "current_host": resources["current_host"],
        "current_instance_type": resources["current_instance_type"],
        "current_instance_group": group["instance_group_name"],
        "current_instance_group_hosts": group["hosts"],
        "instance_groups": [group["instance_group_name"]],
        "instance_groups_dict": {group["instance_group_name"]: group},
        "distribution_instance_groups": [group["instance_group_name"]] if enabled else [],
        "is_hetero": False,
        "module_name": script.removesuffix(".py"),
        "module_dir": toolkit.get("sagemaker_submit_directory", code),
        "log_level": toolkit.get("sagemaker_container_log_level", 20),
        "framework_module": None,
        "input_dir": f"{root}/input",
        "input_config_dir": f"{root}/input/config",
        "model_dir": f"{root}/model",
        "num_cpus": os.cpu_count() or 1,
        "num_gpus": _count("nvidia"),
        "num_neurons": _count("neuron"),
        "user_args": arguments(own),
        **{f"channel_{name}": path for name, path in channels.items()},
        **{f"hp_{name}": value for name, value in own.items()},
    }
    values["training_env"] = {
        **{name: values[name] for name in _REPEATED},
        "additional_framework_parameters": values["framework_params"],
        "channel_input_dirs": channels,
        "distribution_hosts": resources["hosts"] if enabled else [],
        "hyperparameters": own,
        "is_modelparallel_enabled": None,
        "is_smddpmprun_installed": False,
        "is_smddprun_installed": False,
        "is_master": resources["current_host"] == resources["hosts"][0],
        "job_name": job_name,
        "master_hostname": resources["hosts"][0],
        "topology": [],
    }
    variables = {f"SM_{name.upper()}": as_text(value) for name, value in values.items()}
    return {**variables, "TRAINING_JOB_NAME": job_name, "CURRENT_HOST": resources["current_host"]}


# What SM_TRAINING_ENV says again, under the same name.
_REPEATED = (
    "current_host",
    "current_instance_group",
    "current_instance_group_hosts",
    "current_instance_type",
    "distribution_instance_groups",
    "framework_module",
    "hosts",
    "input_config_dir",
    "input_data_config",
    "input_dir",
    "instance_groups",
    "instance_groups_dict",
    "is_hetero",
    "log_level",
    "model_dir",
    "module_dir",
    "module_name",
    "network_interface_name",
    "num_cpus",
    "num_gpus",
    "num_neurons",
    "output_data_dir",
    "output_dir",
    "output_intermediate_dir",
    "resource_config",
    "user_entry_point",
)


def as_text(value: Any) -> str:
    """A variable's text: as it is, empty for None, and JSON without spaces for the rest."""
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))


def parameter_server_cluster(hosts: list[str]) -> dict[str, list[str]]:
    """The cluster of the classic mode: N hosts are one master, N − 1 workers and N servers beside them."""
    return {
        "master": [f"{hosts[0]}:{MASTER_PORT}"],
        "ps": [f"{host}:{SERVER_PORT}" for host in hosts],
        "worker": [f"{host}:{MASTER_PORT}" for host in hosts[1:]],
    }


def parameter_server_config(hosts: list[str], current: str, server: bool = False) -> dict[str, Any]:
    """TF_CONFIG of the script on the host `current`, or of the server beside it."""
    if server:
        task = {"index": hosts.index(current), "type": "ps"}
    elif current == hosts[0]:
        task = {"index": 0, "type": "master"}
    else:
        task = {"index": hosts.index(current) - 1, "type": "worker"}
    return {"cluster": parameter_server_cluster(hosts), "environment": "cloud", "task": task}


def mirrored_config(hosts: list[str], current: str) -> dict[str, Any]:
    """TF_CONFIG for MultiWorkerMirroredStrategy on the host `current`: workers alone."""
    cluster = {"worker": [f"{host}:{MIRRORED_PORT}" for host in hosts]}
    return {
        "cluster": cluster,
        "environment": "cloud",
        "task": {"index": hosts.index(current), "type": "worker"},
    }


def torchrun(hosts: list[str], current: str, per_host: int) -> list[str]:
    """torchrun's own arguments on the host `current`; one host alone gets no rendezvous."""
    words = ["--nnodes", str(len(hosts)), "--nproc_per_node", str(per_host)]
    if len(hosts) > 1:
        words += ["--master_addr", hosts[0], "--master_port", str(TORCH_PORT)]
        words += ["--node_rank", str(hosts.index(current))]
    return words


def mpirun(hosts: list[str], per_host: int, interface: str, exported: list[str]) -> list[str]:
    """The command by which the first host's toolkit starts all MPI ranks, before the script's own part."""
    named = hosts if per_host == 1 else [f"{host}:{per_host}" for host in hosts]
    settings = {
        "btl_tcp_if_include": interface,
        "oob_tcp_if_include": interface,
        "plm_rsh_no_tree_spawn": "1",
        "pml": "ob1",
        "btl": "^openib",
        "orte_abort_on_non_zero_status": "1",
        "btl_vader_single_copy_mechanism": "none",
    }
    words = ["mpirun", "--host", ",".join(named), "-np", str(per_host * len(hosts)), "--allow-run-as-root"]
    words += ["--tag-output", "-bind-to", "none", "-map-by", "slot"]
    for name, value in settings.items():
        words += ["-mca", name, value]
    for name in exported:
        words += ["-x", name]
    return words


def _count(kind: str) -> int:
    """How many accelerators there are, by their device files; asking their tools may take seconds."""
    try:
        names = [path.name for path in Path("/dev").iterdir()]
    except OSError:
        return 0
    return sum(name.startswith(kind) and name.removeprefix(kind).isdecimal() for name in names)
