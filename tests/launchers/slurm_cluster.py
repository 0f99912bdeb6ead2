"""A Slurm cluster on this machine: one controller and two nodes, whose names are addresses of loopback.

    with SlurmCluster() as cluster:
        os.environ["SLURM_CONF"] = str(cluster.conf)

Source: Slurm 22.05, slurm.conf(5). As an ordinary user it works as well: the daemons and the jobs are that user's.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Self

import psutil

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch")
SEARCHED = f"{os.environ.get('PATH', '')}:/usr/sbin"  # daemons are not on everybody's path
NODES = ("127.0.0.1", "127.0.0.2")
PATIENCE_SECONDS = 30.0

CONF = """\
ClusterName=workshop
SlurmctldHost=localhost({address})
SlurmctldPort={ports[0]}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={root}/munge/socket,cred_expire=5
SlurmUser={user}
SlurmdUser={user}
StateSaveLocation={root}/state
SlurmdSpoolDir={root}/%n
SlurmctldPidFile={root}/slurmctld.pid
SlurmdPidFile={root}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
MailProg=/bin/true
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=1,bf_interval=1,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
EnforcePartLimits=ALL
ReturnToService=2
KillWait=2
UnkillableStepTimeout=10
NodeName=127.0.0.1 NodeHostname=localhost NodeAddr={address} Port={ports[1]} CPUs=4 RealMemory=16000 State=UNKNOWN
NodeName=127.0.0.2 NodeHostname=localhost NodeAddr={address} Port={ports[2]} CPUs=4 RealMemory=16000 State=UNKNOWN
PartitionName=test Nodes=ALL Default=YES MaxTime=10 State=UP
"""


def is_installed() -> bool:
    """Whether this machine has Slurm's daemons, and a name by which they can call each other.

    A name at 127.0.1.1 is none: srun would listen there alone, and be called at 127.0.0.1.
    """
    address = _own_address()
    reachable = address == "127.0.0.1" or not address.startswith("127.")
    return all(shutil.which(name, path=SEARCHED) for name in PROGRAMS) and bool(address) and reachable


def _own_address() -> str:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return ""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server((_own_address(), 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


class SlurmCluster:
    """The daemons, and their folder. Leaving the block ends them, and whatever a job has left."""

    def __init__(self) -> None:
        # Not pytest's, since munged wants all to pass through.
        self.root = Path(tempfile.mkdtemp(prefix="slurm-"))
        self.conf = self.root / "slurm.conf"
        self._daemons: list[subprocess.Popen[bytes]] = []

    def ask(self, *words: str) -> str:
        """What one of Slurm's commands prints."""
        environment = {**os.environ, "SLURM_CONF": str(self.conf)}
        return subprocess.run(words, env=environment, check=True, capture_output=True, text=True).stdout

    def processes(self) -> dict[int, str]:
        """The command by process id of all that belongs to this cluster's jobs: their processes, not the daemons."""
        mark = f"SLURM_CONF={self.conf}".encode()
        found = {}
        for process in psutil.process_iter():
            try:
                variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
                if mark in variables and any(each.startswith(b"SLURM_JOB_ID=") for each in variables):
                    found[process.pid] = " ".join(process.cmdline())
            except (OSError, psutil.Error):
                continue
        return found

    def __enter__(self) -> Self:
        munge = self.root / "munge"
        for folder in (self.root, munge, self.root / "state", *(self.root / node for node in NODES)):
            folder.mkdir(mode=0o711, exist_ok=True)
            folder.chmod(0o711)
        key = munge / "key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o400)
        user = pwd.getpwuid(os.getuid()).pw_name
        self.conf.write_text(
            CONF.format(root=self.root, user=user, address=_own_address(), ports=_free_ports(3))
        )
        files = ("socket", "key-file", "log-file", "pid-file", "seed-file")
        try:
            self._start("munged", "-F", *(f"--{file}={munge / file.removesuffix('-file')}" for file in files))
            self._await((munge / "socket").exists)
            self._start("slurmctld", "-D", "-c", "-f", str(self.conf))
            for node in NODES:
                self._start("slurmd", "-D", "-N", node, "-f", str(self.conf))
            self._await(self._is_ready)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, program: str, *options: str) -> None:
        path = shutil.which(program, path=SEARCHED)
        assert path is not None
        with (self.root / "daemons.log").open("ab") as log:
            self._daemons.append(subprocess.Popen([path, *options], stdout=log, stderr=log, cwd=self.root))

    def _is_ready(self) -> bool:
        try:
            return self.ask("sinfo", "-h", "-N", "-t", "idle", "-o", "%N").split() == list(NODES)
        except subprocess.CalledProcessError:
            return False  # the controller is still starting

    def _await(self, condition) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            if time.monotonic() > deadline or any(each.poll() is not None for each in self._daemons):
                raise RuntimeError((self.root / "daemons.log").read_text(errors="replace")[-2000:])
            time.sleep(0.05)

    def __exit__(self, *_: object) -> None:
        if len(self._daemons) > 1:
            with contextlib.suppress(subprocess.CalledProcessError):
                self.ask("scancel", "--user", str(os.getuid()))
        for pid in self.processes():
            psutil.Process(pid).kill()
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(10)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        shutil.rmtree(self.root, ignore_errors=True)
