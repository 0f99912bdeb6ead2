"""Jobs on a Slurm cluster: the script that a practitioner would hand to `sbatch`, written from a job and its strategy.

    Slurm.load("place.yaml").render(job)    # prints as that script

The script starts the job's processes with one `srun`, a task each. Helpers, such as mpirun or Horovod's rendezvous
server, run in the script itself, that is on the first node. The script exports the variables that all processes share,
and writes those that differ from task to task into a table, from which `slurm_task.py` takes them.

Each run has a folder of its own below the shared one. When it has ended, its log and its model are left there.

Sources: Slurm 22.05, sbatch(1), srun(1) and scontrol(1).
"""

from __future__ import annotations

import json
import math
import re
import secrets
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shlex import quote
from typing import ClassVar

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import output, slurm_task
from workshop_utils.launchers.followed import FollowedRun, Receive, Unreachable
from workshop_utils.launchers.local.environment import PROGRAMS, inherited_variables, shared_variables
from workshop_utils.launchers.settings import TargetSettings
from workshop_utils.launchers.source import LEFT_OUT, shipped
from workshop_utils.runs import RunState
from workshop_utils.strategies import MPIRUN, Addresses, ProcessSpec, launched, strategy_of
from workshop_utils.training import data

FIRST_PORT, PORTS = 12_000, 20_000  # the kernel gives away those from 32768 on
PORTS_PER_JOB = 64  # the same for all jobs, so that those of two jobs do not overlap
FAILURES = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
STATES = {
    "COMPLETED": RunState.SUCCEEDED,
    "CANCELLED": RunState.STOPPED,
    **dict.fromkeys(FAILURES, RunState.FAILED),
}
# Open MPI keeps sockets in its scratch folder, which a shared file system may not take.
WORDS = {"programs": "../programs", "mpirun": "mpirun", "scratch": "/tmp"}


@dataclass(frozen=True)
class SlurmRequest:
    """What `launch` would submit.

    Attributes:
        script: for sbatch.
        secrets: the variables that are kept out of the script, in a file that only their owner may read.
        tasks: the name of the process that each task of srun is, by the task's number.
        workers: the names of all processes that run the job's script.
    """

    script: str
    secrets: Mapping[str, str]
    tasks: tuple[str, ...]
    workers: tuple[str, ...]

    def __str__(self) -> str:
        return self.script

    __repr__ = __str__


class Slurm(TargetSettings):
    """Launches jobs on the cluster of this machine, which has `sbatch`, as a login node does.

    A job without `nodes` and `processes_per_node` gets a node for each worker. The folder in which its script runs is
    deleted when the job ends: the script writes what is to be kept to the model folder, which is `outputs`.

    Attributes:
        folder: shared by this machine and all nodes, under the same path: for source, data, logs and models.
        python: the path of the nodes' Python, which has what the script imports.
        partition, account, qos: where the job queues; by default Slurm decides.
        time: the time limit, as sbatch takes it, in place of the job's `timeout`.
        options: more of sbatch's, such as `--constraint=a100`.
        setup: lines of shell that come first, such as `module load openmpi`.
        interface: the network interface that joins the nodes; by default that of each node's host name.
    """

    EXAMPLE: ClassVar[str] = "folder: /shared/workshop"

    folder: Path = Path.home() / "workshop-runs"
    python: Path = Path(sys.executable)
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    interface: str = ""

    def render(self, job: TrainingJob) -> SlurmRequest:
        """The script that `launch` would submit. Sends nothing, and needs no cluster.

        Raises:
            JobError: if the job asks for what Slurm, or its strategy, does not have.
        """
        return self._request(job, self.folder.absolute() / f"{job.name}-...")

    def dry_run(self, job: TrainingJob) -> str:
        """When and where the job would start, as `sbatch --test-only` says it. Submits nothing.

        Raises:
            JobError: as `render` does, or with Slurm's reason if the job could never start.
        """
        return _sbatch("--test-only", self.render(job))

    def launch(self, job: TrainingJob) -> FollowedRun:
        """Submit the job.

        Raises:
            JobError: as `dry_run` does; the run's folder is removed again then.
        """
        folder = self.folder.absolute() / f"{job.name}-{secrets.token_hex(4)}"
        request = self._request(job, folder)
        try:
            _write(job, folder, request.secrets)
            number = _sbatch("--parsable", request).partition(";")[0]
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return FollowedRun(job.name, request.workers, SlurmJob(job.name, number, folder, request.tasks))

    def _request(self, job: TrainingJob, folder: Path) -> SlurmRequest:
        specs = self._specs(job)
        nodes = 1 + max(spec.node for spec in specs)
        per_node = max(Counter(spec.node for spec in specs if spec.runs_script).values())
        helpers = [spec for spec in launched(specs) if not spec.runs_script]
        tasks: list[ProcessSpec | None] = []  # None: idle, since each node has the same number
        for node in range(nodes):
            own = [spec for spec in launched(specs) if spec.runs_script and spec.node == node]
            tasks += [*own, *[None] * (per_node - len(own))]

        environments = [set(spec.environment.items()) for spec in tasks if spec]
        shared = set.intersection(*environments) if environments else set()
        shared = shared.union(*(spec.environment.items() for spec in helpers))
        variables = shared_variables(job, folder / "files")
        variables |= {name: value for name, value in sorted(shared) if value}
        if not job.outputs:
            variables["WORKSHOP_MODEL"] = f"{folder}/model"
        if not Path(job.data).is_dir():  # a folder stays where it is
            variables["WORKSHOP_DATA"] = f"{folder}/files/data"
        if "TMPDIR" not in job.environment:
            del variables["TMPDIR"]  # each node has its own
        secret = {name: variables.pop(name) for name in list(variables) if output.SECRET.search(name)}

        listeners = sum(spec.listens for spec in specs)
        if listeners > PORTS_PER_JOB:
            raise JobError(
                f"strategy {job.strategy!r} needs {listeners} ports for these workers; a job on Slurm has "
                f"{PORTS_PER_JOB}: take fewer workers"
            )
        lines = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in self._options(job, folder, nodes, per_node)),
            '\necho "job $SLURM_JOB_ID starts on $SLURM_JOB_NODELIST"',  # `_blame` looks for the last such line
            "set -e",
            *self.setup,
            f"export PATH={quote(str(self.python.parent))}:$PATH",
            "export SLURM_EXPORT_ENV=ALL  # --export=NONE is for this script, not for its srun",
            *(["source ../secrets"] if secret else []),
            'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
            f"port=$(({FIRST_PORT} + SLURM_JOB_ID % {PORTS // PORTS_PER_JOB} * {PORTS_PER_JOB}))",
            *_exports(variables),
            "",
            *map(self._command, helpers),
        ]
        if any(tasks):
            rows = [spec and dict(spec.environment.items() - shared) for spec in tasks]
            command = next(self._command(spec) for spec in tasks if spec)
            lines += [
                "cat > ../tasks.jsonl <<END",
                *(_expanded(json.dumps(row, sort_keys=True)) for row in rows),
                "END",
            ]
            lines += [
                f"srun --kill-on-bad-exit=1 --label --cpus-per-task={math.ceil(job.resources.cpu)} {command}"
            ]
        names = tuple(spec.name if spec else "slurm" for spec in tasks if any(tasks))
        workers = tuple(spec.name for spec in specs if spec.runs_script)
        return SlurmRequest("\n".join(lines) + "\n", secret, names, workers)

    def _specs(self, job: TrainingJob) -> list[ProcessSpec]:
        """The job's processes, with words such as `{node0}` and `{port0}` for what only the started job knows."""
        strategy = strategy_of(job)
        if strategy.only_on is not None:
            raise JobError(f"strategy is {job.strategy!r}; launch it with --on {strategy.only_on}")
        has_driver = any(spec.starts and MPIRUN not in spec.argv for spec in strategy.plan(job))
        if has_driver and (job.nodes or 1) > 1:
            raise JobError(
                f"nodes is {job.nodes}; strategy {job.strategy!r} starts all workers on one node: leave it out"
            )
        names = [f"{{node{node}}}" for node in range(1 if has_driver else job.nodes or job.workers)]
        listening = [spec for spec in strategy.plan(job, Addresses(nodes=names)) if spec.listens]
        of = {spec.name: f"{names[spec.node]}:{{port{index}}}" for index, spec in enumerate(listening)}
        addresses = Addresses(of, names, interface=self.interface, secret=secrets.token_hex(16))
        own = {"python": self.python.name, "script": job.script}
        return [spec.filled(**own, **WORDS) for spec in strategy.plan(job, addresses)]

    def _options(self, job: TrainingJob, folder: Path, nodes: int, per_node: int) -> list[str]:
        options: dict[str, object] = {
            "job-name": job.name,
            **self.model_dump(include={"partition", "account", "qos"}),
            "nodes": nodes,
            "ntasks-per-node": per_node,
            "cpus-per-task": math.ceil(job.resources.cpu),
            "mem": f"{math.ceil(per_node * job.resources.memory_nbytes / 2**20)}M",
            "gpus-per-node": per_node * job.resources.gpu,
            "time": self.time or math.ceil(job.timeout_seconds / 60),
            "distribution": "block",
            "chdir": quote(f"{folder}/files/source"),
            "output": quote(f"{folder}/log"),
            "open-mode": "append",
            "export": "NONE",
        }
        given = [f"--{name}={value}" for name, value in options.items() if value]
        return [*given, "--requeue" if job.checkpoints else "--no-requeue", *self.options]

    def _command(self, spec: ProcessSpec) -> str:
        """The line of the script that starts `spec`; a helper that does not leave by itself ends with the script."""
        command = " ".join(map(_word, spec.argv))
        if not spec.leaves:
            return f"{command} &\ntrap 'kill $!' EXIT"
        return f"{self.python.name} ../task.py {command}"


def _exports(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={_word(value)}" for name, value in variables.items()]


def _word(text: str) -> str:
    """`text` as one word of the script, in which words such as `{node0}` are expanded."""
    return _expanded(re.sub(r"(\{(?:node|port)\d+\})", r"'\1'", quote(text))).replace("''", "") or "''"


def _expanded(text: str) -> str:
    """`text` with the script's own variables in place of `{node0}` and `{port0}`."""
    text = re.sub(r"\{node(\d+)\}", r"${nodes[\1]}", text)
    return re.sub(r"\{port(\d+)\}", r"$((port + \1))", text)


def _write(job: TrainingJob, folder: Path, secret: Mapping[str, str]) -> None:
    """Fill the run's folder with what the script needs."""
    files = folder / "files"
    if folder.resolve().is_relative_to(job.folder.resolve()):
        raise JobError(
            f"folder is {folder.parent}; it lies in the job's folder, {job.folder}: take one outside"
        )
    folder.mkdir(mode=0o700, parents=True)
    for path in (job.outputs or folder / "model", job.checkpoints or folder):
        Path(path).mkdir(parents=True, exist_ok=True)
    shutil.copytree(job.folder, files / "source", ignore=shutil.ignore_patterns(*LEFT_OUT))
    shutil.copytree(PROGRAMS, files / "programs", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(slurm_task.__file__, files / "task.py")
    if not Path(job.data).is_dir():
        shutil.copytree(data.prepare(job.data), files / "data")
    texts = {f"source/{name}": text for name, text in shipped(strategy_of(job)).items()}
    for name, text in {**texts, "secrets": "\n".join(_exports(secret))}.items():
        path = files / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch(0o600)
        path.write_text(text, encoding="utf-8")


def _slurm(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """What one of Slurm's commands answers; it gives up by itself if the cluster is silent."""
    return subprocess.run(words, input=text, env=inherited_variables(), capture_output=True, text=True)


def _sbatch(option: str, request: SlurmRequest) -> str:
    """What sbatch says. Raises JobError if it refuses the script."""
    if shutil.which("sbatch") is None:
        raise JobError("there is no sbatch here; launch from a login node of the cluster")
    answer = _slurm("sbatch", option, text=request.script)
    if answer.returncode:
        raise JobError(f"Slurm refuses the job: {' '.join(answer.stderr.split())}")
    return (answer.stdout or answer.stderr).strip()


class SlurmJob:
    """A submitted job, as `scontrol` and its log show it; a `followed.Remote`."""

    def __init__(self, name: str, number: str, folder: Path, tasks: Sequence[str]) -> None:
        self._name, self._number, self._folder, self._tasks = name, number, folder, tasks
        self._state, self._position = "", 0

    def look(self) -> tuple[RunState, str]:
        """The job's state now, and why it failed or waits. Raises Unreachable."""
        answer = self._ask("scontrol", "show", "job", "--oneliner", self._number)
        job = dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S+)", answer))
        self._state = job["JobState"]
        if self._state == "PENDING":
            return RunState.RUNNING, f"Slurm to start job {self._number}, which is pending: {job['Reason']}"
        state = STATES.get(self._state, RunState.RUNNING)
        code, killed = map(int, job["ExitCode"].split(":"))
        return state, self._blame(-killed or code) if state is RunState.FAILED else ""

    def read(self, receive: Receive) -> None:
        """Pass on what is new in the log. Raises Unreachable."""
        new = self._log(self._position)
        self._position += len(new)
        for line in self._lines(new):
            receive(*line)

    def stop(self) -> None:
        """Cancel the job. Raises JobError if Slurm refuses, or does not answer."""
        try:
            self._ask("scancel", self._number)
        except Unreachable as error:
            message = (
                f"{self._name} could not be cancelled and may still run: scancel {self._number}. {error}"
            )
            raise JobError(message) from None

    def close(self) -> None:
        """Leave nothing but log and model, unless the job may still need the rest."""
        if self._state in STATES:
            shutil.rmtree(self._folder / "files", ignore_errors=True)

    def _ask(self, *words: str) -> str:
        """What one of Slurm's commands prints. Raises Unreachable."""
        try:
            answer = _slurm(*words)
        except OSError as error:  # such as too many open files
            raise Unreachable(str(error)) from None
        if answer.returncode:
            raise Unreachable(answer.stderr.strip())
        return answer.stdout

    def _log(self, start: int = 0) -> bytes:
        """What the job has printed from byte `start` on; nothing before it has started.

        The last line is left out while it is not whole, unless the job has ended. Raises Unreachable.
        """
        try:
            with (self._folder / "log").open("rb") as file:
                file.seek(start)
                content = file.read()
        except FileNotFoundError:
            return b""
        except OSError as error:  # such as a stale file handle of NFS
            raise Unreachable(str(error)) from None
        return content if self._state in STATES else content[: content.rfind(b"\n") + 1]

    def _lines(self, log: bytes) -> Iterator[tuple[str, str, str]]:
        """Worker, text and stream of each line: srun has put a task's number before it, mpirun a tag."""
        text = log.decode(errors="replace")
        for line in text.removesuffix("\n").split("\n") if text else ():
            labelled = re.match(r"\s*(\d+): ?(.*)", line)
            if labelled and int(labelled[1]) < len(self._tasks):
                yield self._tasks[int(labelled[1])], labelled[2], "stdout"
            else:
                yield from output.attributed("slurm", line, "stdout")

    def _blame(self, code: int) -> str:
        """Why the job failed: which process failed first, and how, since Slurm last started the script."""
        printed = "\n".join(text for _, text, _ in self._lines(self._log()))
        printed = printed.rpartition(f"job {self._number} starts on ")[2]
        worker, killed = output.culprit([printed])
        how = f"{worker or 'the script'} {output.how(killed or code)}"
        error = re.search(r"^srun: error: (\S+): tasks? (\d+)[^:]*: (.+)", printed, re.MULTILINE)
        if error and self._tasks:
            how = f"{self._tasks[int(error[2])]} on {error[1]}: {error[3]}"
        if self._state != "FAILED":
            how = f"Slurm ended it ({self._state})"
        return f"{self._name} failed: {how}"
