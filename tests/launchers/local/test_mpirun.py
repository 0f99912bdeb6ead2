"""What mpirun prints, told apart; and the hosts on which it starts its daemons in an emulated network."""

import socket
import subprocess
import sys

import pytest

from workshop_utils.jobs import JobError
from workshop_utils.launchers import output
from workshop_utils.launchers.local.environment import PROGRAMS, mpirun_program
from workshop_utils.network.ports import PortReservation


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("[prterun-host-1@1,2]<stderr>: a warning", [("worker-2", "a warning", "stderr")]),
        ("[1,0]<stdout>: ", [("worker-0", "", "stdout")]),
        ("prterun noticed", [("mpirun", "prterun noticed", "stderr")]),
        # The zeros at the ends of ranks' outputs are no lines, and hide none.
        ("[a@1,1]<stderr>: \0[a@1,0]<stderr>: \0", []),
        ("[a@1,1]<stderr>: \0[a@1,0]<stdout>: last words", [("worker-0", "last words", "stdout")]),
    ],
)
def test_a_line_of_a_rank_is_its_worker_s_and_one_without_a_tag_is_mpirun_s(text, lines):
    assert list(output.attributed("mpirun", text, "stderr")) == lines


def test_mpirun_is_this_environment_s_or_else_the_system_s(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    with pytest.raises(JobError, match=r"^strategy is 'mpi', but there is no mpirun here: install Open MPI"):
        mpirun_program("strategy is 'mpi'")
    for folder in (tmp_path / "system", tmp_path / "bin"):  # what is looked for last comes first
        folder.mkdir()
        (folder / "mpirun").touch(mode=0o755)
        assert mpirun_program("strategy is 'mpi'") == str(folder / "mpirun")


def test_a_host_takes_no_command_from_who_does_not_know_the_secret():
    program = [sys.executable, "-I", "-S", str(PROGRAMS / "mpi_host.py")]
    friend, stranger = {"WORKSHOP_SECRET": "of this run"}, {"WORKSHOP_SECRET": "a guess"}
    with PortReservation(1) as reservation:
        (port,) = reservation.ports
        call = [*program, "call", str(port), "127.0.0.1"]
        serve = [*program, "serve", "127.0.0.1", str(port)]
        with subprocess.Popen(serve, env=friend, stdout=subprocess.PIPE, text=True) as host:
            subprocess.run([*call, "echo stranger"], env=stranger, check=True, timeout=60)
            with socket.create_connection(("127.0.0.1", port)) as silent:
                silent.shutdown(socket.SHUT_WR)
            subprocess.run([*call, "echo friend"], env=friend, check=True, timeout=60)
            out, _ = host.communicate(timeout=60)
    assert out == "friend\n"
