"""What Horovod adds to a loop of one's own in TensorFlow: a tape that averages gradients, and a broadcast.

The same network, the same batches and the same schedule as in digits_horovod_torch and digits_horovod_keras.
"""

import argparse
import itertools
import math
import os
import random
import sys
import time

# TensorFlow writes to the log while it is loaded; level 2 leaves its errors. oneDNN would add a notice of its own.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

import horovod.tensorflow as hvd
import keras
import tensorflow as tf

from workshop_utils import place


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.2, help="of one worker; N take N times it")
    parser.add_argument(
        "--warmup-epochs", type=float, default=1, help="until the learning rate is N times as high"
    )
    parser.add_argument("--hidden", type=int, default=64, help="units in the hidden layer")
    parser.add_argument("--compression", choices=["none", "fp16"], default="none")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


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
    rank, world_size = hvd.rank(), hvd.size()

    images, labels = map(tf.constant, place.load("train").arrays())
    test_images, test_labels = map(tf.constant, place.load("test").arrays())
    share = len(images) // world_size
    steps = share // options.batch_size  # an epoch; the rest waits for the next shuffle
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {world_size} workers has only {share} images")

    model = keras.Sequential(
        [keras.Input([images.shape[1]]), keras.layers.Dense(options.hidden, "relu"), keras.layers.Dense(10)]
    )
    # As in a script without a seed, each rank draws its own weights.
    model.set_weights(initial_weights([images.shape[1], options.hidden, 10], options.seed + rank))
    optimizer = keras.optimizers.SGD(options.learning_rate)
    optimizer.build(model.trainable_variables)
    compression = hvd.Compression.fp16 if options.compression == "fp16" else hvd.Compression.none
    # Keras 3 wraps TensorFlow's variables; Horovod wants what is inside.
    variables = [variable.value for variable in model.trainable_variables]

    @tf.function
    def train_step(images: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, model(images, training=True))
            loss = tf.reduce_mean(losses)
        tape = hvd.DistributedGradientTape(tape, compression=compression)
        gradients = tape.gradient(loss, variables)  # averaged over all ranks
        optimizer.apply(gradients, model.trainable_variables)
        return loss

    # All go on with the state of rank 0, the optimizer's too.
    hvd.broadcast_variables([*variables, *(variable.value for variable in optimizer.variables)], root_rank=0)
    warmup = max(1, round(options.warmup_epochs * steps))

    step, samples, since = 0, 0, time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = list(range(len(images)))
        random.Random(options.seed + epoch).shuffle(order)
        for batch in tf.split(order[rank::world_size][: steps * options.batch_size], steps):
            # From the learning rate of one worker to N times it (Goyal et al. 2017, sections 2.1 and 2.2).
            learning_rate = options.learning_rate * (1 + (world_size - 1) * min(1.0, step / warmup))
            optimizer.learning_rate = learning_rate
            loss = train_step(tf.gather(images, batch), tf.gather(labels, batch))
            step, samples = step + 1, samples + options.batch_size
            if step == 1 or step % steps % max(1, steps // 4) == 0:
                speed = {"samples_per_second": samples / (time.perf_counter() - since)} if step > 1 else {}
                place.report(step, loss=loss, learning_rate=learning_rate, epoch=epoch, **speed)
                samples, since = 0, time.perf_counter()

        paused = time.perf_counter()
        right = tf.argmax(model(test_images[rank::world_size]), axis=1) == test_labels[rank::world_size]
        correct = hvd.allreduce(tf.reduce_sum(tf.cast(right, tf.int32)), op=hvd.Sum)
        mean_loss = hvd.allreduce(loss, op=hvd.Average)
        if rank == 0:
            place.report(step, accuracy=int(correct) / len(test_labels), mean_loss=mean_loss, epoch=epoch)
        since += time.perf_counter() - paused  # testing is not training

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        model.save_weights(here.model_folder / "model.weights.h5")
    hvd.shutdown()


if __name__ == "__main__":
    main()
