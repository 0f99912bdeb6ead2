"""The mnist jobs of Horovod and MPI end, and say why, under a launcher, settings or data that are not theirs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launching import JOBS

from workshop_utils.strategies import MPI_FOLDERS
from workshop_utils.training import data

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture
def digits(tmp_path):
    """A copy of the digits, for a test to change."""
    return Path(shutil.copytree(data.prepare("digits"), tmp_path / "digits"))


def ended(command, tmp_path, **variables):
    """What `command` has printed and returned; Open MPI's own files go to `tmp_path`."""
    environment = {**os.environ, **dict.fromkeys(MPI_FOLDERS, str(tmp_path)), **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("name", "who", "launcher"),
    [("mnist_horovod", "Horovod", "horovodrun or mpirun"), ("mnist_mpi", "MPI", "mpirun")],
)
def test_under_torchrun_the_job_names_both_counts_and_the_right_launcher(name, who, launcher, tmp_path):
    # All that a script sees of torchrun, which itself would listen on every interface.
    torchrun = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    script = [sys.executable, JOBS / name / "train.py"]
    result = ended(script, tmp_path, WORKSHOP_DATA=str(data.prepare("digits")), **torchrun)
    assert result.returncode == 1
    assert f"started 2 workers, but {who} connects 1; start the job with {launcher}" in result.stderr
    assert "Traceback" not in result.stderr


def change_last_label(folder, to):
    labels = folder / "train-labels-idx1-ubyte"
    labels.write_bytes(labels.read_bytes()[:-1] + bytes([to]))


@pytest.mark.parametrize("name", ["mnist_horovod", "mnist_mpi"])
def test_without_a_launcher_a_label_that_the_network_cannot_predict_is_refused(name, digits, tmp_path):
    change_last_label(digits, to=10)
    result = ended([sys.executable, JOBS / name / "train.py"], tmp_path, WORKSHOP_DATA=str(digits))
    assert "the data has the label 10; the network tells only 0 to 9 apart" in result.stderr
    assert "Traceback" not in result.stderr
