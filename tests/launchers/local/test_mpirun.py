"""What mpirun prints, attributed to ranks; and where mpirun is."""

import sys

import pytest
from conftest import eventually

from workshop_utils.jobs import JobError
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.local.environment import mpirun_program
from workshop_utils.runs import RunState, attributed


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


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_is_left")
def test_an_mpirun_that_outlives_its_ranks_is_ended_with_a_sentence_and_no_other(
    make_job, tmp_path, monkeypatch
):
    job = make_job("", strategy="mpi", workers=1)

    def launched(name, script):
        program = tmp_path / name / "bin" / "mpirun"
        program.parent.mkdir(parents=True)
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        monkeypatch.setattr(sys, "prefix", str(tmp_path / name))
        return Local().launch(job)

    forgetful = "echo '[1,0]<stdout>: done'; sleep 3; exec sleep 1000"  # its one child is the rank
    with (
        launched("silent rank", "sleep 1000") as silent,
        launched("no rank yet", "exec sleep 1000") as slow,
        launched("no rank left", forgetful) as hanging,
    ):
        assert eventually(lambda: hanging.state is RunState.FAILED)
        assert (silent.state, slow.state) == (RunState.RUNNING, RunState.RUNNING)
    ended = "mpirun had not ended 5 s after its last rank, and was stopped; whether its ranks succeeded is not known"
    assert hanging.reason.startswith(f"{job.name} failed: {ended}. Its last lines:\n  ")
    assert "done" in hanging.reason
