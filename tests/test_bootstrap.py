"""The set-up of a fresh machine: what it checks, what it does once, what an interruption leaves."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from packaging.specifiers import SpecifierSet

from workshop_utils import bootstrap, horovod_build
from workshop_utils.bootstrap import PACKAGES, READY, SetupError

ROOT = Path(__file__).parent.parent


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder that looks like a fresh clone."""
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'tiny'\n")
    return tmp_path


@pytest.fixture
def steps(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the long steps by ones that only note that they were taken."""
    taken: list[str] = []

    def create_venv(root: Path, _python: Path) -> None:
        taken.append("venv")
        (root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (root / ".venv" / "bin" / "python").touch()

    def note(name: str) -> Callable[[Path], None]:
        return lambda _root: taken.append(name)

    monkeypatch.setattr(bootstrap, "check_machine", lambda: Path(sys.executable))
    monkeypatch.setattr(bootstrap, "create_venv", create_venv)
    monkeypatch.setattr(bootstrap, "install_packages", note("packages"))
    monkeypatch.setattr(bootstrap, "install_horovod", note("horovod"))
    assert not READY.is_current(checkout)
    return taken


def _answers(version: tuple[int, int, int], **changes: Any) -> dict[str, Any]:
    return {"version": list(version), "has_venv": True, "include": "/nowhere"} | changes


# Once


def test_a_second_set_up_does_nothing(
    checkout: Path, steps: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrap.set_up(checkout)
    assert steps == ["venv", "packages", "horovod"]
    assert READY.is_current(checkout)
    capsys.readouterr()
    bootstrap.set_up(checkout, quiet=True)
    assert steps == ["venv", "packages", "horovod"]
    assert capsys.readouterr().out == ""


def test_a_set_up_that_is_interrupted_is_done_again(
    checkout: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_root: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(bootstrap, "install_horovod", interrupted)
        with pytest.raises(KeyboardInterrupt):
            bootstrap.set_up(checkout)
    assert not READY.is_current(checkout)
    bootstrap.set_up(checkout)
    assert steps == ["venv", "packages", "horovod"]  # what was complete is kept


def test_every_step_is_announced_and_timed(
    checkout: Path, steps: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    bootstrap.set_up(checkout)
    said = capsys.readouterr().out
    assert len(steps) == 3
    for name in ("checking this machine", "virtual environment .venv", "packages", "Horovod"):
        assert len(re.findall(rf"^\[{re.escape(name)}.*: 0 s\]$", said, flags=re.MULTILINE)) == 1
        assert len(re.findall(rf"^\[{re.escape(name)}.*\]$", said, flags=re.MULTILINE)) == 2
    assert "Set-up complete in 0 s." in said


def test_changed_requirements_edits_or_place_ask_for_a_new_set_up(
    checkout: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    bootstrap.set_up(checkout)
    assert len(steps) == 3
    with monkeypatch.context() as patch:
        patch.setattr(horovod_build, "SOURCE_EDITS", ())
        assert not READY.is_current(checkout)
        assert PACKAGES.is_current(checkout)
    moved = checkout / "moved"
    (moved / ".venv" / "bin").mkdir(parents=True)
    for name in ("pyproject.toml", ".venv/.packages", ".venv/.ready", ".venv/bin/python"):
        (moved / name).write_bytes((checkout / name).read_bytes())
    assert not READY.is_current(moved)
    assert READY.is_current(checkout)
    (checkout / "pyproject.toml").write_text("[project]\nname = 'other'\n")
    assert not READY.is_current(checkout)


def test_a_set_up_whose_python_is_gone_is_not_ready(checkout: Path, steps: list[str]) -> None:
    bootstrap.set_up(checkout)
    assert len(steps) == 3
    python = checkout / ".venv" / "bin" / "python"
    python.unlink()
    python.symlink_to("/nowhere/python3.11")
    assert not READY.is_current(checkout)


# The machine


def test_everything_missing_is_named_at_once_with_one_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(bootstrap, "find_python", lambda: (Path("/usr/bin/python3"), []))
    monkeypatch.setattr(bootstrap, "_probe", lambda _python: _answers((3, 11, 2), has_venv=False))
    with pytest.raises(SetupError) as error:
        bootstrap.check_machine()
    assert "a C++ compiler, make, the header files of Python (Python.h), the Python modules venv" in str(
        error.value
    )
    assert str(error.value).endswith("apt-get install g++ make python3-dev python3-venv")


def test_the_version_of_an_unsupported_python_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "python3.12").write_text("#!/bin/sh\n")
    (tmp_path / "python3.12").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(bootstrap, "_probe", lambda _python: _answers((3, 13, 1)))
    with pytest.raises(SetupError) as error:
        bootstrap.check_machine()
    assert "Python 3.11 or 3.12 is needed; found: 3.13.1" in str(error.value)
    assert "a C++ compiler" in str(error.value)


def test_a_supported_python_is_found_past_one_that_does_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, script in {"python3.11": "exit 127", "python3.12": f'exec "{sys.executable}" "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "base_prefix", str(tmp_path / "nowhere"))
    assert bootstrap.find_python() == (tmp_path / "python3.12", [])


def test_the_supported_versions_are_those_of_pyproject() -> None:
    requires = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["requires-python"]
    allowed = [(3, minor) for minor in range(30) if SpecifierSet(requires).contains(f"3.{minor}.1")]
    assert allowed == list(bootstrap.PYTHON_VERSIONS)


@pytest.mark.parametrize("way", ["workshop_utils/bootstrap.py", "-m workshop_utils.bootstrap"])
def test_it_starts_with_the_standard_library_alone(way: str) -> None:
    command = [sys.executable, "-S", *way.split(), "--environment-yml"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert answer.returncode == 0, answer.stderr
    assert answer.stdout.startswith("# Written by")


def test_a_problem_is_one_message_and_no_traceback(
    checkout: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> Path:
        raise SetupError("Missing on this machine: a C++ compiler.")

    monkeypatch.setattr(bootstrap, "ROOT", checkout)
    monkeypatch.setattr(bootstrap, "check_machine", fail)
    monkeypatch.setattr(bootstrap, "end_on_signals", lambda: None)
    assert bootstrap.main([]) == 1
    assert capsys.readouterr().err == "\nThe set-up stopped. Missing on this machine: a C++ compiler.\n"
    assert not (checkout / ".venv").exists()


# The steps


def test_an_environment_is_made_kept_and_made_anew_once_moved(tmp_path: Path) -> None:
    python = Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}"
    first = tmp_path / "first"
    first.mkdir()
    bootstrap.create_venv(first, python)
    (first / ".venv" / "mark").touch()
    bootstrap.create_venv(first, python)
    assert (first / ".venv" / "mark").exists()

    second = first.rename(tmp_path / "second")
    bootstrap.create_venv(second, python)
    assert not (second / ".venv" / "mark").exists()
    assert str(second) in (second / ".venv" / "bin" / "pip").read_text()


def test_a_python_without_venv_is_quoted(checkout: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'No module named venv' >&2; exit 1\n")
    python.chmod(0o755)
    with pytest.raises(SetupError, match="No module named venv"):
        bootstrap.create_venv(checkout, python)


def test_jupyterlab_s_part_of_the_set_up_stops_before_horovod_which_a_later_one_adds(
    checkout: Path, steps: list[str]
) -> None:
    bootstrap.set_up(checkout, with_horovod=False)
    assert steps == ["venv", "packages"]
    assert not READY.is_current(checkout)
    bootstrap.set_up(checkout, with_horovod=False)
    assert steps == ["venv", "packages"]
    bootstrap.set_up(checkout)
    assert steps == ["venv", "packages", "horovod"]
    assert READY.is_current(checkout)


def test_a_failed_horovod_stops_the_set_up(checkout: Path) -> None:
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text("#!/bin/sh\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(SetupError, match="stopped at Horovod"):
        bootstrap.install_horovod(checkout)


@pytest.mark.skipif(os.name != "posix", reason="file locks of Unix")
def test_a_second_set_up_at_the_same_time_waits_and_then_finds_all_done(
    checkout: Path, steps: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import threading

    second = threading.Thread(target=bootstrap.set_up, args=(checkout,))

    def slow(_root: Path) -> None:
        second.start()
        second.join(1)  # it has to wait for this one, and must not get further
        steps.append("horovod")

    monkeypatch.setattr(bootstrap, "install_horovod", slow)
    bootstrap.set_up(checkout)
    second.join(30)
    assert steps == ["venv", "packages", "horovod"]
    assert "Another set-up of this folder is running" in capsys.readouterr().out
