"""Rank, data and metrics: all that a training script imports.

A script learns its place in the cluster from the environment that its platform sets (MPI, Horovod, torchrun,
TensorFlow's `TF_CONFIG`, SageMaker's `SM_*`, Slurm's `SLURM_*`), so the same file runs on a laptop, on SageMaker and on
Kubernetes. This is the one module that reads those variables. It needs the standard library alone, and every
launcher ships it beside the script.

    from workshop_utils import place

    here = place.here()                     # rank 1 of 4
    images, labels = place.load("train").tensors()  # of PyTorch; .arrays() are NumPy's
    place.report(step=10, loss=0.31)        # one JSON line on standard output
"""

from __future__ import annotations

import functools
import json
import math
import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workshop_utils import idx

# What each launcher calls rank, world size, local rank, local world size and node rank. torchrun comes first, since it
# may run inside mpirun or srun; then mpirun, whose ranks share one SM_CURRENT_HOST on SageMaker. MPI does not number
# the nodes.
OPEN_MPI = "OMPI_COMM_WORLD_"
RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK"),
    (f"{OPEN_MPI}RANK", f"{OPEN_MPI}SIZE", f"{OPEN_MPI}LOCAL_RANK", f"{OPEN_MPI}LOCAL_SIZE", "-"),
    ("HOROVOD_RANK", "HOROVOD_SIZE", "HOROVOD_LOCAL_RANK", "HOROVOD_LOCAL_SIZE", "HOROVOD_CROSS_RANK"),
)

# Of a task of Slurm's `srun`: rank, world size, local rank, node rank. They are read last, since other launchers run
# inside Slurm's jobs, and only where SLURM_STEP_ID says that this is a task: Slurm sets some of them in a batch script
# as well.
SLURM_VARIABLES = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_NODEID")

# The order in which the roles of a TF_CONFIG cluster are numbered into ranks. Parameter servers, which hold
# variables and do not train, have no rank.
TRAINING_ROLES = ("chief", "worker")


@dataclass(frozen=True)
class Place:
    """One process's place in the cluster.

    `rank` counts the processes that take part in training, from 0 to `world_size - 1`; it is None for a
    parameter server. `local_rank` counts those on the same machine, from 0 to `local_world_size - 1`, and `node_rank`
    the machines. `servers` is how many of the first ranks serve parameters, under the workshop's own parameter server.
    """

    role: str
    index: int
    rank: int | None
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    data_folder: Path
    model_folder: Path
    servers: int = 0

    @property
    def name(self) -> str:
        """What this process is called in tables and logs, for example `worker-1`."""
        return f"{self.role}-{self.index}"

    @property
    def device(self) -> str:
        """What this process trains on: a GPU of its own, such as "cuda:1", or "cpu" where there are none.

        It asks the framework that the script has imported, so import that first. Each process of a machine takes the
        GPU of its local rank; one that sees a single GPU takes that, since many launchers show each process its own.
        WORKSHOP_DEVICE, such as "cpu", takes precedence. What holds parameters but does not train is on the CPU.

        Raises:
            ValueError: if this process sees several GPUs, but fewer than processes train on this machine; or if
                WORKSHOP_DEVICE is a GPU, and the framework sees none.
        """
        count, chosen = _gpu_count(), os.environ.get("WORKSHOP_DEVICE")
        if chosen and chosen.startswith("cuda") and count == 0:
            raise ValueError(
                f"WORKSHOP_DEVICE is {chosen!r}, but the framework finds no GPU: install its build for CUDA, or train "
                "on the CPU (--gpus 0)"
            )
        if chosen:
            return chosen
        if not count or self.rank is None:
            return "cpu"
        if count == 1:
            return "cuda:0"
        if count < self.local_world_size:
            raise ValueError(
                f"{self.local_world_size} processes train on this machine and see {count} GPUs; start {count} of them "
                "here, or let each see one GPU by CUDA_VISIBLE_DEVICES"
            )
        return f"cuda:{self.local_rank}"

    @property
    def backend(self) -> str:
        """The library of collectives for `device`: "nccl" between GPUs, "gloo" between CPUs."""
        return "nccl" if self.device.startswith("cuda") else "gloo"


def here() -> Place:
    """This process's place, read from the environment.

    The first call also tells the launcher that this process has started. Call it before importing a framework, so that
    a slow import is seen as one.

    On SageMaker it tells gloo the network interface, since a host's own name need not lead to it.

    Raises:
        ValueError: if a variable that says the place cannot be read; the message names it.
    """
    _announce()
    if interface := os.environ.get("SM_NETWORK_INTERFACE_NAME"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    return from_environment(os.environ)


def from_environment(environment: Mapping[str, str]) -> Place:
    """The place that `environment` describes, without touching this process. Raises as `here` does."""
    role, index, rank, world_size, local, local_size, node = "worker", 0, 0, 1, 0, 1, 0
    config = tf_config(environment)
    # Those that say the local rank, too, before those that do not.
    known = [names for names in RANK_VARIABLES if names[0] in environment]
    if names := next((names for names in known if names[2] in environment), next(iter(known), None)):
        rank, world_size = (_integer(environment, name) for name in names[:2])
        local, local_size, node = _on_its_node(environment, rank, world_size, *names[2:])
        # Where ranks change hands, as in an elastic job, a worker keeps the index that it was given.
        index = _integer(environment, "WORKSHOP_INDEX") if "WORKSHOP_INDEX" in environment else rank
    else:
        if config is not None:
            return _from_tf_config(config, environment)
        if environment.get("SM_HOSTS"):
            rank, world_size = _from_hosts(environment)
            node = rank
        elif "SLURM_STEP_ID" in environment:
            rank, world_size, local, node = (_integer(environment, name) for name in SLURM_VARIABLES)
            local_size = _slurm_tasks(environment, node)
        index = rank
    servers = _integer(environment, "WORKSHOP_SERVERS") if "WORKSHOP_SERVERS" in environment else 0
    if servers:
        role, index = ("server", rank) if rank < servers else ("worker", rank - servers)
    return Place(role, index, rank, world_size, local, local_size, node, *_folders(environment), servers)


def _on_its_node(
    environment: Mapping[str, str], rank: int, world_size: int, local: str, local_size: str, node: str
) -> tuple[int, int, int]:
    """Local rank, local world size and node rank, from the variables of these names.

    What they do not say, Slurm does in a task of its own. Elsewhere, without a local rank, there is one process on each
    machine, as in a pod of PyTorchJob; without a local size, all ranks are taken to share a machine; and without a node
    rank, ranks are taken to fill one machine after the other.
    """
    in_task = "SLURM_STEP_ID" in environment and _integer(environment, "SLURM_STEP_NUM_TASKS") == world_size
    if local not in environment and not in_task:
        return 0, 1, rank
    if in_task and local_size not in environment:
        node_rank = _integer(environment, "SLURM_NODEID")
        return _integer(environment, "SLURM_LOCALID"), _slurm_tasks(environment, node_rank), node_rank
    local_rank = _integer(environment, local)
    size = _integer(environment, local_size) if local_size in environment else world_size
    return local_rank, size, _integer(environment, node) if node in environment else rank // size


def _slurm_tasks(environment: Mapping[str, str], node: int) -> int:
    """How many tasks of this step Slurm has put on `node`, from a list such as `4(x2),3`."""
    text = environment.get("SLURM_STEP_TASKS_PER_NODE", "")
    runs = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    tasks = [int(count) for count, times in runs for _ in range(int(times or 1))]
    if node >= len(tasks):
        raise ValueError(f"SLURM_STEP_TASKS_PER_NODE is {text!r}; it must list node {node}, as in 4(x2),3")
    return tasks[node]


def join_seconds() -> float:
    """How long the processes of a job may take to come together: WORKSHOP_JOIN_SECONDS, or a minute.

    The instances of a cloud pull their images minutes apart, so the launchers of clouds set it.
    """
    return float(os.environ.get("WORKSHOP_JOIN_SECONDS", 60))


def rendezvous() -> tuple[int, int, str, bytes, dict[str, Any] | None, str | None, float]:
    """The arguments of `comm.tcp.connect`: how this process joins the workshop's own message passing.

    Rank, size, `host:port` of rank 0, the run's secret; then the links to emulate (`comm.stamped`: `bandwidths` in
    bytes per second by rank, and `latency_seconds`), or None; and the private subnet that the machines of this run
    share, such as "10.0.0.0/16", or None on one machine; and how long all may take to join.

    Raises:
        ValueError: if the environment does not say, because the script was not launched by such a strategy.
    """
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "WORKSHOP_SECRET")
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        raise ValueError(f"{', '.join(missing)} is not set; launch the script with strategy 'ring'")
    rank, size, port = (_integer(os.environ, name) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    host = socket.gethostbyname(os.environ["MASTER_ADDR"])  # on Slurm it is a name
    secret, link = os.environ["WORKSHOP_SECRET"].encode(), os.environ.get("WORKSHOP_LINK")
    subnet = os.environ.get("WORKSHOP_SUBNET") or None
    return rank, size, f"{host}:{port}", secret, json.loads(link) if link else None, subnet, join_seconds()


def restart_count() -> int:
    """How often this job has been restarted since its launch: 0 at first, as torchrun and Slurm count.

    Raises:
        ValueError: if TORCHELASTIC_RESTART_COUNT or SLURM_RESTART_COUNT is not a number.
    """
    names = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    return next((_integer(os.environ, name) for name in names if name in os.environ), 0)


def checkpoint_folder() -> Path | None:
    """Where to keep what is to outlive a failure of the job; None where the launch has named no such place.

    It is the job's `checkpoints`, in WORKSHOP_CHECKPOINTS; on SageMaker the folder that it copies to the bucket while
    the job runs (`/opt/ml/checkpoints`).
    """
    if os.environ.get("WORKSHOP_CHECKPOINTS"):
        return Path(os.environ["WORKSHOP_CHECKPOINTS"])
    return Path("/opt/ml/checkpoints") if os.environ.get("SM_MODEL_DIR") else None


def _from_tf_config(config: dict[str, Any], environment: Mapping[str, str]) -> Place:
    cluster, task = config["cluster"], config["task"]
    role, index = task["type"], int(task["index"])
    # Beside parameter servers the chief hands out steps and computes none, so it needs no device.
    computing = ("worker",) if "ps" in cluster else TRAINING_ROLES
    tasks = [(kind, number) for kind in TRAINING_ROLES for number in range(len(cluster.get(kind, [])))]
    hosts = [cluster[kind][number].rpartition(":")[0] for kind, number in tasks]
    rank, local, local_size, node = None, 0, 1, 0
    if role in TRAINING_ROLES:
        rank = tasks.index((role, index)) if (role, index) in tasks else index
        # Tasks with the same host in their addresses share a machine.
        host = hosts[rank] if rank < len(hosts) else ""
        beside = [
            each for each, other in zip(tasks, hosts, strict=True) if other == host and each[0] in computing
        ]
        local = beside.index((role, index)) if (role, index) in beside else 0
        local_size, node = max(1, len(beside)), list(dict.fromkeys(hosts)).index(host) if host else 0
    return Place(role, index, rank, len(tasks), local, local_size, node, *_folders(environment))


def _from_hosts(environment: Mapping[str, str]) -> tuple[int, int]:
    """Rank and world size where one process a host trains, in the order in which SageMaker lists the hosts."""
    text, current = environment["SM_HOSTS"], environment.get("SM_CURRENT_HOST")
    try:
        hosts = json.loads(text)
    except ValueError:
        hosts = None
    if not isinstance(hosts, list):
        raise ValueError(f"SM_HOSTS is {text!r}; it must be a JSON list of host names")
    if current not in hosts:
        raise ValueError(f"SM_CURRENT_HOST is {current!r}; it must be one of SM_HOSTS, {text}")
    return hosts.index(current), len(hosts)


def _folders(environment: Mapping[str, str]) -> tuple[Path, Path]:
    data = environment.get("WORKSHOP_DATA") or environment.get("SM_CHANNEL_TRAINING") or "data"
    model = environment.get("WORKSHOP_MODEL") or environment.get("SM_MODEL_DIR") or "model"
    return Path(data), Path(model)


def _integer(environment: Mapping[str, str], name: str) -> int:
    value = environment.get(name, "")
    if not value.isdecimal():
        raise ValueError(f"{name} is {value!r}; it must be a whole number, as the launcher sets it")
    return int(value)


def tf_config(environment: Mapping[str, str] | None = None) -> dict[str, Any] | None:
    """`TF_CONFIG` as TensorFlow 2 wants it, or None where there is none.

    SageMaker's classic mode calls the coordinating process `master` and adds an `environment`; TensorFlow's
    strategies refuse both. With no argument, the mended form is also put back into this process's environment,
    so that a `TFConfigClusterResolver` reads it.

    Raises:
        ValueError: if TF_CONFIG is not JSON with a `task` that names its `type` and `index`.
    """
    text = (os.environ if environment is None else environment).get("TF_CONFIG")
    if not text:
        return None
    try:
        config = json.loads(text)
        task = config["task"]
        kind, index = task["type"], int(task["index"])
        hosts_of = dict(config.get("cluster", {}).items())
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"TF_CONFIG is {text!r}; it must be JSON with cluster and task: {error}") from error
    cluster = {("chief" if name == "master" else name): hosts for name, hosts in hosts_of.items()}
    mended = {"cluster": cluster, "task": {"type": "chief" if kind == "master" else kind, "index": index}}
    if environment is None:
        os.environ["TF_CONFIG"] = json.dumps(mended)
    return mended


def report(step: int, **values: float | str) -> None:
    """Print one metric record as a JSON line, which any platform carries home with the log.

    The well-known names are `loss`, `accuracy`, `samples_per_second`, `bytes_sent`, `epoch`, and `device`: where this
    process computes, such as "cuda:0". Others are carried as they are. A value that is not
    finite becomes null, since JSON has no NaN.
    """
    record: dict[str, Any] = {"step": int(step)}
    for name, value in values.items():
        number = value if isinstance(value, str) else float(value)
        record[name] = number if isinstance(number, str) or math.isfinite(number) else None
    print_record("metric", **record)


def print_record(kind: str, **values: Any) -> None:
    """Print a record of this process as a JSON line, which the launcher reads."""
    place = from_environment(os.environ)
    who = {"workshop": kind, "worker": place.name, "rank": place.rank, "time": round(time.time(), 6)}
    # One write for the whole line: ranks under mpirun share a pipe, and a line in two parts would be torn.
    sys.stdout.write(json.dumps({**who, **values}) + "\n")
    sys.stdout.flush()


def _gpu_count() -> int | None:
    """How many GPUs the framework that this process has imported can use; None if it has imported none."""
    if torch := sys.modules.get("torch"):
        return int(torch.cuda.device_count())
    if tensorflow := sys.modules.get("tensorflow"):
        return len(tensorflow.config.list_physical_devices("GPU"))
    return None


def argument(text: str) -> Any:
    """The value of a command-line argument in a script that `TrainingJob.from_function` has written: JSON, or text."""
    try:
        return {"True": True, "False": False}[text] if text in ("True", "False") else json.loads(text)
    except ValueError:
        return text


@functools.cache  # once a process, however often a script asks for its place
def _announce() -> None:
    print_record("start", pid=os.getpid())


def load(split: str = "train", folder: Path | None = None) -> idx.Examples:
    """The images and labels of `split` ("train" or "test") from the data folder.

    The files are those of MNIST (LeCun et al. 1998, http://yann.lecun.com/exdb/mnist/):
    `train-images-idx3-ubyte` and so on, plain or with `.gz`. The digits of scikit-learn come in the same format.

    Raises:
        FileNotFoundError: if a file is missing; the message names the folder and where it was set.
        ValueError: if a file is not idx, is cut short, or images and labels differ in number.
    """
    try:
        return idx.load(folder or here().data_folder, split)
    except FileNotFoundError as error:
        where = "WORKSHOP_DATA or SM_CHANNEL_TRAINING says where the data is; a job names it in `data`"
        raise FileNotFoundError(f"{error} ({where})") from None
