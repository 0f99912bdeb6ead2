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
MAKEFILE = (ROOT / "Makefile").read_text()


def make(*arguments, folder=ROOT):
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(("MAKE", "MFLAGS"))}
    return subprocess.run(["make", *arguments], cwd=folder, env=environment, capture_output=True, text=True)


def commands_of(*arguments):
    return make("--always-make", "--dry-run", *arguments).stdout


# conda, dev container


def test_conda_gets_what_pyproject_requires():
    dependencies = yaml.safe_load((ROOT / "environment.yml").read_text())["dependencies"]
    python, _, packages = dependencies
    assert int(python.removeprefix("python=3.")) in bootstrap.supported_python(ROOT)[1]
    assert packages["pip"][-1] == "-e .[test]"


def test_the_dev_container_has_a_supported_python_and_sets_up():
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    version = re.fullmatch(r"python:3\.(\d+)-\w+", container["image"])
    assert int(version[1]) in bootstrap.supported_python(ROOT)[1]
    assert container["postCreateCommand"].endswith("make setup")
    # As `workshop doctor` asks for.
    assert int(container["hostRequirements"]["memory"].removesuffix("gb")) >= 6


# make


def test_make_run_passes_its_parameters_on():
    parameters = ["WORKERS=4", "SIZE=small", "STRATEGIES=horovod,mpi", "NOTEBOOKS=a.ipynb"]
    commands = " ".join(commands_of("run", *parameters).split())
    assert "WORKSHOP_SIZE=small .venv/bin/workshop run a.ipynb --output build" in commands
    assert "-p workers=4" in commands
    assert "--strategies horovod,mpi" in commands
    assert " -p " not in commands_of("run")


@pytest.mark.parametrize("failing", ["", "lint", "unit tests", "notebooks (source)"])
def test_make_test_runs_all_checks_and_any_of_them_can_fail_it(failing, tmp_path):
    (tmp_path / "Makefile").write_text(MAKEFILE)
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    unit, notebooks = "pytest tests/launchers", "pytest --nbval"
    fails = {"": "-", "lint": "ruff check", "unit tests": unit, "notebooks (source)": notebooks}[failing]
    for name in ("ruff", "lint-imports", "mypy", "pytest", "python3"):
        (tools / name).write_text(f'#!/bin/sh\ncase "{name} $*" in "{fails}"*) exit 1; esac\n')
        (tools / name).chmod(0o755)
    answer = make("test", folder=tmp_path)
    assert answer.returncode == (2 if failing else 0)
    results = dict(re.findall(r"^== (.+): (passed|FAILED), \d+ s", answer.stdout, flags=re.MULTILINE))
    expected = ["lint"] if failing == "lint" else ["lint", "types", "unit tests", "notebooks (source)"]
    assert results == {name: "FAILED" if name == failing else "passed" for name in expected}
