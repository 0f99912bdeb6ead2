"""Horovod under Keras's own `fit`: an optimizer that averages gradients, and callbacks for the rest.

Horovod's Keras module was written for Keras 2. With Keras 3 its callbacks raise errors, and its optimizer silently
averages nothing. What they should do fits into a few lines each, which stand here.
"""

import argparse
import itertools
import math
import os
import random
import sys
import time
from typing import Any

# TensorFlow writes to the log while it is loaded; level 2 leaves its errors. oneDNN would add a notice of its own.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from workshop_utils import place

Logs = dict[str, float] | None


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.2, help="of one worker; N take N times it")
    parser.add_argument(
        "--warmup-epochs", type=float, default=1, help="until the learning rate is N times as high"
    )
    parser.add_argument("--hidden", type=int, default=64, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


class DistributedSGD(keras.optimizers.SGD):
    """Gradient descent with the average of all ranks' gradients, which meet here and nowhere else."""

    def apply(self, grads: list[tf.Tensor], trainable_variables: Any = None) -> None:
        """All gradients as one group, so that they are sent together."""
        grads = hvd.grouped_allreduce(list(grads), op=hvd.Average)
        super().apply(grads, trainable_variables)


class BroadcastOfState(keras.callbacks.Callback):
    """Before the first step all ranks take over the weights of rank 0, and its optimizer's state."""

    def on_train_begin(self, logs: Logs = None) -> None:
        self.model.optimizer.build(self.model.trainable_variables)
        states = [*self.model.variables, *self.model.optimizer.variables]
        hvd.broadcast_variables([state.value for state in states], root_rank=0)


class WarmUp(keras.callbacks.Callback):
    """From the learning rate of one worker to N times it (Goyal et al. 2017, sections 2.1 and 2.2)."""

    def __init__(self, learning_rate: float, steps: int) -> None:
        super().__init__()
        self.learning_rate, self.steps, self.step = learning_rate, max(1, steps), 0

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        grown = 1 + (hvd.size() - 1) * min(1.0, self.step / self.steps)
        self.model.optimizer.learning_rate = self.learning_rate * grown
        self.step += 1


class Shuffle(keras.callbacks.Callback):
    """Each epoch takes the examples in another order."""

    def __init__(self, data: "Batches") -> None:
        super().__init__()
        self.data = data

    def on_epoch_begin(self, epoch: int, logs: Logs = None) -> None:
        self.data.shuffle(epoch + 1)


class Report(keras.callbacks.Callback):
    """Each rank's own figures as it goes, and the averages over all ranks after each epoch."""

    def __init__(self, data: "Batches") -> None:
        super().__init__()
        self.data = data
        self.step, self.samples, self.since, self.loss = 0, 0, time.perf_counter(), 0.0

    def on_train_batch_begin(self, batch: int, logs: Logs = None) -> None:
        self.model.reset_metrics()  # otherwise the loss would be the mean of the epoch so far

    def on_train_batch_end(self, batch: int, logs: Logs = None) -> None:
        self.step, self.samples = self.step + 1, self.samples + self.data.batch_size
        self.loss = float((logs or {})["loss"])
        if self.step == 1 or self.step % len(self.data) % max(1, len(self.data) // 4) == 0:
            speed = (
                {"samples_per_second": self.samples / (time.perf_counter() - self.since)}
                if self.step > 1
                else {}
            )
            learning_rate = float(self.model.optimizer.learning_rate)
            place.report(
                self.step, loss=self.loss, learning_rate=learning_rate, epoch=self.data.epoch, **speed
            )
            self.samples, self.since = 0, time.perf_counter()

    def on_test_begin(self, logs: Logs = None) -> None:
        self.paused = time.perf_counter()  # testing is not training

    def on_epoch_end(self, epoch: int, logs: Logs = None) -> None:
        correct = tf.constant((logs or {})["val_accuracy"]) * len(self.data.test_labels)
        accuracy = hvd.allreduce(correct, op=hvd.Sum) / self.data.tests  # the ranks' shares differ in size
        mean_loss = hvd.allreduce(tf.constant(self.loss), op=hvd.Average)
        if hvd.rank() == 0:
            place.report(self.step, accuracy=accuracy, mean_loss=mean_loss, epoch=epoch + 1)
        self.since += time.perf_counter() - self.paused


class Batches(keras.utils.PyDataset):
    """This rank's batches; each epoch the examples are shuffled alike on all ranks, and each takes its share."""

    def __init__(self, batch_size: int, seed: int) -> None:
        super().__init__()
        self.images, self.labels = place.load("train").arrays()
        test_images, test_labels = place.load("test").arrays()
        rank, self.world_size = hvd.rank(), hvd.size()
        self.test_images, self.test_labels = (
            test_images[rank :: self.world_size],
            test_labels[rank :: self.world_size],
        )
        self.tests = len(test_labels)
        self.batch_size, self.seed = batch_size, seed
        self.shuffle(1)

    def shuffle(self, epoch: int) -> None:
        """Shuffle for `epoch`, counted from 1."""
        self.epoch = epoch
        order = list(range(len(self.images)))
        random.Random(self.seed + self.epoch).shuffle(order)
        self.mine = order[hvd.rank() :: self.world_size]

    def __len__(self) -> int:
        return len(self.images) // self.world_size // self.batch_size  # the rest waits for the next shuffle

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        batch = self.mine[index * self.batch_size : (index + 1) * self.batch_size]
        return self.images[batch], self.labels[batch]


def initial_weights(sizes: list[int], seed: int) -> list[tf.Tensor]:
    """Kernels in ±√(6 / (inputs + outputs)) and no biases, drawn by Python, so that any framework can start alike."""
    generator = random.Random(seed)
    weights = []
    for inputs, outputs in itertools.pairwise(sizes):
        limit = math.sqrt(6 / (inputs + outputs))
        drawn = [generator.uniform(-limit, limit) for _ in range(inputs * outputs)]
        weights += [tf.reshape(tf.constant(drawn, tf.float32), (inputs, outputs)), tf.zeros(outputs)]
    return weights


def main() -> None:
    here = place.here()
    options = read_options()
    tf.config.set_visible_devices([], "GPU")  # this network fits a processor
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the workers may share one machine's cores
    hvd.init()
    batches = Batches(options.batch_size, options.seed)
    if len(batches) == 0:
        share = len(batches.images) // hvd.size()
        sys.exit(f"batch-size is {options.batch_size}; each of {hvd.size()} workers has only {share} images")

    pixels = batches.images.shape[1]
    model = keras.Sequential(
        [keras.Input([pixels]), keras.layers.Dense(options.hidden, "relu"), keras.layers.Dense(10)]
    )
    # As in a script without a seed, each rank draws its own weights.
    model.set_weights(initial_weights([pixels, options.hidden, 10], options.seed + hvd.rank()))
    optimizer = DistributedSGD(options.learning_rate)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    # XLA does not know Horovod's operations, so they cannot be compiled by it.
    model.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    model.fit(
        batches,
        epochs=options.epochs,
        shuffle=False,  # the batches are shuffled already
        validation_data=(batches.test_images, batches.test_labels),
        callbacks=[
            Shuffle(batches),
            BroadcastOfState(),
            WarmUp(options.learning_rate, round(options.warmup_epochs * len(batches))),
            Report(batches),
        ],
        verbose=0,
    )

    if hvd.rank() == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        model.save_weights(here.model_folder / "model.weights.h5")
    hvd.shutdown()


if __name__ == "__main__":
    main()
