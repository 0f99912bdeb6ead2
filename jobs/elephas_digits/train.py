"""Train a Keras model on Spark with Elephas, in each of its three modes.

    export SPARK_LOCAL_IP=127.0.0.1 PYSPARK_PYTHON=ENVIRONMENT/bin/python
    spark-submit --master 'local[2]' train.py --data FOLDER

ENVIRONMENT has the packages of `requirements.txt`, FOLDER images and labels in the four files of MNIST.

`synchronous`: every epoch each partition trains a copy, and the driver adds the mean of what they have changed.
`asynchronous` and `hogwild`: a parameter server in a process beside the driver, which adds the whole of each change;
workers read from and write to it over http as they please, with hogwild without locks. So the same learning rate takes
longer steps there. For each mode, and each seed from 0, the driver prints a line of JSON: loss and accuracy on the test
images.

What Elephas 7.3 would let pass is refused here, or put right; each place says why.
"""

import argparse
import contextlib
import json
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from elephas.spark_model import AsynchronousSparkModel, SparkModel
from elephas.utils.rdd_utils import to_simple_rdd
from pyspark.sql import SparkSession
from tensorflow import keras

CLASSES = 10
MODES = ("synchronous", "asynchronous", "hogwild")
LOOPBACK = "127.0.0.1"


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--data", type=Path, required=True, help="a folder with images and labels")
    parser.add_argument("--mode", default="synchronous", help=f"{', '.join(MODES)}; or several, with commas")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--learning-rate", default="0.1", help="of all modes; or one for each, with commas")
    parser.add_argument(
        "--seeds", type=int, default=1, help="trainings, each with initial weights of its own"
    )
    given = parser.parse_args()
    given.modes = given.mode.split(",")
    if unknown := set(given.modes) - set(MODES):
        parser.error(f"mode is {given.mode!r}; {min(unknown)!r} is none of {', '.join(MODES)}")
    rates = [float(rate) for rate in given.learning_rate.split(",")]
    given.rates = rates * len(given.modes) if len(rates) == 1 else rates
    if len(given.rates) != len(given.modes):
        parser.error(f"learning-rate is {given.learning_rate!r}; it must be one, or one for each mode")
    for name in ("epochs", "batch_size", "seeds"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    return given


def load(folder: Path, split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in [0, 1], shape (count, pixels), and labels as rows with a one, shape (count, classes)."""
    labels = np.fromfile(folder / f"{split}-labels-idx1-ubyte", np.uint8, offset=8)
    images = np.fromfile(folder / f"{split}-images-idx3-ubyte", np.uint8, offset=16)
    return images.reshape(len(labels), -1) / np.float32(255), np.eye(CLASSES, dtype=np.float32)[labels]


def network(pixels: int, rate: float, seed: int) -> Any:
    """A perceptron with one hidden layer."""
    keras.utils.set_random_seed(seed)
    layers = [keras.layers.Dense(64, activation="relu"), keras.layers.Dense(CLASSES, activation="softmax")]
    model = keras.Sequential([keras.Input((pixels,)), *layers])
    model.compile(keras.optimizers.SGD(rate), "categorical_crossentropy", ["accuracy"])
    return model


def free_port() -> int:
    with socket.create_server((LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextlib.contextmanager
def distributed(model: Any, mode: str, given: argparse.Namespace, partitions: int) -> Iterator[Any]:
    """Elephas's model, such that nothing of it is left afterwards."""
    if mode == "synchronous":
        # SparkModel takes `mode` too, and forgets it: SparkModel(mode="asynchronous") trains synchronously.
        yield SparkModel(model, num_workers=partitions, batch_size=given.batch_size)
        return
    # The server listens where SPARK_LOCAL_IP says; without it, on the address of the host's name. Who reaches its port
    # can read and change the weights: nobody is asked for a password.
    if os.environ.get("SPARK_LOCAL_IP") != LOOPBACK:
        sys.exit(
            f"SPARK_LOCAL_IP is {os.environ.get('SPARK_LOCAL_IP')!r}; it must be {LOOPBACK}, since the parameter "
            f"server of mode {mode!r} lets everybody in: use a master on this machine, or mode synchronous"
        )
    elephas = AsynchronousSparkModel(
        model,
        num_workers=partitions,
        batch_size=given.batch_size,
        mode=mode,
        # The other, by plain sockets, leaves threads that spin, and now and then never ends.
        parameter_server_mode="http",
        port=free_port(),
    )
    server = elephas.parameter_server
    logging.getLogger("werkzeug").setLevel(logging.ERROR)  # otherwise a line for every visit
    server.debug = False  # on by default: error pages that run Python once their PIN is typed
    try:
        yield elephas
    finally:
        # Elephas stops it only after a training that went well; otherwise it would stay, and the driver wait for it.
        with contextlib.suppress(ValueError):  # it has been stopped, and closed
            if server.server.is_alive():
                server.stop()


def refuse_skipped_partitions(rdd: Any, partitions: int, batch_size: int) -> None:
    """Exit where a partition, as Elephas will cut them, has no more rows than a batch.

    Elephas trains nothing on such a one, in any mode, and reports success (`worker.py`: `x_train.shape[0] > ...`).
    """
    sizes = rdd.repartition(partitions).mapPartitions(lambda rows: [sum(1 for _ in rows)]).collect()
    if min(sizes) <= batch_size:
        sys.exit(
            f"batch-size is {batch_size}; the smallest of {partitions} partitions has {min(sizes)} rows, and must "
            "have more than a batch, or Elephas skips it: use fewer cores, or smaller batches"
        )


def main() -> None:
    given = options()
    images, labels = load(given.data, "train")
    test_images, test_labels = load(given.data, "t10k")
    session = SparkSession.builder.getOrCreate()
    context = session.sparkContext
    partitions = context.defaultParallelism
    rdd = to_simple_rdd(context, images, labels)
    refuse_skipped_partitions(rdd, partitions, given.batch_size)
    for mode, rate, seed in (
        (mode, rate, seed)
        for mode, rate in zip(given.modes, given.rates, strict=True)
        for seed in range(given.seeds)
    ):
        model = network(images.shape[1], rate, seed)
        with distributed(model, mode, given, partitions) as elephas:
            elephas.fit(
                rdd, epochs=given.epochs, batch_size=given.batch_size, verbose=0, validation_split=0.0
            )
            trained = elephas.master_network
        predicted = trained.predict(test_images, verbose=0)
        loss = float(-np.log((predicted * test_labels).sum(axis=1)).mean())
        accuracy = float((predicted.argmax(axis=1) == test_labels.argmax(axis=1)).mean())
        print(json.dumps({"mode": mode, "rate": rate, "seed": seed, "loss": loss, "accuracy": accuracy}))
    session.stop()


if __name__ == "__main__":
    main()
