"""A warm server: it has imported a framework already, and forks supervisors whose ranks are forked as well.

Part of the program `supervisor`, so the standard library alone. The other side of it, which starts and asks it, is
`warm`.
"""

import gc
import importlib
import os
import select
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

Script = Callable[[], None]

# What Keras imports where it finds it, for programs that use it: more than a third of what `import tensorflow` costs.
# And pandas imports pyarrow, which starts a thread, so that the server could not fork.
OPTIONAL = ("matplotlib", "pandas", "sklearn")
# What the server says when all is imported: it may fork; or a library has started threads, so it may not.
READY, HAS_THREADS = b"!", b"?"


def serve(modules: list[str], supervise: Callable[..., Script | None]) -> Script | None:
    """Import `modules`, then fork for descriptors that are received together; the fork does `supervise(*descriptors)`.

    In a forked rank, the script that it is to run; otherwise None.
    """
    connection = socket.socket(fileno=0)
    owner = _descriptors_of_parent()
    heard = [connection.fileno(), *owner]
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt in the notebook is not meant for us
    absent = dict.fromkeys(set(OPTIONAL) - sys.modules.keys())
    sys.modules.update(absent)  # type: ignore[arg-type]  # an import of None fails as that of a missing package
    stderr, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)  # libraries print notices when they are imported
    try:
        for module in modules:
            importlib.import_module(module)
    finally:
        os.dup2(stderr, 2)
    for descriptor in (stderr, nothing):
        os.close(descriptor)
    for module in absent:
        del sys.modules[module]
    gc.freeze()  # what is imported stays; a fork's garbage collector need not look at it, nor copy its pages
    # A fork copies one thread only; locks that others held would stay locked for ever.
    try:
        connection.sendall(READY if len([*Path("/proc/self/task").iterdir()]) == 1 else HAS_THREADS)
    except BrokenPipeError:
        return None  # the owner has died meanwhile
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # supervisors that have ended need no waiting for
    while True:
        ready, _, _ = select.select(heard, [], [])
        if ready != heard[:1]:
            return None  # the owner has died, though a child of its own may still hold the socket
        message, descriptors, _, _ = socket.recv_fds(connection, 16, 4)
        if not message:
            return None
        connection.sendall(READY)
        if os.fork() == 0:
            connection.close()
            for descriptor in owner:
                os.close(descriptor)
            os.setsid()
            script = supervise(*descriptors)
            if script is None:
                os._exit(0)  # its work is done; to take down what was imported would keep the owner waiting
            return script
        for descriptor in descriptors:
            os.close(descriptor)


def _descriptors_of_parent() -> list[int]:
    """A descriptor that is readable once the parent has died, or none where the system has no such thing."""
    try:
        return [os.pidfd_open(os.getppid())]
    except (AttributeError, OSError):
        return []
