"""What mpirun prints, attributed to ranks; and where mpirun is."""

import sys

import pytest

from workshop_utils.jobs import JobError
from workshop_utils.launchers.local.environment import mpirun_program
from workshop_utils.runs import attributed


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
    assert list(attributed("mpirun", text, "stderr")) == lines


def test_mpirun_is_this_environment_s_or_else_the_system_s(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path / "system"))
    with pytest.raises(JobError, match=r"^strategy is 'mpi', but there is no mpirun here: install Open MPI"):
        mpirun_program("strategy is 'mpi'")
    for folder in (tmp_path / "system", tmp_path / "bin"):  # what is looked for last comes first
        folder.mkdir()
        (folder / "mpirun").touch(mode=0o755)
        assert mpirun_program("strategy is 'mpi'") == str(folder / "mpirun")
