"""What ranks share with their notebook: settings of libraries, such as PyTorch's default dtype, logging and warnings.

The notebook calls `gathered`, a rank `apply`; what is not imported there yet is set once it is.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
import sys
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from operator import attrgetter
from typing import Any

_received: dict[str, bytes] = {}  # the last of each module's
_waiting: dict[str, Callable[[Any], None]] = {}  # for the import of a module


def _loggers() -> dict[str, tuple[int, bool, list[Any]]]:
    """By name the level of each logger, whether it propagates, and the formatters of what it prints by itself."""
    loggers = {}
    for name, logger in {"": logging.root, **logging.root.manager.loggerDict}.items():
        if isinstance(logger, logging.Logger) and (logger.level or logger.handlers):
            is_librarys = name.partition(".")[0] in sys.modules and name != "__main__"  # which adds its own
            printing = [each for each in logger.handlers if type(each) is logging.StreamHandler]
            if any(type(each.formatter) not in (logging.Formatter, type(None)) for each in printing):
                continue  # a program's own, such as that of the notebook's kernel
            formatters = [] if is_librarys else [each.formatter for each in printing]
            loggers[name] = logger.level, logger.propagate, formatters
    return loggers


def _set_loggers(**loggers: tuple[int, bool, list[Any]]) -> None:
    for name, (level, propagates, formatters) in loggers.items():
        logger = logging.getLogger(name)
        logger.setLevel(level)
        logger.propagate = propagates
        if formatters:
            logger.handlers.clear()
        for formatter in formatters:
            logger.addHandler(logging.StreamHandler())
            logger.handlers[-1].setFormatter(formatter)


def _set_filters(*filters: Any) -> None:
    others = [*warnings.filters]
    warnings.resetwarnings()
    vars(warnings)["filters"] += [*(each for each in filters if each not in others), *others]


def _set_precision(digits: int) -> None:
    sys.modules["decimal"].getcontext().prec = digits


# By module what sets something, and to what: arguments by name in a dictionary, several in a tuple, or one.
_SETTINGS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "logging": lambda _: {"_set_loggers": _loggers()},
    "warnings": lambda module: {
        "_set_filters": tuple(each for each in module.filters if each[2].__module__ == "builtins")
    },
    "sys": lambda sys: {"setrecursionlimit": sys.getrecursionlimit()},
    "decimal": lambda decimal: {"_set_precision": decimal.getcontext().prec},
    "numpy": lambda numpy: {"set_printoptions": numpy.get_printoptions(), "seterr": numpy.geterr()},
    "torch": lambda torch: {
        "set_default_dtype": torch.get_default_dtype(),
        "set_default_device": torch.get_default_device(),
        "set_float32_matmul_precision": torch.get_float32_matmul_precision(),
        "use_deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "set_grad_enabled": torch.is_grad_enabled(),
        "set_printoptions": vars(torch._tensor_str.PRINT_OPTS),
    },
    "keras": lambda keras: {
        "config.set_floatx": keras.config.floatx(),
        "config.set_dtype_policy": keras.config.dtype_policy().name,
    },
    "pandas": lambda pandas: {"options.display.d.update": pandas.options.display.d},
    "matplotlib": lambda matplotlib: {
        "rcParams.update": {
            each: matplotlib.rcParams[each] for each in matplotlib.rcParams if each != "backend"
        }
    },
}


def gathered() -> dict[str, bytes]:
    """The settings of what is imported here, a pickle for each module. Raises JobError for those of a GPU."""
    import cloudpickle

    from workshop_utils.jobs import JobError

    settings: dict[str, bytes] = {}
    device = getattr(sys.modules.get("torch"), "get_default_device", lambda: None)()
    if device is not None and device.type not in ("cpu", "meta"):
        where = f"PyTorch's default device is '{device}', where ranks may not find it"
        raise JobError(f"{where}; set it to 'cpu', or in the program")
    for name, read in _SETTINGS.items():
        with contextlib.suppress(Exception):  # another version's, or something that cannot be pickled
            settings[name] = cloudpickle.dumps(read(sys.modules[name]))
    return settings


def apply(settings: dict[str, bytes]) -> None:
    """Have here the settings that were `gathered` there, where they differ."""

    def set_in(module: Any) -> None:
        data, last = settings[module.__name__], _received.get(module.__name__)
        if data == last:
            return
        _received[module.__name__] = data
        here, new = _SETTINGS[module.__name__](module), pickle.loads(data)
        # What a rank that stays has set itself since then stays.
        before = pickle.loads(last) if last else here
        for setter, value in new.items():
            if value not in (here[setter], before[setter]):
                call = globals()[setter] if setter in globals() else attrgetter(setter)(module)
                named, listed = (value, ()) if isinstance(value, dict) else ({}, value)
                call(*(listed if isinstance(listed, tuple) else [listed]), **named)

    for name in settings:
        after_import(name, set_in)


def after_import(name: str, action: Callable[[Any], None]) -> None:
    """Call `action` with a module: now, or once it is imported."""
    if name in sys.modules:
        action(sys.modules[name])
        return
    _waiting[name] = action
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


class _Finder:
    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path, target) if name in _waiting else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module
            vars(spec.loader)["exec_module"] = lambda module: (execute(module), _waiting[name](module))
        return spec
