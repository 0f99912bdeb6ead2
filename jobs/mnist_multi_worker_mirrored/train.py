"""Train a small network on handwritten digits with MultiWorkerMirroredStrategy: every worker holds a mirror of it.

The workers compute gradients of different images, average them in an all-reduce, and all make the same update. A
worker trains on a GPU of its own, where its machine has any, with NCCL between them, or on its CPU, with TensorFlow's
ring. It has been run on CPUs; what concerns GPUs has not been run.

It has its own training loop, since Keras 3's `fit` takes MirroredStrategy alone. Under this strategy fit
ends with "Attempt to convert a value (PerReplica ...) with an unsupported type ... to a Tensor"
(https://github.com/keras-team/keras/issues/20585).

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
from workshop_utils.training.tf_cluster import leave_last

NAMES = ("w1", "b1", "w2", "b2")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of a step of all workers")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bytes-per-pack", type=int, default=0, help="of a collective; 0: automatic")
    parser.add_argument("--checkpoint-steps", type=int, default=100, help="from one checkpoint to the next")
    options = parser.parse_args()
    for name in ("epochs", "batch_size", "hidden", "checkpoint_steps"):
        if getattr(options, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    if not 0 < options.learning_rate < math.inf:
        parser.error(f"learning-rate is {options.learning_rate}; it must be a finite number above 0")
    if options.bytes_per_pack < 0:
        parser.error(f"bytes-per-pack is {options.bytes_per_pack}; it must be at least 0")
    return options


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


def main() -> None:
    here, options = place.here(), parse()
    rank, world_size = here.rank or 0, here.world_size
    tf.get_logger().setLevel("ERROR")
    place.tf_config()
    hints = tf.distribute.experimental.CommunicationOptions(
        implementation=choose_device(here), bytes_per_pack=options.bytes_per_pack
    )

    train, test_set = place.load("train"), place.load("test")
    share = train.count // world_size  # equal shares, since every step needs every rank
    steps = share // options.batch_size  # an epoch; the remainder is dropped; the next epoch shuffles again
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {world_size} workers has only {share} images")

    # Where the launch names a place for checkpoints, go on from the newest one of a run with these settings. With
    # others the next step would be another one; only epochs may be added. tf.train.CheckpointManager is what a user
    # of Keras would take; these are on the disk before training goes on (fsync), and their SHA-256 is compared.
    folder = place.checkpoint_folder()
    names = ("seed", "batch_size", "hidden", "learning_rate", "momentum")
    settings = {name.replace("_", "-"): getattr(options, name) for name in names}
    settings |= {"workers": world_size, "images": train.count, "pixels": train.height * train.width}
    settings["data"] = zlib.crc32(train.labels)
    last = steps * options.epochs
    checkpoint = resume(folder, settings, last) if folder and rank == 0 else None

    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=hints)
    images, labels = map(tf.constant, train.arrays())
    test_images, test_labels = map(tf.constant, test_set.arrays())
    values = dict(zip(NAMES, initial_weights(images.shape[1], options.hidden, options.seed), strict=True))
    values |= {f"momentum of {name}": tf.zeros_like(value) for name, value in values.items()}
    values["step"] = tf.constant(0, tf.int64)
    if checkpoint:
        values = checkpoint.arrays
        print(f"resumed after step {checkpoint.step}")
    with strategy.scope():
        # Rank 0's value is that of all: the strategy broadcasts it, so the others need not see the checkpoint.
        same = tf.VariableAggregation.ONLY_FIRST_REPLICA  # what is assigned is the same on all workers
        state = {name: tf.Variable(value, aggregation=same) for name, value in values.items()}
    weights, momenta = ([state[of + name] for name in NAMES] for of in ("", "momentum of "))
    for name in NAMES:
        print(f"variable {name} on {state[name].values[0].device}")

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

    step = int(state["step"].numpy())
    begin = step
    test_loss = test_step()[0]  # every worker takes part
    if rank == 0:
        place.report(step=step, test_loss=test_loss, epoch=step // steps)
    since = time.perf_counter()
    for epoch in range(step // steps, options.epochs):
        order = tf.random.experimental.stateless_shuffle(tf.range(len(images)), (options.seed, epoch + 1))
        batches = tf.split(order[mine][: steps * options.batch_size], steps)
        for batch in batches[step % steps :]:  # those of this epoch that the checkpoint does not know yet
            loss = train_step(tf.gather(images, batch), tf.gather(labels, batch))
            step += 1
            if step == begin + 1:  # its time is that of tracing, so the clock starts after it
                device = here.device if "GPU" in weights[0].values[0].device else "cpu"
                place.report(step=step, loss=loss, epoch=epoch + 1, device=device)
                since = time.perf_counter()
            elif step % max(1, last // 20) == 0:
                value = loss.numpy()  # waits for the step, which a GPU may still be computing
                speed = (step - begin - 1) * options.batch_size / (time.perf_counter() - since)
                place.report(step=step, loss=value, samples_per_second=speed, epoch=epoch + 1)
            if folder and (step % options.checkpoint_steps == 0 or step == last):
                loss.numpy()
                paused = time.perf_counter()
                if rank == 0:
                    arrays = {name: variable.numpy() for name, variable in state.items()}
                    checkpoints.save(folder, step, arrays, settings)
                meet().numpy()  # here, or the others would wait in the next step, and count that as training
                since += time.perf_counter() - paused  # neither saving nor testing is training

        loss.numpy()  # the last step has ended now, on a GPU too
        paused = time.perf_counter()
        test_loss, accuracy = test_step().numpy()
        if rank == 0:
            place.report(step=step, test_loss=test_loss, accuracy=accuracy, epoch=epoch + 1)
        since += time.perf_counter() - paused

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        np.savez(here.model_folder / "model.npz", **{name: state[name].numpy() for name in NAMES})
    leave_last()


if __name__ == "__main__":
    main()
