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
FOR_WHEEL = ("pyproject.toml", "README.md", "LICENSE")  # beside the package
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
    source = folder / "source"  # a copy, since setuptools takes files of earlier builds from `build/`
    shutil.copytree(
        ROOT / "workshop_utils", source / "workshop_utils", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in FOR_WHEEL:
        shutil.copy(ROOT / name, source)
    run(
        folder,
        sys.executable,
        "-m",
        "uv",
        "build",
        "--wheel",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "source",
    )
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


def test_the_wheel_holds_every_file_of_the_package(wheel):
    tracked = run(ROOT, "git", "ls-files", "workshop_utils").split()
    assert {*tracked} <= {*zipfile.ZipFile(wheel).namelist()}


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
