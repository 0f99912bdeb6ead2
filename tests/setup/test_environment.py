"""The ways to the environment (conda, make) lead to that of pyproject.toml."""

import os
import subprocess
from pathlib import Path

import pytest
import yaml

from workshop_utils.setup import bootstrap

ROOT = Path(__file__).parents[2]


def commands_of(*arguments):
    """What `make ARGUMENTS` would carry out."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(("MAKE", "MFLAGS"))}
    words = ["make", "--always-make", "--dry-run", *arguments]
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True).stdout


# conda


def test_conda_gets_what_pyproject_requires():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python, _, packages = dependencies
    assert int(python.removeprefix("python=3.")) in bootstrap.supported_python(ROOT)[1]
    assert packages["pip"][-1] == "-e .[all,test]"
    assert not [line for line in packages["pip"] if "constraint" in line]  # pip wants none with hashes


# make


@pytest.mark.processes
def test_make_run_passes_its_parameters_on():
    parameters = ["WORKERS=4", "SIZE=small", "NOTEBOOKS=a.ipynb"]
    commands = " ".join(commands_of("run", *parameters).split())
    assert "WORKSHOP_SIZE=small .venv/bin/workshop run a.ipynb --output build" in commands
    assert "-p workers=4" in commands
    assert " -p " not in commands_of("run")
    assert "workshop run" not in commands_of("run", "size=small")  # make would ignore it
