"""A server that has imported a framework already, from which ranks fork in milliseconds.

Importing PyTorch takes seconds; forking a process that has imported it takes milliseconds. A notebook launches
the same job again and again, so it keeps one such server. Each run still gets processes of its own, forked from
a server that has never run a learner's code, under a supervisor of its own: same isolation, same clean-up.

A fork copies only the thread that calls it, so the server must have exactly one; OMP_NUM_THREADS=1 and its like see to
that. Ranks started by mpirun always start cold.

A forked script cannot change variables that its framework reads on import, since that has happened. TensorFlow has been
imported with those of OF_TENSORFLOW, unless the user's own environment says otherwise, and without pandas, scikit-learn
and Matplotlib, so that Keras does not know their objects: a script that imports one of these beside it starts cold.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from workshop_utils.jobs import TrainingJob, imports
from workshop_utils.launchers.local import warm_server
from workshop_utils.launchers.local.run import SUPERVISOR
from workshop_utils.runs import interrupts_deferred

# What to import for a script that imports the framework named. `torch._dynamo` is what torch.optim imports when
# an optimizer is first made, a second later than one would think.
WARM_MODULES = {
    "tensorflow": ("tensorflow",),
    "torch": ("torch", "torch.distributed", "torch._dynamo", "numpy"),
    "numpy": ("numpy", "numpy.random"),  # which NumPy itself imports when it is first used
    # Not for scripts: a function's ranks (`workshop_utils.ranks`), which use this package itself.
    "workshop_utils.ranks": (
        *("numpy", "numpy.random", "cloudpickle"),
        *(
            "workshop_utils.comm.tcp",
            "workshop_utils.comm.process_group",
            "workshop_utils.training.tcp_bytes",
        ),
    ),
}
COLD_MODULES = {"horovod", "mpi4py", "pyspark"}
# Loaded in the fork, in a moment, once its framework is there; until its `init` it starts no thread.
ALLOWED_MODULES = {"horovod.torch", "horovod.tensorflow", "horovod.tensorflow.keras"}

# Read by libraries when they are loaded: a fork cannot change them any more.
READ_AT_IMPORT = (
    *("OMP_", "MKL_", "OPENBLAS_", "KMP_", "LD_", "MALLOC_", "PYTHON"),
    *("TORCH_", "NUMEXPR_", "TF_", "XLA_", "GRPC_", "KERAS_"),
)
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# As the workshop's jobs set them before they import TensorFlow: no notices, and no oneDNN, which sums in another order.
OF_TENSORFLOW = {"TF_CPP_MIN_LOG_LEVEL": "2", "TF_ENABLE_ONEDNN_OPTS": "0"}


class WarmServerError(RuntimeError):
    """A warm server could not be started."""


def framework_of(script: Path) -> str | None:
    """The key in WARM_MODULES for a script that can be forked from a warm server, None for one that cannot."""
    imported = imports.packages(imports.imported(script).keys() - ALLOWED_MODULES)
    framework = next((name for name in WARM_MODULES if name in imported), None)
    keras_knows = warm_server.OPTIONAL if framework == "tensorflow" else ()
    return None if imported & COLD_MODULES.union(keras_knows) else framework


class WarmServer:
    """One server process, which ends with this one.

    Attributes:
        may_fork: False where a library started a thread on import.
    """

    def __init__(self, modules: tuple[str, ...]) -> None:
        self._connection, theirs = socket.socketpair()
        self._lock = threading.Lock()
        # An interrupt ends it: nobody would know that it goes on importing.
        with contextlib.ExitStack() as stack:
            with theirs, interrupts_deferred():
                self._process = subprocess.Popen(
                    [sys.executable, "-u", str(SUPERVISOR), "--warm", *modules],  # its forks print as they go
                    stdin=theirs.fileno(),
                    env={**OF_TENSORFLOW, **os.environ, **ONE_THREAD},
                    start_new_session=True,
                )
                stack.callback(self.close)
                stack.callback(self._process.kill)
            answer = self._connection.recv(1)
            stack.pop_all()
        self.may_fork = answer == warm_server.READY
        if not self.may_fork:
            self.close()
        if not answer:
            ended = f"ended with code {self._process.returncode} while importing {', '.join(modules)}"
            raise WarmServerError(f"the warm server {ended}; standard error says why")

    def start(self, *descriptors: int) -> bool:
        """Fork a supervisor that has these `descriptors`: the specification's, the events' and locks.

        Return False if the server died before acknowledging, once it is gone.
        """
        with self._lock, contextlib.suppress(OSError):
            socket.send_fds(self._connection, [b"fork"], [*descriptors])
            if self._connection.recv(1):
                return True
        self.close()
        return False

    def close(self) -> None:
        """End the server; runs that were forked from it go on."""
        self._connection.close()
        self._process.wait()


_STARTING = threading.Lock()
SERVERS: dict[str, WarmServer] = {}  # this process's own


def framework_for(job: TrainingJob) -> str | None:
    """The key in WARM_MODULES of the server from which `job` can fork; None if it must start cold."""
    loaded = [name for name in job.environment if name.startswith(READ_AT_IMPORT)]
    # With two cores or more a rank uses several threads, and the server's libraries use one.
    # And whether its imports have touched CUDA is the framework's affair; a fork could not use it then.
    is_like_it = job.resources.cpu < 2 and not job.resources.gpu
    is_like_it &= all(job.environment[name] == ONE_THREAD.get(name) for name in loaded)
    return framework_of(job.script_path) if is_like_it else None


def starter(framework: str | None) -> Callable[..., None] | None:
    """What starts processes as forks of this process's server for `framework`; None where they must start cold.

    On macOS they must: its own libraries start threads behind Python's back, and a fork of such a process may crash.
    """
    if framework is None or sys.platform != "linux" or not _server_for(framework).may_fork:
        return None

    def start(*descriptors: int) -> None:
        if not _server_for(framework).start(*descriptors):
            _server_for(framework).start(*descriptors)  # another one

    return start


def _server_for(framework: str) -> WarmServer:
    """This process's server for `framework`, started if there is none that lives."""
    with _STARTING:
        server = SERVERS.get(framework)
        if server is None or (server.may_fork and server._process.poll() is not None):
            server = SERVERS[framework] = WarmServer(WARM_MODULES[framework])
        return server
