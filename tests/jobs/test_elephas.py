"""Elephas in its own environment: a mode with a server trains, and what it would let pass is refused."""

import contextlib
import shutil
from pathlib import Path

import psutil
import pytest

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.spark import Spark
from workshop_utils.launchers.spark.launcher import environment_of
from workshop_utils.runs import RunState

JOB = Path(__file__).parents[2] / "jobs" / "elephas_digits"
PATIENCE_SECONDS = 280.0
# One driver for all, since loading TensorFlow and starting a JVM take longer than training.
DRIVER = f"""
import runpy, sys

too_large = [[mode, "--batch-size", "750"] for mode in ("synchronous", "asynchronous", "hogwild")]
for words in (*too_large, ["asynchronous", "--epochs", "3"]):
    sys.argv = ["train.py", "--mode", *words]
    try:
        runpy.run_path("{JOB}/train.py", run_name="__main__")
    except SystemExit as refused:
        print(refused)
"""


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.usefixtures("nothing_is_left")
def test_a_partition_that_would_be_skipped_is_refused_in_every_mode_and_the_asynchronous_one_trains_on_loopback(
    tmp_path,
):  # lesson 14 runs the synchronous one, too
    folder = tmp_path / JOB.name  # which names the environment, too
    shutil.copytree(JOB, folder)
    (folder / "train.py").write_text(DRIVER)
    job = TrainingJob.load(folder)
    environment = environment_of(job)
    assert environment is not None
    environment.build()  # most of the time that this test takes on a fresh machine
    addresses = set()
    with Spark().launch(job) as run:
        while run.state is RunState.RUNNING:
            with contextlib.suppress(psutil.NoSuchProcess, KeyError):
                driver = psutil.Process(run.process_ids["driver-0"])
                for process in (driver, *driver.children(recursive=True)):
                    listening = [each for each in process.net_connections("inet") if each.status == "LISTEN"]
                    addresses |= {each.laddr.ip.removeprefix("::ffff:") for each in listening}
            with contextlib.suppress(TimeoutError):
                run.wait(0.5)
        run.wait(PATIENCE_SECONDS)
    assert addresses == {"127.0.0.1"}  # Spark's, and the parameter server's
    (record,) = run.records
    assert record["accuracy"] > 0.5  # guessing gives a tenth; which worker comes when decides the rest
    lines = [line.text for line in run.logs()]
    assert sum("must have more than a batch, or Elephas skips it" in line for line in lines) == 3
    assert any("Async training complete" in line for line in lines)
