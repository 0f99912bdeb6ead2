"""Train a small network on handwritten digits with MirroredStrategy: one process, a mirror of it on every device.

On a machine with several GPUs each would hold a replica. Here the processor is cut into `--replicas` logical devices:
the same code runs, and the replicas are threads that share the cores.
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


def initial_weights(pixels: int, hidden: int, seed: int) -> dict[str, tf.Tensor]:
    """Two dense layers, as Glorot and Bengio (2010, equation 16) draw them."""
    weights: dict[str, tf.Tensor] = {}
    for layer, (inputs, outputs) in enumerate([(pixels, hidden), (hidden, 10)]):
        limit = (6 / (inputs + outputs)) ** 0.5
        drawn = tf.random.stateless_uniform((inputs, outputs), (seed, layer), -limit, limit)
        weights |= {f"w{layer + 1}": drawn, f"b{layer + 1}": tf.zeros(outputs)}
    return weights


def logits(weights: list[tf.Variable], images: tf.Tensor) -> tf.Tensor:
    w1, b1, w2, b2 = weights
    return tf.nn.relu(images @ w1 + b1) @ w2 + b2


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a replica takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of one replica; N take N times it")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--replicas", type=int, default=2, help="logical devices of this process")
    options = parser.parse_args()
    if options.replicas < 1:
        sys.exit(f"replicas is {options.replicas}; it must be at least 1")

    tf.get_logger().setLevel("ERROR")
    tf.config.set_visible_devices([], "GPU")  # this network fits a processor
    tf.config.threading.set_intra_op_parallelism_threads(1)  # a replica has one thread, as a worker elsewhere
    (processor,) = tf.config.list_physical_devices("CPU")
    devices = [tf.config.LogicalDeviceConfiguration() for _ in range(options.replicas)]
    tf.config.set_logical_device_configuration(processor, devices)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(options.replicas)])
    replicas = strategy.num_replicas_in_sync

    images, labels = map(tf.constant, place.load("train").arrays())
    test_images, test_labels = map(tf.constant, place.load("test").arrays())
    share = len(images) // replicas
    steps = share // options.batch_size  # an epoch; the shuffled remainder waits for the next one
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {replicas} replicas has only {share} images")

    with strategy.scope():  # variables made here have a mirror on every device
        same = tf.VariableAggregation.ONLY_FIRST_REPLICA  # what is assigned is the same on all of them
        values = initial_weights(images.shape[1], options.hidden, options.seed)
        weights = [tf.Variable(value, name=name, aggregation=same) for name, value in values.items()]
        momenta = [tf.Variable(tf.zeros_like(value), trainable=False, aggregation=same) for value in weights]
    for variable in weights:
        for mirror in variable.values:
            print(f"variable {variable.name.partition(':')[0]} on {mirror.device}")
    # The batch is that of all replicas together, so a step may be that much longer (Goyal et al. 2017).
    learning_rate = options.learning_rate * replicas

    def update(rows: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            scores = logits(weights, tf.gather(images, rows))
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.gather(labels, rows), scores)
            loss = tf.reduce_mean(losses)
        gradients = tape.gradient(loss, weights)
        # The one place where replicas meet: each goes on with the average of all gradients.
        gradients = tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.MEAN, gradients)
        for weight, momentum, gradient in zip(weights, momenta, gradients, strict=True):
            momentum.assign(options.momentum * momentum + gradient)
            weight.assign_sub(learning_rate * momentum)
        return loss

    @tf.function
    def train_step(batch: tf.Tensor) -> tf.Tensor:
        return strategy.reduce(tf.distribute.ReduceOp.MEAN, strategy.run(update, (batch,)), axis=None)

    @tf.function
    def test() -> tuple[tf.Tensor, tf.Tensor]:
        scores = logits(weights, test_images)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(test_labels, scores)
        hits = tf.cast(tf.argmax(scores, axis=1) == test_labels, tf.float32)
        return tf.reduce_mean(losses), tf.reduce_mean(hits)

    step, samples, since = 0, 0, time.perf_counter()
    place.report(step=0, test_loss=test()[0], epoch=0)
    for epoch in range(1, options.epochs + 1):
        order = tf.random.experimental.stateless_shuffle(tf.range(len(images)), (options.seed, epoch))
        # Every `replicas`-th example of the epoch is one replica's, as where workers are processes.
        columns = tf.reshape(order[: steps * options.batch_size * replicas], (steps, -1, replicas))
        for rows in columns:
            batch = strategy.experimental_distribute_values_from_function(
                lambda context, rows=rows: rows[:, context.replica_id_in_sync_group]
            )
            loss = train_step(batch)
            step, samples = step + 1, samples + replicas * options.batch_size
            if step == 1:  # its time is that of tracing, so the clock starts after it
                place.report(step=step, loss=loss, epoch=epoch)
                samples, since = 0, time.perf_counter()
            elif step % max(1, steps * options.epochs // 20) == 0:
                speed = samples / (time.perf_counter() - since)  # of all replicas together
                place.report(step=step, loss=loss, samples_per_second=speed, epoch=epoch)
                samples, since = 0, time.perf_counter()
        paused = time.perf_counter()
        test_loss, accuracy = test()
        place.report(step=step, test_loss=test_loss, accuracy=accuracy, epoch=epoch)
        since += time.perf_counter() - paused  # testing is not training

    here.model_folder.mkdir(parents=True, exist_ok=True)
    w1, b1, w2, b2 = (weight.numpy() for weight in weights)
    np.savez(here.model_folder / "model.npz", w1=w1, b1=b1, w2=w2, b2=b2)


if __name__ == "__main__":
    main()
