"""What mpirun prints, told apart; and the hosts on which it starts its daemons in an emulated network."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from workshop_utils.jobs import JobError
from workshop_utils.launchers import mpirun
from workshop_utils.processes.ports import PortReservation

SECRET = {"WORKSHOP_SECRET": "of this run"}


def test_a_line_of_a_rank_is_its_worker_s_and_one_without_a_tag_is_mpirun_s():
    assert list(mpirun.lines("mpirun", "[prterun-host-1@1,2]<stderr>: a warning", "stdout")) == [
        ("worker-2", "a warning", "stderr")
    ]
    assert list(mpirun.lines("mpirun", "[1,0]<stdout>: ", "stdout")) == [("worker-0", "", "stdout")]
    assert list(mpirun.lines("mpirun", "prterun noticed", "stderr")) == [
        ("mpirun", "prterun noticed", "stderr")
    ]


def test_the_zeros_at_the_ends_of_ranks_outputs_are_no_lines_and_hide_none():
    assert list(mpirun.lines("mpirun", "[a@1,1]<stderr>: \0[a@1,0]<stderr>: \0", "stderr")) == []
    assert list(mpirun.lines("mpirun", "[a@1,1]<stderr>: \0[a@1,0]<stdout>: last words", "stderr")) == [
        ("worker-0", "last words", "stdout")
    ]


def imitation(folder: Path) -> str:
    """A program `mpirun` in `folder`."""
    folder.mkdir(exist_ok=True)
    (folder / "mpirun").touch(mode=0o755)
    return str(folder / "mpirun")


def test_mpirun_is_this_environment_s_or_else_the_system_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    with pytest.raises(JobError, match=r"^strategy is 'mpi', but there is no mpirun here: install Open MPI"):
        mpirun.program("strategy is 'mpi'")
    system = imitation(tmp_path / "system")
    assert mpirun.program("strategy is 'mpi'") == system
    own = imitation(tmp_path / "bin")
    assert mpirun.program("strategy is 'mpi'") == own


def agent(folder: Path) -> list[str]:
    """The agent as mpirun calls it, but for the host and the command."""
    script = folder / mpirun.AGENT
    script.write_text(mpirun.files()[mpirun.AGENT])
    return ["sh", str(script)]


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch):
    with PortReservation(1) as reservation:
        (number,) = reservation.ports
        monkeypatch.setattr(mpirun, "PORT", number)
        yield number


def host(port: int) -> subprocess.Popen[str]:
    words = [sys.executable, "-I", "-S", str(mpirun.HOST), "serve", "127.0.0.1", str(port)]
    return subprocess.Popen(words, env=SECRET, stdout=subprocess.PIPE, text=True)


def test_a_host_becomes_the_command_that_its_agent_hands_over_and_the_agent_ends_with_it(port, tmp_path):
    with host(port) as served:
        called = subprocess.run(
            [*agent(tmp_path), "127.0.0.1", "GREETING='good day'; export GREETING;", 'echo "$GREETING" $$'],
            env=SECRET | {"PATH": os.environ["PATH"]},
            check=False,
            timeout=60,
        )
        assert called.returncode == 0
        out, _ = served.communicate(timeout=60)
    assert out == f"good day {served.pid}\n"


def test_a_host_takes_no_command_from_who_does_not_know_the_secret(port, tmp_path):
    with host(port) as served:
        words, environment = [*agent(tmp_path), "127.0.0.1"], {"PATH": os.environ["PATH"]}
        stranger = {**environment, "WORKSHOP_SECRET": "a guess"}
        subprocess.run([*words, "echo stranger"], env=stranger, check=True, timeout=60)
        with socket.create_connection(("127.0.0.1", port)) as silent:
            silent.shutdown(socket.SHUT_WR)
        subprocess.run([*words, "echo friend"], env=SECRET | environment, check=True, timeout=60)
        out, _ = served.communicate(timeout=60)
    assert out == "friend\n"
