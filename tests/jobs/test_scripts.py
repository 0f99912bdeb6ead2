"""Each training script runs in an environment that holds its framework and `place` alone, as platforms give it."""

from __future__ import annotations

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

import workshop_utils
from workshop_utils import data
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import mpirun
from workshop_utils.processes.ports import PortReservation
from workshop_utils.strategies import strategy_of

JOBS = Path(__file__).parents[2] / "jobs"
SCRIPTS = sorted(JOBS.glob("*/train.py"))
PROGRAMS = Path(sys.prefix) / "bin"  # torchrun, horovodrun and mpirun of this environment
QUIET = "a framework's notices at start are kept out of what a learner sees"
TENSORFLOW = "tensorflow-cpu" if sys.platform == "linux" else "tensorflow"

# What each job may import. NumPy is TensorFlow's dependency, and not PyTorch's.
FRAMEWORKS = {
    "mnist_single": ["torch"],
    "mnist_torch_ddp": ["torch"],
    "mnist_horovod": ["horovod", "torch"],
    "mnist_mpi": ["mpi4py", "numpy"],
    "mnist_multi_worker_mirrored": [TENSORFLOW],
    "mnist_parameter_server": [TENSORFLOW],
}


def closure(names: list[str]) -> set[str]:
    """The distributions that `names` need, without extras."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        found.add(name)
        for line in importlib.metadata.requires(name) or []:
            requirement = Requirement(line)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                waiting.append(requirement.name)
    return found


def link_distributions(names: list[str], folder: Path) -> None:
    """Links in `folder` to what the distributions of `closure(names)` have installed."""
    folder.mkdir()
    for name in closure(names):
        distribution = importlib.metadata.distribution(name)
        for file in distribution.files or []:
            top = file.parts[0]
            target = Path(str(distribution.locate_file(top)))
            if top not in ("..", "__pycache__") and target.exists() and not (folder / top).exists():
                (folder / top).symlink_to(target)


@dataclass(frozen=True)
class Isolated:
    """A job's script, and an environment in which it finds its framework and `place`, and nothing else."""

    job: str
    python_path: str
    variables: dict[str, str]
    model: Path

    @property
    def command(self) -> list[str]:
        """Runs the script; the path is set here, so that a launcher in front of it keeps its own."""
        return [*self.python, str(JOBS / self.job / "train.py"), "--epochs", "1", "--batch-size", "16"]

    @property
    def python(self) -> list[str]:
        return ["env", f"PYTHONPATH={self.python_path}", sys.executable, "-S", "-s"]

    def run(self, launcher: list[str]) -> list[dict[str, Any]]:
        """The records that are printed where `launcher`, if any, starts the script."""
        command = [*launcher, *self.command]
        done = subprocess.run(command, env=self.variables, capture_output=True, text=True, timeout=240)
        assert done.returncode == 0, done.stdout + done.stderr
        if not launcher and "torch" not in FRAMEWORKS[self.job]:  # PyTorch says that it has no NumPy
            assert done.stderr == "", QUIET
        return records(done.stdout)


def records(output: str) -> list[dict[str, Any]]:
    """Launchers put a tag before each line, such as [0]<stdout>:."""
    lines = [line for line in output.splitlines() if '{"workshop"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


@pytest.fixture
def isolated(request: pytest.FixtureRequest, tmp_path: Path) -> Isolated:
    job = request.param
    link_distributions(FRAMEWORKS[job], tmp_path / "framework")
    package = tmp_path / "source" / "workshop_utils"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "place.py").symlink_to(Path(workshop_utils.__file__).with_name("place.py"))
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    variables = {
        **kept,
        "WORKSHOP_DATA": str(data.prepare("digits")),
        "WORKSHOP_MODEL": str(tmp_path / "model"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "LD_LIBRARY_PATH": f"{sys.prefix}/lib",  # MPI's; elsewhere it is a library of the system
        **mpirun.scratch_variables(
            tmp_path
        ),  # Open MPI leaves the shared memory of a process without mpirun behind
    }
    path = os.pathsep.join(str(tmp_path / part) for part in ("source", "framework"))
    return Isolated(job, path, variables, tmp_path / "model")


def run_with_tf_config(isolated: Isolated, sizes: dict[str, int]) -> list[dict[str, Any]]:
    """Start one process for each task of a cluster of `sizes`; the records of all of them."""
    with PortReservation(sum(sizes.values())) as reservation:
        ports = iter(reservation.ports)
        cluster = {role: [f"127.0.0.1:{next(ports)}" for _ in range(size)] for role, size in sizes.items()}
        processes = []
        for role, size in sizes.items():
            for index in range(size):
                config = json.dumps({"cluster": cluster, "task": {"type": role, "index": index}})
                variables = {**isolated.variables, "TF_CONFIG": config}
                pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
                processes.append(subprocess.Popen(isolated.command, env=variables, **pipes))
        try:
            outputs = [process.communicate(timeout=240) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    for process, (out, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, out + errors
        assert errors == "", QUIET
    return [record for out, _ in outputs for record in records(out)]


def assert_trained(found: list[dict[str, Any]], isolated: Isolated, ranks: set[int]) -> None:
    metrics = [record for record in found if record["workshop"] == "metric"]
    steps = {
        rank: [record["step"] for record in metrics if record["rank"] == rank and "loss" in record]
        for rank in ranks
    }
    assert all(steps[rank][0] <= 4 for rank in ranks), "each rank reports its first step"
    assert len({tuple(steps[rank]) for rank in ranks}) == 1, "all ranks take the same steps"
    speeds = [record for record in metrics if record.get("samples_per_second") is not None]
    assert {record["rank"] for record in speeds} == ranks
    assert all(record["samples_per_second"] > 0 for record in speeds)
    assert {record["rank"] for record in metrics} == ranks
    (accuracy,) = [record for record in metrics if "accuracy" in record]
    assert accuracy["rank"] == 0
    assert accuracy["epoch"] == 1
    assert accuracy["accuracy"] > 0.7  # after one epoch; chance is 0.1
    assert [path.name for path in isolated.model.iterdir()] in (["model.pt"], ["model.npz"])


def only(job: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("isolated", [job], indirect=True, ids=[job])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_script_imports_nothing_of_this_package_but_what_travels_with_it(script: Path) -> None:
    imported = set()
    for node in ast.walk(ast.parse(script.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "a script stands alone: it has no package to import from"
            imported |= {f"{node.module}.{alias.name}" for alias in node.names}
    ours = {name for name in imported if name.startswith("workshop_utils")}
    if strategy_of(TrainingJob.load(script.parent)).uses_comm:
        ours = {
            name for name in ours if not name.startswith(("workshop_utils.comm.", "workshop_utils.parallel."))
        }
    assert ours <= {"workshop_utils.place", "workshop_utils.checkpoints"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "isolated", ["mnist_single", "mnist_horovod", "mnist_mpi", "mnist_multi_worker_mirrored"], indirect=True
)
def test_a_script_runs_alone_where_no_launcher_has_set_anything(isolated: Isolated) -> None:
    assert_trained(isolated.run([]), isolated, ranks={0})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("isolated", "launcher"),
    [
        ("mnist_torch_ddp", ["torchrun", "--standalone", "--nproc-per-node", "2", "--no-python"]),
        ("mnist_horovod", ["horovodrun", "--gloo", "-np", "2"]),
        (
            "mnist_mpi",
            [
                "mpirun",
                "--allow-run-as-root",
                *mpirun.SHARING,
                *mpirun.as_options(mpirun.YIELDING),
                "-n",
                "2",
            ],
        ),
    ],
    indirect=["isolated"],
)
def test_a_script_runs_under_its_framework_s_own_launcher(isolated: Isolated, launcher: list[str]) -> None:
    program, *options = launcher
    assert_trained(isolated.run([str(PROGRAMS / program), *options]), isolated, {0, 1})


@pytest.mark.slow
@only("mnist_multi_worker_mirrored")
def test_multi_worker_mirrored_runs_with_a_tf_config(isolated: Isolated) -> None:
    assert_trained(run_with_tf_config(isolated, {"worker": 2}), isolated, {0, 1})


@pytest.mark.slow
@only("mnist_parameter_server")
def test_parameter_server_runs_with_a_tf_config(isolated: Isolated) -> None:
    found = run_with_tf_config(isolated, {"chief": 1, "ps": 2, "worker": 3})
    started = {record["worker"]: record["rank"] for record in found if record["workshop"] == "start"}
    assert started["chief-0"] == 0
    assert started["worker-1"] == 2
    assert started["ps-0"] is None
    assert_trained(found, isolated, ranks={0})  # the chief speaks for all
