"""A function from a notebook as a training script: its source, and that of every name that it uses.

The names are followed through the notebook: functions and classes travel as their source, modules and what comes from
them as imports, numbers, text and containers of them as they are. What cannot travel is refused by name.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import json
import linecache
import os
import re
import symtable
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from workshop_utils.jobs import JobError, StrategyName
from workshop_utils.jobs.cache import cache_folder

# By framework: the strategy that starts its ranks, and the module that joins them. Without a framework a job's
# messages go through PyTorch's process group, which every target can start (`comm.over_torch`).
FRAMEWORKS: dict[str | None, tuple[StrategyName, str]] = {
    None: ("torch_ddp", "torch.distributed"),
    "torch": ("torch_ddp", "torch.distributed"),
    "horovod": ("horovod", "horovod.torch"),
    "tensorflow": ("multi_worker_mirrored", "tensorflow"),
}

# Of this package: what travels with every job, and what does where a script imports something of it.
TRAVELS = ("place", "training.checkpoints", "training.tcp_bytes")
TRAVELS_IF_USED = ("comm", "parallel")

MAIN = """

if __name__ == "__main__":
    import {module}  # joins the ranks

    from workshop_utils.comm.process_group import run

    run({name}, {framework!r}, {parameters})
"""


def check_call(program: Any, arguments: Any, framework: str | None) -> None:
    """Raise JobError unless a rank can call `program(group, **arguments)`."""
    if framework not in FRAMEWORKS:
        names = ", ".join(repr(name) for name in FRAMEWORKS if name)
        raise JobError(
            f"framework is {framework!r}; it must be {names}, or None for the workshop's own message passing"
        )
    if not callable(program):
        raise JobError(f"program is {program!r}; it must be a function")
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise JobError(f"arguments is {arguments!r}; it must hold values by the names of parameters")
    try:
        inspect.signature(program).bind(None, **arguments)
    except TypeError as error:
        name = getattr(program, "__name__", "program")
        given = "".join(f", {each}=…" for each in arguments)
        raise JobError(f"a rank would call {name}(group{given}): {error}") from None


def names_used(source: str) -> set[str]:
    """The names that `source` takes from around it, or from Python's own."""

    def of(table: symtable.SymbolTable) -> Iterator[str]:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (symbol.is_global() or table.get_type() == "module"):
                yield symbol.get_name()
        for child in table.get_children():
            yield from of(child)

    return set(of(symtable.symtable(source, "<source>", "exec")))


def write(program: Any, framework: str | None) -> Path:
    """A folder of the cache with the script `train.py`, which calls `program` on a rank. Raises JobError."""
    text = script(program, framework)
    folder = (
        cache_folder() / "functions" / f"{program.__name__}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    )
    folder.mkdir(parents=True, exist_ok=True)
    unfinished = folder / f".{os.getpid()}"
    unfinished.write_text(text, encoding="utf-8")
    unfinished.replace(folder / "train.py")  # whole or not at all, for whoever makes the same one now
    return folder


def script(program: Any, framework: str | None) -> str:
    """The text of a script that calls `program` on a rank.

    Raises:
        JobError: if `program`, or something that it uses, cannot travel; the message names it.
    """
    if not isinstance(program, FunctionType) or program.__name__ == "<lambda>":
        raise JobError(f"program is {program!r}; it must be a function that `def` has given a name")
    source = _Source()
    source.add_definition(program.__name__, program)
    imports = "\n".join(sorted(source.imports))
    module = FRAMEWORKS[framework][1]
    if framework == "horovod" and re.search(r"^(import|from) tensorflow\b", imports, re.MULTILINE):
        module = "horovod.tensorflow"
    parameters = list(inspect.signature(program).parameters)[1:]
    main = MAIN.format(module=module, name=program.__name__, framework=framework, parameters=parameters)
    title = f'"""`{program.__name__}`, a function from a notebook, as a training script."""'
    text = "\n\n".join([title, *filter(None, [imports]), *source.definitions]) + "\n" + main
    _check_own_modules(text)
    return text


def encoded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` for a command line: numbers, and text that is not JSON, as they are; all else as JSON.

    Raises:
        JobError: for a value that JSON does not have; the message names the argument.
    """
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        try:
            text = json.dumps(value)
        except (TypeError, ValueError):
            raise JobError(
                f"arguments.{name} ({type(value).__qualname__}) cannot travel: a job's arguments are JSON, that is "
                "numbers, text, true, false, null, lists and objects. Make it in the function, of what JSON has"
            ) from None
        as_it_is = isinstance(value, int | float) and not isinstance(value, bool)
        as_it_is = as_it_is or (isinstance(value, str) and value == decoded(value))
        values[name] = value if as_it_is else text
    return values


def decoded(text: str) -> Any:
    """The value of an argument that `encoded` has made text."""
    try:
        return json.loads(text)
    except ValueError:
        return text


class _Source:
    """The parts of a script, each name once, what is needed before what needs it."""

    def __init__(self) -> None:
        self.imports: list[str] = []
        self.definitions: list[str] = []
        self._values: dict[str, Any] = {}

    def add_definition(self, name: str, value: Any) -> None:
        """Add the source of a function or class, after that of all it uses. Raises JobError."""
        self._values[name] = value
        text, around = _source_of(value), _surroundings(value)
        for used in sorted(names_used(text) & around.keys()):
            self._add(used, around[used])
        self.definitions.append("\n" + text.rstrip())

    def _add(self, name: str, value: Any) -> None:
        """Add what makes `name` mean `value`."""
        if name in self._values:
            if self._values[name] is not value:
                raise JobError(f"`{name}` means two things in what the function uses: rename one of them")
            return
        self._values[name] = value
        own = getattr(value, "__name__", None)
        if isinstance(value, ModuleType):
            self.imports.append(_import(name, value))
        elif module := _home(value):
            self.imports.append(f"from {module} import {own}" + (f" as {name}" if own != name else ""))
        elif isinstance(value, FunctionType | type) and not is_installed(value.__module__):
            if own != name:
                self._add(value.__name__, value)
                self.definitions.append(f"{name} = {own}")
            else:
                self.add_definition(name, value)
        else:
            self.definitions.append(f"{name} = {_literal(name, value)}")


def _import(name: str, module: ModuleType) -> str:
    full = module.__name__
    if not is_installed(full):
        raise JobError(f"`{name}` is the module {full}, a file of yours, which does not travel")
    package, _, last = full.rpartition(".")
    if name == full:
        return f"import {full}"
    return f"from {package} import {last}" if package and name == last else f"import {full} as {name}"


def _home(value: Any) -> str | None:
    """The installed module from which `value` can be imported under its own name."""
    name, module = getattr(value, "__name__", None), getattr(value, "__module__", None)
    if not isinstance(name, str) or not isinstance(module, str) or not is_installed(module):
        return None
    return module if getattr(sys.modules.get(module), name, None) is value else None


def _literal(name: str, value: Any) -> str:
    try:
        if ast.literal_eval(repr(value)) == value:
            return repr(value)
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        pass  # as below
    raise JobError(
        f"`{name}` ({type(value).__qualname__}) cannot be written as source: make it in the function, or pass what it "
        "is made of in arguments"
    )


def is_installed(module: str) -> bool:
    """Whether `module` comes with Python or with a package, so that other machines have it too."""
    root = module.partition(".")[0]
    if root in {*sys.stdlib_module_names, __name__.partition(".")[0]}:
        return root != "__main__"
    loaded = sys.modules.get(root)
    spec = importlib.util.find_spec(root) if loaded is None else getattr(loaded, "__spec__", None)
    folders = [sysconfig.get_path(name) for name in ("purelib", "platlib")]
    return any(Path(str(spec and spec.origin)).is_relative_to(folder) for folder in folders)


def _surroundings(value: Any) -> dict[str, Any]:
    """What names mean in the source of a function or class; not those of IPython's own that have a built-in twin."""
    around = dict(vars(sys.modules[value.__module__])) if value.__module__ in sys.modules else {}
    for function in [value] if isinstance(value, FunctionType) else _functions_of(value):
        around |= {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    return {name: each for name, each in around.items() if name not in {"open", "display"}}


def _functions_of(value: type) -> list[FunctionType]:
    return [each for each in vars(value).values() if isinstance(each, FunctionType)]


def _source_of(value: Any) -> str:
    """The definition of a function or class, not indented. Raises JobError where nobody has kept it."""
    try:
        return textwrap.dedent(inspect.getsource(value))
    except (OSError, TypeError):
        if isinstance(value, FunctionType):
            raise JobError(
                f"the source of `{value.__name__}` is not known: define it in a cell or a file"
            ) from None
    # Python looks for a class in its module's file; a notebook has cells, which only `linecache` keeps.
    for file in (*(each.__code__.co_filename for each in _functions_of(value)), *reversed(linecache.cache)):
        lines = linecache.getlines(file)
        if any(f"class {value.__name__}" in line for line in lines):
            for node in ast.walk(ast.parse("".join(lines))):
                if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    return textwrap.dedent("".join(lines[first - 1 : node.end_lineno]))
    raise JobError(f"the source of `{value.__name__}` is not known: define it in a cell or a file")


def _check_own_modules(text: str) -> None:
    """Raise JobError if the script imports what this package does not send with its jobs."""
    travels = [f"workshop_utils.{each}" for each in (*TRAVELS, *TRAVELS_IF_USED)]
    for node in ast.walk(ast.parse(text)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
        for name in names:
            full = f"{node.module}.{name}" if isinstance(node, ast.ImportFrom) else name
            if full.startswith("workshop_utils") and not f"{full}.".startswith(
                tuple(f"{each}." for each in travels)
            ):
                raise JobError(f"{full} does not travel with a job; these do: {', '.join(travels)}")
