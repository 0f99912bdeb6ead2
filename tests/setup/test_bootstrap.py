"""The set-up of a fresh machine: what it checks, what it does once, what an interruption leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

from workshop_utils.setup import bootstrap, horovod_build
from workshop_utils.setup.bootstrap import PACKAGES, READY
from workshop_utils.setup.logged_command import SetupError

ROOT = Path(__file__).parents[2]
STEPS = ["venv", "packages", "horovod"]


@pytest.fixture
def checkout(tmp_path):
    """A folder that looks like a fresh clone."""
    (tmp_path / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.11,<3.13"\n')
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
    monkeypatch.setattr(bootstrap, "install_packages", lambda _root: taken.append("packages"))
    monkeypatch.setattr(horovod_build, "install", lambda: taken.append("horovod"))
    monkeypatch.setattr(sys, "prefix", str(checkout / ".venv"))
    return taken


def test_packages_come_first_and_finished_parts_are_not_repeated(checkout, steps, monkeypatch, capsys):
    bootstrap.set_up(checkout, with_horovod=False)
    assert (steps, bootstrap.is_current(checkout, READY)) == (STEPS[:2], False)
    bootstrap.set_up(checkout)
    assert (steps, bootstrap.is_current(checkout, READY)) == (STEPS, True)
    capsys.readouterr()
    bootstrap.set_up(checkout, quiet=True)
    bootstrap.set_up(checkout, with_horovod=False, quiet=True)
    assert (steps, capsys.readouterr().err) == (STEPS, "")
    monkeypatch.setattr(horovod_build, "build_digest", lambda: "new")  # another build repeats that part alone
    bootstrap.set_up(checkout)
    assert steps == [*STEPS, "horovod"]


@pytest.mark.parametrize("change", ["requirements", "lost Python", "move"])
def test_changed_requirements_a_lost_python_or_a_move_require_a_new_set_up(change, checkout, steps):
    bootstrap.set_up(checkout)
    assert steps == STEPS
    if change == "requirements":
        (checkout / "pyproject.toml").write_text('[project]\nrequires-python = ">=3.11,<3.14"\n')
    elif change == "lost Python":
        (checkout / ".venv" / "bin" / "python").unlink()
        (checkout / ".venv" / "bin" / "python").symlink_to("/nowhere/python3.11")
    else:
        checkout = checkout.rename(checkout.with_name("moved"))
    assert not bootstrap.is_current(checkout, READY)
    assert not bootstrap.is_current(checkout, PACKAGES)


@pytest.mark.usefixtures("steps")
def test_everything_missing_is_named_before_anything_is_made(checkout, monkeypatch):
    monkeypatch.setenv("PATH", str(checkout))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(SetupError, match=r"g\+\+, make, patch. Install with:\n.*install g\+\+ make patch"):
        bootstrap.set_up(checkout)
    assert not (checkout / ".venv").exists()


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
    assert not bootstrap.is_usable(first.rename(checkout / "moved") / ".venv", range(11, 13))
