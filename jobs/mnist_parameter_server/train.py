"""Train a small network on handwritten digits with ParameterServerStrategy: servers hold it, workers improve it.

The chief hands out batches and never waits for a slow worker; parameter servers hold the weights; a worker reads
them, computes a gradient and sends it back, while others may have changed them in between (asynchronous). A worker
computes on a GPU of its own, where its machine has any; chief and servers never do. It has been run on CPUs; what
concerns GPUs has not been run.

The chief has its own training loop, since Keras 3's `fit` takes MirroredStrategy alone. Under this strategy fit ends
with "To use this dataset, you need to pass this dataset to ClusterCoordinator.create_per_worker_dataset".

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

# TensorFlow writes to the log while it is loaded; level 2 leaves its errors. oneDNN would add a notice of its own.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Otherwise TensorFlow imports Keras 3 at once, and that takes as long again. Remove it where you use tf.keras.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf

from workshop_utils import place
from workshop_utils.training import checkpoints
from workshop_utils.training.tf_cluster import serve_until_chief_leaves

NAMES = ("w1", "b1", "w2", "b2")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of a step, which one worker makes")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoint-steps", type=int, default=100, help="at least, between two checkpoints")
    options = parser.parse_args()
    for name in ("epochs", "batch_size", "hidden", "checkpoint_steps"):
        if getattr(options, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if not 0 < options.learning_rate < math.inf:
        parser.error(f"learning-rate is {options.learning_rate}; it must be a finite number above 0")
    return options


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


def load(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in 0 to 255, uint8 of shape (count, pixels), and labels, int64 of shape (count,)."""
    examples = place.load(split)
    images = np.frombuffer(examples.images, np.uint8).reshape(examples.count, -1)
    return images, np.frombuffer(examples.labels, np.uint8).astype(np.int64)


def initial_weights(pixels: int, hidden: int, seed: int) -> list[tf.Tensor]:
    """Two dense layers, as Glorot and Bengio (2010, equation 16) draw them."""
    weights = []
    for layer, (inputs, outputs) in enumerate([(pixels, hidden), (hidden, 10)]):
        limit = (6 / (inputs + outputs)) ** 0.5
        weights.append(tf.random.stateless_uniform((inputs, outputs), (seed, layer), -limit, limit))
        weights.append(tf.zeros(outputs))
    return weights


def logits(weights: list[tf.Tensor], images: tf.Tensor) -> tf.Tensor:
    w1, b1, w2, b2 = weights
    return tf.nn.relu(tf.cast(images, tf.float32) / 255 @ w1 + b1) @ w2 + b2


def resume(folder: Path, settings: checkpoints.Settings, last: int) -> checkpoints.Checkpoint | None:
    """The newest whole checkpoint; None if there is none.

    One of a run with other settings, or of a step after `last`, ends this run.
    """
    try:
        checkpoints.make_folder(folder)  # fails now, not at the first checkpoint
        checkpoint = checkpoints.newest(folder, settings)
    except (OSError, checkpoints.OtherRun) as error:
        sys.exit(f"cannot resume: {error}")
    if checkpoint and checkpoint.step > last:
        sys.exit(
            f"cannot resume: the checkpoint in {folder} is of step {checkpoint.step}, and this run would end at step "
            f"{last}: ask for more epochs, or give another folder for checkpoints"
        )
    return checkpoint


def coordinate(here: place.Place, workers: int, options: argparse.Namespace) -> None:
    """The chief's part: it gives each batch to a worker that is free."""
    images, labels = load("train")
    test_images, test_labels = load("test")
    share = len(images) // workers
    steps = (
        share // options.batch_size * workers
    )  # an epoch; the remainder is dropped; the next epoch shuffles again
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {workers} workers has only {share} images")

    # Where the launch names a place for checkpoints, go on from the newest one of a run with these settings. With
    # others it would be another run; only epochs may be added. A user of Keras would take tf.train.CheckpointManager;
    # these checkpoints are on the disk before training goes on (fsync), and their SHA-256 is compared on reading.
    folder = place.checkpoint_folder()
    names = ("seed", "batch_size", "hidden", "learning_rate", "momentum")
    settings = {name.replace("_", "-"): getattr(options, name) for name in names}
    settings |= {"workers": workers, "images": len(images), "pixels": images.shape[1]}
    settings["data"] = zlib.crc32(labels.tobytes())
    checkpoint = resume(folder, settings, steps * options.epochs) if folder else None

    tf.config.set_visible_devices([], "GPU")  # the chief computes nothing but tests
    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    values = dict(zip(NAMES, initial_weights(images.shape[1], options.hidden, options.seed), strict=True))
    values |= {f"momentum of {name}": tf.zeros_like(value) for name, value in values.items()}
    step = begin = saved = checkpoint.step if checkpoint else 0
    if checkpoint:
        values = checkpoint.arrays
        print(f"resumed after step {step}")
    weights, momenta = [], []
    for name in NAMES:
        with strategy.scope():  # variables made here live on the servers, in turn
            weights.append(tf.Variable(values[name]))
            with strategy.extended.colocate_vars_with(
                weights[-1]
            ):  # one operation on one server updates both
                momenta.append(tf.Variable(values[f"momentum of {name}"], trainable=False))
        print(f"variable {name} on {weights[-1].device}")
    # The learning rate stays what it is for one worker: each gradient, of one batch, is a step of its own, and
    # with more workers the gradients grow staler, which a larger step would make worse.

    @tf.function
    def train_step(batch: tf.Tensor) -> tf.Tensor:
        # The images become part of this function, so each worker receives them once, as bytes, and then row numbers.
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.gather(labels, batch), logits(weights, tf.gather(images, batch))
            )
            loss = tf.reduce_mean(losses)
        for weight, momentum, gradient in zip(weights, momenta, tape.gradient(loss, weights), strict=True):
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
        order = tf.random.experimental.stateless_shuffle(tf.range(len(images)), (options.seed, epoch))
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
        values = {"loss": loss.fetch(), "test_loss": test_loss, "accuracy": accuracy}
        place.report(step=step, epoch=epoch, samples_per_second=speed, **values)
        if folder and (step - saved >= options.checkpoint_steps or epoch == options.epochs):
            arrays = {name: weight.numpy() for name, weight in zip(NAMES, weights, strict=True)}
            arrays |= {f"momentum of {name}": each.numpy() for name, each in zip(NAMES, momenta, strict=True)}
            checkpoints.save(folder, step, arrays, settings)
            saved = step
        since += time.perf_counter() - paused  # neither testing nor saving is training

    here.model_folder.mkdir(parents=True, exist_ok=True)
    arrays = {name: weight.numpy() for name, weight in zip(NAMES, weights, strict=True)}
    np.savez(here.model_folder / "model.npz", **arrays)


def main() -> None:
    here, options = place.here(), parse()
    config = place.tf_config()
    if config is None:
        sys.exit("TF_CONFIG is not set; this job needs a cluster of a chief, parameter servers and workers")
    tf.get_logger().setLevel("ERROR")
    if here.role == "chief":
        coordinate(here, len(config["cluster"]["worker"]), options)
    else:
        _server = tf.distribute.Server(config["cluster"], here.role, here.index, "grpc", server_options(here))
        if here.role == "worker":
            place.report(step=0, device=here.device)
        serve_until_chief_leaves()


if __name__ == "__main__":
    main()
