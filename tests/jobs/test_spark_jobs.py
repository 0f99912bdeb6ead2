"""The Spark programs: SGD that takes one process's steps, and data that Spark prepares and PyTorch trains on.

They run one after another in one driver, since starting a JVM takes longer than all of them.
"""

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from launching import JOBS, launched

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.spark import Spark
from workshop_utils.runs import RunFailed
from workshop_utils.training import data

PATIENCE_SECONDS = 240.0

pytestmark = [pytest.mark.timeout(600), pytest.mark.usefixtures("nothing_is_left")]
STEPS, BATCH, RATE = 4, 50, 0.5
SGD = f"--steps {STEPS} --batch-size {BATCH} --learning-rate {RATE}"
# Nine partitions, which share neither the images nor the batch evenly, on two threads.
PROGRAMS = (("spark_sgd", f"{SGD} --partitions 9"), ("spark_prepare", "--files 3"))
DRIVER = """
import runpy, sys

for program, words in {programs!r}:
    sys.argv = [program, *words.split()]
    runpy.run_path(f"{jobs}/{{program}}/train.py", run_name="__main__")
raise SystemExit("the driver has had enough")
"""


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """The run of both programs, which fails at last, and the folder in which their results are."""
    folder = tmp_path_factory.mktemp("programs")
    (folder / "train.py").write_text(DRIVER.format(programs=PROGRAMS, jobs=JOBS))
    fields = {"strategy": "spark_program", "workers": 2, "outputs": str(folder / "out"), "timeout": "4min"}
    job = TrainingJob(name="programs", folder=folder, **fields)
    with Spark().launch(job) as run, pytest.raises(RunFailed):
        run.wait(PATIENCE_SECONDS)
    return run, folder / "out"


def by_one_process():
    """The weights after the steps, computed in the plainest way, and each step's loss."""
    arrays = data.arrays(data.prepare("digits"))
    images = np.round(arrays.train_images * 255).astype(np.float64) / 255  # exact, as the jobs have them
    labels = arrays.train_labels
    weights, losses = np.zeros((images.shape[1], 10)), []
    for step in range(STEPS):
        rows = np.arange(step * BATCH, (step + 1) * BATCH) % len(images)
        x, y = images[rows], labels[rows]
        p = np.exp(x @ weights)
        p /= p.sum(axis=1, keepdims=True)
        losses.append(float(-np.log(p[np.arange(BATCH), y]).mean()))
        p[np.arange(BATCH), y] -= 1
        weights -= RATE * x.T @ p / BATCH
    return weights, losses


def test_sgd_by_partitions_and_a_tree_takes_the_steps_of_one_process_and_of_the_ring(programs, tmp_path):
    weights, losses = by_one_process()
    spark, folder = programs
    steps = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}
    ring = launched("spark_ring", tmp_path, warm=False, arguments=steps, workers=3)
    for run, model in ((spark, folder), (ring, tmp_path)):
        metrics = run.metrics
        first = metrics[metrics["loss"].notna() & (metrics["rank"] == 0)]
        np.testing.assert_allclose(first["loss"], losses, rtol=1e-9)
        np.testing.assert_allclose(np.load(model / "model.npy"), weights, rtol=1e-9, atol=1e-12)
    nbytes = (weights.size + 1) * 8
    metrics = spark.metrics[spark.metrics["loss"].notna()]
    # A tree of depth 2 over 9 partitions: √9 sums come to the driver.
    assert set(metrics["partials"]) == {3}
    assert set(metrics["bytes_received"]) == {3 * nbytes}
    sent = ring.metrics[ring.metrics["bytes_sent"].notna()].groupby("step")["bytes_sent"].sum()
    assert set(sent) == {2 * (3 - 1) * nbytes}  # 2 (N - 1) / N · K a rank, of N ranks


def test_spark_prepares_parquet_and_every_row_of_it_is_trained_on_once(programs):
    run, folder = programs
    before, after = (record for record in run.records if "rows" in record)
    images = len(data.arrays(data.prepare("digits")).train_labels)
    assert (before["rows"], after["rows"], after["files"]) == (images + 100 + 20, images, 3)
    tables = [
        pyarrow.parquet.read_table(file) for file in sorted((folder / "train.parquet").glob("*.parquet"))
    ]
    counts = [table.num_rows for table in tables]
    assert sum(counts) == images
    assert max(counts) - min(counts) <= 1
    pixels = [row for table in tables for row in table["pixels"].to_pylist()]
    assert len(set(pixels)) == images  # no row twice
    assert all(any(row) for row in pixels)
    labels = tables[0]["label"].to_pylist()
    assert labels != sorted(labels)

    arguments = {"parquet": str(folder / "train.parquet"), "epochs": 8}
    reading = launched("spark_parquet", arguments=arguments, workers=2)
    last = reading.metrics.groupby("worker").last()
    assert sorted(last["rows"]) == sorted([counts[0] + counts[2], counts[1]])
    assert last["accuracy"].nunique() == 1  # all ranks have the same weights
    assert last["accuracy"].iloc[0] > 0.8


def test_fewer_row_groups_than_workers_are_refused(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"label": [1], "pixels": [b"x"]}), tmp_path / "one.parquet")
    with pytest.raises(RunFailed, match="with 1 row groups; each of 2 workers needs one"):
        launched("spark_parquet", arguments={"parquet": str(tmp_path)}, workers=2)


def test_a_spark_program_that_fails_is_blamed_with_its_last_lines(programs):
    run, _ = programs
    assert "programs failed: driver-0 ended with exit code 1" in run.reason
    assert run.reason.endswith("\n  the driver has had enough")
