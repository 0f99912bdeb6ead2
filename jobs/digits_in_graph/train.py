"""Train a small network on handwritten digits by in-graph replication: one graph holds every worker's copy.

TensorFlow's first way (Abadi et al. 2015, "TensorFlow: Large-Scale Machine Learning on Heterogeneous Distributed
Systems", section 7, "Data Parallel Training"), through `tf.compat.v1`. The chief alone has a training loop: its
graph has variables on the parameter servers and, for each worker, a tower that computes a gradient there. Servers
and workers run whatever part of the graph the chief sends them. A worker computes on a GPU of its own, where its
machine has any; chief and servers never do. It has been run on CPUs; what concerns GPUs has not been run.

The embedded `data: digits` are scikit-learn's, of 8 × 8 pixels; `data: mnist` is the real thing.
"""

import argparse
import os
import sys
import time
from typing import Any, NamedTuple

# TensorFlow writes to the log while it is loaded; level 2 leaves its errors. oneDNN would add a notice of its own.
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")
# Otherwise TensorFlow imports Keras 3 at once, and that takes as long again. Remove it where you use tf.keras.
os.environ.setdefault("TF_USE_LEGACY_KERAS", "1")

import numpy as np
import tensorflow as tf

from workshop_utils import place

v1 = tf.compat.v1


def load(split: str) -> tuple[np.ndarray, np.ndarray]:
    """Images in 0 to 255, shape (count, pixels), and labels, shape (count,)."""
    examples = place.load(split)
    images = np.frombuffer(examples.images, np.uint8).reshape(examples.count, -1)
    return images, np.frombuffer(examples.labels, np.uint8).astype(np.int64)


def initial_weights(pixels: int, hidden: int, seed: int) -> dict[str, np.ndarray]:
    """Two dense layers, as Glorot and Bengio (2010, equation 16) draw them."""
    weights: dict[str, np.ndarray] = {}
    for layer, (inputs, outputs) in enumerate([(pixels, hidden), (hidden, 10)]):
        limit = (6 / (inputs + outputs)) ** 0.5
        drawn = tf.random.stateless_uniform((inputs, outputs), (seed, layer), -limit, limit)
        weights |= {f"w{layer + 1}": drawn.numpy(), f"b{layer + 1}": np.zeros(outputs, np.float32)}
    return weights


def logits(weights: list[Any], images: tf.Tensor) -> tf.Tensor:
    w1, b1, w2, b2 = weights
    return tf.nn.relu(tf.cast(images, tf.float32) / 255 @ w1 + b1) @ w2 + b2


def mean_loss(labels: tf.Tensor, scores: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, scores))


def server_options(here: place.Place) -> Any:
    """What a server may use of its machine: a worker has a GPU of its own, where there are any, the others none.

    Raises:
        ValueError: if there is no GPU for a worker that should have one.
    """
    # Several threads to run operations in, since some wait for other processes; one for arithmetic, where processes
    # share the cores of a machine.
    options = v1.ConfigProto(inter_op_parallelism_threads=16)
    device = here.device if here.role == "worker" else "cpu"
    if device != "cpu":
        options.gpu_options.visible_device_list = device.partition(":")[2]
        options.gpu_options.allow_growth = True  # otherwise it takes all of the GPU's memory at once
        return options
    options.device_count["GPU"] = 0
    if here.local_world_size > 1:
        options.intra_op_parallelism_threads = 1
    return options


class Model(NamedTuple):
    """What the chief runs of its graph."""

    weights: list[Any]
    rows: list[Any]  # for each worker, which images make its batch; fed at each step
    loss: Any
    train: Any
    test: Any  # mean loss and accuracy


def build(cluster: dict[str, list[str]], options: argparse.Namespace) -> tuple[Any, Model]:
    """The one graph: variables on the servers, a tower on each worker, everything else on the chief."""
    images, labels = load("train")
    test_images, test_labels = load("test")
    values = initial_weights(images.shape[1], options.hidden, options.seed)
    workers = len(cluster["worker"])

    servers = v1.train.replica_device_setter(cluster=cluster, worker_device="/job:chief/task:0")
    with tf.Graph().as_default() as graph, v1.device(servers):
        weights = [v1.Variable(value, name=name, use_resource=True) for name, value in values.items()]
        rows, losses, gradients = [], [], []
        for worker in range(workers):
            with v1.device(f"/job:worker/task:{worker}"):  # its tower; the images become part of the graph
                rows.append(v1.placeholder(tf.int64, [None]))
                scores = logits(weights, tf.gather(images, rows[-1]))
                losses.append(mean_loss(tf.gather(labels, rows[-1]), scores))
                gradients.append(v1.gradients(losses[-1], weights))
        means = []
        for weight, of_workers in zip(weights, zip(*gradients, strict=True), strict=True):
            with v1.device(weight.device):  # where the variable is, so that only gradients travel
                means.append(tf.add_n(of_workers) / workers)
        optimizer = v1.train.MomentumOptimizer(options.learning_rate, options.momentum)
        train = optimizer.apply_gradients(zip(means, weights, strict=True))
        scores = logits(weights, test_images)
        hits = tf.cast(tf.equal(tf.argmax(scores, axis=1), test_labels), tf.float32)
        test = (mean_loss(tf.constant(test_labels), scores), tf.reduce_mean(hits))
        loss = tf.add_n(losses) / workers
    return graph, Model(weights, rows, loss, train, test)


def train(session: Any, model: Model, epochs: list[list[dict[Any, np.ndarray]]]) -> None:
    """Every step of all workers is one call of `session.run`, with a batch for each of them."""
    step, since, total = 0, time.perf_counter(), sum(map(len, epochs))
    place.report(step=0, test_loss=session.run(model.test)[0], epoch=0)
    for epoch, batches in enumerate(epochs, 1):
        for batch in batches:
            loss, _ = session.run([model.loss, model.train], batch)
            step += 1
            if step == 1:  # every process has prepared its part of the graph now, so the clock starts here
                place.report(step=step, loss=loss, epoch=epoch)
                since = time.perf_counter()
            elif step % max(1, total // 20) == 0:
                samples = (step - 1) * sum(map(len, batch.values()))  # of all workers together
                speed = samples / (time.perf_counter() - since)
                place.report(step=step, loss=loss, samples_per_second=speed, epoch=epoch)
        paused = time.perf_counter()
        test_loss, accuracy = session.run(model.test)
        place.report(step=step, test_loss=test_loss, accuracy=accuracy, epoch=epoch)
        since += time.perf_counter() - paused  # testing is not training


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of a step of all workers")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    config = place.tf_config()
    if config is None or not {"chief", "ps", "worker"} <= set(config["cluster"]):
        sys.exit("TF_CONFIG must name a cluster of a chief, parameter servers (ps) and workers")
    tf.get_logger().setLevel("ERROR")
    tf.config.set_visible_devices([], "GPU")  # what runs outside the session is small
    limits = server_options(here)
    server = tf.distribute.Server(config["cluster"], here.role, here.index, "grpc", limits)
    if here.role != "chief":
        if here.role == "worker":
            place.report(step=0, device=here.device)
        place.serve_until_chief_leaves()
        return

    count, workers = place.load("train").count, len(config["cluster"]["worker"])
    steps = (
        count // workers // options.batch_size
    )  # an epoch; the remainder is dropped; the next epoch shuffles again
    if steps == 0:
        share = count // workers
        sys.exit(f"batch-size is {options.batch_size}; each of {workers} workers has only {share} images")
    epochs = []
    graph, model = build(config["cluster"], options)
    for epoch in range(1, options.epochs + 1):
        order = tf.random.experimental.stateless_shuffle(tf.range(count), (options.seed, epoch)).numpy()
        shares = [order[worker::workers][: steps * options.batch_size] for worker in range(workers)]
        batches = zip(*(np.split(share, steps) for share in shares), strict=True)
        epochs.append([dict(zip(model.rows, batch, strict=True)) for batch in batches])

    for variable in model.weights:
        print(f"variable {variable.op.name} on {variable.device}")
    with v1.Session(server.target, graph=graph, config=limits) as session:
        with graph.as_default():
            session.run(v1.global_variables_initializer())
        train(session, model, epochs)
        w1, b1, w2, b2 = session.run(model.weights)
    here.model_folder.mkdir(parents=True, exist_ok=True)
    np.savez(here.model_folder / "model.npz", w1=w1, b1=b1, w2=w2, b2=b2)


if __name__ == "__main__":
    main()
