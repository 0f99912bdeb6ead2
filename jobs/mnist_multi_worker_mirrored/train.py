"""Train a small network on handwritten digits with MultiWorkerMirroredStrategy: every worker holds a mirror of it."""

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


def load(split: str) -> tuple[tf.Tensor, tf.Tensor]:
    """Images in [0, 1], shape (count, pixels), and labels, shape (count,)."""
    examples = place.load(split)
    images = tf.reshape(tf.io.decode_raw(examples.images, tf.uint8), (examples.count, -1))
    return tf.cast(images, tf.float32) / 255, tf.cast(tf.io.decode_raw(examples.labels, tf.uint8), tf.int64)


def initial_weights(pixels: int, hidden: int, seed: int) -> list[tf.Tensor]:
    """Two dense layers, as Glorot and Bengio (2010, equation 16) draw them."""
    weights = []
    for layer, (inputs, outputs) in enumerate([(pixels, hidden), (hidden, 10)]):
        limit = (6 / (inputs + outputs)) ** 0.5
        weights.append(tf.random.stateless_uniform((inputs, outputs), (seed, layer), -limit, limit))
        weights.append(tf.zeros(outputs))
    return weights


def logits(weights: list[tf.Variable], images: tf.Tensor) -> tf.Tensor:
    w1, b1, w2, b2 = weights
    return tf.nn.relu(images @ w1 + b1) @ w2 + b2


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of one worker; N take N times it")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes-per-pack", type=int, default=0, help="gradients a collective; 0: all in one")
    options = parser.parse_args()
    if options.bytes_per_pack < 0:
        sys.exit(f"bytes-per-pack is {options.bytes_per_pack}; it must be 0 or a number of bytes")

    tf.get_logger().setLevel("ERROR")
    tf.config.set_visible_devices([], "GPU")  # a worker is one replica, and this network fits a processor
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the workers may share one machine's cores
    place.tf_config()
    hints = tf.distribute.experimental.CommunicationOptions(
        implementation=tf.distribute.experimental.CommunicationImplementation.RING,
        bytes_per_pack=options.bytes_per_pack,
    )
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=hints)
    rank, world_size = here.rank or 0, here.world_size

    images, labels = load("train")
    test_images, test_labels = load("test")
    mine = slice(rank, None, world_size)  # every world_size-th example, to train as to test
    share = len(images) // world_size  # equal shares, since every step needs every rank
    steps = share // options.batch_size  # an epoch; the shuffled remainder waits for the next one
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {world_size} workers has only {share} images")

    with strategy.scope():
        same = tf.VariableAggregation.ONLY_FIRST_REPLICA  # what is assigned is the same on all workers
        values = initial_weights(images.shape[1], options.hidden, options.seed)
        weights = [tf.Variable(value, aggregation=same) for value in values]
        momenta = [tf.Variable(tf.zeros_like(value), trainable=False, aggregation=same) for value in values]
    for name, variable in zip(("w1", "b1", "w2", "b2"), weights, strict=True):
        print(f"variable {name} on {variable.values[0].device}")
    # N workers make the batch N times as large and the steps N times fewer, so each step may be N times as
    # long: the linear scaling rule (Goyal et al. 2017, section 2.1).
    learning_rate = options.learning_rate * world_size

    def update(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits(weights, images))
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, weights)
        # The one place where workers meet: each goes on with the average of all gradients.
        context = tf.distribute.get_replica_context()
        gradients = context.all_reduce(tf.distribute.ReduceOp.MEAN, gradients, hints)
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            momentum.assign(options.momentum * momentum + gradient)
            weight.assign_sub(learning_rate * momentum)
        return loss

    def test() -> tf.Tensor:
        scores, expected = logits(weights, test_images[mine]), test_labels[mine]
        correct = tf.cast(tf.argmax(scores, axis=1) == expected, tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(expected, scores)
        sums = tf.stack([tf.reduce_sum(losses), tf.reduce_sum(correct)])
        sums = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, sums)
        return sums / len(test_labels)

    train_step = tf.function(lambda images, labels: strategy.run(update, (images, labels)))
    test_step = tf.function(lambda: strategy.run(test))

    step, samples = 0, 0
    test_loss = test_step()[0]  # every worker takes part
    if rank == 0:
        place.report(step=step, test_loss=test_loss, epoch=0)
    since = time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = tf.random.experimental.stateless_shuffle(tf.range(len(images)), (options.seed, epoch))
        for batch in tf.split(order[mine][: steps * options.batch_size], steps):
            loss = train_step(tf.gather(images, batch), tf.gather(labels, batch))
            step, samples = step + 1, samples + options.batch_size
            if step == 1:  # its time is that of tracing, so the clock starts after it
                place.report(step=step, loss=loss, epoch=epoch)
                samples, since = 0, time.perf_counter()
            elif step % max(1, steps * options.epochs // 20) == 0:
                speed = samples / (time.perf_counter() - since)
                place.report(step=step, loss=loss, samples_per_second=speed, epoch=epoch)
                samples, since = 0, time.perf_counter()

        paused = time.perf_counter()
        test_loss, accuracy = test_step()
        if rank == 0:
            place.report(step=step, test_loss=test_loss, accuracy=accuracy, epoch=epoch)
        since += time.perf_counter() - paused  # testing is not training

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        w1, b1, w2, b2 = (weight.numpy() for weight in weights)
        np.savez(here.model_folder / "model.npz", w1=w1, b1=b1, w2=w2, b2=b2)
    place.leave_last()


if __name__ == "__main__":
    main()
