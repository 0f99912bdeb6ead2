"""What travels from the notebook to its ranks: a function or a cell, and copies of the variables that it uses."""

from __future__ import annotations

import base64
import contextlib
import copyreg
import dis
import functools
import hashlib
import inspect
import io
import itertools
import linecache
import logging
import operator
import os
import pickle
import pickletools
import re
import sys
from collections import ChainMap
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import CellType, CodeType, FunctionType, MappingProxyType, MethodType, ModuleType
from typing import Any, ClassVar, NewType
from weakref import WeakKeyDictionary, WeakValueDictionary

import cloudpickle
import numpy as np

from workshop_utils.jobs import JobError
from workshop_utils.jobs.function import TWINS, is_installed
from workshop_utils.launchers.local import warm_server
from workshop_utils.training import settings

MOST_BYTES = 16 * 1024**2

# Of which a rank has its own: generators whose methods are `random.random`, `np.random.rand` and the like, and what
# stands for the absent default of a dataclass's field.
RANKS_OWN = {
    "random": "_inst",
    "numpy.random.mtrand": "_rand",
    "torch": "default_generator",
    "dataclasses": "MISSING",
}

# A cell's source, its file name, what it calls that through which its rank speaks, and flags for the compiler.
Cell = tuple[str, str, str, int]


class _TooLarge(Exception):
    """More than MOST_BYTES were to be pickled."""


@dataclass
class Cargo:
    """What a call or a cell uses.

    Attributes:
        variables: of `__main__`, by name, also those that functions of the notebook use.
        homes: the user's own modules, files beside the notebook, that each of them needs; by "" the program's.
        notes: what is otherwise on a rank, in sentences, by the variable; by "" the program's.
    """

    variables: dict[str, Any] = field(default_factory=dict)
    homes: dict[str, set[str]] = field(default_factory=dict)
    notes: dict[str, set[str]] = field(default_factory=dict)


def gathered(
    program: Any, arguments: Mapping[str, Any], names: Iterable[str] = (), own: Collection[str] = ()
) -> Cargo:
    """What `program(group, **arguments)` uses, or with `program` None a cell that uses `names`; `own` is the rank's.

    Raises:
        JobError: if something cannot be pickled, or is too large; the message names the variable.
    """
    main, cargo = vars(sys.modules["__main__"]), Cargo()
    try:
        with _by_value(program):
            pickler = _Pickler((program, dict(arguments)))
            waiting = [*names, *pickler.names]
            cargo.homes[""], cargo.notes[""] = pickler.modules, pickler.notes
            for name in waiting:  # which grows
                if name in main and name not in {*own, *cargo.variables}:
                    cargo.variables[name] = main[name]
                    pickler = _Pickler(main[name])
                    cargo.homes[name], cargo.notes[name] = pickler.modules, pickler.notes
                    if theirs := sorted(pickler.names & {*own} & main.keys() - {*TWINS}):
                        cargo.notes[name].add(
                            f"Also in functions of the notebook, these are the rank's: {', '.join(theirs)}"
                        )
                    waiting += pickler.names
    except Exception as error:
        raise JobError(_refusal(program, {**arguments, **cargo.variables}, error)) from None
    # In the order in which the notebook has bound them, and a class before its subclasses.
    ordered: dict[str, Any] = {}
    for name in [name for name in main if name in cargo.variables]:
        kinds = reversed(main[name].__mro__) if isinstance(main[name], type) else ()
        bases = [base for kind in kinds if main.get(base := kind.__name__) is kind]
        for each in (*bases, name):
            if each in cargo.variables:
                ordered.setdefault(each, main[each])
    cargo.variables = ordered
    for module in sorted(set[str]().union(*cargo.homes.values())):
        kinds = (list, dict, set, bytearray, np.ndarray)
        attributes = {
            id(each): name for name, each in vars(sys.modules[module]).items() if type(each) in kinds
        }
        for name, value in ordered.items():
            if attribute := attributes.get(id(value)):
                cargo.notes[name].add(f"{name} and {module}.{attribute} are two objects on a rank.")
    return cargo


def packed(
    program: Any, arguments: Mapping[str, Any], variables: Mapping[str, Any], named: Mapping[int, str]
) -> bytes:
    """A call, or with `program` None a cell's variables, as a pickle.

    `named` are functions and classes that the rank has already, by their ids, with their names there.

    Raises:
        JobError: if it is too large.
    """
    try:
        with _by_value(program):
            whole = ([_Binding(*each) for each in variables.items()], program, dict(arguments))
            return _Pickler(whole, [*arguments.values(), *variables.values()], named).pickle
    except Exception as error:
        raise JobError(_refusal(program, {**arguments, **variables}, error)) from None


@contextlib.contextmanager
def _by_value(program: Any) -> Iterator[None]:
    """Pickle what is in the file of `program` by value: as with a cell, what is there now travels."""
    module = sys.modules.get(getattr(program, "__module__", None) or "")
    if module is None or module.__name__ == "__main__" or is_installed(module.__name__):
        yield
        return
    cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def attributes_of(modules: Iterable[str]) -> dict[str, dict[str, bytes]]:
    """The attributes, as pickles, of modules and of those of the user's that they use; not what cannot be pickled."""
    states: dict[str, dict[str, bytes]] = {}
    waiting = [*modules]
    for module in waiting:  # which grows
        if module in states:
            continue
        states[module] = {}
        if not is_installed(module) and _is_older(sys.modules[module]):
            print(f"{module} has changed since the notebook imported it; ranks have it as it is now")
            continue
        attributes = [(name, each) for name, each in vars(sys.modules[module]).items() if name[:2] != "__"]
        if is_installed(module):
            attributes = [each for each in attributes if is_notebooks(each[1])]
        for name, value in attributes:  # which grows
            with contextlib.suppress(Exception):  # whatever its own __reduce__ raises
                pickler = _Pickler(value)
                waiting += pickler.modules
                if not isinstance(value, ModuleType):
                    states[module][name] = pickler.pickle
            if isinstance(value, type) and value.__module__ == module:
                methods = vars(value).items()
                attributes += [(f"{name}.{each}", method) for each, method in methods if is_notebooks(method)]
    return states


def _is_older(module: ModuleType) -> bool:
    """Whether a module is not what its file holds now, as far as its functions show."""
    # Autoreload has given it what its file holds, in code that is not the same.
    if "IPython.extensions.autoreload" in sys.modules:
        return False
    file = getattr(module, "__file__", None) or ""
    kinds = [each for each in vars(module).values() if isinstance(each, type)]
    values = itertools.chain(*(vars(each).values() for each in [module, *kinds]))
    codes = {each.__code__ for each in values if isinstance(each, FunctionType)}
    try:
        now = codes_of(compile(Path(file).read_bytes(), file, "exec", dont_inherit=True))
    except (OSError, SyntaxError):  # it has no file, or one that no rank can import
        return False
    return not {each for each in codes if each.co_filename == file}.issubset(now)


def import_problem(module: str) -> str:
    """Why the file of a module that was imported cannot be imported again; "" if it can be compiled."""
    file = getattr(sys.modules.get(module), "__file__", None) or ""
    try:
        compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    except OSError as error:
        return f"{file}: {error.strerror}"
    except (SyntaxError, ValueError) as error:
        return f"{file}, line {getattr(error, 'lineno', 1)}: {getattr(error, 'msg', error)}"
    return ""


def is_notebooks(value: Any) -> bool:
    """Whether it is a function or a class of the notebook, which may have put it into a module, too."""
    # By its type: some objects of PyTorch warn when they are asked for their class.
    return issubclass(type(value), FunctionType | type) and value.__module__ == "__main__"


def digest(value: Any) -> bytes:
    """What differs once `value` has changed; empty where that cannot be told."""
    if isinstance(value, type):
        vars(copyreg)["_slotnames"](value)  # which to pickle an instance leaves in the class
    pickles = {_Digested(value).pickle for _ in range(2)}
    return hashlib.sha256(pickles.pop()).digest() if len(pickles) == 1 else b""


def objects_in(value: Any) -> dict[Any, Any]:
    """The objects in `value` that can change, by what two values have in common if they share one.

    Functions and classes are not looked into. Nothing is found in what cannot be pickled any more.
    """
    try:
        memo = _Digested([value]).memo.copy().values()
    except Exception:  # whatever its own __reduce__ raises
        return {}
    return {_identity(each): each for _, each in memo if _can_change(each)}


def _can_change(value: Any) -> bool:
    if isinstance(value, list | dict | set | bytearray | np.ndarray):
        return True
    if not hasattr(value, "__dict__") or type(value).__module__ == "typing":
        return False
    named = FunctionType | type | ModuleType | Enum | logging.Logger | NewType
    return not isinstance(value, named) and _rank_has_its_own(value) is None


def _rank_has_its_own(value: Any) -> tuple[ModuleType, str] | None:
    """The module and the attribute of RANKS_OWN that `value` is."""
    for module, name in RANKS_OWN.items():
        if module in sys.modules and value is getattr(sys.modules[module], name, None):
            return sys.modules[module], name
    return None


def _identity(value: Any) -> Any:
    """What is the same for views of an array, and for tensors with one storage."""
    while isinstance(value, np.ndarray) and isinstance(value.base, np.ndarray):
        value = value.base
    tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
    storage = 0
    with contextlib.suppress(NotImplementedError, RuntimeError):  # sparse tensors have none
        storage = value.untyped_storage().data_ptr() if isinstance(value, tensor) else 0
    return ("storage", storage) if storage else id(value)


def source_of(module: str) -> bytes:
    """What a module's file holds; empty if it has none."""
    with contextlib.suppress(OSError, TypeError):
        return Path(getattr(sys.modules.get(module), "__file__", "")).read_bytes()
    return b""


def loaded(data: bytes) -> Any:
    """What a rank has sent back; the notebook's classes stay as they are here."""
    known = {*cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS}

    class Unpickler(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found = super().find_class(module, name)
            if name == "_make_skeleton_class":  # a new one would be told to its bases

                def make(*arguments: Any) -> Any:
                    by_id = cloudpickle.cloudpickle._DYNAMIC_CLASS_TRACKER_BY_ID
                    return by_id.get(arguments[4]) or found(*arguments)

                return make
            if name == "_class_setstate":
                return lambda kind, state: kind if kind in known else found(kind, state)
            return found

    return Unpickler(io.BytesIO(data)).load()


def travels(value: Any) -> bool:
    """Whether a rank can have a copy of `value`."""
    try:
        return bool(_Pickler(value).pickle)
    except Exception:  # whatever its own __reduce__ raises
        return False


def server_for(texts: Iterable[str], framework: str | None) -> str | None:
    """The warm server whose forks need the fewest imports; None where a fork would miss some of Keras's.

    `texts` are those in the call (`texts_in`), the names of the modules that it imports among them.
    """
    roots = {text.partition(".")[0] for text in texts} | {framework}
    if "tensorflow" in roots:
        return None if roots & set(warm_server.OPTIONAL) else "tensorflow"
    return "torch" if roots & {"torch", "horovod"} else "workshop_utils.ranks"


def request(
    call: bytes,
    texts: Iterable[str],
    modules: Mapping[str, Any],
    framework: str | None,
    cell: Cell | None,
    may_die: Collection[int],
) -> str:
    """The file that `rank.py` reads for one call or cell, of which `modules` come first; `texts` are in the call."""
    # A cell is in no file, so its lines travel with it, for tracebacks.
    names = {text for text in texts if text in linecache.cache and not Path(text).exists()}
    names |= {cell[1]} if cell else set()
    request = {
        "path": sys.path,
        "folder": str(Path.cwd()),
        "environment": dict(os.environ),
        "sources": {name: "".join(linecache.getlines(name)) for name in names},
        "framework": framework,
        "call": call,
        "modules": modules,
        "cell": cell,
        "may_die": tuple(may_die),
        "settings": settings.gathered(),
    }
    return base64.b64encode(pickle.dumps(request)).decode()


def texts_in(call: bytes) -> set[str]:
    """The texts in a pickle: names of modules and of files among them. It takes half a second for 10 MiB of numbers."""
    return {value for _, value, _ in pickletools.genops(call) if isinstance(value, str)}


class _Limited(io.BytesIO):
    def write(self, data: Any) -> int:
        if self.tell() + memoryview(data).nbytes > MOST_BYTES:
            raise _TooLarge(f"more than {MOST_BYTES >> 20} MiB")
        return super().write(data)


class _RanksMain(dict[str, Any]):
    """Stands for the variables of the rank's `__main__`."""


def _wholes(values: Iterable[Any]) -> set[int]:
    """The ids of arrays that are to be sent as one, since some of `values` are parts of them and may overlap."""
    arrays = [each for each in values if type(each) is np.ndarray]
    pairs = itertools.permutations(arrays, 2)
    wholes = [each for each in arrays if each.base is None]
    wholes += [one.base for one, other in pairs if one.base is not None and np.may_share_memory(one, other)]
    return {
        id(each)
        for each in wholes
        if type(each) is np.ndarray and each.flags.c_contiguous and not each.dtype.hasobject
    }


@dataclass
class _Binding:
    """A variable, which is bound on the rank before the next is made: a base before what it hears of subclasses."""

    name: str
    value: Any


def _reduced_code(code: CodeType) -> Any:
    """With its file, which a traceback names, and which cloudpickle 3.1.3 leaves out."""
    make, parts = cloudpickle.Pickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if part == "<dynamic-code>" else part for part in parts)


def _reduced_cache(function: Any) -> Any:
    if function.__module__ != "__main__":
        return function.__reduce__()
    parameters = function.cache_parameters().values()  # else its name is looked for, which comes later
    return type(function), (function.__wrapped__, *parameters, functools._CacheInfo), vars(function)


def _reduced_new_type(kind: NewType) -> Any:
    if kind.__module__ != "__main__":
        return kind.__reduce__()
    return type(kind), (kind.__name__, kind.__supertype__), {"__module__": "__main__"}


# What needs neither the pickler nor a look at its bases.
_REDUCERS: dict[type, Callable[[Any], Any]] = {
    _RanksMain: lambda _: (vars, (sys.modules["__main__"],)),
    CodeType: _reduced_code,
    # Before Python 3.12 it holds a lock.
    functools.cached_property: lambda value: (type(value), (value.func,), {"attrname": value.attrname}),
}


class _Pickler(cloudpickle.Pickler):
    """The `pickle` of a value, in which functions of `__main__` use the variables of the rank's.

    Attributes:
        names: the variables of `__main__` that it needs there.
        modules: the user's own that it imports.
        notes: what is otherwise on a rank, in sentences.
    """

    dispatch_table: ClassVar[Any] = ChainMap(_REDUCERS, *cloudpickle.Pickler.dispatch_table.maps)

    def __init__(
        self, value: Any, beside: Iterable[Any] = (), named: Mapping[int, str] = MappingProxyType({})
    ) -> None:
        file = _Limited()
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.names, self.modules, self.notes = set[str](), set[str](), set[str]()
        self._main = vars(sys.modules["__main__"])
        self.globals_ref[id(self._main)] = _RanksMain()
        self._wholes, self._storages = _wholes(beside), dict[Any, Any]()
        self._value, self._cells, self._named = value, dict[int, CellType](), named
        self.dump(value)
        self.pickle = file.getvalue()

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, _Binding):
            return operator.setitem, (self.globals_ref[id(self._main)], value.name, value.value)
        if name := self._named.get(id(value)):
            return operator.getitem, (self.globals_ref[id(self._main)], name)
        # Of IPython, whose import would take a second.
        if isinstance(value, FunctionType) and str(value.__module__).startswith("IPython."):
            names = {"_modified_open": "open", "display": "display"}
            if value.__name__ in names:
                return getattr, (sys.modules["builtins"], names[value.__name__])
        if type(value).__name__ in ("ExitAutocall", "ZMQExitAutocall"):
            return getattr, (sys.modules["builtins"], "exit")
        if found := _rank_has_its_own(value):
            return getattr, found
        if isinstance(value, functools._lru_cache_wrapper):
            return _reduced_cache(value)
        if isinstance(value, NewType):
            return _reduced_new_type(value)
        # cloudpickle would send what is in it
        if isinstance(value, io.IOBase) and not isinstance(value, io.BytesIO | io.StringIO):
            raise TypeError("it is an open file")
        if isinstance(value, WeakKeyDictionary | WeakValueDictionary):  # as in functools.singledispatch
            return type(value), (dict(value),)
        if type(value) is np.ndarray and value.base is not None and id(value.base) in self._wholes:
            offset = value.__array_interface__["data"][0] - value.base.__array_interface__["data"][0]
            return type(value), (value.shape, value.dtype, value.base, offset, value.strides)
        tensor: Any = getattr(sys.modules.get("torch"), "Tensor", ())
        if isinstance(value, tensor) and value._backward_hooks:
            self.notes.add("Hooks of tensors stay in the notebook: register them again on the ranks.")
        if isinstance(value, tensor) and value.is_leaf and value.grad is not None:
            if value.grad.grad_fn is not None:
                raise TypeError("its gradient has a graph, which a rank has not; detach the gradient")
            plain = type(value).__name__ == "Tensor"
            reduced = self._reduced_tensor(value) if plain else value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
            return *reduced[:2], value.grad, None, None, tensor.grad.__set__  # PyTorch leaves it out
        if type(value).__module__ == "torch" and type(value).__name__ == "Tensor":
            return self._reduced_tensor(value)
        if isinstance(value, ModuleType) and value.__name__ not in sys.modules:  # its functions would lose it
            raise TypeError("it is a module that no import has made")
        reduced = super().reducer_override(value)
        # cloudpickle 3.1.3 leaves out where a class is defined, and which attributes its instances may have.
        if isinstance(reduced, tuple) and getattr(reduced[0], "__name__", "") == "_make_skeleton_class":
            body = {"__qualname__": value.__qualname__, "__slots__": vars(value).get("__slots__")}
            reduced[1][3].update({name: each for name, each in body.items() if each})
        if isinstance(value, FunctionType) and value.__closure__ and reduced is not NotImplemented:
            # Functions that share a variable of the function around them are to share it on a rank, too.
            make, (*code, _), *state = reduced
            cells = tuple(self._cells.setdefault(id(each), CellType()) for each in value.__closure__)
            reduced = (make, (*code, cells), *state)
        if isinstance(value, ModuleType | FunctionType | type):
            self._note(value, reduced)
        return reduced

    def _reduced_tensor(self, tensor: Any) -> Any:
        if tensor.is_cuda:
            raise TypeError("it is on a GPU, where ranks may not find it; send it as `.cpu()`")
        if tensor.grad_fn is not None:
            raise TypeError(
                "it has been computed, and no gradient would flow back on a rank; send it as `.detach()`"
            )
        make, parts = tensor.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
        if make.__name__ == "_rebuild_tensor_v2":  # parts of one tensor remain that
            storage = self._storages.setdefault((tensor.untyped_storage().data_ptr(), tensor.dtype), parts[0])
            parts = (storage, *parts[1:])
        return make, parts

    def _note(self, value: Any, reduced: Any) -> None:
        """Note what a module, a function or a class needs."""
        module = str(value.__name__ if isinstance(value, ModuleType) else value.__module__)
        if module != "__main__":
            is_named = isinstance(value, ModuleType) or reduced is NotImplemented
            if is_named and module in sys.modules:
                put_in = [each for each in vars(sys.modules[module]).values() if is_notebooks(each)]
                codes = [each.__code__ for each in put_in if isinstance(each, FunctionType)]
                self.names |= self._main.keys() & set[str]().union(*map(globals_of, codes))
                self.modules |= {module} if put_in or not is_installed(module) else set()
        else:
            name = value.__name__
            if self._main.get(name) is value:
                self.names.add(name)  # pools of processes pickle it by its name
            # Python 3.11 would give a class annotations by being asked for them.
            notes = (
                vars(value).get("__annotations__", {}) if isinstance(value, type) else value.__annotations__
            )
            hints = [each for each in notes.values() if isinstance(each, str)]
            self.names |= self._main.keys() & set(re.findall(r"\w+", " ".join(hints)))
        is_by_value = isinstance(value, FunctionType) and reduced is not NotImplemented
        if is_by_value and value.__globals__ is self._main:
            variables = reduced[2][1]["__globals__"]
            self.names |= variables.keys()
            variables.clear()
            if globals_of(value.__code__) & {"globals", "eval", "exec"}:
                self.notes.add(
                    f"`{value.__name__}` finds only names that the cell, or functions, use by themselves."
                )


class _Digested(_Pickler):
    """A pickle in which functions and classes are but themselves: each time cloudpickle may write them otherwise."""

    def persistent_id(self, value: Any) -> int | None:
        return id(value) if isinstance(value, FunctionType | type) and value is not self._value else None


def _refusal(program: Any, arguments: Mapping[str, Any], error: Exception) -> str:
    """Why a call cannot be sent, with the name of the variable."""
    for name, value in _variables(program, arguments):
        subject = f"`{name}` ({type(value).__qualname__})"
        try:
            _Pickler(value)
        except _TooLarge as size:
            return f"{subject} is too large to be sent to the ranks: {size}. Make or load it in the program"
        except Exception as reason:
            return f"{subject} cannot be sent to the ranks: {reason}. Make it in the program"
    return (
        f"the program, with all its variables, cannot be sent to the ranks: {error}. Make or load some in it"
    )


def _variables(program: Any, arguments: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """What the pickle is made of: arguments, and what the notebook's functions use, each with its name."""
    waiting, seen = [("program", program), *arguments.items()], set()
    classes = []
    for name, value in waiting:  # which grows
        if isinstance(value, MethodType):
            waiting += [(name, value.__func__), (f"{name}.__self__", value.__self__)]
        elif isinstance(value, type):
            classes.append((name, value))
            waiting += [(name, each) for each in vars(value).values() if isinstance(each, FunctionType)]
        elif not isinstance(value, FunctionType):
            yield name, value
        elif value not in seen and not is_installed(str(value.__module__)):
            seen.add(value)
            used = globals_of(value.__code__) & value.__globals__.keys()
            waiting += [(each, value.__globals__[each]) for each in used]
            parameters = inspect.signature(value).parameters.values()
            waiting += [(each.name, each.default) for each in parameters if each.default is not each.empty]
            with contextlib.suppress(ValueError):  # a variable of the function around it has no value yet
                waiting += inspect.getclosurevars(value).nonlocals.items()
    yield from classes


def codes_of(code: CodeType) -> list[CodeType]:
    """Code, and that of the functions inside it."""
    inner = [codes_of(each) for each in code.co_consts if isinstance(each, CodeType)]
    return [code, *itertools.chain(*inner)]


def globals_of(code: CodeType) -> set[str]:
    """The global names that a function or a cell uses, in functions inside it as well."""
    used = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "DELETE_GLOBAL", "DELETE_NAME")
    instructions = itertools.chain(*map(dis.get_instructions, codes_of(code)))
    return {each.argval for each in instructions if each.opname in used}


def parts_used(code: CodeType, values: Iterable[Any]) -> list[ModuleType]:
    """The modules that the notebook has imported, and that a cell reaches as attributes of packages in `values`."""
    packages = [f"{each.__name__}." for each in values if isinstance(each, ModuleType)]
    attributes = set(itertools.chain(*(each.co_names for each in codes_of(code))))
    reached = [
        name
        for name in sys.modules
        for each in packages
        if name.startswith(each) and attributes.issuperset(name.removeprefix(each).split("."))
    ]
    return [sys.modules[name] for name in reached if sys.modules[name]]


def notebook() -> Any:
    """IPython's shell, or None outside a notebook."""
    return sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None


def with_cells(text: str) -> str:
    """`text` with "Cell In[3], line 2" in place of the file names by which the notebook knows its cells."""
    names = getattr(getattr(notebook(), "compile", None), "format_code_name", None)
    if names is None:  # outside a notebook, or IPython 7, whose own tracebacks show files, too
        return text
    return re.sub(r'File "([^"\n]+)"', lambda file: " ".join(names(file[1]) or [file[0]]), text)
