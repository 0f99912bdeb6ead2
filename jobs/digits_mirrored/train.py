"""Train a small network on handwritten digits with MirroredStrategy: one process, a mirror of it on every device.

The replicas are on the machine's GPUs. Where there are none, the processor is cut into `--replicas` logical devices:
the same code runs, and the replicas are threads that share the cores. It has been run on CPUs; what concerns GPUs has
not been run.

Keras's own `fit` is the training loop. Of TensorFlow's strategies, Keras 3 takes this one (its guide "Multi-GPU
distributed training with TensorFlow", https://keras.io/guides/distributed_training_with_tensorflow), so the jobs with
other strategies have loops of their own. The embedded `data: digits` are scikit-learn's, of 8 × 8 pixels; `data: mnist`
is the real thing.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

# TensorFlow writes to the log while it is loaded; level 2 leaves its errors. oneDNN would add a notice of its own.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import keras
import numpy as np
import tensorflow as tf

from workshop_utils import place


def choose_devices(here: place.Place, replicas: int) -> list[str]:
    """The devices of the replicas: as many GPUs, or as many parts of the processor where there is no GPU.

    Raises:
        ValueError: if there are GPUs, but not as many as replicas.
    """
    if here.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
        tf.config.threading.set_intra_op_parallelism_threads(
            1
        )  # a replica has one thread, as a worker elsewhere
        (processor,) = tf.config.list_physical_devices("CPU")
        parts = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
        tf.config.set_logical_device_configuration(processor, parts)
        return [f"CPU:{index}" for index in range(replicas)]
    gpus = tf.config.list_physical_devices("GPU")
    if len(gpus) != replicas:  # one that is left over would be idle
        raise ValueError(
            f"replicas is {replicas}; this process has {len(gpus)} GPU(s) for them: launch it with --gpus {replicas}, "
            f"with -a replicas={len(gpus)}, or, to train on the CPU, with --gpus 0"
        )
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)  # otherwise it takes all of its memory at once
    return [f"GPU:{index}" for index in range(replicas)]


def initial_weights(pixels: int, hidden: int, seed: int) -> list[tf.Tensor]:
    """Two dense layers, as Glorot and Bengio (2010, equation 16) draw them."""
    weights = []
    for layer, (inputs, outputs) in enumerate([(pixels, hidden), (hidden, 10)]):
        limit = (6 / (inputs + outputs)) ** 0.5
        weights.append(tf.random.stateless_uniform((inputs, outputs), (seed, layer), -limit, limit))
        weights.append(tf.zeros(outputs))
    return weights


def batches_of(
    images: tf.Tensor, labels: tf.Tensor, replicas: int, steps: int, options: argparse.Namespace
) -> tf.data.Dataset:
    """The batches of all epochs, each for all replicas together: one after the other they take their parts of it."""

    def rows_of(epoch: tf.Tensor) -> tf.data.Dataset:
        order = tf.random.experimental.stateless_shuffle(tf.range(len(images)), (options.seed, epoch))
        # Every `replicas`-th example of the epoch is one replica's, as where workers are processes.
        columns = tf.reshape(order[: steps * options.batch_size * replicas], (steps, -1, replicas))
        return tf.data.Dataset.from_tensor_slices(tf.reshape(tf.transpose(columns, (0, 2, 1)), (steps, -1)))

    rows = tf.data.Dataset.range(1, options.epochs + 1).flat_map(rows_of)
    batches = rows.map(lambda batch: (tf.gather(images, batch), tf.gather(labels, batch)))
    # AutoShard decides which examples of a dataset each worker reads. Here is one worker, so there is nothing to
    # divide. Several workers that make the same dataset would need DATA, which gives each of them every N-th element.
    settings = tf.data.Options()
    settings.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    # A batch is quickly made, and the replicas need the cores: one thread, and nothing that tunes how many there are.
    settings.threading.private_threadpool_size = 1
    settings.autotune.enabled = False
    return batches.with_options(settings)


class Reports(keras.callbacks.Callback):
    """Reports, while `fit` trains: loss (the mean since the epoch began), throughput, and a test after each epoch."""

    def __init__(self, batch: int, total: int, test: Callable[[], tuple[Any, Any]]) -> None:
        """`batch` is how many examples a step takes, `total` how many steps there are."""
        super().__init__()
        self.batch, self.total, self.test = batch, total, test
        self.step, self.epoch, self.since = 0, 0, 0.0

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        self.epoch = epoch + 1

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        self.step += 1
        loss = (logs or {})["loss"]
        if self.step == 1:  # its time is that of tracing, so the clock starts after it
            mirrors = [each.device.partition("GPU:")[2] for each in self.model.weights[0].value.values]
            device = ", ".join(f"cuda:{gpu}" if gpu else "cpu" for gpu in dict.fromkeys(mirrors))
            place.report(step=1, loss=loss, epoch=self.epoch, device=device)
            self.since = time.perf_counter()
        elif self.step % max(1, self.total // 20) == 0:
            speed = (
                (self.step - 1) * self.batch / (time.perf_counter() - self.since)
            )  # of all replicas together
            place.report(step=self.step, loss=loss, samples_per_second=speed, epoch=self.epoch)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        paused = time.perf_counter()
        test_loss, accuracy = self.test()
        place.report(step=self.step, test_loss=test_loss, accuracy=accuracy, epoch=self.epoch)
        self.since += time.perf_counter() - paused  # testing is not training


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a replica takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of a step of all replicas")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=2, help="devices on which to train")
    options = parser.parse_args()
    if options.replicas < 1:
        sys.exit(f"replicas is {options.replicas}; it must be at least 1")

    tf.get_logger().setLevel("ERROR")
    strategy = tf.distribute.MirroredStrategy(choose_devices(here, options.replicas))
    replicas = strategy.num_replicas_in_sync

    with tf.device("CPU:0"):  # where batches are made
        images, labels = map(tf.constant, place.load("train").arrays())
    test_images, test_labels = map(tf.constant, place.load("test").arrays())
    share = len(images) // replicas
    steps = share // options.batch_size  # an epoch; the remainder is dropped; the next epoch shuffles again
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {replicas} replicas has only {share} images")

    with strategy.scope():  # variables made here have a mirror on every device
        layers = [keras.layers.Dense(options.hidden, "relu"), keras.layers.Dense(10)]
        model = keras.Sequential([keras.Input((images.shape[1],)), *layers])
        model.set_weights(initial_weights(images.shape[1], options.hidden, options.seed))
        model.compile(
            optimizer=keras.optimizers.SGD(options.learning_rate, options.momentum),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            jit_compile=False,  # XLA would compile for seconds
        )
    for name, variable in zip(("w1", "b1", "w2", "b2"), model.weights, strict=True):
        for mirror in variable.value.values:
            print(f"variable {name} on {mirror.device}")

    @tf.function  # Keras's `evaluate` would cut the test set into one part for each replica, and fails if one is larger
    def test() -> tuple[tf.Tensor, tf.Tensor]:
        scores = model(test_images)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(test_labels, scores)
        hits = tf.cast(tf.argmax(scores, axis=1) == test_labels, tf.float32)
        return tf.reduce_mean(losses), tf.reduce_mean(hits)

    place.report(step=0, test_loss=test()[0], epoch=0)
    model.fit(
        batches_of(images, labels, replicas, steps, options),
        epochs=options.epochs,
        steps_per_epoch=steps,
        shuffle=False,  # the batches are in their order already
        callbacks=[Reports(options.batch_size * replicas, steps * options.epochs, test)],
        verbose=0,
    )

    here.model_folder.mkdir(parents=True, exist_ok=True)
    w1, b1, w2, b2 = model.get_weights()
    np.savez(here.model_folder / "model.npz", w1=w1, b1=b1, w2=w2, b2=b2)


if __name__ == "__main__":
    main()
