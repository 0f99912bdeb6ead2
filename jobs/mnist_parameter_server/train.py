"""Train a small network on handwritten digits with ParameterServerStrategy: servers hold it, workers improve it.

The chief hands out batches and never waits for a slow worker; parameter servers hold the weights; a worker reads
them, computes a gradient and sends it back, while others may have changed them in between (asynchronous).
"""

import argparse
import os
import sys
import time

# TensorFlow writes to the log while it is loaded; level 2 leaves its errors. oneDNN would add a notice of its own.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Otherwise TensorFlow imports Keras 3 at once, and that takes as long again. Remove it where you use tf.keras.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf

from workshop_utils import place


def load(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in 0 to 255, shape (count, pixels), and labels, shape (count,)."""
    examples = place.load(split)
    images = np.frombuffer(examples.images, np.uint8).reshape(examples.count, -1)
    return images, np.frombuffer(examples.labels, np.uint8)


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


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    config = place.tf_config()
    if config is None:
        sys.exit("TF_CONFIG is not set; this job needs a cluster of a chief, parameter servers and workers")
    tf.get_logger().setLevel("ERROR")
    if here.role != "chief":
        # One thread for arithmetic, since the processes may share one machine's cores; but several to run operations
        # in: those that wait for a server hold theirs, and a worker with a single one would wait for ever.
        threads = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=16)
        _server = tf.distribute.Server(config["cluster"], here.role, here.index, "grpc", threads)
        place.serve_until_chief_leaves()
        return

    strategy = tf.distribute.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    workers = len(config["cluster"]["worker"])

    images, labels = load("train")
    test_images, test_labels = load("test")
    steps = len(images) // options.batch_size  # an epoch; the shuffled remainder waits for the next one
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; there are only {len(images)} images to train on")

    with strategy.scope():  # variables made here live on the servers, in turn
        values = initial_weights(images.shape[1], options.hidden, options.seed)
        weights = [tf.Variable(value) for value in values]
        momenta = []
        for weight, value in zip(weights, values, strict=True):
            with strategy.extended.colocate_vars_with(weight):  # one operation on one server updates both
                momenta.append(tf.Variable(tf.zeros_like(value), trainable=False))
    for name, variable in zip(("w1", "b1", "w2", "b2"), weights, strict=True):
        print(f"variable {name} on {variable.device}")
    # The learning rate stays what it is for one worker: each gradient, of one batch, is a step of its own, and
    # with more workers the gradients grow staler, which a larger step would make worse.

    @tf.function
    def train_step(batch: tf.Tensor) -> tf.Tensor:
        # The images become part of this function, so each worker receives them once, and then row numbers.
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(
                tf.gather(labels.astype(np.int64), batch), logits(weights, tf.gather(images, batch))
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
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(test_labels.astype(np.int64), scores)
        return float(tf.reduce_mean(losses)), float(np.mean(np.argmax(scores, axis=1) == test_labels))

    place.report(step=0, test_loss=test()[0], epoch=0)
    step, samples, since = 0, 0, time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = np.random.default_rng((options.seed, epoch)).permutation(len(images))
        for batch in np.split(order[: steps * options.batch_size], steps):
            loss = coordinator.schedule(train_step, args=(tf.constant(batch),))
            step, samples = step + 1, samples + options.batch_size
            if step == workers:  # each has received the function by now, so the clock starts here
                coordinator.join()
                place.report(step=step, loss=loss.fetch(), epoch=epoch)
                samples, since = 0, time.perf_counter()
        coordinator.join()
        # Of all workers together: which of them takes a batch is settled only when it is free.
        speed = samples / (time.perf_counter() - since) if samples else float("nan")
        test_loss, accuracy = test()
        last = {"test_loss": test_loss, "accuracy": accuracy, "epoch": epoch}
        place.report(step=step, loss=loss.fetch(), samples_per_second=speed, **last)
        samples, since = 0, time.perf_counter()

    here.model_folder.mkdir(parents=True, exist_ok=True)
    w1, b1, w2, b2 = (weight.numpy() for weight in weights)
    np.savez(here.model_folder / "model.npz", w1=w1, b1=b1, w2=w2, b2=b2)


if __name__ == "__main__":
    main()
