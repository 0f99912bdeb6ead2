"""Prepare training data in Spark: raw rows in, clean, shuffled Parquet out, as many files as the readers can share.

The rows are the images, with some twice and some without ink, as raw data is. What comes out lies in the model folder,
`train.parquet/`: `label` (one byte) and `pixels` (the image's bytes), in files of equal size. The driver reports how
many `rows` there were before and after, and how many `files` there are.
"""

import argparse
import sys
import time

from pyspark.sql import SparkSession
from pyspark.sql import functions as column

from workshop_utils import place


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--files", type=int, default=4, help="of equal size, in one of which each row lies")
    parser.add_argument("--repeated", type=int, default=100, help="rows that are in the raw data twice")
    parser.add_argument("--blank", type=int, default=20, help="rows without ink in the raw data")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if given.files < 1:
        parser.error(f"files is {given.files}; it must be at least 1")
    return given


def raw_rows(given: argparse.Namespace) -> list[tuple[int, int, bytearray]]:
    """Number, label and pixels of each row: what a first export gives."""
    examples = place.load("train")
    size = examples.height * examples.width
    rows = [
        (index, examples.labels[index], bytearray(examples.images[index * size : (index + 1) * size]))
        for index in range(examples.count)
    ]
    if not 0 <= given.repeated <= len(rows):
        sys.exit(f"repeated is {given.repeated}; it must be from 0 to {len(rows)}, the number of images")
    repeated = [(len(rows) + number, *rows[number][1:]) for number in range(given.repeated)]
    blank = [(2 * len(rows) + number, 0, bytearray(size)) for number in range(given.blank)]
    return rows + repeated + blank


def main() -> None:
    given = options()
    here = place.here()
    session = SparkSession.builder.getOrCreate()
    session.conf.set("spark.sql.shuffle.partitions", str(given.files))
    started = time.perf_counter()
    raw = session.createDataFrame(raw_rows(given), "number long, label byte, pixels binary")
    inked = raw.filter(column.length(column.regexp_replace(column.hex("pixels"), "0", "")) > 0)
    clean = inked.groupBy("label", "pixels").agg(column.min("number").alias("number"))
    # A hash of the row's number as its place: the same shuffle whatever the number of partitions before.
    shuffled = clean.orderBy(column.xxhash64("number", column.lit(given.seed)))
    kept = shuffled.rdd.zipWithIndex().map(lambda pair: (pair[1], pair[0]["label"], pair[0]["pixels"]))
    placed = session.createDataFrame(kept, "place long, label byte, pixels binary")
    folder = here.model_folder / "train.parquet"
    (
        placed.withColumn("file", column.col("place") % given.files)
        .repartitionByRange(given.files, "file")
        .sortWithinPartitions("place")
        .select("label", "pixels")
        .write.mode("overwrite")
        .parquet(f"file:{folder}")
    )
    written = session.read.parquet(f"file:{folder}").count()
    files = len(list(folder.glob("*.parquet")))
    place.report(step=1, rows=raw.count(), files=0)
    place.report(step=2, rows=written, files=files, seconds_taken=time.perf_counter() - started)
    session.stop()


if __name__ == "__main__":
    main()
