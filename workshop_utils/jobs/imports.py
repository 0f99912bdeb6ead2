"""What a training script imports, where its processes meet, whether it could use a GPU: it is read, and not run."""

from __future__ import annotations

import ast
import contextlib
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workshop_utils.jobs import TrainingJob

PYTORCH, TENSORFLOW = {"torch", "torchvision"}, {"tensorflow", "keras"}
# Packages that compute on CPUs, or wherever the tensors are that they are given.
CPU_PACKAGES = {"horovod", "matplotlib", "mpi4py", "numpy", "pandas", "psutil", "scipy", "sklearn", "yaml"}
# Modules of this package that do the same. `comm.process_group` makes a GPU PyTorch's current device.
CPU_MODULES = re.compile(r"workshop_utils(\.(place|comm|parallel|training)(?!\.process_group)(\..+)?)?")
# Modules and functions through which a script runs code that this module does not read.
CODE_MODULES = {"ctypes", "importlib", "pickle", "runpy", "subprocess"}
CODE_CALLS = re.compile(r"(__import__|exec\w*|popen|spawn\w*|system)\(")
# How PyTorch comes to use a GPU. FSDP and DataParallel take one by themselves, `.to(0)` is the first, and
# a file may hold tensors on one.
PLACES_TENSORS = re.compile(
    r"(?i)accelerat|\bdataparallel\(|cuda|device|gpu|nccl|fsdp|fully_shard|(torch|jit|export|hub)\.load\(|\.to\((?!torch\.\w+\))"
)

# An address of a process's own host, as a script writes it, and where a host alone is one at which processes meet.
LOOPBACK = re.compile(r"(tcp://)?(127\.0\.0\.1|localhost)(:[^/\s]*)?(/\S*)?")
MEETING = re.compile(r"(?i)master_?addr|tcpstore")
# What holds a value for want of another, and how a script asks whether its launcher has set one.
STAND_INS, CHOICES = {"get", "getenv", "setdefault", "ExceptHandler"}, {"If", "IfExp", "BoolOp"}
ASKS_LAUNCHER = re.compile(r"\bin (os\.)?environ\b|environ\.get\(|getenv\(")


def imported(script: Path, *, always: bool = False) -> dict[str, set[str]]:
    """The modules that `script` imports anywhere, each with the names that are taken from it.

    With `always` only those that it cannot do without: not in a function, a condition or a `try`.
    A script that cannot be read or parsed imports none: where it runs, Python shows its own message.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError):
        return {}
    modules: dict[str, set[str]] = defaultdict(set)
    for node in tree.body if always else ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.name] |= set()
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules[node.module] |= {alias.name for alias in node.names}
    return dict(modules)


def packages(modules: Iterable[str]) -> set[str]:
    """The packages, or modules outside packages, to which `modules` belong."""
    return {module.partition(".")[0] for module in modules}


def own_files(job: TrainingJob) -> list[Path]:
    """The script of `job`, and the modules below its folder that it imports, one from another."""
    files = [job.script_path]
    for path in files:  # which grows
        for module, names in imported(path).items():
            for full_name in (module, *(f"{module}.{name}" for name in sorted(names))):
                for folder in dict.fromkeys((job.folder, job.script_path.parent, path.parent)):
                    beside = folder / full_name.replace(".", "/")
                    both = beside.with_suffix(".py"), beside / "__init__.py"
                    files += [each for each in both if each not in files and each.is_file()]
    return files


def loopback_addresses(job: TrainingJob) -> list[str]:
    """Where `job` lets its processes meet at an address of each one's own host, such as `train.py, line 3`.

    An address that stands in for one that no launcher has set, or for an argument that the job gives, is none.
    """
    variables = (f"{name}={text}" for name, text in job.environment.items() if name != "MASTER_ADDR")
    words = [*job.command_line_arguments, *variables]
    found = [repr(word) for word in words if LOOPBACK.fullmatch(word.rpartition("=")[2])]
    for path in own_files(job):
        with contextlib.suppress(OSError, SyntaxError):
            lines = _loopback_lines(ast.parse(path.read_bytes()), {word.partition("=")[0] for word in words})
            found += [f"{path.name}, line {line}" for line in dict.fromkeys(lines)]
    return found


def mpi_doubt(job: TrainingJob) -> str:
    """That MPI's ranks are not joined, in a sentence; "" if they are, or if there is one."""
    if (
        job.workers == 1
        or job.strategy in ("mpi", "horovod")
        or "mpi4py" not in packages(imported(job.script_path, always=True))
    ):
        return ""
    return f"{job.program} imports mpi4py, and under {job.strategy} each worker is rank 0 of 1: take --strategy mpi"


def meeting_doubt(job: TrainingJob) -> str:
    """That processes on several hosts would not meet where `job` has them meet, in a sentence; "" if they may."""
    where = " and ".join(loopback_addresses(job))
    advice = "leave the address to the launcher"
    if job.strategy == "torch_ddp":
        advice = (
            "meet at the one in MASTER_ADDR and MASTER_PORT (in arguments, {master_addr} and {master_port})"
        )
    elif job.strategy in ("multi_worker_mirrored", "parameter_server"):
        advice = "meet at the one in TF_CONFIG"
    return where and (
        f"{where}: an address of a process's own host, at which no other host's processes can be reached; {advice}"
    )


def _loopback_lines(node: ast.AST, given: set[str], statement: str = "") -> Iterator[int]:
    """The lines in `node`, which belongs to `statement`, with such an address; `given` are the job's flags."""
    name, texts = type(node).__name__, set[object]()
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        texts = {getattr(each, "value", None) for each in node.args}
    asks = name in CHOICES and ASKS_LAUNCHER.search(ast.unparse(getattr(node, "test", node)))
    if asks or name in STAND_INS or (name == "add_argument" and given & texts):
        return
    if isinstance(node, ast.stmt):
        statement = "" if hasattr(node, "body") else ast.unparse(node)
    match = LOOPBACK.fullmatch(str(getattr(node, "value", "")))
    if isinstance(node, ast.Constant) and match and (match[1] or match[3] or MEETING.search(statement)):
        yield node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _loopback_lines(child, given, statement)


def why_no_gpu(job: TrainingJob) -> str | None:
    """What the script of `job` does that surely leaves GPUs idle; None if it may use one, or its text does not say.

    Its own modules are read too.
    """
    texts, modules = dict[Path, str](), set[str]()
    for path in own_files(job):
        try:
            texts[path] = path.read_text(encoding="utf-8")
            ast.parse(texts[path])
        except (OSError, ValueError, SyntaxError):
            return None
        for module, names in imported(path).items():
            modules |= {module} | {f"{module}.{name}" for name in names}
    own = {part.removesuffix(".py") for path in texts for part in path.relative_to(job.folder).parts}
    text = "\n".join([*texts.values(), *job.command_line_arguments, str(job.environment)])
    understood = (sys.stdlib_module_names - CODE_MODULES) | CPU_PACKAGES | PYTORCH
    others = packages(module for module in modules if not CPU_MODULES.fullmatch(module)) - understood - own
    if others or CODE_CALLS.search(text):
        return None
    if not PYTORCH & packages(modules):
        return "imports nothing that can use a GPU"
    takes = any(re.fullmatch(r"torch(\.\w+)*\.(load|DataParallel)", module) for module in modules)
    return None if takes or PLACES_TENSORS.search(text) else "puts no tensor on a GPU"
