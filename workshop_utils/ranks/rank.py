"""One rank of `on_ranks`: a program that a warm server forks, or that starts cold.

It reads `request` in the run's own folder, calls the program there, and leaves `worker-0.value`, a pickle, or
`worker-0.error`, JSON. Where ranks stay, its standard input is a socket: there it says that it is done, and learns the
name of the next request. It imports little, since each rank imports it again.
"""

import base64
import builtins
import contextlib
import functools
import importlib
import json
import linecache
import os
import pickle
import signal
import stat
import sys
import time
import traceback
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

MOST_EVENTS = 2_000  # of the trace, the first ones
MOST_SECONDS = 1e6  # for a message: the time-out of the call decides, and shows the stacks


# What runs a cell, and no traceback shows: this package, and what awaits.
OF_OTHERS = (str(Path(__file__).parents[1]), str(Path(contextlib.__file__).with_name("asyncio")))
PROCESS = os.getpid()
_NONE = object()
_runner: Any = None


class _FirstEvents(list[Any]):
    def append(self, event: Any) -> None:
        if len(self) < MOST_EVENTS:
            super().append(event)


def main() -> int:
    folder = Path(os.environ["TMPDIR"])
    prompts = _prompts()
    request = _read(folder / "request")
    # Imported only now, from where the notebook imports it, and not from what travels with a job.
    from workshop_utils import place
    from workshop_utils.comm.process_group import process_group
    from workshop_utils.training.settings import apply

    if "WORKSHOP_EMULATED_DEVICE" in os.environ:
        from workshop_utils.training import emulated_device

        emulated_device.switch_on()
    builtins.input, place.load = _no_input, _load_digits
    sys.breakpointhook = _no_breakpoint
    here = place.here()
    apply(request["settings"])
    _show_as_a_cell_does(str(folder / here.name))
    error = folder / f"{here.name}.error"
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")  # in place of this program
    vars(main_module)["__builtins__"] = builtins
    try:
        # The first to write is the inner one, before the others learn of the error and fail as well.
        with _written_to(error), process_group(request["framework"]) as group, _written_to(error):
            if request["framework"] is None:
                group.timeout_seconds, group.may_die = MOST_SECONDS, request["may_die"]
                _answer_whom_it_waits_for(group, folder / f"{here.name}.waits")
            if hasattr(group, "barrier"):  # all begin together; a strategy of TensorFlow has none
                group.barrier()
            while True:
                # Written before this rank leaves the others, who may still wait for it.
                (folder / f"{here.name}.value").write_bytes(_result_of(request, group, here))
                if prompts is None:
                    break
                sys.stdout.flush()
                sys.stderr.flush()
                prompts.write(b"!")
                if not (name := prompts.readline().decode().strip()):
                    break
                request = _read(folder / name, request)
                apply(request["settings"])
    except BaseException:
        return 1
    finally:
        if prompts is not None:
            prompts.close()
    return 0


def _prompts() -> Any:
    """Where the ranks stay, the socket on which this one learns of the next cell; it was standard input."""
    if not stat.S_ISSOCK(os.fstat(0).st_mode):
        return None
    prompts = os.fdopen(os.dup(0), "r+b", buffering=0)
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    return prompts


def _read(file: Path, before: Mapping[str, Any] = types.MappingProxyType({})) -> dict[str, Any]:
    """A request, with its source lines, and the folder and path that are not as `before`: a cell may change its own."""
    request: dict[str, Any] = pickle.loads(base64.b64decode(file.read_text()))
    if request["path"] != before.get("path"):
        sys.path[:] = request["path"]
    if request["folder"] != before.get("folder"):
        os.chdir(request["folder"])
    variables, were = request["environment"], before.get("environment", request["environment"])
    for name in [name for name in were.keys() | variables if were.get(name) != variables.get(name)]:
        os.environ.pop(name, None)
        os.environ.update({name: variables[name]} if name in variables else {})
    for name, text in request["sources"].items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    return request


def _result_of(request: dict[str, Any], group: Any, here: Any) -> bytes:
    """What the program returned and sent on this rank, and which names of `__main__` it bound, pickled."""
    import cloudpickle

    from workshop_utils.training.tcp_bytes import count_bytes

    communicator = group if request["framework"] is None else None
    namespace = vars(sys.modules["__main__"])
    for name, (is_new, attributes) in request["modules"].items():
        module = importlib.import_module(name)
        _set_attributes(importlib.reload(module) if is_new else module, attributes)
    _, program, arguments = pickle.loads(request["call"])  # which binds variables
    if request["cell"] is not None:
        source, name, group_name, flags = request["cell"]
        namespace.update({"rank": here.rank, "size": here.world_size, group_name: group})
    before = dict(namespace)
    if communicator is not None:
        communicator.traffic.reset()
        communicator.trace = _FirstEvents()
    with contextlib.nullcontext() if communicator else count_bytes() as counted:
        started = time.perf_counter()
        try:
            if request["cell"] is None:
                value = program(group, **arguments)
            else:
                value = _run_cell(source, name, flags, namespace)
        except SystemExit as leaving:
            if leaving.code or os.getpid() != PROCESS:
                raise
            value = None
        finally:
            if shown := sys.modules.get("workshop_utils.training.display"):
                shown.show()
        seconds = time.perf_counter() - started
    if os.getpid() != PROCESS:  # a child that the cell has forked, and not ended
        os._exit(0)
    if "WORKSHOP_EMULATED_DEVICE" in os.environ:
        from workshop_utils.training import emulated_device

        emulated_device.report_host_share()
    messages, trace = None, ()
    if communicator is None:
        sent = counted.sent if counted else 0
    else:
        messages = int(communicator.traffic.messages_sent.sum())
        sent, trace = int(communicator.traffic.bytes_sent.sum()), tuple(communicator.trace)
    bound = {
        each
        for each in before.keys() | namespace
        if before.get(each, _NONE) is not namespace.get(each, _NONE)
    }
    try:
        return cloudpickle.dumps((value, messages, sent, seconds, trace, bound))
    except Exception as error:
        kind = type(value).__qualname__
        raise TypeError(f"it returned a {kind}, which cannot be sent back: {_text_of(error)}") from None


def _set_attributes(module: Any, attributes: dict[str, bytes]) -> None:
    """Give a module the attributes that differ from those in the notebook, which come as pickles."""
    import cloudpickle

    for name, pickled in attributes.items():
        *owners, last = name.split(".")
        owner = functools.reduce(getattr, owners, module)
        try:
            is_same = cloudpickle.dumps(vars(owner).get(last, _NONE), pickle.HIGHEST_PROTOCOL) == pickled
        except Exception:  # whatever its own __reduce__ raises
            is_same = False
        if not is_same:
            setattr(owner, last, pickle.loads(pickled))


def _run_cell(source: str, name: str, flags: int, namespace: dict[str, Any]) -> Any:
    """Execute a cell; the value of its last expression."""
    import ast
    import inspect

    def run(tree: Any, mode: str) -> Any:
        code = compile(tree, name, mode, flags | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, dont_inherit=True)
        value = eval(code, namespace)  # of mode exec, too
        return _awaited(value) if code.co_flags & inspect.CO_COROUTINE else value

    *body, last = ast.parse(source, name).body or ast.parse("pass").body
    if not isinstance(last, ast.Expr):
        return run(ast.Module([*body, last], []), "exec")
    run(ast.Module(body, []), "exec")
    return run(ast.Expression(last.value), "eval")


def _awaited(value: Any) -> Any:
    """The result of a coroutine, on one loop for all cells."""
    global _runner
    import asyncio

    _runner = _runner or asyncio.Runner()
    return _runner.run(value)


def _answer_whom_it_waits_for(communicator: Any, file: Path) -> None:
    """At SIGUSR1, which asks for this rank's stack, also write for whom it waits."""
    import faulthandler

    def answer(*_: object) -> None:
        if (peer := communicator.waits_for) is not None:
            where = communicator._collective or "send or recv"
            file.write_text(f"rank {communicator.rank} waits for rank {peer}, in {where}")

    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, answer)
    faulthandler.register(signal.SIGUSR1, all_threads=False, chain=True)


def _show_as_a_cell_does(files: str) -> None:
    """Show figures and the like in files whose names begin with `files`, and tqdm's bars as text."""
    from workshop_utils.training.settings import after_import

    os.environ.update(WORKSHOP_DISPLAY=files, MPLBACKEND="module://workshop_utils.training.display")
    vars(builtins)["display"] = _display
    after_import("IPython.core.display_functions", lambda module: vars(module).update(display=_display))
    after_import("tqdm.notebook", lambda module: vars(module).update(_bars()))


def _display(*values: Any, **options: Any) -> Any:
    from workshop_utils.training import display  # few programs do; it imports Matplotlib

    return display.display(*values, **options)


def _bars() -> dict[str, Any]:
    from tqdm import std

    return {"tqdm": std.tqdm, "tqdm_notebook": std.tqdm, "trange": std.trange, "tnrange": std.trange}


def _load_digits(split: str = "train", folder: Path | None = None) -> Any:
    """What `place.load` is here. Few programs load data, so the first that does has it prepared."""
    from workshop_utils import idx
    from workshop_utils.training import data

    return idx.load(folder or data.prepare("digits"), split)


def _no_input(prompt: object = "") -> str:
    raise EOFError(
        f"input({str(prompt)!r}) cannot be answered on a rank; call it first, and pass the answer as an argument"
    )


def _text_of(error: BaseException) -> str:
    """What an error says, or what a traceback shows where its own `__str__` fails."""
    try:
        return str(error)
    except Exception:
        return "<exception str() failed>"


def _no_breakpoint(*_: object, **__: object) -> None:
    raise RuntimeError("nobody can answer breakpoint() on a rank; print what you want to know")


@contextlib.contextmanager
def _written_to(file: Path) -> Iterator[None]:
    """Write an error that leaves the block to `file`, unless an earlier one is there, without this package's frames."""
    try:
        yield
    except BaseException as error:
        if os.getpid() != PROCESS:
            _end_child(error)
        whole = _traceback_of(error)
        summary = f"{type(error).__name__}: {_text_of(error)}".removesuffix(": ")
        if "re-initialize CUDA" in summary:
            summary += " It was in use in the process from which this one was forked."
        record = {
            "time": time.monotonic(),
            "summary": summary,
            "traceback": "".join(whole.format()) if whole.stack else "",
        }
        if not file.exists():
            try:
                file.write_text(json.dumps(record))
            except OSError:  # the disk is full
                print(record["traceback"] or summary, file=sys.stderr)
        raise


def _end_child(error: BaseException) -> NoReturn:
    """End a child that the cell has forked, which does not speak for the rank, with the code that Python would."""
    code = 1
    try:
        if not isinstance(error, SystemExit):
            print("".join(_traceback_of(error).format()), end="", file=sys.stderr)
        elif error.code is None or isinstance(error.code, int):
            code = (error.code or 0) & 0xFF
        else:
            print(error.code, file=sys.stderr)
    finally:  # also where the cell has closed standard error
        os._exit(code)


def _traceback_of(error: BaseException) -> traceback.TracebackException:
    """The traceback of an error, and of those that led to it, without this package's frames."""
    whole = traceback.TracebackException.from_exception(error)
    shown: traceback.TracebackException | None = whole
    while shown is not None:
        shown.stack[:] = [frame for frame in shown.stack if not frame.filename.startswith(OF_OTHERS)]
        shown = shown.__cause__ or shown.__context__
    return whole


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a thread of the program that goes on is not waited for
