"""The Spark programs: SGD that takes one process's steps, and data that Spark prepares and PyTorch trains on."""

from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from launching import job_of, launched

from workshop_utils.launchers.local import Local
from workshop_utils.launchers.spark import Spark
from workshop_utils.runs import RunFailed
from workshop_utils.training import data

PATIENCE_SECONDS = 240.0

pytestmark = pytest.mark.timeout(600)  # two JVMs and four Pythons for a job, on a busy machine
STEPS, BATCH, RATE = 4, 50, 0.5


@pytest.fixture(autouse=True)
def _leaves_nothing(nothing_is_left: None) -> None:
    pass


def by_one_process() -> tuple[np.ndarray, list[float]]:
    """The weights after the steps, written anew in the plainest way, and each step's loss."""
    found = data.arrays(data.prepare("digits"))
    images = np.round(found.train_images * 255).astype(np.float64) / 255  # exact, as the jobs have them
    labels = found.train_labels
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


def test_sgd_by_partitions_and_a_tree_takes_the_steps_of_one_process_and_of_the_ring(tmp_path: Path) -> None:
    weights, losses = by_one_process()
    steps = {"steps": STEPS, "batch_size": BATCH, "learning_rate": RATE}
    # Nine partitions, which share neither the images nor the batch evenly, on two threads; and three ranks.
    spark = job_of("spark_sgd", timeout="4min", arguments={**steps, "partitions": 9})
    ring = job_of("spark_ring", arguments=steps, workers=3)
    for launcher, job in (
        (Spark(output=tmp_path / spark.name), spark),
        (Local(output=tmp_path / ring.name), ring),
    ):
        with launcher.launch(job) as run:
            run.wait(PATIENCE_SECONDS)
        metrics = run.metrics
        first = metrics[metrics["loss"].notna() & (metrics["rank"] == 0)]
        np.testing.assert_allclose(first["loss"], losses, rtol=1e-9)
        np.testing.assert_allclose(np.load(tmp_path / job.name / "model.npy"), weights, rtol=1e-9, atol=1e-12)
        nbytes = (weights.size + 1) * 8
        if job is spark:
            # A tree of depth 2 over 9 partitions: √9 sums come to the driver.
            assert set(first["partials"]) == {3}
            assert set(first["bytes_received"]) == {3 * nbytes}
        else:
            sent = metrics[metrics["bytes_sent"].notna()].groupby("step")["bytes_sent"].sum()
            assert set(sent) == {2 * (3 - 1) * nbytes}  # 2 (N - 1) / N · K a rank, of N ranks


def test_spark_prepares_parquet_and_every_row_of_it_is_trained_on_once(tmp_path: Path) -> None:
    prepare = job_of("spark_prepare", timeout="4min", arguments={"files": 3})
    with Spark(output=tmp_path / "prepared").launch(prepare) as run:
        run.wait(PATIENCE_SECONDS)
    before, after = run.records
    images = len(data.arrays(data.prepare("digits")).train_labels)
    assert (before["rows"], after["rows"], after["files"]) == (images + 100 + 20, images, 3)
    folder = tmp_path / "prepared" / "train.parquet"
    tables = [pyarrow.parquet.read_table(file) for file in sorted(folder.glob("*.parquet"))]
    counts = [table.num_rows for table in tables]
    assert sum(counts) == images
    assert max(counts) - min(counts) <= 1
    pixels = [row for table in tables for row in table["pixels"].to_pylist()]
    assert len(set(pixels)) == images  # no row twice
    assert all(any(row) for row in pixels)
    labels = tables[0]["label"].to_pylist()
    assert labels != sorted(labels)

    run = launched("spark_parquet", arguments={"parquet": str(folder), "epochs": 8}, workers=2)
    last = run.metrics.groupby("worker").last()
    assert sorted(last["rows"]) == sorted([counts[0] + counts[2], counts[1]])
    assert last["accuracy"].nunique() == 1  # all ranks have the same weights
    assert last["accuracy"].iloc[0] > 0.8


def test_fewer_row_groups_than_workers_are_refused(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"label": [1], "pixels": [b"x"]}), tmp_path / "one.parquet")
    with pytest.raises(RunFailed, match="with 1 row groups; each of 2 workers needs one"):
        launched("spark_parquet", arguments={"parquet": str(tmp_path)}, workers=2)
