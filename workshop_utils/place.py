"""Who am I, where is my data, here is a metric: all that a training script imports.

A script learns its place in the cluster from the environment that its platform sets (MPI, Horovod, torchrun,
TensorFlow's `TF_CONFIG`, SageMaker's `SM_*`, Slurm's `SLURM_*`), so the same file runs on a laptop, on SageMaker and on
Kubernetes. This is the one module that reads those variables. It needs the standard library alone, and every
launcher ships it beside the script.

    from workshop_utils import place

    here = place.here()                     # rank 1 of 4
    images, labels = place.load("train").tensors()  # of PyTorch; .arrays() are NumPy's
    place.report(step=10, loss=0.31)        # one JSON line on standard output
    with place.profile(steps=5) as profiler:  # a trace of this rank; profiler.step() ends each step
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import gzip
import importlib
import json
import math
import os
import re
import signal
import socket
import struct
import sys
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

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

# Steps before `profile` records: in the first ones DDP rebuilds its buckets and memory is allocated.
WARM_UP_STEPS = 3


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

    The first call also lets the launcher ask where this process stands: on SIGUSR1 it prints its stack, which
    is how a hang gets a name. Call it before importing a framework, so that a slow import is seen too.

    Raises:
        ValueError: if a variable that says the place cannot be read; the message names it.
    """
    place = from_environment(os.environ)
    _announce(place)
    emulated_device()
    return place


@functools.cache
def emulated_device() -> Any:
    """The device that this rank computes on in an emulated cluster (`training.emulated_device`); None elsewhere."""
    if "WORKSHOP_EMULATED_DEVICE" not in os.environ:
        return None
    # By name, since this module needs nothing of the package on any other platform.
    emulation = importlib.import_module("workshop_utils.training.emulated_device")
    place, given = from_environment(os.environ), json.loads(os.environ["WORKSHOP_EMULATED_DEVICE"])
    seconds = given["seconds"] * given["slower"].get(place.name, 1.0)
    device = emulation.EmulatedDevice(seconds, given["jitter"], seed=1000 * given["seed"] + (place.rank or 0))
    if given["pytorch"]:
        emulation.attach_to_pytorch(device)
    atexit.register(report_host_share)
    return device


def report_host_share() -> None:
    """Tell the launcher what part of the time this rank kept a core busy beside its emulated device."""
    if device := emulated_device():
        who = _who(from_environment(os.environ), "device")
        _print_record(
            {
                **who,
                "passes": device.steps,
                "host_share": round(device.host_share(), 4),
                "late_share": round(device.late_share(), 4),
            }
        )


@contextlib.contextmanager
def computing(share: float = 1.0) -> Iterator[None]:
    """Make the block last as long as `share` of a step's forward and backward pass on the emulated device.

    For code without PyTorch, whose layers no hook sees. Where no device is emulated it does nothing.
    """
    if share < 0:
        raise ValueError(f"share is {share}; it must not be negative")
    if device := emulated_device():
        device.begin_step()
    yield
    if device:
        device.compute(share)


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
    host = socket.gethostbyname(os.environ["MASTER_ADDR"])  # on SageMaker and Kubernetes it is a name
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
    data = environment.get("SM_CHANNEL_TRAINING") or environment.get("WORKSHOP_DATA") or "data"
    model = environment.get("SM_MODEL_DIR") or environment.get("WORKSHOP_MODEL") or "model"
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


def serve_until_chief_leaves(poll_seconds: float = 0.5, patience_seconds: float | None = None) -> None:
    """Return once the chief's port, having answered, answers no more.

    For parameter servers and workers under a coordinator: `tf.distribute.Server.join()` never returns, so
    without this the platform would have to kill them.

    Raises:
        TimeoutError: if the chief has not answered within `patience_seconds`; by default two minutes, or
            `join_seconds` if that is more.
    """
    if patience_seconds is None:
        patience_seconds = max(120.0, join_seconds())
    config = tf_config()
    if config is None or not config["cluster"].get("chief"):
        raise ValueError("TF_CONFIG names no chief, so there is nobody to wait for")
    chief = config["cluster"]["chief"][0]
    deadline = time.monotonic() + patience_seconds
    while not _answers(chief):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the chief at {chief} did not answer within {patience_seconds:.0f} s")
        time.sleep(poll_seconds)
    while _answers(chief):
        time.sleep(poll_seconds)


def leave_last(poll_seconds: float = 0.1, patience_seconds: float = 120.0) -> None:
    """Return once TF_CONFIG's chief and workers have all come here; on the first of them, once no other answers.

    A worker that ends right after its last collective may close a connection from which another one still reads.
    And the first task hosts TensorFlow's coordination service. If it ended before the others, one of them that is still
    ending would log that the service is gone. One that has not ended after `patience_seconds` is not waited for.
    """
    config = tf_config()
    if config is None:
        return
    tasks = [
        (role, index, address)
        for role in TRAINING_ROLES
        for index, address in enumerate(config["cluster"].get(role, []))
    ]
    if len(tasks) > 1 and "tensorflow" in sys.modules:
        from tensorflow.python.eager import context

        if context.context().coordination_service is not None:
            context.context().wait_at_barrier("leave", int(patience_seconds * 1000))
    if not tasks or tasks[0][:2] != (config["task"]["type"], config["task"]["index"]):
        return
    deadline = time.monotonic() + patience_seconds
    for _, _, address in tasks[1:]:
        while _answers(address) and time.monotonic() < deadline:
            time.sleep(poll_seconds)


def _answers(address: str) -> bool:
    """Whether somebody listens at `address`, that is `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


def report(step: int, **values: float | str) -> None:
    """Print one metric record as a JSON line, which any platform carries home with the log.

    The well-known names are `loss`, `accuracy`, `samples_per_second`, `bytes_sent`, `epoch`, and `device`: where this
    process computes, such as "cuda:0". Others are carried as they are. A value that is not
    finite becomes null, since JSON has no NaN.
    """
    place = from_environment(os.environ)
    record: dict[str, Any] = {**_who(place, "metric"), "step": int(step)}
    for name, value in values.items():
        number = value if isinstance(value, str) else float(value)
        record[name] = number if isinstance(number, str) or math.isfinite(number) else None
    _print_record(record)


def _gpu_count() -> int | None:
    """How many GPUs the framework that this process has imported can use; None if it has imported none."""
    if torch := sys.modules.get("torch"):
        return int(torch.cuda.device_count())
    if tensorflow := sys.modules.get("tensorflow"):
        return len(tensorflow.config.list_physical_devices("GPU"))
    return None


@contextlib.contextmanager
def profile(steps: int = 0) -> Iterator[Any]:
    """Record `steps` steps of this rank with PyTorch's profiler. Yields an object whose `step()` ends a step.

        with place.profile(steps=options.profile_steps) as profiler:
            for images, labels in batches:
                ...
                profiler.step()

    By default, with 0 steps, nothing is recorded and PyTorch is not imported. Otherwise, after WARM_UP_STEPS steps,
    CPU activity is recorded, and CUDA's where there is a GPU. It goes to `trace-rank-0000.json.gz`, in the folder
    WORKSHOP_TRACE or else in `traces` below the model folder (which a local run keeps only if the job has `outputs`),
    once the steps are over or the block ends, even by an error. The file appears complete or not at all.
    `workshop trace` merges the ranks' files.

    Raises:
        ValueError: if `steps` is below zero.
        OSError: if the file cannot be written.
    """
    if steps < 0:
        raise ValueError(f"steps is {steps}; it must be 0, to record nothing, or more")
    if steps == 0:
        yield SimpleNamespace(step=lambda: None)
        return
    import torch

    here = from_environment(os.environ)
    folder = Path(os.environ.get("WORKSHOP_TRACE") or here.model_folder / "traces")
    path = folder / f"trace-rank-{here.rank or 0:04d}.json.gz"

    def write(profiler: Any) -> None:
        if profiler.step_num > WARM_UP_STEPS:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / f".{path.name}"  # beside it, since a rename cannot cross file systems
            profiler.export_chrome_trace(str(partial))
            partial.replace(path)
            print(f"trace of rank {here.rank or 0}: {path}")

    activities = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    else:  # PyTorch 2.13 logs its own calls; with a GPU, what CUPTI logs is worth reading
        os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    profiler = torch.profiler.profile(
        activities=activities,
        schedule=torch.profiler.schedule(wait=WARM_UP_STEPS - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=True,  # they give the bytes of a collective
    )
    profiler.preset_metadata_json("workshop", json.dumps({"rank": here.rank, "world_size": here.world_size}))
    with profiler:
        try:
            yield profiler
        finally:
            complete = profiler.step_num - WARM_UP_STEPS
            if 0 < complete < steps:  # the trace ends with a step that is not complete
                profiler.add_metadata_json("complete_steps", str(complete))
    if complete <= 0:
        print(
            f"no trace: the first {WARM_UP_STEPS} steps are warm-up, and no others followed", file=sys.stderr
        )


def argument(text: str) -> Any:
    """The value of a command-line argument in a script that `TrainingJob.from_function` has written: JSON, or text."""
    try:
        return {"True": True, "False": False}[text] if text in ("True", "False") else json.loads(text)
    except ValueError:
        return text


@functools.cache  # once a process, however often a script asks for its place
def _announce(place: Place) -> None:
    # A notebook's standard error has no file descriptor; there is no launcher to ask for the stack either.
    with contextlib.suppress(ValueError, OSError, AttributeError, RuntimeError):
        faulthandler.register(signal.SIGUSR1, file=sys.stderr, all_threads=False, chain=False)
    _print_record({**_who(place, "start"), "pid": os.getpid()})


def _who(place: Place, kind: str) -> dict[str, Any]:
    """How every record begins."""
    return {"workshop": kind, "worker": place.name, "rank": place.rank, "time": round(time.time(), 6)}


def _print_record(record: dict[str, Any]) -> None:
    # One write for the whole line: ranks under mpirun share a pipe, and a line in two parts would be torn.
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


@dataclass(frozen=True)
class Examples:
    """Labelled images: `images` holds count × height × width bytes in row order, `labels` one byte each."""

    count: int
    height: int
    width: int
    images: bytes
    labels: bytes

    def arrays(self) -> tuple[Any, Any]:
        """NumPy arrays: images in [0, 1], float32 of shape (count, pixels), and labels, int64 of shape (count,)."""
        import numpy as np

        images = np.frombuffer(self.images, np.uint8).reshape(self.count, -1)
        return images.astype(np.float32) / np.float32(255), np.frombuffer(self.labels, np.uint8).astype(
            np.int64
        )

    def tensors(self) -> tuple[Any, Any]:
        """The same as PyTorch's tensors."""
        import torch

        images = torch.frombuffer(bytearray(self.images), dtype=torch.uint8).view(self.count, -1) / 255
        return images, torch.frombuffer(bytearray(self.labels), dtype=torch.uint8).long()


def load(split: str = "train", folder: Path | None = None) -> Examples:
    """The images and labels of `split` ("train" or "test") from the data folder.

    The files are those of MNIST (LeCun et al. 1998, http://yann.lecun.com/exdb/mnist/):
    `train-images-idx3-ubyte` and so on, plain or with `.gz`. The digits of scikit-learn come in the same format.

    Raises:
        FileNotFoundError: if a file is missing; the message names the folder and where it was set.
        ValueError: if a file is not idx, is cut short, or images and labels differ in number.
    """
    folder = folder or here().data_folder
    prefix = {"train": "train", "test": "t10k"}.get(split)
    if prefix is None:
        raise ValueError(f"split is {split!r}; it must be 'train' or 'test'")
    (count, height, width), images = read_idx(_find(folder, f"{prefix}-images-idx3-ubyte"), 3)
    (labelled,), labels = read_idx(_find(folder, f"{prefix}-labels-idx1-ubyte"), 1)
    if count != labelled:
        raise ValueError(f"{folder} holds {count} {split} images but {labelled} labels")
    return Examples(count, height, width, images, labels)


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(
        f"{name} is not in {folder.absolute()} (SM_CHANNEL_TRAINING or WORKSHOP_DATA says where the data is)"
    )


def read_idx(path: Path, expected: int | None = None) -> tuple[tuple[int, ...], bytes]:
    """Shape and contents of an idx file of unsigned bytes, the format of MNIST, plain or gzipped.

    `expected` is the number of dimensions it must have.

    Raises:
        ValueError: if the file is not idx, holds values other than bytes, has another shape, or is not as long as it
            claims.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            content: bytes = file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(f"{path} ends inside its header")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} claims {math.prod(shape)} bytes of shape {shape} but holds {len(content) - start}"
        )
    if expected not in (None, dimensions):
        raise ValueError(f"{path} has shape {shape}; it must have {expected} dimensions")
    return shape, content[start:]
