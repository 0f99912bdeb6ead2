"""The ways to the environment (conda, dev container, make) lead to that of pyproject.toml."""

import json
import os
import re
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


# conda, dev container


def test_conda_gets_what_pyproject_requires():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python, _, packages = dependencies
    assert int(python.removeprefix("python=3.")) in bootstrap.supported_python(ROOT)[1]
    assert packages["pip"][-1] == "-e .[all,test]"


def test_the_dev_container_has_a_supported_python_and_sets_up():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    version = re.fullmatch(r"python:3\.(\d+)-\w+", container["image"])
    assert int(version[1]) in bootstrap.supported_python(ROOT)[1]
    assert container["postCreateCommand"].endswith("make setup")
    # As `workshop doctor` asks for.
    assert int(container["hostRequirements"]["memory"].removesuffix("gb")) >= 6


# make


@pytest.mark.processes
def test_make_run_passes_its_parameters_on():
    parameters = ["WORKERS=4", "SIZE=small", "NOTEBOOKS=a.ipynb"]
    commands = " ".join(commands_of("run", *parameters).split())
    assert "WORKSHOP_SIZE=small .venv/bin/workshop run a.ipynb --output build" in commands
    assert "-p workers=4" in commands
    assert " -p " not in commands_of("run")
