"""What travels from the notebook to its ranks: a function or a cell, and copies of the variables that it uses."""

from __future__ import annotations

import inspect
import io
import linecache
import pickle
import pickletools
import re
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cloudpickle

from workshop_utils.jobs import JobError
from workshop_utils.jobs.function import is_installed
from workshop_utils.launchers.local import warm_server

MOST_BYTES = 16 * 1024**2


class _TooLarge(Exception):
    """More than MOST_BYTES were to be pickled."""


@dataclass(frozen=True)
class Packed:
    """A pickle, and the texts that it holds: names of modules and of files among them."""

    program: bytes
    cell: tuple[str, str] | None = None  # source and file name

    def server(self, framework: str | None) -> str | None:
        """The warm server whose forks need the fewest imports; None where a fork would miss some of Keras's."""
        roots = {text.partition(".")[0] for text in self._texts()} | {framework}
        for name in ("tensorflow", "torch"):
            if name in roots:
                return name if name == "torch" or not roots & set(warm_server.OPTIONAL) else None
        return "torch" if framework == "horovod" else "workshop_utils.ranks"

    def write(self, file: Path, framework: str | None, group: str) -> None:
        """Write what `rank.py` reads."""
        # A cell is in no file, so its lines travel with it, for tracebacks.
        names = {text for text in self._texts() if text in linecache.cache and not Path(text).exists()}
        names |= {self.cell[1]} if self.cell else set()
        request = {
            "path": sys.path,
            "folder": str(Path.cwd()),
            "sources": {name: "".join(linecache.getlines(name)) for name in names},
            "framework": framework,
            "group": group,
            "program": self.program,
            "cell": self.cell,
        }
        file.write_bytes(pickle.dumps(request))

    def _texts(self) -> Iterator[str]:
        for _, value, _ in pickletools.genops(self.program):
            if isinstance(value, str):
                yield value


def packed(program: Any, arguments: Mapping[str, Any], cell: tuple[str, str] | None = None) -> Packed:
    """Pickle a call, or for a cell the variables that it uses, its `arguments`.

    Raises:
        JobError: if something cannot be pickled, or is too large; the message names the variable.
    """
    module = sys.modules.get(getattr(program, "__module__", None) or "")
    # A file beside the notebook: as with a cell, what is there now travels, and no rank imports it.
    own = [module] if module and module.__name__ != "__main__" and not is_installed(module.__name__) else []
    try:
        for each in own:
            cloudpickle.register_pickle_by_value(each)
        return Packed(_pickled((program, dict(arguments))), cell)
    except Exception as error:
        for name, value in _variables(program, arguments):
            _check(name, value)
        raise JobError(f"the program cannot be sent to the ranks: {error}") from error
    finally:
        for each in own:
            cloudpickle.unregister_pickle_by_value(each)


def _pickled(value: Any) -> bytes:
    file = _Limited()
    _Pickler(file, protocol=pickle.HIGHEST_PROTOCOL).dump(value)
    return file.getvalue()


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise _TooLarge(f"it has more than {MOST_BYTES >> 20} MiB")
        return super().write(data)


class _Pickler(cloudpickle.Pickler):
    def reducer_override(self, value: Any) -> Any:
        if getattr(value, "__name__", "") == "_modified_open":  # IPython's, whose import would take a second
            return getattr, (sys.modules["builtins"], "open")
        if isinstance(value, io.IOBase):  # cloudpickle would send what is in it
            raise TypeError("it is an open file")
        if getattr(value, "is_cuda", False) is True:
            raise TypeError("it is on a GPU")
        return super().reducer_override(value)


def _variables(program: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the pickle is made of: arguments, and what functions of the notebook use, each with its name."""
    yield from arguments.items()
    waiting, seen = [program], set()
    while waiting:
        function = waiting.pop()
        if not isinstance(function, types.FunctionType) or function in seen:
            continue
        seen.add(function)
        used = inspect.getclosurevars(function)
        for name, value in {**used.globals, **used.nonlocals}.items():
            waiting.append(value)
            if not isinstance(value, types.FunctionType | types.ModuleType):
                yield name, value


def _check(name: str, value: Any) -> None:
    """Raise JobError if `value` by itself cannot be sent."""
    kind = type(value).__qualname__
    try:
        _pickled(value)
    except _TooLarge as error:
        raise JobError(
            f"`{name}` ({kind}) is too large to be sent to the ranks: {error}. Make or load it in the program"
        ) from None
    except Exception as error:
        raise JobError(
            f"`{name}` ({kind}) cannot be sent to the ranks: {error}. Make it in the program"
        ) from None


def with_cells(text: str) -> str:
    """`text` with "Cell In[3], line 2" in place of the file names by which the notebook knows its cells."""
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    number_of: Callable[[str], Any] = getattr(
        getattr(shell, "compile", None), "format_code_name", lambda _: None
    )

    def cell(match: re.Match[str]) -> str:
        named = number_of(match["file"])
        return f"{' '.join(named)}, line {match['line']}" if named else match[0]

    return re.sub(r'File "(?P<file>[^"]+)", line (?P<line>\d+)', cell, text)
