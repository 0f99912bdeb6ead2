"""Classic script mode: what the toolkit inside AWS's images is told, and what it does on each host.

Hyperparameters whose names begin with `sagemaker_` tell it what to start; the others become the script's arguments, and
every value is JSON. On each host it sets variables, writes files below /opt/ml (`container`) and starts processes
(`plan`); the emulator does the same. Sources: AWS, "SageMaker training storage folders"; sagemaker-training-toolkit,
ENVIRONMENT_VARIABLES.md, params.py, runner.py, environment.py and mapping.py; sagemaker-tensorflow-training-toolkit,
training.py; compared with what version 5.1.4 gives, November 2026.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from workshop_utils.jobs import StrategyName
from workshop_utils.launchers.template import filled
from workshop_utils.strategies import PROGRAMS, PYTHON, SCRIPT, STRATEGIES, ProcessSpec

if TYPE_CHECKING:
    from workshop_utils.launchers.sagemaker.request import Submission

Texts = dict[str, str]

PARAMETER_SERVER = "sagemaker_parameter_server_enabled"
MPI = "sagemaker_mpi_enabled"
MULTI_WORKER_MIRRORED = "sagemaker_multi_worker_mirrored_strategy_enabled"
TORCH_DISTRIBUTED = "sagemaker_torch_distributed_enabled"

# Ports at which the processes meet.
MASTER_PORT, SERVER_PORT = 2222, 2223  # parameter servers: the master's and workers', and the servers'
MIRRORED_PORT = 8890
TORCH_PORT = 7777  # torchrun's rendezvous


# The hyperparameter that asks for a strategy; None for a script on its own.
SWITCHES: dict[StrategyName, str | None] = {
    "single": None,
    "parameter_server": PARAMETER_SERVER,
    "multi_worker_mirrored": MULTI_WORKER_MIRRORED,
    "horovod": MPI,  # Horovod takes its ranks from MPI
    "mpi": MPI,
    "torch_ddp": TORCH_DISTRIBUTED,
}
STARTER = "SAGEMAKER_TRAINING_MODULE"
# What it must name for the toolkit to heed a switch. Without it, it knows MPI and plain scripts.
MODULES = {
    PARAMETER_SERVER: "sagemaker_tensorflow_container.training:main",
    MULTI_WORKER_MIRRORED: "sagemaker_tensorflow_container.training:main",
    TORCH_DISTRIBUTED: "sagemaker_pytorch_container.training:main",
}
SEVERAL = (MPI, TORCH_DISTRIBUTED)  # with these, the toolkit can start several processes on a host


def host_names(count: int) -> tuple[str, ...]:
    """`algo-1` to `algo-COUNT` as SageMaker lists them: sorted as text, so `algo-10` stands before `algo-2`."""
    return tuple(sorted(f"algo-{number}" for number in range(1, count + 1)))


def hyperparameters(submission: Submission) -> dict[str, str]:
    """HyperParameters of the request: the script's arguments, and what the toolkit is told.

    There is no `model_dir` among them: the toolkit would pass it to the script as an argument, and the workshop's
    scripts find their folder in SM_MODEL_DIR, so that they run unmodified.
    """
    job, settings = submission.job, submission.settings
    values: dict[str, Any] = {**job.arguments, "sagemaker_program": job.script}
    if settings.mode == "toolkit":
        values |= {
            "sagemaker_submit_directory": submission.source_uri,
            "sagemaker_job_name": submission.name,
            "sagemaker_region": settings.region_name,
            "sagemaker_container_log_level": 20,
        }
        switch = SWITCHES[job.strategy]
        if switch:
            values[switch] = True
        if switch in SEVERAL:  # torchrun's number has the same name
            values["sagemaker_mpi_num_of_processes_per_host"] = job.processes_per_node or 1
        if switch == TORCH_DISTRIBUTED:
            values["sagemaker_instance_type"] = settings.instance_type
    # As the SDK's version 2 sends it, so that a number comes out of it as a number.
    return {name: json.dumps(value) for name, value in sorted(values.items())}


def arguments(own: Mapping[str, Any]) -> list[str]:
    """The script's command line: `--key value` (`-k value` for a single letter), sorted by key."""
    words: list[str] = []
    for name in sorted(own):
        words += [f"--{name}" if len(name) > 1 else f"-{name}", str(own[name])]
    return words


# What it starts


def parameter_server_cluster(hosts: Sequence[str]) -> dict[str, list[str]]:
    """The cluster of the classic mode: N hosts are one master, N - 1 workers and N servers beside them."""
    return {
        "master": [f"{hosts[0]}:{MASTER_PORT}"],
        "ps": [f"{host}:{SERVER_PORT}" for host in hosts],
        "worker": [f"{host}:{MASTER_PORT}" for host in hosts[1:]],
    }


def cluster(submission: Submission) -> dict[str, list[str]]:
    """The addresses, as `host:port`, at which the processes of a job find each other, by role."""
    hosts, switch = submission.hosts, SWITCHES[submission.job.strategy]
    if switch == PARAMETER_SERVER:
        return parameter_server_cluster(hosts)
    if switch == MULTI_WORKER_MIRRORED:
        return {"worker": [f"{host}:{MIRRORED_PORT}" for host in hosts]}
    return {"store": [f"{hosts[0]}:{TORCH_PORT}"]} if switch == TORCH_DISTRIBUTED else {}


def plan(submission: Submission, at: Mapping[str, str]) -> list[ProcessSpec]:
    """The processes that the toolkit starts on the hosts. `at` translates the addresses of `cluster`."""
    job, hosts, switch = submission.job, submission.hosts, SWITCHES[submission.job.strategy]
    script = (SCRIPT, *arguments(job.arguments))
    if switch == MPI:  # mpirun on the first host starts all ranks
        mpirun = STRATEGIES["mpi"].plan(job)[0]
        return [replace(mpirun, argv=(*mpirun.argv[: mpirun.argv.index(SCRIPT)], *script))]
    translated = {role: [at[address] for address in listed] for role, listed in cluster(submission).items()}
    specs = []
    for node in range(len(hosts)):
        command, variables = (PYTHON, *script), {}
        if switch == PARAMETER_SERVER:
            role, index = ("worker", node - 1) if node else ("master", 0)
            variables["TF_CONFIG"] = _tf_config(translated, role, index)
            config = _tf_config(translated, "ps", node)
            server = (PYTHON, f"{PROGRAMS}/emulated_instance.py", "server", config)
            # A server beside the script on every host. All hosts but the first wait until the first has gone.
            specs.append(ProcessSpec("ps", node, node=node, argv=server, required=node > 0))
        elif switch == MULTI_WORKER_MIRRORED:
            variables["TF_CONFIG"] = _tf_config(translated, "worker", node)
        elif switch == TORCH_DISTRIBUTED:
            variables["GLOO_SOCKET_IFNAME"] = "{interface}"
            words = ["--nnodes", str(len(hosts)), "--nproc_per_node", str(job.processes_per_node or 1)]
            if len(hosts) > 1:  # one host alone gets no rendezvous
                address, _, port = translated["store"][0].rpartition(":")
                words += ["--master_addr", address, "--master_port", port, "--node_rank", str(node)]
            command = (PYTHON, "-m", "torch.distributed.run", *words, *script)
        specs.append(ProcessSpec("script", node, node=node, argv=command, environment=variables))
    return specs


def _tf_config(cluster: Mapping[str, Sequence[str]], role: str, index: int) -> str:
    return json.dumps({"cluster": cluster, "environment": "cloud", "task": {"index": index, "type": role}})


# What a container holds


def container(submission: Submission, host: str, root: str, interface: str) -> tuple[Texts, Texts]:
    """What the container of `host` finds below `root`: the files of `input/config`, and its variables."""
    job, hosts, settings = submission.job, list(submission.hosts), submission.settings
    parameters = hyperparameters(submission)
    asked = {name: json.loads(text) for name, text in parameters.items() if name not in job.arguments}
    values = {
        "host": host,
        "hosts": hosts,
        "is_master": host == hosts[0],
        "master": hosts[0],
        "instance_type": settings.instance_type,
        "input_mode": settings.input_mode,
        "interface": interface,
        "name": submission.name,
        "script": job.script,
        "module": job.script.removesuffix(".py"),
        "source": asked.get("sagemaker_submit_directory", f"{root}/input/data/code"),
        "arguments": job.arguments,
        "user_args": arguments(job.arguments),
        "parameters": parameters,
        "switches": {n: asked[n] for n in asked if n.endswith(("_enabled", "_per_host", "_type"))},
        "cpus": os.cpu_count() or 1,
        "gpus": 0,
        "neurons": 0,
    }
    template = Path(__file__).with_name("container.yaml").read_text(encoding="utf-8")
    contents = filled(yaml.safe_load(template.replace("/opt/ml", root)), values)
    files = {name: json.dumps(content) for name, content in contents["files"].items()}
    named = contents["variables"] | {f"hp_{name}": value for name, value in job.arguments.items()}
    variables = {f"SM_{name.upper()}": _as_text(value) for name, value in named.items()}
    return files, {**variables, "TRAINING_JOB_NAME": submission.name, "CURRENT_HOST": host}


def _as_text(value: Any) -> str:
    """A variable's text: text as it is, and anything else as JSON without spaces."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, separators=(",", ":"))
