"""Train a small network on handwritten digits with TensorFlow, by one of two strategies for many workers.

- MultiWorkerMirroredStrategy (`job.yaml`): every worker holds a mirror of the network. They compute gradients of
  different images, average them in an all-reduce, and all make the same update.
- ParameterServerStrategy (`parameter_server.yaml`): servers hold the weights, and a chief hands out batches and never
  waits for a slow worker. A worker reads the weights, computes a gradient and sends it back, while others may have
  changed them in between.

A worker trains on a GPU of its own, where its machine has any, or on its CPU; chief and servers need none. It has been
run on CPUs; what concerns GPUs has not been run.

The training loops are its own, since Keras 3's `fit` takes MirroredStrategy alone. Mirrored among several workers it
ends with "Attempt to convert a value (PerReplica ...) with an unsupported type ... to a Tensor"
(https://github.com/keras-team/keras/issues/20585), and at parameter servers with "To use this dataset, you need to pass
this dataset to ClusterCoordinator.create_per_worker_dataset".

Where the launch names a place for checkpoints, a job that was killed goes on from the newest: `--checkpoints FOLDER`.
The embedded `data: digits` are scikit-learn's, of 8 × 8 pixels; `data: mnist` is the real thing.
"""

import argparse
import math
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

# TensorFlow writes to the log while it is loaded; level 2 leaves its errors. oneDNN would add a notice of its own.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Otherwise TensorFlow imports Keras 3 at once, and that takes as long again. Remove it where you use tf.keras.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf

from workshop_utils import place
from workshop_utils.training import checkpoints
from workshop_utils.training.tf_cluster import leave_last, serve_until_chief_leaves

NAMES = ("w1", "b1", "w2", "b2")


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument(
        "--learning-rate", type=float, default=0.05, help="of a step, whoever takes part in it"
    )
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes-per-pack", type=int, default=0, help="of a collective; 0: automatic")
    parser.add_argument("--checkpoint-steps", type=int, default=100, help="between two checkpoints, at least")
    options = parser.parse_args()
    for name in ("epochs", "batch_size", "hidden", "checkpoint_steps"):
        if getattr(options, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if not 0 < options.learning_rate < math.inf:
        parser.error(f"learning-rate is {options.learning_rate}; it must be a finite number above 0")
    if options.bytes_per_pack < 0:
        parser.error(f"bytes-per-pack is {options.bytes_per_pack}; it must be at least 0")
    return options


# Both strategies train the same network, and save the same arrays.


def load(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in 0 to 255, uint8 of shape (count, pixels), and labels, int64 of shape (count,)."""
    examples = place.load(split)
    images = np.frombuffer(examples.images, np.uint8).reshape(examples.count, -1)
    return images, np.frombuffer(examples.labels, np.uint8).astype(np.int64)


def initial_values(pixels: int, hidden: int, seed: int) -> dict[str, Any]:
    """Two dense layers, as Glorot and Bengio (2010, equation 16) draw them, and no momentum yet; by name."""
    weights = []
    for layer, (inputs, outputs) in enumerate([(pixels, hidden), (hidden, 10)]):
        limit = (6 / (inputs + outputs)) ** 0.5
        weights.append(tf.random.stateless_uniform((inputs, outputs), (seed, layer), -limit, limit))
        weights.append(tf.zeros(outputs))
    values = dict(zip(NAMES, weights, strict=True))
    return values | {f"momentum of {name}": tf.zeros_like(value) for name, value in values.items()}


def logits(weights: list[tf.Variable], images: tf.Tensor) -> tf.Tensor:
    w1, b1, w2, b2 = weights
    return tf.nn.relu(tf.cast(images, tf.float32) / 255 @ w1 + b1) @ w2 + b2


def loss_and_gradients(weights: list[tf.Variable], images: tf.Tensor, labels: tf.Tensor) -> tuple[Any, Any]:
    with tf.GradientTape() as tape:
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits(weights, images))
        loss = tf.reduce_mean(losses)
    return loss, tape.gradient(loss, weights)


class Plan:
    """What an epoch has, and where the run's checkpoints are."""

    def __init__(
        self, images: np.ndarray, labels: np.ndarray, workers: int, options: argparse.Namespace
    ) -> None:
        share = len(images) // workers  # equal shares of an epoch
        self.steps = share // options.batch_size  # of a worker; the rest waits for the next shuffle
        if self.steps == 0:
            sys.exit(f"batch-size is {options.batch_size}; each of {workers} workers has only {share} images")
        # With other settings the next step would be another one; only epochs may be added. A user of Keras would take
        # tf.train.CheckpointManager; these checkpoints are on the disk before training goes on (fsync), and their
        # SHA-256 is compared on reading.
        self.folder = place.checkpoint_folder()
        names = ("seed", "batch_size", "hidden", "learning_rate", "momentum")
        self.settings = {name.replace("_", "-"): getattr(options, name) for name in names}
        self.settings |= {"workers": workers, "images": len(images), "pixels": images.shape[1]}
        self.settings["data"] = zlib.crc32(labels.astype(np.uint8).tobytes())

    def newest(self, last: int) -> checkpoints.Checkpoint | None:
        """The newest whole checkpoint; None if there is none.

        One of a run with other settings, or of a step after `last`, ends this run.
        """
        if not self.folder:
            return None
        try:
            self.folder.mkdir(parents=True, exist_ok=True)  # fails now, not at the first checkpoint
            checkpoint = checkpoints.newest(self.folder, self.settings)
        except (OSError, checkpoints.OtherRun) as error:
            sys.exit(f"cannot resume: {error}")
        if checkpoint and checkpoint.step > last:
            sys.exit(
                f"cannot resume: the checkpoint in {self.folder} is of step {checkpoint.step}, and this run would end "
                f"at step {last}: ask for more epochs, or give another folder for checkpoints"
            )
        if checkpoint:
            print(f"resumed after step {checkpoint.step}")
        return checkpoint


def shuffled(count: int, seed: int, epoch: int) -> tf.Tensor:
    """The order of the examples in an epoch, counted from 1: the same for every worker."""
    return tf.random.experimental.stateless_shuffle(tf.range(count), (seed, epoch))


def save_model(folder: Path, weights: list[tf.Variable]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: weight.numpy() for name, weight in zip(NAMES, weights, strict=True)}
    np.savez(folder / "model.npz", allow_pickle=False, **arrays)


# MultiWorkerMirroredStrategy


def choose_device(here: place.Place) -> tf.distribute.experimental.CommunicationImplementation:
    """Let this process use its own GPU alone, or none, before TensorFlow takes any; returns the library between them.

    Raises:
        ValueError: if there is no GPU for a worker that should have one.
    """
    implementations = tf.distribute.experimental.CommunicationImplementation
    if here.device == "cpu":
        tf.config.set_visible_devices([], "GPU")
        if here.local_world_size > 1:  # more threads than cores would only take turns
            tf.config.threading.set_intra_op_parallelism_threads(1)
        return implementations.RING
    gpu = tf.config.list_physical_devices("GPU")[int(here.device.partition(":")[2] or 0)]
    tf.config.set_visible_devices(gpu, "GPU")
    tf.config.experimental.set_memory_growth(gpu, True)  # otherwise it takes all of the GPU's memory at once
    return implementations.NCCL


def train_mirrors(here: place.Place, options: argparse.Namespace) -> None:
    rank, world_size = here.rank or 0, here.world_size
    hints = tf.distribute.experimental.CommunicationOptions(
        implementation=choose_device(here), bytes_per_pack=options.bytes_per_pack
    )
    (images, labels), (test_images, test_labels) = load("train"), load("test")
    plan = Plan(images, labels, world_size, options)
    steps, last = plan.steps, plan.steps * options.epochs
    checkpoint = plan.newest(last) if rank == 0 else None
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=hints)
    images, labels, test_images, test_labels = map(tf.constant, (images, labels, test_images, test_labels))
    values = initial_values(images.shape[1], options.hidden, options.seed) | {
        "step": tf.constant(0, tf.int64)
    }
    if checkpoint:
        values = checkpoint.arrays
    with strategy.scope():
        # Rank 0's value is that of all: the strategy broadcasts it, so the others need not see the checkpoint.
        same = tf.VariableAggregation.ONLY_FIRST_REPLICA  # what is assigned is the same on all workers
        state = {name: tf.Variable(value, aggregation=same) for name, value in values.items()}
    weights, momenta = ([state[of + name] for name in NAMES] for of in ("", "momentum of "))
    for name in NAMES:
        print(f"variable {name} on {state[name].values[0].device}")

    def update(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        loss, gradients = loss_and_gradients(weights, images, labels)
        # The one place where workers meet: each goes on with the average of all gradients.
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients, hints)
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            momentum.assign(options.momentum * momentum + gradient)
            weight.assign_sub(options.learning_rate * momentum)
        state["step"].assign_add(1)
        return loss

    # Every world_size-th row is this worker's, to train as to test. AutoShardPolicy, which divides a tf.data.Dataset
    # that a strategy distributes, has nothing to do here: no Dataset is distributed.
    mine = slice(rank, None, world_size)

    def test() -> tf.Tensor:
        scores, expected = logits(weights, test_images[mine]), test_labels[mine]
        correct = tf.cast(tf.argmax(scores, axis=1) == expected, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(expected, scores)
        sums = tf.stack([tf.reduce_sum(losses), tf.reduce_sum(correct)])
        sums = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sums)
        return sums / len(test_labels)

    def wait_for_all() -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, tf.zeros(()))

    train_step = tf.function(lambda images, labels: strategy.run(update, (images, labels)))
    test_step = tf.function(lambda: strategy.run(test))
    meet = tf.function(lambda: strategy.run(wait_for_all))

    step = begin = int(state["step"].numpy())
    test_loss = test_step()[0]  # every worker takes part
    if rank == 0:
        place.report(step=step, test_loss=test_loss, epoch=step // steps)
    since = time.perf_counter()
    for epoch in range(step // steps + 1, options.epochs + 1):
        order = shuffled(len(images), options.seed, epoch)[mine]
        batches = tf.split(order[: steps * options.batch_size], steps)
        for batch in batches[step % steps :]:  # those of this epoch that the checkpoint does not know yet
            loss = train_step(tf.gather(images, batch), tf.gather(labels, batch))
            step += 1
            if step == begin + 1:  # its time is that of tracing, so the clock starts after it
                device = here.device if "GPU" in weights[0].values[0].device else "cpu"
                place.report(step=step, loss=loss, epoch=epoch, device=device)
                since = time.perf_counter()
            elif step % max(1, last // 20) == 0:
                value = loss.numpy()  # waits for the step, which a GPU may still be computing
                speed = (step - begin - 1) * options.batch_size / (time.perf_counter() - since)
                place.report(step=step, loss=value, samples_per_second=speed, epoch=epoch)
            if plan.folder and (step % options.checkpoint_steps == 0 or step == last):
                loss.numpy()
                paused = time.perf_counter()
                if rank == 0:
                    arrays = {name: variable.numpy() for name, variable in state.items()}
                    checkpoints.save(plan.folder, step, arrays, plan.settings)
                meet().numpy()  # here, or the others would wait in the next step, and count that as training
                since += time.perf_counter() - paused  # neither saving nor testing is training

        loss.numpy()  # the last step has ended now, on a GPU too
        paused = time.perf_counter()
        test_loss, accuracy = test_step().numpy()
        if rank == 0:
            place.report(step=step, test_loss=test_loss, accuracy=accuracy, epoch=epoch)
        since += time.perf_counter() - paused

    if rank == 0:
        save_model(here.model_folder, weights)
    leave_last()


# ParameterServerStrategy


def server_options(here: place.Place) -> tf.compat.v1.ConfigProto:
    """What a server may use of its machine: a worker has a GPU of its own, where there are any, the others none.

    Raises:
        ValueError: if there is no GPU for a worker that should have one.
    """
    # Several threads to run operations in: those that wait for a server hold theirs, and a worker with a single one
    # would wait for ever. But one for arithmetic, where processes share the cores of a machine.
    options = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=16)
    device = here.device if here.role == "worker" else "cpu"
    if device != "cpu":
        options.gpu_options.visible_device_list = device.partition(":")[2]
        options.gpu_options.allow_growth = True  # otherwise it takes all of the GPU's memory at once
        return options
    options.device_count["GPU"] = 0
    if here.local_world_size > 1:
        options.intra_op_parallelism_threads = 1
    return options


def coordinate(here: place.Place, workers: int, options: argparse.Namespace) -> None:
    """The chief's part: it gives each batch to a worker that is free."""
    (images, labels), (test_images, test_labels) = load("train"), load("test")
    plan = Plan(images, labels, workers, options)
    steps = plan.steps * workers
    checkpoint = plan.newest(steps * options.epochs)
    tf.config.set_visible_devices([], "GPU")  # the chief computes nothing but tests
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    values = (
        checkpoint.arrays if checkpoint else initial_values(images.shape[1], options.hidden, options.seed)
    )
    step = begin = saved = checkpoint.step if checkpoint else 0
    weights, momenta = [], []
    for name in NAMES:
        with strategy.scope():  # variables made here live on the servers, in turn
            weight = tf.Variable(values[name])
            with strategy.extended.colocate_vars_with(weight):  # one operation on one server updates both
                momenta.append(tf.Variable(values[f"momentum of {name}"], trainable=False))
        weights.append(weight)
        print(f"variable {name} on {weight.device}")
    # The learning rate stays what it is for one worker: each gradient, of one batch, is a step of its own, and
    # with more workers the gradients grow staler, which a larger step would make worse.

    @tf.function
    def train_step(batch: tf.Tensor) -> tf.Tensor:
        # The images become part of this function, so each worker receives them once, as bytes, and then row numbers.
        loss, gradients = loss_and_gradients(weights, tf.gather(images, batch), tf.gather(labels, batch))
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            # One operation on the server, under its lock: no update of another worker comes between.
            slot = {"var": weight.handle, "accum": momentum.handle, "use_locking": True}
            rates = {"lr": options.learning_rate, "momentum": options.momentum}
            tf.raw_ops.ResourceApplyMomentum(grad=gradient, **slot, **rates)
        return loss

    def test() -> tuple[float, float]:
        scores = logits(weights, test_images)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(test_labels, scores)
        return float(tf.reduce_mean(losses)), float(np.mean(np.argmax(scores, axis=1) == test_labels))

    place.report(step=step, test_loss=test()[0], epoch=step // steps)
    since = time.perf_counter()
    for epoch in range(step // steps + 1, options.epochs + 1):
        # Every N-th row of the epoch's order is for one of N batches. Row numbers are all that travels, so there is no
        # tf.data.Dataset for AutoShardPolicy to divide.
        order = shuffled(len(images), options.seed, epoch)
        rows = tf.reshape(order[: steps * options.batch_size], (-1, options.batch_size, workers))
        for batch in tf.reshape(tf.transpose(rows, (0, 2, 1)), (steps, options.batch_size)):
            loss = coordinator.schedule(train_step, args=(batch,))
            step += 1
            if step == begin + workers:  # by now most workers, and usually all, have received the function
                coordinator.join()
                place.report(step=step, loss=loss.fetch(), epoch=epoch)
                since = time.perf_counter()
        coordinator.join()  # nobody changes the weights while they are tested and saved
        paused = time.perf_counter()
        # Of all workers together: which of them takes a batch is settled only when it is free.
        samples = (step - begin - workers) * options.batch_size
        speed = samples / (paused - since) if samples else float("nan")
        test_loss, accuracy = test()
        measured = {"loss": loss.fetch(), "test_loss": test_loss, "accuracy": accuracy}
        place.report(step=step, epoch=epoch, samples_per_second=speed, **measured)
        if plan.folder and (step - saved >= options.checkpoint_steps or epoch == options.epochs):
            variables = zip(
                [*NAMES, *(f"momentum of {name}" for name in NAMES)], weights + momenta, strict=True
            )
            arrays = {name: variable.numpy() for name, variable in variables}
            checkpoints.save(plan.folder, step, arrays, plan.settings)
            saved = step
        since += time.perf_counter() - paused  # neither testing nor saving is training
    save_model(here.model_folder, weights)


def main() -> None:
    here, options = place.here(), read_options()
    tf.get_logger().setLevel("ERROR")
    config = place.tf_config()
    if config is None or "ps" not in config["cluster"]:
        train_mirrors(here, options)
    elif here.role == "chief":
        coordinate(here, len(config["cluster"]["worker"]), options)
    else:
        _server = tf.distribute.Server(config["cluster"], here.role, here.index, "grpc", server_options(here))
        if here.role == "worker":
            place.report(step=0, device=here.device)
        serve_until_chief_leaves()


if __name__ == "__main__":
    main()
