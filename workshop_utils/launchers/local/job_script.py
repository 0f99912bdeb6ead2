"""Runs a job's script as Python would, in a process that has done something else before.

`python job_script.py SCRIPT ARGUMENT...` switches on the emulated device of its rank, and then runs the script. It
needs the standard library alone, as the programs do that use it: `supervisor`, `horovod_elastic`.
"""

import atexit
import builtins
import contextlib
import faulthandler
import gc
import io
import os
import signal
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

AT_START = str(Path(__file__).with_name("at_start"))  # first on PYTHONPATH

# The modules of PyTorch's process groups, and of what holds them.
GROUPS = {"torch._C._distributed_c10d", "torch.distributed.distributed_c10d"}


def run(script: str, *arguments: str) -> None:
    """Run `script` as `python SCRIPT ARGUMENT...` would; its traceback shows no frame of what has started it.

    Raises:
        SystemExit: if the script does, or with 1 after an error, whose traceback has been printed.
    """
    sys.argv = [script, *arguments]
    script = str(Path(script).absolute())  # as Python names the file, wherever the script goes
    sys.path.insert(0, str(Path(script).parent))
    # It stays `__main__`, with its names, until the process ends; `runpy` would drop some of them here.
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    vars(main).update(__file__=script, __builtins__=builtins)
    try:
        exec(compile(Path(script).read_bytes(), script, "exec", dont_inherit=True), vars(main))
        return
    except SystemExit:
        raise
    except BaseException as error:
        _report(error)
    sys.exit(1)


def _report(error: BaseException) -> None:
    trace = error.__traceback__
    while trace and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    sys.excepthook(type(error), error.with_traceback(trace), trace)


def forked(argv: list[str], environment: dict[str, str]) -> Callable[[], None]:
    """What a forked rank runs in place of `python SCRIPT ARGUMENT...`, in a process as fresh as can be."""
    _, script, *arguments = argv

    def run_and_end() -> None:
        os.environ.clear()
        os.environ.update(environment)
        if "tempfile" in sys.modules:  # it may have been asked for its folder before the fork
            vars(sys.modules["tempfile"])["tempdir"] = None
        # As `at_start` has it, which was not imported in this process.
        faulthandler.enable(file=2)
        faulthandler.register(signal.SIGUSR1, file=2, all_threads=False, chain=False)
        folders = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:0] = [folder for folder in folders if folder not in ("", AT_START)]
        # Python's own generator notices a fork; TensorFlow's is made when it is first asked.
        if "numpy.random" in sys.modules:
            sys.modules["numpy.random"].seed()
        if "torch" in sys.modules:
            sys.modules["torch"].default_generator.seed()
        _end(_exit_code_of(script, *arguments))

    return run_and_end


def _end(code: int) -> NoReturn:
    """End as Python does: threads and exit handlers end, open files are written, and the script's objects go.

    What was imported before the fork stays: to take it down takes most of a second. PyTorch's process groups stay, too:
    the destructor of one of gloo waits, holding the interpreter's lock, for a thread that may be waiting for that lock.
    """
    threading._shutdown()  # type: ignore[attr-defined] # waits for threads, having told pools of them to end
    atexit._run_exitfuncs()
    _flush()
    if "torch.distributed" in sys.modules:
        _kept = [each for each in gc.get_referents(*gc.get_objects()) if type(each).__module__ in GROUPS]
    gc.collect()  # before and after, as in Py_FinalizeEx: a file's layers then go from the outermost inwards
    sys.modules.pop("__main__", None)
    gc.collect()
    _flush()
    os._exit(code)


def _flush() -> None:
    """Write what files hold back; one that cannot be written is as silent as at Python's end."""
    files = [each for each in gc.get_objects() if issubclass(type(each), io.IOBase)]
    files.sort(key=lambda each: not isinstance(each, io.TextIOBase))  # which write into others
    for file in (*files, sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            file.flush()


def _exit_code_of(script: str, *arguments: str) -> int:
    """The exit code with which Python would end after `script`, having printed what Python would print."""
    try:
        run(script, *arguments)
    except SystemExit as leaving:
        if leaving.code is None or isinstance(leaving.code, int):
            return (leaving.code or 0) & 0xFF
        print(leaving.code, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    del sys.path[0]  # this program's own folder

    from workshop_utils.training import emulated_device

    emulated_device.switch_on()
    run(*sys.argv[1:])
