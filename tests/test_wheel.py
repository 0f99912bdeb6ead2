"""The wheel, installed where there is no checkout, does what the checkout does."""

import os
import shutil
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from pathlib import Path

import pytest

from workshop_utils.launchers.targets import TARGETS

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[1]
SHARED = ("notebooks", "jobs", "docs", "images")  # below workshop_utils/share/
FOR_WHEEL = ("pyproject.toml", "README.md", "LICENSE", "workshop_utils", *SHARED)
CONFIGS = {
    "sagemaker": "{role: 'arn:aws:iam::123456789012:role/workshop', region: us-east-1}",
    "slurm": "{folder: /shared/runs}",
}

# Of a person who has the package and a folder of their own.
SCRIPT = """
import numpy as np
from workshop_utils import place
from workshop_utils.comm import ring, tcp

with tcp.connect(*place.rendezvous()) as communicator:
    array = np.full(3, communicator.rank + 1.0)
    ring.ring_all_reduce(communicator, array)
    place.report(step=1, loss=float(array[0]))
"""
JOB = "{name: mine, strategy: ring, workers: 2, data: digits}"

PROGRAM = """
import importlib, pkgutil, sys
from pathlib import Path

import workshop_utils
from typer.testing import CliRunner
from workshop_utils import cli, on_ranks
from workshop_utils.network import availability

site = Path(sys.prefix)
for module in pkgutil.walk_packages(workshop_utils.__path__, "workshop_utils."):
    spec = importlib.util.find_spec(module.name)
    assert site in Path(spec.origin).parents, spec.origin

def workshop(line):
    result = CliRunner().invoke(cli.app, line.split())
    print(f"== {line}: {result.exit_code}", result.output, result.exception or "", sep="\\n")
    assert result.exit_code == 0, line

if __name__ == "__main__":
    for target in sys.argv[1:]:
        config = f" --config {target}.yaml" if Path(f"{target}.yaml").is_file() else ""
        workshop(f"launch ddp --on {target} --render{config}")
    workshop("scale-model p100-25g --model vgg16 --workers 1,2 --predict")
    if availability() != "none":
        workshop("scale-model p100-25g --model resnet50 --workers 2")
    print("ranks", on_ranks(2, lambda communicator: communicator.rank).values)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"  # what git tracks, and nothing that earlier work has left
    for name in run(ROOT, "git", "ls-files", *FOR_WHEEL).splitlines():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    build = ["build", "--wheel", "--no-build-isolation", "--python", sys.executable, "source"]
    run(folder, sys.executable, "-m", "uv", *build)
    (path,) = (source / "dist").glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """The `bin` of an environment that has the wheel, and all packages of this one but for the checkout."""
    folder = tmp_path_factory.mktemp("installed")
    run(folder, sys.executable, "-m", "venv", "--without-pip", "environment")
    run(folder, sys.executable, "-m", "uv", "pip", "install", "--no-deps", "--python", "environment", wheel)
    (packages,) = (folder / "environment" / "lib").glob("python*/site-packages")
    # A path in such a file is searched for modules, and not for other such files: that of the checkout has no effect.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    return folder / "environment" / "bin"


def run(folder, *words, path=os.environ["PATH"]):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(
        [*map(str, words)], cwd=folder, env=environment | {"PATH": path}, text=True, timeout=280,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_wheel_holds_every_file_of_the_package_and_what_the_lessons_name(wheel):
    packaged = run(ROOT, "git", "ls-files", "workshop_utils").splitlines()
    shared = [f"workshop_utils/share/{name}" for name in run(ROOT, "git", "ls-files", *SHARED).splitlines()]
    assert {*packaged, *shared} <= {*zipfile.ZipFile(wheel).namelist()}


def test_from_the_wheel_a_learner_gets_the_lessons_and_keeps_what_they_change(installed, tmp_path):
    for folder in ("notebooks", "workshop/jobs/mine"):  # as somebody else's, who works in the same folder
        (tmp_path / folder).mkdir(parents=True)
    copied = run(tmp_path, installed / "workshop", "copy-lessons")
    assert "workshop/my_lessons/00_welcome.ipynb: new" in copied
    for named in ("jobs/mnist_torch_ddp/job.yaml", "docs/glossary.md", "images"):
        assert (tmp_path / "workshop" / named).exists()
    script = tmp_path / "workshop" / "jobs" / "mnist_torch_ddp" / "train.py"
    script.write_text("mine")
    assert run(tmp_path, installed / "workshop", "copy-lessons") == ""
    assert script.read_text() == "mine"


def test_without_a_checkout_jobs_are_launched_and_rendered_and_a_cluster_is_emulated(installed, tmp_path):
    for name, job in {"mine": JOB, "ddp": JOB.replace("ring", "torch_ddp")}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "train.py").write_text(SCRIPT)
        (tmp_path / name / "job.yaml").write_text(job)
    for target, config in CONFIGS.items():
        (tmp_path / f"{target}.yaml").write_text(config)
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM))
    path = f"{installed}:{os.environ['PATH']}"  # mpirun and torchrun are of the other environment
    assert "3.0" in run(tmp_path, installed / "workshop", "launch", "mine", path=path)
    said = run(tmp_path, installed / "python", "program.py", *TARGETS, path=path)
    assert said.rstrip().endswith("ranks [0, 1]")
