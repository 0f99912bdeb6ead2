"""What a training script imports, and whether it could use a GPU, read from its text: it is not run."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workshop_utils.jobs import TrainingJob

# Packages that compute on CPUs, or on the tensors that they are given.
PASSIVE = {"horovod", "matplotlib", "mpi4py", "numpy", "pandas", "psutil", "scipy", "sklearn", "yaml"}
# Modules of this package that leave it to the script where tensors are.
OURS = re.compile(r"workshop_utils(\.(place|comm|training)(\..+)?)?")
# Of the standard library, what brings in code that this module does not read.
OPEN_ENDED = {"ctypes", "importlib", "pickle", "runpy", "subprocess"}
STARTS = re.compile(r"\b(__import__|exec[lv]?\w{0,2}|popen|posix_spawnp?|spawn[lv]\w{0,2}|system)\(")
# How PyTorch is told to use a GPU. FSDP takes one by itself; `.to(0)` is the first.
PLACES_TENSORS = re.compile(r"(?i)accelerat|cuda|device|gpu|nccl|fsdp|fully_shard|\.to\((?!torch\.\w+\))")


def imported(script: Path) -> dict[str, set[str]]:
    """The modules that `script` imports anywhere, each with the names that are taken from it.

    A script that cannot be read or parsed imports none: where it runs, Python shows its own message.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError):
        return {}
    found: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                found[alias.name] |= set()
        elif isinstance(node, ast.ImportFrom) and node.module:
            found[node.module] |= {alias.name for alias in node.names}
    return dict(found)


def packages(modules: Iterable[str]) -> set[str]:
    """The packages, or modules outside packages, to which `modules` belong."""
    return {module.partition(".")[0] for module in modules}


def why_no_gpu(job: TrainingJob) -> str | None:
    """Why the script of `job` certainly leaves GPUs idle; None if it may use one, or if its text does not say.

    The modules beside it that it imports are read too.
    """
    script = job.script_path
    pending, texts, modules = [script], dict[Path, str](), set[str]()
    while pending:
        path = pending.pop()
        try:
            texts[path] = path.read_text(encoding="utf-8")
            ast.parse(texts[path])
        except (OSError, ValueError, SyntaxError):
            return None
        for module, names in imported(path).items():
            beside = script.parent / f"{module}.py"
            if beside.is_file():
                pending += [beside] if beside not in texts else []
            else:
                modules |= {f"{module}.{name}" for name in names} if module == "workshop_utils" else {module}
    text = "\n".join([*texts.values(), *job.command_line_arguments, str(job.environment)])
    frameworks = {"torch", "torchvision", "tensorflow", "keras"} & packages(modules)
    ours = {module for module in modules if module.startswith("workshop_utils")}
    known = (sys.stdlib_module_names - OPEN_ENDED) | PASSIVE | frameworks
    if STARTS.search(text) or packages(modules - ours) - known or not all(map(OURS.fullmatch, ours)):
        return None
    if not frameworks:
        return "nothing that it imports can use one"
    if not frameworks & {"torch", "torchvision"}:
        only_once = text.count("set_visible_devices") == 1 and "KERAS_BACKEND" not in text
        return "it hides all GPUs from TensorFlow" if only_once and _hides_gpus(texts[script]) else None
    is_told = frameworks & {"tensorflow", "keras"} or PLACES_TENSORS.search(text)
    return None if is_told else "it puts no tensor on a GPU"


def _hides_gpus(text: str) -> bool:
    """Whether a statement that always runs hides all GPUs from TensorFlow."""
    calls = (ast.unparse(each) for each in _always_run(ast.parse(text)) if isinstance(each, ast.Expr))
    return any(call.endswith("config.set_visible_devices([], 'GPU')") for call in calls)


def _always_run(module: ast.Module) -> Iterator[ast.stmt]:
    """The statements of a script that nothing branches around, and of the functions that those call by themselves."""
    functions = {node.name: node for node in module.body if isinstance(node, ast.FunctionDef)}
    pending = list[ast.stmt](module.body)
    for statement in pending:
        yield statement
        if isinstance(statement, ast.If) and ast.unparse(statement.test) == "__name__ == '__main__'":
            pending += statement.body
        elif called := re.fullmatch(r"(?:sys\.exit\()?(\w+)\(\)\)?", ast.unparse(statement)):
            pending += functions.pop(called[1]).body if called[1] in functions else []
