"""Jobs on a Slurm cluster: the script that a practitioner would hand to `sbatch`, written from a job and its strategy.

    Slurm.load("place.yaml").render(job)    # prints as that script

The script (`slurm.sh` is its outline) starts the job's processes with one `srun`, a task each. Helpers, such as mpirun
or Horovod's rendezvous server, run in the script itself, that is on the first node. The script exports the variables
that all processes share, and writes `task.sh`, which adds those of each task. `slurm_task.py` runs each process.

Each run has a folder of its own below the shared one. When it has ended, its log and its model are left there.

Sources: Slurm 22.05, sbatch(1), srun(1) and scontrol(1).
"""

from __future__ import annotations

import math
import re
import secrets
import shutil
import subprocess
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from shlex import quote
from typing import ClassVar, NamedTuple

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import output, requirements
from workshop_utils.launchers.local.environment import NO_GPU, PROGRAMS, inherited_variables, shared_variables
from workshop_utils.launchers.remote import Receive, RemoteRun, Unreachable
from workshop_utils.launchers.settings import TargetSettings
from workshop_utils.launchers.source import packed, unpack
from workshop_utils.runs import RunState, attributed
from workshop_utils.strategies import Addresses, ProcessSpec, launched, strategy_of
from workshop_utils.training.data import NAMED

OUTLINE = Path(__file__).with_name("slurm.sh").read_text(encoding="utf-8")
LOOK = """for path in {}; do
  [ -e "$path" ] || {{ echo "data: $SLURMD_NODENAME sees no $path; it, and WORKSHOP_CACHE, must be where all nodes see \
it"; exit 1; }}
done

"""
FAILURES = ("FAILED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "BOOT_FAIL", "DEADLINE", "PREEMPTED")
FINAL = {"COMPLETED": RunState.SUCCEEDED, "CANCELLED": RunState.STOPPED}
FINAL |= dict.fromkeys(FAILURES, RunState.FAILED)
# After either line mpirun ends all ranks, and yet its exit code is 0 (Open MPI 4 and 5).
LOST_NODE = re.compile(r"^srun returned non-zero|lost communication with a remote daemon", re.MULTILINE)
# Open MPI keeps sockets in its scratch folder, which a shared file system may not take.
WORDS = {"programs": "../programs", "mpirun": "mpirun", "scratch": "/tmp"}


class SlurmRequest(NamedTuple):
    """What `launch` would submit.

    Attributes:
        script: for sbatch.
        source: the `.tar.gz` of the job's source.
        secrets: the variables that are kept out of the script, in a file that only their owner may read.
        workers: the names of all processes that run the job's script.
        tasks: the name of the process that each srun task runs, by task number; empty where mpirun or a driver
            starts the processes.
    """

    script: str
    source: bytes
    secrets: Mapping[str, str]
    workers: tuple[str, ...]
    tasks: Mapping[int, str]

    def __repr__(self) -> str:
        return self.script


class Slurm(TargetSettings):
    """Launches jobs on the cluster of this machine, which has `sbatch`, as a login node does.

    A job without `nodes` and `processes_per_node` gets a node for each worker. The folder in which its script runs is
    deleted when the job ends: the script writes what is to be kept to the model folder, which is `outputs`.

    Attributes:
        folder: shared by this machine and all nodes, under the same path: for source, logs and models.
        python: the path of the nodes' Python, which has what the script imports.
        options: of sbatch, such as `--partition=gpu`; they take precedence over those that follow from the job.
        setup: lines of shell that come first, such as `module load openmpi`.
        interface: the network interface that joins the nodes; by default that of each node's host name.
    """

    EXAMPLE: ClassVar[str] = "folder: /shared/workshop"

    folder: Path = Path.home() / "workshop-runs"
    python: Path = Path(sys.executable)
    options: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    interface: str = ""

    def render(self, job: TrainingJob) -> SlurmRequest:
        """The script that `launch` would submit. Sends nothing, and needs no cluster.

        Raises:
            JobError: if the job asks for what Slurm, or its strategy, does not have.
        """
        return self._request(job, self.folder.absolute() / f"{job.name}-...")

    def launch(self, job: TrainingJob) -> RemoteRun:
        """Submit the job.

        Raises:
            JobError: as `render` does, or with Slurm's reason if it refuses the job; the run's folder is removed then.
        """
        folder = self.folder.absolute() / f"{job.name}-{secrets.token_hex(4)}"
        request = self._request(job, folder)
        try:
            _fill(folder, job, request)
            number = _ask("sbatch", "--parsable", text=request.script, refusal=UNSUBMITTED).partition(";")[0]
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        submitted = SlurmJob(job.name, number, folder, request.tasks)
        return RemoteRun(job.name, request.workers, submitted, outputs=job.outputs)

    def _request(self, job: TrainingJob, folder: Path) -> SlurmRequest:
        if folder.resolve().is_relative_to(job.folder.resolve()):
            raise JobError(f"folder {self.folder} lies in the job's folder, {job.folder}: take one outside")
        if job.image is not None:
            raise JobError(
                f"image is {job.image!r}; on Slurm the ranks run in python, {self.python}: leave it out"
            )
        if job.requirements and (job.folder / "requirements.txt").is_file():
            requirements.require(job.folder / "requirements.txt", str(self.python))
        specs = self._specs(job)
        ranks = [spec for spec in specs if spec.runs_script]
        per_node, cpus = 1 + max(spec.local_rank for spec in ranks), math.ceil(job.resources.cpu)
        # Each node has the same number of tasks; on some there may be one without work.
        tasks = {spec.node * per_node + spec.local_rank: spec for spec in ranks}
        by_srun = ranks[0] in launched(specs)

        told = ranks if by_srun else launched(specs)
        shared = set.intersection(*(set(spec.environment.items()) for spec in told))
        variables = shared_variables(job.replace(outputs=job.outputs or f"{folder}/model"), folder / "files")
        variables |= {name: value for name, value in sorted(shared) if value}
        # Each node has a folder of its own, and GPUs that the job does not count if an option asks for some.
        asks_for_gpus = any(re.match("-G|--(gpus|gres|tres)", option) for option in self.options)
        for name in ("TMPDIR", *(NO_GPU if asks_for_gpus else ())):
            if name not in job.environment:
                variables.pop(name, None)
        sources = [source for source in job.channels.values() if source not in NAMED]
        paths = [path for path in (Path(each).expanduser().absolute() for each in sources) if path.exists()]
        data = {variables["WORKSHOP_DATA"], *map(str, paths)} if job.channels else set()
        secret = {
            name: variables.pop(name) for name, value in [*variables.items()] if output.is_secret(name, value)
        }

        lines = [self._command(spec) for spec in launched(specs) if not spec.runs_script]
        if by_srun:
            lines += ["cat > ../task.sh <<END", r"case \$SLURM_PROCID in"]
            for number, spec in sorted(tasks.items()):
                own = [_word(f"{n}={value}") for n, value in sorted(spec.environment.items() - shared)]
                lines.append(rf'{number}) exec env {" ".join(own)} {self.python.name} ../task.py "\$@" ;;')
            srun = f"srun --kill-on-bad-exit=1 --label --cpus-per-task={cpus} bash ../task.sh"
            lines += [
                "esac",
                "END",
                " ".join([srun, *map(_word, ranks[0].argv), *map(quote, ranks[0].arguments)]),
            ]
        gpus, megabytes = (
            per_node * job.resources.gpu,
            math.ceil(per_node * job.resources.memory_nbytes / 2**20),
        )
        # Slurm takes no two that differ.
        own_memory = any(re.match(r"--mem(-per-[cg]pu)?\b(?!-)", option) for option in self.options)
        options = [f"--gpus-per-node={gpus}"] if gpus else []  # some clusters know no GPUs at all
        options += ["--requeue" if job.checkpoints else "--no-requeue", *self.options]
        script = OUTLINE.format(
            job=job,
            nodes=1 + max(spec.node for spec in ranks),
            per_node=per_node,
            cpus=cpus,
            memory="" if own_memory else f"#SBATCH --mem={megabytes}M\n",
            minutes=math.ceil(job.timeout_seconds / 60),
            folder=quote(str(folder)),
            options="\n".join(f"#SBATCH {option}" for option in options),
            setup="\n".join(self.setup),
            path=quote(str(self.python.parent)),
            exports=_exports(variables, {name for name, _ in shared}),
            data=LOOK.format(" ".join(map(quote, sorted(data)))) if data else "",
            processes="\n".join(lines),
        )
        names = {number: spec.name for number, spec in tasks.items()}
        return SlurmRequest(script, packed(job), secret, tuple(names.values()), names if by_srun else {})

    def _specs(self, job: TrainingJob) -> list[ProcessSpec]:
        """The job's processes, with words such as `{node0}` and `{port0}` for what only the started job knows."""
        strategy = strategy_of(job)
        nodes = [f"{{node{node}}}" for node in range(1 if strategy.one_node else job.nodes or job.workers)]
        listening = [spec for spec in strategy.plan(job, Addresses(nodes=nodes)) if spec.listens]
        if (count := len(listening)) > 64:  # see the outline
            raise JobError(f"{job.strategy} needs {count} ports; a job on Slurm has 64: take fewer workers")
        at = {spec.name: f"{nodes[spec.node]}:{{port{index}}}" for index, spec in enumerate(listening)}
        addresses = Addresses(at, nodes, interface=self.interface, secret=secrets.token_hex(16))
        own = {"python": self.python.name, "script": job.script, "start": "workshop_utils/start.py"}
        return [spec.filled(**own, **WORDS) for spec in strategy.plan(job, addresses)]

    def _command(self, spec: ProcessSpec) -> str:
        """The line of the script that starts `spec`; a server that workers ask ends with the script."""
        command = " ".join([*map(_word, spec.argv), *map(quote, spec.arguments)])
        is_server = not (spec.required or spec.runs_script)
        return f"{command} &" if is_server else f"{self.python.name} ../task.py {command}"


def _exports(variables: Mapping[str, str], with_words: Collection[str] = ()) -> str:
    quoted = {name: (_word if name in with_words else quote)(value) for name, value in variables.items()}
    return "\n".join(f"export {name}={value}" for name, value in quoted.items())


def _word(text: str) -> str:
    """`text` as one word of the script, with the script's own variables for words such as `{node0}` and `{port0}`."""
    return re.sub(r"\{(node|port)(\d+)\}", r"'${\1[\2]}'", quote(text)).replace("''", "") or "''"


def _fill(folder: Path, job: TrainingJob, request: SlurmRequest) -> None:
    """Make the run's folder, with what the script needs."""
    files = folder / "files"
    folder.mkdir(mode=0o700, parents=True)
    (folder / "log").touch()
    for path in (job.outputs or folder / "model", job.checkpoints or folder):
        Path(path).mkdir(parents=True, exist_ok=True)
    shutil.copytree(PROGRAMS, files / "programs", ignore=shutil.ignore_patterns("__pycache__"))
    unpack(request.source, files / "source")
    shutil.copy(Path(__file__).with_name("slurm_task.py"), files / "task.py")
    (files / "secrets").write_text(_exports(request.secrets), encoding="utf-8")


UNSUBMITTED = "the job cannot be submitted: "


def _ask(*words: str, text: str = "", refusal: str = "") -> str:
    """What one of Slurm's commands prints; it gives up by itself if the cluster is silent.

    Raises:
        Unreachable: if it fails or is missing, with the reason; JobError with a `refusal`, which comes first then.
    """
    failure = JobError if refusal else Unreachable
    try:
        answer = subprocess.run(words, input=text, env=inherited_variables(), capture_output=True, text=True)
    except FileNotFoundError:
        raise failure(f"{refusal}there is no {words[0]} here; launch from a login node") from None
    except OSError as error:  # such as too many open files
        raise failure(f"{refusal}{error}") from None
    if answer.returncode:
        raise failure(refusal + " ".join(answer.stderr.split()))
    return (answer.stdout or answer.stderr).strip()


class SlurmJob:
    """A submitted job, as `scontrol` and its log show it; a `remote.RemoteJob`."""

    def __init__(self, name: str, number: str, folder: Path, tasks: Mapping[int, str]) -> None:
        self._name, self._number, self._folder, self._tasks = name, number, folder, tasks
        self._state, self._position = "", 0

    def poll(self) -> tuple[RunState, str]:
        """The job's state now, and why it failed or waits. Raises Unreachable."""
        answer = _ask("scontrol", "show", "job", "--oneliner", self._number)
        job = dict(re.findall(r"\b(JobState|Reason|ExitCode)=(\S+)", answer))
        self._state = job["JobState"]
        if self._state == "PENDING":
            return RunState.RUNNING, f"Slurm to start job {self._number}, which is pending: {job['Reason']}"
        if self._state == "COMPLETED" and not self._tasks and LOST_NODE.search(self._printed()):
            return RunState.FAILED, f"{self._name} failed: mpirun lost a node"
        state = FINAL.get(self._state, RunState.RUNNING)
        code, killed = map(int, job["ExitCode"].split(":"))
        return state, self._blame(-killed or code) if state is RunState.FAILED else ""

    def read(self, receive: Receive) -> None:
        """Pass on what is new in the log."""
        new = self._log(self._position)
        self._position += len(new)
        for line in self._lines(new):
            receive(*line)

    def stop(self) -> None:
        """Cancel the job. Raises JobError if Slurm refuses, or does not answer."""
        still = f"{self._name} could not be cancelled and may still run: scancel {self._number}. "
        _ask("scancel", self._number, refusal=still)

    def close(self) -> None:
        """Leave nothing but log and model, unless the job may still need the rest."""
        if self._state in FINAL:
            shutil.rmtree(self._folder / "files", ignore_errors=True)

    def _log(self, start: int = 0) -> bytes:
        """What the job has printed from byte `start` on, without its last line while that is not whole."""
        log = self._folder / "log"
        if not log.exists():  # deleted
            return b""
        with log.open("rb") as file:
            file.seek(start)
            content = file.read()
        return content if self._state in FINAL else content[: content.rfind(b"\n") + 1]

    def _lines(self, log: bytes) -> Iterator[tuple[str, str, str]]:
        """Worker, text and stream of each line: srun has put a task's number before it, mpirun a tag."""
        for line in re.findall("[^\n]+", log.decode(errors="replace")):
            labelled = re.match(r"\s*(\d+): ?(.*)", line)
            if labelled and int(labelled[1]) in self._tasks:
                yield self._tasks[int(labelled[1])], labelled[2], "stdout"
            else:
                yield from attributed("slurm", line, "stdout")

    def _printed(self) -> str:
        """What the job has printed since Slurm last started the script, without labels and tags."""
        printed = "\n".join(text for _, text, _ in self._lines(self._log()))
        return printed.rpartition(f"job {self._number} starts on ")[2]

    def _blame(self, code: int) -> str:
        """Why the job failed: which process failed first, and how."""
        if self._state != "FAILED":
            return f"{self._name} failed: Slurm ended it ({self._state})"
        printed = self._printed()
        worker, killed = output.culprit([printed])
        how = f"{worker or 'the script'} {output.how(killed or code)}"
        error = re.search(r"^srun: error: (\S+): tasks? (\d+)[^:]*: (.+)", printed, re.MULTILINE)
        if error and self._tasks:  # without tasks, it is about mpirun's daemons
            how = f"{self._tasks.get(int(error[2]), 'a task')} on {error[1]}: {error[3]}"
        return f"{self._name} failed: {how}"
