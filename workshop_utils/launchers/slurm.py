"""Jobs on a Slurm cluster: the script that a practitioner would hand to `sbatch`, written from a job and its strategy.

    Slurm.load("place.yaml").render(job)    # prints as that script

The script starts the job's processes with one `srun`, a task each. Helpers, such as mpirun or Horovod's rendezvous
server, run in the script itself, that is on the first node. Variables that all processes share are exported there;
those that differ from task to task are in a table, from which `slurm_task.py` takes them.

Each run has a folder of its own below the shared one. When it has ended, its log and its model are left there.

Sources: Slurm 22.05, sbatch(1), srun(1) and scontrol(1).
"""

from __future__ import annotations

import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from pydantic import field_validator

from workshop_utils.jobs import Duration, JobError, TrainingJob
from workshop_utils.launchers import output
from workshop_utils.launchers.followed import FollowedRun, Receive, Unreachable
from workshop_utils.launchers.local.environment import PROGRAMS, inherited_variables
from workshop_utils.launchers.settings import PlaceSettings
from workshop_utils.launchers.source import shipped
from workshop_utils.quantities import seconds_of
from workshop_utils.runs import RunState
from workshop_utils.strategies import MPIRUN, Addresses, ProcessSpec, launched, strategy_of
from workshop_utils.training import data

TASK = Path(__file__).with_name("slurm_task.py")
SECRET = re.compile(r"SECRET|TOKEN|PASSWORD|KEY$")  # a variable that must not stand in a script
SCRATCH = "/tmp"  # on each node, for sockets, which a shared file system may not take
PORTS = range(12_000, 32_000)  # the kernel gives away those above
ANSWER_SECONDS = 60.0
WORD = re.compile(r"(\{(?:node|port)\d+\})")  # what only the started job knows
SRUN_ERROR = re.compile(r"^srun: error: (\S+): tasks? (\d+)[^:]*: (.+)$", re.MULTILINE)
FAILURES = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
STATES = {
    "COMPLETED": RunState.SUCCEEDED,
    "CANCELLED": RunState.STOPPED,
    **dict.fromkeys(FAILURES, RunState.FAILED),
}


@dataclass(frozen=True)
class SlurmRequest:
    """What `launch` would submit.

    Attributes:
        script: for sbatch.
        files: text by path in the run's folder, besides the job's own; only their owner may read `secrets`.
        tasks: the name of the process that each task of srun is; None for a task without work.
        workers: the names of all processes that run the job's script, whoever starts them.
    """

    script: str
    files: Mapping[str, str]
    tasks: tuple[str | None, ...]
    workers: tuple[str, ...]

    def __str__(self) -> str:
        rows = enumerate(self.files["tasks.jsonl"].splitlines())
        table = "".join(f"#   task {task}: {row}\n" for task, row in rows if row != "{}")
        return self.script + (f"\n# ../tasks.jsonl, the variables that differ:\n{table}" if table else "")

    __repr__ = __str__


class Slurm(PlaceSettings):
    """Launches jobs on the cluster of this machine, which has `sbatch`, as a login node does.

    A job without `nodes` and `processes_per_node` gets a node for each worker.

    Attributes:
        folder: shared by this machine and all nodes, under the same path: for source, data, logs and models.
        python: the nodes' Python, which has what the script imports.
        partition, account, qos: where the job queues; by default Slurm decides.
        time_limit: in place of the job's `timeout`.
        options: more of sbatch's, such as `--constraint=a100`.
        setup: lines of shell that come before everything else, such as `module load openmpi`.
        interface: the network interface that joins the nodes; by default that of each node's host name.
        subnet: the nodes' private subnet, such as 10.0.0.0/16, without which the workshop's own message passing stays
            on loopback.
    """

    EXAMPLE: ClassVar[str] = "folder: /shared/workshop"

    folder: Path = Path.home() / "workshop-runs"
    python: str = sys.executable
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time_limit: Duration | None = None
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    interface: str = ""
    subnet: str | None = None

    @field_validator("folder")
    @classmethod
    def _is_absolute(cls, folder: Path) -> Path:
        if not folder.is_absolute():
            raise ValueError("it must be an absolute path, which is the same on all nodes")
        return folder

    def render(self, job: TrainingJob) -> SlurmRequest:
        """The script that `launch` would submit. Sends nothing, and needs no cluster.

        Raises:
            JobError: if the job asks for what Slurm, or its strategy, does not have.
        """
        return self._request(job, self.folder / f"{job.name}-...")

    def dry_run(self, job: TrainingJob) -> str:
        """When and where the job would start, as `sbatch --test-only` says it. Submits nothing.

        Raises:
            JobError: as `render` does, or with Slurm's reason if the job could never start.
        """
        return _sbatch("--test-only", self.render(job).script)

    def launch(self, job: TrainingJob) -> FollowedRun:
        """Submit the job.

        Raises:
            JobError: as `dry_run` does; the run's folder is removed again then.
        """
        folder = self.folder / f"{job.name}-{secrets.token_hex(4)}"
        request = self._request(job, folder)
        try:
            self._write(job, folder, request.files)
            number = _sbatch("--parsable", request.script).partition(";")[0]
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return FollowedRun(job.name, request.workers, SlurmJob(job.name, number, folder, request.tasks))

    def _write(self, job: TrainingJob, folder: Path, files: Mapping[str, str]) -> None:
        for path in (folder, job.outputs or folder / "model", job.checkpoints or folder):
            Path(path).mkdir(parents=True, exist_ok=True)
        folder.chmod(0o700)
        shutil.copytree(job.folder, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(0o600)
            path.write_text(text, encoding="utf-8")
        if not self._data_folder(
            job
        ).exists():  # renamed once it is whole, since several jobs may copy the same
            copy = shutil.copytree(data.prepare(job.data), folder / "data")
            self._data_folder(job).parent.mkdir(exist_ok=True)
            copy.rename(self._data_folder(job))

    def _data_folder(self, job: TrainingJob) -> Path:
        """Where the nodes find the data: a folder stays where it is, anything else is copied to the shared one."""
        own = Path(job.data).absolute()
        return own if own.is_dir() else self.folder / "data" / re.sub(r"\W+", "-", job.data)

    def _request(self, job: TrainingJob, folder: Path) -> SlurmRequest:
        specs = self._specs(job)
        helpers = [spec for spec in launched(specs) if not spec.runs_script]
        rows = _rows(specs)
        tasks = [row for row in rows if row is not None]
        variables = self._variables(job, folder)
        for spec in (*helpers, *tasks[:1]):
            own = spec.environment.items()
            variables |= {k: v for k, v in own if all(task.environment.get(k) == v for task in tasks)}
        table = [row and {k: v for k, v in row.environment.items() if k not in variables} for row in rows]
        secret = {name: variables.pop(name) for name in list(variables) if SECRET.search(name)}
        commands = [self._command(spec) for spec in helpers]
        if tasks:
            srun = f"srun --kill-on-bad-exit=1 --label --cpus-per-task={math.ceil(job.resources.cpu)}"
            commands.append(f'NODES="${{nodes[*]}}" PORT=$port {srun} {self._command(tasks[0])}')
        script = [
            "#!/bin/bash",
            *(f"#SBATCH {option}" for option in self._options(job, folder, specs)),
            "",
            "set -e",
            *self.setup,
            *(
                [f"export PATH={shlex.quote(str(Path(self.python).parent))}:$PATH"]
                if "/" in self.python
                else []
            ),
            "export SLURM_EXPORT_ENV=ALL",
            *(["source ../secrets"] if secret else []),
            'nodes=($(scontrol show hostnames "$SLURM_JOB_NODELIST"))',
            f"port=$(({PORTS.start} + SLURM_JOB_ID * {len(specs)} % {len(PORTS) - len(specs)}))",
            *_exports(variables),
            "",
            *commands,
            "",
        ]
        programs = {
            word.rpartition("/")[2] for spec in helpers for word in spec.argv if word.startswith("../")
        }
        files = {
            **{f"source/{name}": text for name, text in shipped(strategy_of(job)).items()},
            **{name: (PROGRAMS / name).read_text(encoding="utf-8") for name in programs},
            "task.py": TASK.read_text(encoding="utf-8"),
            "tasks.jsonl": "".join(f"{json.dumps(row)}\n" for row in table),
            "secrets": "".join(f"{line}\n" for line in _exports(secret)),
        }
        names = tuple(row.name if row else None for row in rows)
        return SlurmRequest(
            "\n".join(script), files, names, tuple(spec.name for spec in specs if spec.runs_script)
        )

    def _specs(self, job: TrainingJob) -> list[ProcessSpec]:
        """The job's processes, with words such as `{node0}` and `{port0}` for what only the started job knows."""
        strategy = strategy_of(job)
        if strategy.only_on is not None:
            raise JobError(f"strategy is {job.strategy!r}; launch it with --on {strategy.only_on}")
        nodes = job.nodes or job.workers
        if driver := next((s for s in strategy.plan(job) if s.starts and MPIRUN not in s.argv), None):
            if job.nodes not in (None, 1):
                raise JobError(
                    f"nodes is {job.nodes}; the {driver.role} of strategy {job.strategy!r} starts the workers on its "
                    "own node: leave it out"
                )
            nodes = 1
        names = [f"{{node{node}}}" for node in range(nodes)]
        listening = [spec for spec in strategy.plan(job, Addresses(nodes=names)) if spec.listens]
        of = {spec.name: f"{names[spec.node]}:{{port{index}}}" for index, spec in enumerate(listening)}
        secret = secrets.token_hex(16)
        words = {"python": Path(self.python).name, "script": job.script, "programs": "..", "mpirun": "mpirun"}
        return [
            spec.filled(**words, scratch=SCRATCH)
            for spec in strategy.plan(job, Addresses(of, names, interface=self.interface, secret=secret))
        ]

    def _options(self, job: TrainingJob, folder: Path, specs: Sequence[ProcessSpec]) -> list[str]:
        per_node, resources = _per_node(specs), job.resources
        seconds = math.ceil(seconds_of(self.time_limit or job.timeout))
        values: dict[str, object] = {
            "job-name": job.name,
            "partition": self.partition,
            "account": self.account,
            "qos": self.qos,
            "nodes": 1 + max(spec.node for spec in specs),
            "ntasks-per-node": per_node,
            "cpus-per-task": math.ceil(resources.cpu),
            "mem": f"{math.ceil(per_node * resources.memory_nbytes / 2**20)}M",
            "gpus-per-node": per_node * resources.gpu or None,
            "time": f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}",
            "distribution": "block",
            "chdir": folder / "source",
            "output": folder / "log",
            "open-mode": "append",
            "export": "NONE",
        }
        options = [
            f"--{name}={shlex.quote(str(value))}" for name, value in values.items() if value is not None
        ]
        return [*options, "--requeue" if job.checkpoints else "--no-requeue", *self.options]

    def _variables(self, job: TrainingJob, folder: Path) -> dict[str, str]:
        """What every process of the job is told, whatever its strategy."""
        threads = str(max(1, int(job.resources.cpu)))
        outputs, checkpoints = (job.storage(name, "folder") for name in ("outputs", "checkpoints"))
        variables = {
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": threads,
            "TF_NUM_INTRAOP_THREADS": threads,
            "WORKSHOP_DATA": str(self._data_folder(job)),
            "WORKSHOP_MODEL": str(Path(outputs or folder / "model").absolute()),
            "WORKSHOP_CHECKPOINTS": checkpoints and str(Path(checkpoints).absolute()),
            "WORKSHOP_SUBNET": self.subnet,
        }
        return {name: value for name, value in variables.items() if value is not None} | job.environment

    def _command(self, spec: ProcessSpec) -> str:
        """The line of the script that starts `spec`; a helper that does not leave by itself ends with the script."""
        command = " ".join(map(_shell, spec.argv))
        if not spec.leaves:
            return f"{command} &\ntrap 'kill $!' EXIT"
        return f"{Path(self.python).name} ../task.py {command}"


def _per_node(specs: Sequence[ProcessSpec]) -> int:
    """How many processes run the script on the node that has most of them."""
    return max(Counter(spec.node for spec in specs if spec.runs_script).values())


def _rows(specs: Sequence[ProcessSpec]) -> list[ProcessSpec | None]:
    """Which process each task of srun is, node by node; None where one node has fewer than another.

    Empty if helpers start all that run the script.
    """
    rows: list[ProcessSpec | None] = []
    tasks = [spec for spec in launched(specs) if spec.runs_script]
    for node in sorted({spec.node for spec in tasks}):
        on_node = [spec for spec in tasks if spec.node == node]
        rows += [*on_node, *[None] * (_per_node(specs) - len(on_node))]
    return rows


def _exports(variables: Mapping[str, str]) -> list[str]:
    return [f"export {name}={_shell(value)}" for name, value in variables.items()]


def _shell(text: str) -> str:
    """`text` as one word of the script, in which `{node0}` and `{port0}` are the script's own variables."""
    parts = []
    for part in filter(None, WORD.split(text)):
        if WORD.fullmatch(part):
            number = part[5:-1]
            parts.append(f"${{nodes[{number}]}}" if part[1] == "n" else f"$((port + {number}))")
        else:
            parts.append(shlex.quote(part))
    return "".join(parts) or "''"


def _slurm(*words: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """What one of Slurm's commands answers. Raises Unreachable if it takes too long."""
    conf = {name: value for name, value in os.environ.items() if name == "SLURM_CONF"}
    variables = inherited_variables() | conf  # not those of a job inside of which this may run
    try:
        return subprocess.run(
            words, input=text, env=variables, capture_output=True, text=True, timeout=ANSWER_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise Unreachable(f"{words[0]} took longer than {ANSWER_SECONDS:.0f} s") from None


def _sbatch(option: str, script: str) -> str:
    """What sbatch says to `script`. Raises JobError if it refuses."""
    if shutil.which("sbatch") is None:
        raise JobError(
            "there is no sbatch here; launch from a machine of the cluster, such as its login node"
        )
    answer = _slurm("sbatch", option, text=script)
    if answer.returncode:
        raise JobError(f"Slurm refuses the job: {' '.join(answer.stderr.split())}")
    return (answer.stdout or answer.stderr).strip()


class SlurmJob:
    """A submitted job, as `scontrol` and its log show it; a `followed.Remote`."""

    def __init__(self, name: str, number: str, folder: Path, tasks: Sequence[str | None]) -> None:
        self._name, self._number, self._folder, self._tasks = name, number, folder, tasks
        self._news = [f"Slurm runs it as job {number}; its log is {folder}/log"]
        self._waits_for = ""
        self._position = 0
        self._has_ended = False

    def look(self) -> tuple[RunState, str]:
        """The job's state now, and the reason if it failed. Raises Unreachable."""
        answer = _slurm("scontrol", "show", "job", "--oneliner", self._number)
        if "Invalid job id" in answer.stderr:
            return RunState.FAILED, f"{self._name} failed: Slurm has forgotten job {self._number}"
        if answer.returncode:
            raise Unreachable(answer.stderr.strip())
        job = dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S+)", answer.stdout))
        if job["JobState"] == "PENDING" and job["Reason"] not in ("None", self._waits_for):
            self._waits_for = job["Reason"]
            self._news.append(f"job {self._number} waits in the queue: {self._waits_for}")
        state = STATES.get(job["JobState"], RunState.RUNNING)
        self._has_ended = state is not RunState.RUNNING
        return state, self._blame(job["JobState"], job["ExitCode"]) if state is RunState.FAILED else ""

    def read(self, receive: Receive) -> None:
        """Pass on what is new in the log, and what there is to say of the queue."""
        while self._news:
            receive("slurm", self._news.pop(0), "stderr")
        new, newline, _ = self._log()[self._position :].rpartition(b"\n")
        self._position += len(new + newline)
        for line in self._lines(new + newline):
            receive(*line)

    def stop(self) -> None:
        """Cancel the job."""
        answer = _slurm("scancel", self._number)
        if answer.returncode:
            raise Unreachable(f"scancel: {answer.stderr.strip()}")

    def close(self) -> None:
        """Leave log and model alone in the run's folder, unless the job may still need the rest."""
        for path in self._folder.iterdir() if self._has_ended else ():
            if path.is_dir() and path.name != "model":
                shutil.rmtree(path, ignore_errors=True)
            elif path.is_file() and path.name != "log":
                path.unlink(missing_ok=True)

    def _log(self) -> bytes:
        path = self._folder / "log"
        return path.read_bytes() if path.exists() else b""

    def _lines(self, log: bytes) -> Iterator[tuple[str, str, str]]:
        """Worker, text and stream of each line: srun has put a task's number before it, mpirun a tag."""
        for line in log.decode(errors="replace").split("\n")[:-1]:
            labelled = re.match(r"\s*(\d+): ?(.*)", line)
            if labelled and int(labelled[1]) < len(self._tasks):
                yield self._tasks[int(labelled[1])] or "slurm", labelled[2], "stdout"
            else:
                yield from output.attributed("slurm", line, "stdout")

    def _blame(self, state: str, exit_code: str) -> str:
        """The message of a run that failed: the process that failed first, how, and its last lines."""
        log = self._log()
        lines = [line for line in self._lines(log) if not line[1].startswith('{"workshop"')]
        error = SRUN_ERROR.search(log.decode(errors="replace"))
        worker, killed = output.culprit(text for _, text, _ in lines)
        if state == "FAILED" and error and self._tasks:
            worker = self._tasks[int(error[2])]
            how = f"{worker} on {error[1]}: {error[3]}"
        elif state == "FAILED":
            how = f"{worker or 'the script'} {output.how(killed or int(exit_code.split(':')[0]))}"
        else:
            how = "it met its time limit" if state == "TIMEOUT" else f"Slurm ended it with state {state}"
        return f"{self._name} failed: {how}. {output.last_lines([t for w, t, _ in lines if worker in (None, w)])}"
