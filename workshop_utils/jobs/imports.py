"""What a training script imports, and whether it could use a GPU, read from its text: it is not run."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable
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


def imported(script: Path) -> dict[str, set[str]]:
    """The modules that `script` imports anywhere, each with the names that are taken from it.

    A script that cannot be read or parsed imports none: where it runs, Python shows its own message.
    """
    try:
        tree = ast.parse(script.read_bytes())
    except (OSError, SyntaxError):
        return {}
    modules: dict[str, set[str]] = defaultdict(set)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                modules[alias.name] |= set()
        elif isinstance(node, ast.ImportFrom) and node.module:
            modules[node.module] |= {alias.name for alias in node.names}
    return dict(modules)


def packages(modules: Iterable[str]) -> set[str]:
    """The packages, or modules outside packages, to which `modules` belong."""
    return {module.partition(".")[0] for module in modules}


def why_no_gpu(job: TrainingJob) -> str | None:
    """Why the script of `job` certainly leaves GPUs idle; None if it may use one.

    It may if it, or a module beside it, imports anything but packages for CPUs.
    """
    pending, texts, modules = [job.script_path], dict[Path, str](), set[str]()
    while pending:
        path = pending.pop()
        try:
            texts[path] = path.read_text(encoding="utf-8")
            ast.parse(texts[path])
        except (OSError, ValueError, SyntaxError):
            return None
        for module, names in imported(path).items():
            beside = path.with_name(f"{module}.py")
            if beside.is_file():
                pending += {beside} - texts.keys()
            else:
                modules |= {module} | {f"{module}.{name}" for name in names}
    calls = CODE_CALLS.search("\n".join(texts.values()))
    others = packages(module for module in modules if not CPU_MODULES.fullmatch(module))
    may_use_one = others - (sys.stdlib_module_names - CODE_MODULES) - CPU_PACKAGES or calls
    return None if may_use_one else "nothing that it imports can use one"
