"""A function from a notebook as a training script: its source, and that of every name that it uses.

The names are followed through the notebook: functions and classes travel as their source, what an installed package has
as an import, numbers, text and containers of them as they are. What cannot travel is refused by name.
"""

from __future__ import annotations
import __future__

import ast
import builtins
import contextlib
import hashlib
import importlib.util
import inspect
import json
import linecache
import re
import secrets
import shutil
import symtable
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from workshop_utils import place
from workshop_utils.cache import cache_folder, unwritable
from workshop_utils.jobs import JobError, StrategyName

# By framework: the strategy that starts its ranks, and the module that joins them. Without a framework a job's
# messages go through PyTorch's process group, which every target can start (`comm.over_torch`).
FRAMEWORKS: dict[str | None, tuple[StrategyName, str]] = {
    None: ("torch_ddp", "torch.distributed"),
    "torch": ("torch_ddp", "torch.distributed"),
    "horovod": ("horovod", "horovod.torch"),
    "tensorflow": ("multi_worker_mirrored", "tensorflow"),
}
# By framework: what the object through which a rank communicates is called.
GROUPS = {None: "communicator", "torch": "dist", "horovod": "hvd", "tensorflow": "strategy"}

# Of this package: what travels with every job, and what does if a script imports something of it. The latter need
# those before them.
TRAVELS = (
    *("place", "idx"),
    *(
        f"training.{name}"
        for name in ("checkpoints", "emulated_device", "profiler", "tcp_bytes", "tf_cluster")
    ),
)
TRAVELS_IF_USED = ("comm", "parallel")

NOTEBOOK = ("IPython", "ipykernel")  # the packages whose objects no rank has
TWINS = ("open", "exit", "quit")  # of Python's own; a notebook has others in their place
ADVICE = "Functions travel that `def` makes, with decorators above it that use functools.wraps"

MOST_CHARACTERS = 64 * 1024  # of one value, in a script
FUTURE = "from __future__ import annotations"
GROUP = "import workshop_utils.comm.process_group"  # first, since it sets what TensorFlow reads when it is imported
MAIN = """

if __name__ == "__main__":
    import {module}  # joins the ranks

    workshop_utils.comm.process_group.run({name}, {framework!r})
"""


def check_framework(framework: Any) -> None:
    """Raise JobError unless ranks can use it."""
    if framework not in FRAMEWORKS:
        names = ", ".join(repr(name) for name in FRAMEWORKS if name)
        raise JobError(
            f"framework is {framework!r}; it must be {names}, or None for the workshop's own message passing"
        )


def check_call(program: Any, arguments: Any, framework: str | None) -> None:
    """Raise JobError unless a rank can call `program(group, **arguments)`."""
    check_framework(framework)
    if not callable(program):
        raise JobError(f"program is {program!r}; it must be a function")
    if inspect.iscoroutinefunction(program) or inspect.isgeneratorfunction(program):
        raise JobError(
            f"program is {program!r}; calling it would not run it: it must have no async and no yield"
        )
    if not isinstance(arguments, Mapping) or not all(isinstance(name, str) for name in arguments):
        raise JobError(f"arguments is {arguments!r}; it must hold values by the names of parameters")
    try:
        inspect.signature(program).bind(None, **arguments)
    except (TypeError, ValueError) as error:
        name = getattr(program, "__name__", "program")
        given = "".join(f", {each}=…" for each in arguments)
        raise JobError(f"a rank would call {name}({GROUPS[framework]}{given}): {error}") from None


def encoded(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments` for a command line: numbers, and text that `place.argument` leaves alone, as they are; else JSON.

    Raises:
        JobError: for a value that would not come back from JSON as it was; the message names the argument.
    """
    values: dict[str, Any] = {}
    for name, value in arguments.items():
        text, plain = "", None
        with contextlib.suppress(TypeError, ValueError, RecursionError):
            text = json.dumps(value, allow_nan=False)
            plain = json.loads(text)
        if not text or plain != value:  # a tuple would be a list, a key that is a number would be text
            raise JobError(
                f"arguments.{name} ({type(value).__qualname__}) cannot travel: a job's arguments are JSON, that is "
                "numbers, text, true, false, null, lists, and objects with text for keys. Make it in the function, "
                "of what JSON has"
            )
        is_plain = type(plain) in (int, float) or (isinstance(plain, str) and place.argument(plain) == plain)
        values[name] = plain if is_plain else text
    return values


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
    """A folder, kept for a week, with the script `train.py`, which calls `program` on a rank. Raises JobError."""
    text = script(program, framework)
    digest = hashlib.sha256(text.encode()).hexdigest()[:12]
    folder = cache_folder() / "functions" / f"{program.__name__}-{digest}"
    try:
        folder.mkdir(0o700, parents=True, exist_ok=True)  # a constant may be a secret
        unfinished = folder.with_name(f".{secrets.token_hex(8)}")
        unfinished.write_text(text, encoding="utf-8")
        unfinished.replace(folder / "train.py")  # whole or not at all, for whoever writes the same one now
    except OSError as error:
        raise JobError(unwritable(error)) from error
    for other in folder.parent.iterdir():
        with contextlib.suppress(OSError):  # somebody else removes it
            if time.time() - other.stat().st_mtime > 7 * 24 * 3600:
                shutil.rmtree(other)
    return folder


def script(program: Any, framework: str | None) -> str:
    """The text of a script that calls `program` on a rank.

    Raises:
        JobError: if `program`, or something that it uses, cannot travel; the message names it.
    """
    if not isinstance(program, FunctionType) or program.__name__ == "<lambda>":
        raise JobError(f"program is {program!r}; it must be a function that `def` has given a name")
    source = _Source()
    source.add(program.__name__, program)
    imports = "\n".join(sorted(source.imports, key=lambda line: (line not in (FUTURE, GROUP), line)))
    module = FRAMEWORKS[framework][1]
    if framework == "horovod" and re.search(r"^(import|from) tensorflow\b", imports, re.MULTILINE):
        module = "horovod.tensorflow"
    title = f'"""`{program.__name__}`, a function from a notebook, as a training script."""'
    main = MAIN.format(module=module, name=program.__name__, framework=framework)
    text = "\n\n".join([title, imports, *source.definitions]) + "\n" + main
    _check_imports(text)
    return text


class _Source:
    """The parts of a script, each name once, what is needed before what needs it."""

    def __init__(self) -> None:
        self.imports = {GROUP}
        self.definitions: list[str] = []
        self._values: dict[str, Any] = {}

    def add(self, name: str, value: Any) -> None:
        """Add what makes `name` mean `value`, after all that this uses. Raises JobError."""
        if name in self._values:
            if self._values[name] is not value:
                raise JobError(f"`{name}` means two things in what the function uses: rename one. {ADVICE}")
            return
        self._values[name] = value
        real_name, home = getattr(value, "__name__", name), str(getattr(value, "__module__", ""))
        alias = f" as {name}" if real_name != name else ""
        if vars(builtins).get(name, self) is value:
            return
        if isinstance(value, ModuleType):
            self.imports.add(f"import {real_name}{alias}")
        elif literal := _literal(value):
            self.definitions.append(f"{name} = {literal}")
        elif module := _home(real_name, value):
            self.imports.add(f"from {module} import {real_name}{alias}")
        elif not isinstance(inspect.unwrap(value), FunctionType | type) or is_installed(home):
            raise JobError(
                f"`{name}` ({type(value).__qualname__}) cannot be written as source of at most {MOST_CHARACTERS >> 10} "
                "thousand characters: make it in the function, or pass what it is made of in arguments"
            )
        elif real_name not in (name, "<lambda>"):
            self.add(real_name, value)
            self.definitions.append(f"{name} = {real_name}")
        else:
            self._add_definition(name, value)

    def _add_definition(self, name: str, value: Any) -> None:
        """Add the source of a function or class. Raises JobError."""
        members = [value, *(vars(value).values() if isinstance(value, type) else ())]
        functions = [each for each in map(inspect.unwrap, members) if isinstance(each, FunctionType)]
        text = _source_of(name, value, functions)
        text = f"if True:  # as deep as it was\n{text}" if text[0].isspace() else text
        around = {**vars(builtins), **getattr(sys.modules.get(value.__module__), "__dict__", {})}
        for each in functions:
            around |= {**each.__globals__, **inspect.getclosurevars(each).nonlocals}
            if each.__code__.co_flags & __future__.annotations.compiler_flag:
                self.imports.add(FUTURE)
        names = None
        with contextlib.suppress(SyntaxError):  # such as a `nonlocal` without the function around it
            names = names_used(text) if _defines(text, name, value, around) else None
        if names is None:
            raise JobError(f"the source of `{name}` does not make it what it is here. {ADVICE}")
        for used in sorted(names & around.keys()):
            meaning = around[used]
            home = getattr(meaning, "__globals__", {}).get("__name__") or getattr(meaning, "__module__", "")
            if str(home).partition(".")[0] not in NOTEBOOK:
                if not used.startswith("__"):  # a module's own, as __name__
                    self.add(used, meaning)
            elif used not in TWINS:
                raise JobError(f"`{used}` belongs to the notebook, as do % and ! commands; a rank has none")
            if isinstance(meaning, ModuleType):  # the name `xml` does not say that `xml.etree` was imported
                parts = (each for each in sys.modules if each.startswith(f"{used}.") and each in text)
                self.imports.update(f"import {each}" for each in parts)
        self.definitions.append("\n" + text.rstrip())


def _home(name: str, value: Any) -> str | None:
    """The installed module from which `value` can be imported under its own name."""
    module = getattr(value, "__module__", None)
    if module is None or is_installed(module):
        # In any module: what is written in C often does not say where it belongs.
        for each in map(str, (module, *sys.modules)):
            if getattr(sys.modules.get(each), "__dict__", {}).get(name) is value and is_installed(each):
                return each
    return None


def _literal(value: Any) -> str | None:
    """`value` as source, if that gives the same."""
    with contextlib.suppress(Exception):  # of the value's own __repr__ and __eq__
        text = repr(value)
        same = ast.literal_eval(text) if len(text) <= MOST_CHARACTERS else None
        if type(same) is type(value) and same == value:
            return text
    return None


def is_installed(module: str) -> bool:
    """Whether `module` comes with Python or with a package, so that other machines have it too."""
    root = module.partition(".")[0]
    if root in {*sys.stdlib_module_names, __name__.partition(".")[0]}:
        return True
    spec = _spec(root)
    places = [spec.origin, *(spec.submodule_search_locations or ())] if spec else []
    return any(re.search(r"[/\\](site|dist)-packages\b", str(each)) for each in places)


def _spec(root: str) -> Any:
    loaded = sys.modules.get(root)
    return importlib.util.find_spec(root) if loaded is None else getattr(loaded, "__spec__", None)


def _source_of(name: str, value: Any, functions: list[FunctionType]) -> str:
    """The definition of a function or class. Raises JobError where nobody has kept it."""
    with contextlib.suppress(OSError, TypeError):
        return inspect.getsource(value)
    # Python looks for a class in its module's file. A notebook has cells: those of its methods, or those run last.
    files = ["".join(linecache.getlines(each.__code__.co_filename)) for each in functions]
    for whole in (*files, *reversed(getattr(sys.modules["__main__"], "In", ()))):
        with contextlib.suppress(SyntaxError):
            for node in ast.walk(ast.parse(whole)):
                if isinstance(node, ast.ClassDef) and node.name == value.__name__:
                    first = min([node.lineno, *(each.lineno for each in node.decorator_list)])
                    return "".join(whole.splitlines(keepends=True)[first - 1 : node.end_lineno])
    raise JobError(f"the source of `{name}` is not known: define it in a file, or in a cell without %%")


def _defines(text: str, name: str, value: Any, around: Mapping[str, Any]) -> bool:
    """Whether `text` is a statement that makes `name` what `value` is."""
    node: Any = ast.parse(text).body[0]
    node = node.body[0] if isinstance(node, ast.If) else node
    if isinstance(node, ast.Assign) and isinstance(node.value, ast.Lambda):
        return [ast.unparse(each) for each in node.targets] == [name]
    is_decorated = bool(getattr(node, "decorator_list", ()))
    is_same = is_decorated == hasattr(value, "__wrapped__") or (is_decorated and around.get(name) is value)
    return getattr(node, "name", None) == name and (is_same or isinstance(value, type))


def _check_imports(text: str) -> None:
    """Raise JobError if the script imports what does not travel."""
    travels = [f"workshop_utils.{each}" for each in (*TRAVELS, *TRAVELS_IF_USED)]
    for node in ast.walk(ast.parse(text)):
        package = f"{'.' * node.level}{node.module or ''}." if isinstance(node, ast.ImportFrom) else ""
        for alias in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
            full = package + alias.name
            root = full.partition(".")[0]  # none of what is relative
            if root == "workshop_utils" and not f"{full}.".startswith(tuple(f"{each}." for each in travels)):
                raise JobError(f"{full} does not travel with a job; these do: {', '.join(travels)}")
            if not root or (_spec(root) and not is_installed(root)):
                raise JobError(
                    f"{full} is a file of yours, which does not travel as a module: in a cell of its own, import from "
                    "it by name what the function uses"
                )
