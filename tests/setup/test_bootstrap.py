"""The set-up of a fresh machine: what it checks, what it does once, what an interruption leaves."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from workshop_utils.setup import bootstrap, horovod_build
from workshop_utils.setup.bootstrap import ALL, HOROVOD, LAB
from workshop_utils.setup.logged_command import SetupError

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a fresh clone."""
    (tmp_path / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.11,<3.14"\n')
    return tmp_path


@pytest.fixture
def steps(checkout, monkeypatch):
    """Replaces the long steps by ones that only record that they were taken."""
    taken = []

    def make_venv(root):
        taken.append("venv")
        (root / ".venv" / "bin").mkdir(parents=True, exist_ok=True)
        (root / ".venv" / "bin" / "python").touch()

    monkeypatch.setattr(bootstrap, "make_venv", make_venv)
    monkeypatch.setattr(bootstrap, "install_packages", lambda _root, part: taken.append(part))
    monkeypatch.setattr(horovod_build, "missing_build_tools", list)
    monkeypatch.setattr(horovod_build, "install", lambda: taken.append("horovod"))
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    return taken


def test_each_part_builds_on_those_before_it_and_is_not_repeated(checkout, steps, monkeypatch, capsys):
    bootstrap.set_up(checkout, LAB)
    assert (steps, bootstrap.is_current(checkout, ALL)) == (["venv", "lab"], False)
    steps.clear()
    bootstrap.set_up(checkout, HOROVOD)
    assert (steps, bootstrap.is_current(checkout, HOROVOD)) == (["venv", "all", "horovod"], True)
    capsys.readouterr()
    for part in (LAB, ALL, HOROVOD):
        bootstrap.set_up(checkout, part, quiet=True)
    assert (len(steps), capsys.readouterr().err) == (3, "")
    monkeypatch.setattr(horovod_build, "build_digest", lambda: "another")  # repeats that part alone
    bootstrap.set_up(checkout, LAB)
    bootstrap.set_up(checkout, HOROVOD)
    assert steps == ["venv", "all", "horovod", "horovod"]


@pytest.mark.parametrize("change", ["requirements", "lost Python", "move"])
def test_changed_requirements_a_lost_python_or_a_move_require_a_new_set_up(change, checkout, steps):
    bootstrap.set_up(checkout, HOROVOD)
    assert steps == ["venv", "all", "horovod"]
    if change == "requirements":
        (checkout / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.11,<3.15"\n')
    elif change == "lost Python":
        (checkout / ".venv" / "bin" / "python").unlink()
        (checkout / ".venv" / "bin" / "python").symlink_to("/nowhere/python3.11")
    else:
        checkout = checkout.rename(checkout.with_name("moved"))
    assert not any(bootstrap.is_current(checkout, part) for part in (LAB, ALL, HOROVOD))


def test_horovod_is_left_out_with_a_word_where_nothing_can_compile_it(checkout, steps, monkeypatch, capsys):
    monkeypatch.setattr(horovod_build, "missing_build_tools", lambda: ["g++", "make"])
    bootstrap.set_up(checkout, HOROVOD)
    assert steps == ["venv", "all"]
    told = capsys.readouterr().err
    assert "Horovod is left out, since there is no g++, no make" in told
    assert re.search(r"install g\+\+ make", told)
    bootstrap.set_up(checkout, HOROVOD, quiet=True)  # as each target of make does
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("cause", ["a folder that may not be written", "a failed download"])
def test_what_fails_is_told_in_a_sentence_and_the_next_call_goes_on(
    cause, checkout, steps, monkeypatch, capsys
):
    def fail(*_arguments):
        if cause == "a failed download":
            raise SetupError("uv pip failed: dns error")
        raise OSError(30, "Read-only file system", str(checkout / ".venv"))

    working = bootstrap.install_packages
    monkeypatch.setattr(bootstrap, "ROOT", checkout)
    monkeypatch.setattr(bootstrap, "install_packages", fail)
    assert bootstrap.main(["--lab"]) == 1
    told = capsys.readouterr().err
    reason = "dns error" if cause == "a failed download" else ".venv cannot be written: Read-only file system"
    assert "The set-up stopped. " in told
    assert reason in told
    monkeypatch.setattr(bootstrap, "install_packages", working)
    assert bootstrap.main(["--lab"]) == 0
    assert bootstrap.is_current(checkout, LAB)


@pytest.mark.processes
def test_it_starts_with_the_standard_library_alone():
    command = [sys.executable, "-S", "-m", "workshop_utils.setup.bootstrap", "--help"]
    answer = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (answer.returncode, "--without-horovod" in answer.stdout) == (0, True), answer.stderr


@pytest.mark.processes
def test_an_environment_is_kept_unless_it_was_moved(checkout):
    first = checkout / "first"
    first.mkdir()
    (first / "pyproject.toml").write_text((checkout / "pyproject.toml").read_text())
    bootstrap.make_venv(first)
    (first / ".venv" / "mark").touch()
    bootstrap.make_venv(first)
    assert (first / ".venv" / "mark").exists()
    assert not bootstrap.is_usable(first.rename(checkout / "moved") / ".venv", range(11, 14))
