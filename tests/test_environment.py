"""The doors to the environment (conda, Binder, dev container, make, CI) lead to the one of pyproject.toml."""

from __future__ import annotations

import json
import os
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from workshop_utils import bootstrap
from workshop_utils.horovod_build import HOROVOD_VERSION
from workshop_utils.packages import PYTORCH_CPU_INDEX

ROOT = Path(__file__).parent.parent


@pytest.fixture
def project() -> dict[str, Any]:
    content: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return content


@pytest.fixture
def conda() -> dict[str, Any]:
    content: dict[str, Any] = yaml.safe_load((ROOT / "environment.yml").read_text())
    return content


def _make(*arguments: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    command = ["make", "--always-make", "--dry-run", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    ).stdout


# conda and Binder


def test_environment_yml_is_the_one_made_from_pyproject() -> None:
    made = bootstrap.conda_environment(ROOT)
    assert (ROOT / "environment.yml").read_text() == made, "run `make environment.yml`"


def test_conda_gets_every_requirement_and_the_package_itself(
    project: dict[str, Any], conda: dict[str, Any]
) -> None:
    (pip,) = [entry["pip"] for entry in conda["dependencies"] if isinstance(entry, dict)]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    needs = [need for need in pip if not need.startswith("-")]
    assert {str(Requirement(need)) for need in needs} == {str(Requirement(need)) for need in wanted}
    assert len(needs) == len(wanted)
    assert [need for need in pip if need.startswith("-")] == [
        f"--extra-index-url {PYTORCH_CPU_INDEX}",
        "-e .",
    ]


def test_conda_gets_a_python_that_pyproject_allows(project: dict[str, Any], conda: dict[str, Any]) -> None:
    (python,) = [entry for entry in conda["dependencies"] if str(entry).startswith("python=")]
    assert SpecifierSet(project["requires-python"]).contains(python.removeprefix("python=") + ".9")
    assert "pip" in conda["dependencies"]


@pytest.mark.parametrize("name", ["pyproject.toml", "environment.yml"])
def test_horovod_is_named_with_its_version_in_a_comment_and_required_nowhere(name: str) -> None:
    lines = (ROOT / name).read_text().splitlines()
    naming = [line.strip() for line in lines if "horovod" in line.lower()]
    assert any(re.match(rf"# Horovod {re.escape(HOROVOD_VERSION)} ", line) for line in naming)
    assert not any(re.match(r"[-\"' ]*horovod\b", line, re.IGNORECASE) for line in naming)


def test_binder_reads_the_files_in_the_root() -> None:
    # Where a folder binder/ or .binder/ exists, Binder reads environment.yml and postBuild there and only there.
    assert not (ROOT / "binder").exists()
    assert not (ROOT / ".binder").exists()
    assert os.access(ROOT / "postBuild", os.X_OK)
    assert "\nworkshop install-horovod\n" in (ROOT / "postBuild").read_text()


def test_the_dev_container_has_a_supported_python_and_sets_up() -> None:
    container = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    version = re.fullmatch(r"python:3\.(\d+)-\w+", container["image"])
    assert version is not None
    assert (3, int(version[1])) in bootstrap.PYTHON_VERSIONS
    assert container["postCreateCommand"].endswith("make setup")


# make


def test_make_alone_lists_every_target() -> None:
    targets = re.search(r"\.PHONY: (.*)", (ROOT / "Makefile").read_text())
    assert targets is not None
    listed = subprocess.run(["make", "-s"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"^  make (\S+)", listed, flags=re.MULTILINE) == targets[1].split()


@pytest.mark.parametrize("target", ["run", "test", "lint", "types", "unit", "notebooks", "bench", "site"])
def test_every_target_that_works_sets_up_first(target: str) -> None:
    assert _make(target).lstrip().startswith("python3 -m workshop_utils.bootstrap --quiet")


def test_lab_waits_for_the_packages_alone_and_opens_the_learner_s_own_copy() -> None:
    setup, command = _make("lab").strip().splitlines()
    assert setup == "python3 -m workshop_utils.bootstrap --without-horovod --quiet"
    assert command == ".venv/bin/workshop lab my_lessons"


def test_make_run_hands_its_parameters_on() -> None:
    commands = " ".join(
        _make("run", "WORKERS=4", "SIZE=small", "STRATEGIES=horovod,mpi", "NOTEBOOKS=a.ipynb").split()
    )
    assert "WORKSHOP_SIZE=small .venv/bin/workshop run a.ipynb --output build" in commands
    assert "-p workers=4" in commands
    assert "--strategies horovod,mpi" in commands
    assert " -p " not in _make("run")


def test_make_clean_keeps_the_environment() -> None:
    removals = [line for line in _make("clean").splitlines() if line.startswith("rm")]
    assert removals
    assert not any(".venv" in line for line in removals)


@pytest.mark.parametrize(("unit", "notebooks", "code"), [(0, 0, 0), (1, 0, 2), (0, 1, 2), (1, 1, 2)])
def test_unit_tests_and_notebooks_both_run_and_either_can_fail_the_whole(
    unit: int, notebooks: int, code: int, tmp_path: Path
) -> None:
    pytest_code = f'$([ "$1" = tests/launchers ] && echo {unit} || echo {notebooks})'
    _imitation(tmp_path, {"ruff": "0", "mypy": "0", "pytest": pytest_code})
    answer = _test(tmp_path)
    assert answer.returncode == code
    ran = re.findall(r"^ran (\w+) (\S+)", answer.stdout, flags=re.MULTILINE)
    assert ran == [
        ("ruff", "check"),
        ("ruff", "format"),
        ("mypy", "-"),
        ("pytest", "tests/launchers"),
        ("pytest", "--nbval-lax"),
    ]
    assert re.search(rf"== unit tests: {'FAILED' if unit else 'passed'}, \d+ s", answer.stdout)
    assert re.search(rf"== notebooks \(source\): {'FAILED' if notebooks else 'passed'}, \d+ s", answer.stdout)


def test_a_failing_lint_stops_before_the_tests(tmp_path: Path) -> None:
    _imitation(tmp_path, {"ruff": "1", "mypy": "0", "pytest": "0"})
    answer = _test(tmp_path)
    assert answer.returncode == 2
    assert "== lint: FAILED" in answer.stdout
    assert "pytest" not in answer.stdout


def _imitation(folder: Path, exit_codes: dict[str, str]) -> None:
    """Lays out a checkout with our Makefile whose tools only say that they ran."""
    (folder / "Makefile").write_text((ROOT / "Makefile").read_text())
    tools = folder / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name, code in (exit_codes | {"python3": "0", "lint-imports": "0"}).items():
        (tools / name).write_text(f'#!/bin/sh\necho "ran {name} ${{1:--}}"\nexit {code}\n')
        (tools / name).chmod(0o755)
    (tools / "python3").write_text("#!/bin/sh\n")


def _test(folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(
        ["make", "test"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
    )


def test_ci_asks_nothing_and_runs_make_test() -> None:
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)]).returncode == 0
    text = script.read_text()
    assert "set -eu" in text
    assert text.rstrip().endswith("exec make test </dev/null")
