"""Each training script runs where there is nothing but what travels and its framework, as in a platform's image."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import with_horovod
from launching import JOBS, MPI

from workshop_utils.jobs import TrainingJob, imports
from workshop_utils.launchers.source import shipped
from workshop_utils.strategies import MPI_FOLDERS
from workshop_utils.training import data

pytestmark = pytest.mark.processes

SCRIPTS = [path.with_name("train.py") for path in sorted(JOBS.glob("*/job.yaml"))]
PROGRAMS = Path(sys.prefix) / "bin"  # torchrun, horovodrun and mpirun of this environment

# What these jobs may import beside Python's own library: their image holds nothing else.
FRAMEWORKS = {
    "digits_ring": {"mpi4py", "numpy"},
    "mnist_torch_ddp": {"torch"},
    "gpt_fsdp": {"torch"},
    "mnist_horovod": {"horovod", "torch"},
    "mnist_tensorflow": {"tensorflow", "numpy"},
}
# What images lack and this environment has. Keras imports the last four if it can, and horovodrun TensorFlow.
ELSEWHERE = {"torch", "tensorflow", "horovod", "mpi4py", "matplotlib", "pandas", "scipy", "sklearn"}


@pytest.fixture
def variables(job, tmp_path):
    """The environment of a process that finds only what travels with `job`, and only its framework."""
    source = tmp_path / "source"
    for name, text in shipped(TrainingJob.load(JOBS / job)).items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    missing = dict.fromkeys(ELSEWHERE - FRAMEWORKS[job])  # None in sys.modules is a module that is not there
    (source / "sitecustomize.py").write_text(f"import sys\nsys.modules.update({missing})\n")
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR") if name in os.environ}
    return {
        **kept,
        "PYTHONPATH": str(source),
        "WORKSHOP_DATA": str(data.prepare("digits")),
        "WORKSHOP_MODEL": str(tmp_path / "model"),
        "OMP_NUM_THREADS": "1",
        "PYTHONUNBUFFERED": "1",
        "LD_LIBRARY_PATH": f"{sys.prefix}/lib",  # MPI's; elsewhere it is a library of the system
        # Open MPI leaves the shared memory of a process without mpirun behind.
        **dict.fromkeys(MPI_FOLDERS, str(tmp_path)),
    }


def ended(job, environments, *launcher):
    """The records of processes that run the script of `job`, behind `launcher`, one in each environment."""
    script = [sys.executable, str(JOBS / job / "train.py"), "--epochs", "1", "--batch-size", "16"]
    if job == "digits_ring":  # whose ring needs a launcher of the workshop's
        script += ["--all-reduce", "mpi"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    processes = [subprocess.Popen([*launcher, *script], env=each, **pipes) for each in environments]
    try:
        outputs = [process.communicate(timeout=240) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (out, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, out + errors
        assert launcher or errors == "", "a framework's notices at start are kept out of what a learner sees"
    # Launchers put a tag before each line, such as [0]<stdout>:.
    lines = [line for out, _ in outputs for line in out.splitlines() if '{"workshop"' in line]
    return [json.loads(line[line.index("{") :]) for line in lines]


def assert_trained(found, variables, ranks):
    metrics = [record for record in found if record["workshop"] == "metric"]
    steps = {
        rank: [record["step"] for record in metrics if record["rank"] == rank and "loss" in record]
        for rank in ranks
    }
    assert all(steps[rank][0] <= 4 for rank in ranks), "each rank reports its first step"
    assert len({tuple(steps[rank]) for rank in ranks}) == 1, "all ranks take the same steps"
    speeds = [record for record in metrics if record.get("samples_per_second") is not None]
    assert {record["rank"] for record in speeds} == {record["rank"] for record in metrics} == ranks
    assert all(record["samples_per_second"] > 0 for record in speeds)
    (accuracy,) = [record for record in metrics if "accuracy" in record]
    assert (accuracy["rank"], accuracy["epoch"]) == (0, 1)
    assert accuracy["accuracy"] > 0.7  # after one epoch; chance is 0.1
    model = Path(variables["WORKSHOP_MODEL"])
    assert [path.name for path in model.iterdir()] in (["model.pt"], ["model.npz"])


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.parent.name)
def test_a_script_imports_nothing_of_this_package_but_what_travels_with_it(script):
    modules = imports.imported(script)
    ours = modules.pop("workshop_utils", set())
    ours |= {module.split(".")[1] for module in modules if module.startswith("workshop_utils.")}
    ours |= modules.get("workshop_utils.training", set())
    parts = [Path(name).with_suffix("").parts for name in shipped(TrainingJob.load(script.parent))]
    assert ours <= {part for path in parts for part in path}
    others = imports.packages(modules) - {"workshop_utils"} - set(sys.stdlib_module_names)
    assert others <= FRAMEWORKS.get(script.parent.name, others)


@pytest.mark.parametrize("job", ["mnist_torch_ddp", "digits_ring", "mnist_tensorflow"])
def test_a_script_runs_alone_where_no_launcher_has_set_anything(job, variables):
    assert_trained(ended(job, [variables]), variables, ranks={0})


@pytest.mark.parametrize(
    ("job", "program", "options"),
    [
        ("mnist_torch_ddp", "torchrun", ["--standalone", "--nproc-per-node", "2", "--no-python"]),
        with_horovod("mnist_horovod", "horovodrun", ["--gloo", "-np", "2"]),
        ("digits_ring", "mpirun", [*MPI, "-n", "2"]),
    ],
)
def test_a_script_runs_under_its_framework_s_own_launcher(job, program, options, variables):
    found = ended(job, [variables], str(PROGRAMS / program), *options)
    assert_trained(found, variables, ranks={0, 1})


def test_no_script_takes_an_argument_for_the_beginning_of_a_longer_one():
    texts = {script.parent.name: script.read_text() for script in SCRIPTS}
    short = [name for name in texts if texts[name].count("Parser(") > texts[name].count("allow_abbrev=False")]
    assert short == []
