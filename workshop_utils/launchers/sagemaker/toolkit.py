"""Classic script mode: what the toolkit inside AWS's images is told, and what it does on each host.

The toolkit starts the strategies for which the SDK has no driver: TensorFlow's, and MPI. Hyperparameters whose names
begin with `sagemaker_` tell it what to start; the others become the script's arguments, and every value is JSON. On
each host it sets variables, writes files below /opt/ml (`container`) and starts the script (`script`); the emulator
does the same. Sources: AWS, "SageMaker training storage folders"; sagemaker-training-toolkit, ENVIRONMENT_VARIABLES.md,
params.py, runner.py, environment.py and mapping.py; sagemaker-tensorflow-training-toolkit, training.py; compared with
what version 5.1.4 gives, November 2026.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from workshop_utils.jobs import StrategyName, words_of
from workshop_utils.launchers.template import filled
from workshop_utils.network import LOOPBACK_INTERFACE
from workshop_utils.strategies import PYTHON, SCRIPT, STRATEGIES, ProcessSpec

if TYPE_CHECKING:
    from workshop_utils.launchers.sagemaker.request import Request
    from workshop_utils.launchers.sagemaker.submission import Submission

Texts = dict[str, str]

PARAMETER_SERVER = "sagemaker_parameter_server_enabled"
MPI = "sagemaker_mpi_enabled"
MULTI_WORKER_MIRRORED = "sagemaker_multi_worker_mirrored_strategy_enabled"

# Ports at which the processes meet.
MASTER_PORT, SERVER_PORT = 2222, 2223  # parameter servers: the master's and workers', and the servers'
MIRRORED_PORT = 8890

# The hyperparameter that asks for a strategy.
SWITCHES: dict[StrategyName, str] = {
    "parameter_server": PARAMETER_SERVER,
    "multi_worker_mirrored": MULTI_WORKER_MIRRORED,
    "horovod": MPI,  # Horovod takes its ranks from MPI
    "mpi": MPI,
}
# What makes the toolkit heed TensorFlow's switches. Without it, it knows MPI and plain scripts.
STARTER, TENSORFLOW = "SAGEMAKER_TRAINING_MODULE", "sagemaker_tensorflow_container.training:main"


def host_names(count: int) -> tuple[str, ...]:
    """`algo-1` to `algo-COUNT` as SageMaker lists them: sorted as text, so `algo-10` stands before `algo-2`."""
    return tuple(sorted(f"algo-{number}" for number in range(1, count + 1)))


def instructions(submission: Submission) -> dict[str, Any]:
    """The hyperparameters that are for the toolkit.

    There is no `model_dir` among them: the toolkit would pass it to the script as an argument, and the workshop's
    scripts find their folder in SM_MODEL_DIR, so that they run unmodified.
    """
    job, switch = submission.job, SWITCHES[submission.job.strategy]
    per_host = {"sagemaker_mpi_num_of_processes_per_host": job.processes_per_node or 1}
    return {
        "sagemaker_program": submission.entry,
        "sagemaker_submit_directory": submission.source_uri,
        "sagemaker_job_name": submission.name,
        "sagemaker_region": submission.settings.region_name,
        "sagemaker_container_log_level": 20,
        switch: True,
        **(per_host if switch == MPI else {}),
    }


# What it starts


def parameter_server_cluster(hosts: Sequence[str]) -> dict[str, list[str]]:
    """The cluster of the classic mode: N hosts are one master, N - 1 workers and N servers beside them."""
    return {
        "master": [f"{hosts[0]}:{MASTER_PORT}"],
        "ps": [f"{host}:{SERVER_PORT}" for host in hosts],
        "worker": [f"{host}:{MASTER_PORT}" for host in hosts[1:]],
    }


def cluster(submission: Submission) -> dict[str, list[str]]:
    """The addresses, as `host:port`, at which TensorFlow's processes find each other, by role."""
    hosts, switch = submission.hosts, SWITCHES[submission.job.strategy]
    if switch == PARAMETER_SERVER:
        return parameter_server_cluster(hosts)
    mirrored = {"worker": [f"{host}:{MIRRORED_PORT}" for host in hosts]}
    return mirrored if switch == MULTI_WORKER_MIRRORED else {}


def script(submission: Submission, node: int, cluster: Mapping[str, Sequence[str]]) -> ProcessSpec:
    """The script on host number `node`, as the toolkit starts it. With MPI, the first host starts all ranks."""
    job, switch = submission.job, SWITCHES[submission.job.strategy]
    words = (SCRIPT, *words_of(submission.arguments))
    if switch == MPI:
        mpirun = STRATEGIES["mpi"].plan(job.replace(strategy="mpi"))[0]
        own = mpirun.argv[: mpirun.argv.index(PYTHON)]
        ranks = replace(mpirun, argv=(*own, PYTHON, "-m", "mpi4py", *words), arguments=())
        return ProcessSpec("host", node, argv=("true",)) if node else ranks
    role, index = "worker", node
    if switch == PARAMETER_SERVER:
        role, index = ("worker", node - 1) if node else ("master", 0)
    variables = {"TF_CONFIG": tf_config(cluster, role, index)}
    return ProcessSpec("script", node, argv=(PYTHON, *words), environment=variables)


def tf_config(cluster: Mapping[str, Sequence[str]], role: str, index: int) -> str:
    """TF_CONFIG as the toolkit writes it, for one process of `cluster`."""
    return json.dumps({"cluster": cluster, "environment": "cloud", "task": {"index": index, "type": role}})


# What a container holds


def container(request: Request, host: str, root: str) -> tuple[Texts, Texts]:
    """What the container of `host` finds below `root`: the files of `input/config`, and the toolkit's variables."""
    submission = request.submission
    hosts, settings = list(submission.hosts), submission.settings
    parameters, own = submission.hyperparameters, submission.arguments
    asked = {name: json.loads(text) for name, text in parameters.items() if name not in own}
    names = [each["ChannelName"] for each in request.body.get("InputDataConfig", [])]
    folders = {name: f"{root}/input/data/{name}" for name in names}
    channel = {"TrainingInputMode": settings.input_mode, "S3DistributionType": "FullyReplicated"}
    channel["RecordWrapperType"] = "None"
    values = {
        "host": host,
        "hosts": hosts,
        "is_master": host == hosts[0],
        "master": hosts[0],
        "instance_type": settings.instance_type,
        "channels": dict.fromkeys(names, channel),
        "interface": LOOPBACK_INTERFACE,
        "name": submission.name,
        "names": names,
        "folders": folders,
        "script": submission.entry,
        "module": submission.entry.removesuffix(".py"),
        "source": submission.source_uri,
        "arguments": own,
        "user_args": words_of(own),
        "parameters": parameters,
        "switches": {n: asked[n] for n in asked if n.endswith(("_enabled", "_per_host"))},
        "cpus": os.cpu_count() or 1,
        "gpus": 0,
        "neurons": 0,
    }
    template = Path(__file__).with_name("container.yaml").read_text(encoding="utf-8")
    contents = filled(yaml.safe_load(template.replace("/opt/ml", root)), values)
    files = {name: json.dumps(content) for name, content in contents["files"].items()}
    named = contents["variables"] | {f"hp_{name}": value for name, value in own.items()}
    named |= {f"channel_{name}": folder for name, folder in folders.items()}
    variables = {f"SM_{name.upper()}": _as_text(value) for name, value in named.items()}
    return files, {**variables, "CURRENT_HOST": host}


def _as_text(value: Any) -> str:
    """A variable's text: text as it is, and anything else as JSON without spaces."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
