"""Train a small network on handwritten digits by between-graph replication: every worker drives a graph of its own.

TensorFlow 1's usual way ("Distributed TensorFlow", the guide of version 1), through `tf.compat.v1`. Every process
builds the same graph; `replica_device_setter` puts its variables on the parameter servers, where equal names are
one variable. With `--consistency synchronous`, a `SyncReplicasOptimizer` collects one gradient of every worker
before the variables change (Abadi et al. 2016, "TensorFlow: A System for Large-Scale Machine Learning", section 4.4).

A worker computes on a GPU of its own, where its machine has any; chief and servers never do. It has been run on CPUs;
what concerns GPUs has not been run. The embedded `data: digits` are scikit-learn's, of 8 × 8 pixels; `data: mnist` is
the real thing.
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


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of an update of the variables")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--consistency", choices=["synchronous", "asynchronous"], default="synchronous")
    parser.add_argument("--slow-worker", type=int, default=-1, help="this worker takes longer")
    parser.add_argument("--slow-seconds", type=float, default=0.05, help="by so much a step")
    return parser.parse_args()


def server_options(here: place.Place) -> Any:
    """What a server may use of its machine: a worker has a GPU of its own, where there are any, the others none.

    Raises:
        ValueError: if there is no GPU for a worker that should have one.
    """
    # Several threads to run operations in, since some wait for other processes; one for arithmetic, where processes
    # share the cores of a machine. A session sees the servers and itself alone: without the filter it would wait for
    # the other workers, even for those that have left.
    filters = ["/job:ps", f"/job:{here.role}/task:{here.index}"]
    options = v1.ConfigProto(inter_op_parallelism_threads=16, device_filters=filters)
    device = here.device if here.role == "worker" else "cpu"
    if device != "cpu":
        options.gpu_options.visible_device_list = device.partition(":")[2]
        options.gpu_options.allow_growth = True  # otherwise it takes all of the GPU's memory at once
        return options
    options.device_count["GPU"] = 0
    if here.local_world_size > 1:
        options.intra_op_parallelism_threads = 1
    return options


class Replica(NamedTuple):
    """One process's graph: the same in all of them but for the device on which it computes."""

    weights: list[Any]
    global_step: Any
    rows: Any  # which images make the batch, fed at each step
    loss: Any
    train: Any
    test: Any  # mean loss and accuracy
    optimizer: Any
    arrived: Any  # how many processes are ready to begin
    arrive: Any


def build(cluster: dict[str, list[str]], device: str, options: argparse.Namespace) -> tuple[Any, Replica]:
    """The graph, in which `replica_device_setter` sends variables to the servers and all else to `device`."""
    images, labels = load("train")
    test_images, test_labels = load("test")
    values = initial_weights(images.shape[1], options.hidden, options.seed)
    workers, synchronous = len(cluster["worker"]), options.consistency == "synchronous"

    setter = v1.train.replica_device_setter(cluster=cluster, worker_device=device)
    with tf.Graph().as_default() as graph, v1.device(setter):
        global_step = v1.train.get_or_create_global_step()
        weights = [v1.Variable(value, name=name, use_resource=True) for name, value in values.items()]
        rows = v1.placeholder(tf.int64, [None])
        loss = mean_loss(tf.gather(labels, rows), logits(weights, tf.gather(images, rows)))
        optimizer = v1.train.MomentumOptimizer(options.learning_rate, options.momentum, use_locking=True)
        if synchronous:
            optimizer = v1.train.SyncReplicasOptimizer(optimizer, replicas_to_aggregate=workers)
        train = optimizer.minimize(loss, global_step, weights)
        scores = logits(weights, test_images)
        hits = tf.cast(tf.equal(tf.argmax(scores, axis=1), test_labels), tf.float32)
        test = (mean_loss(tf.constant(test_labels), scores), tf.reduce_mean(hits))
        arrived = v1.Variable(0, name="arrived", use_resource=True)
        arrive = arrived.assign_add(1, use_locking=True)
    return graph, Replica(weights, global_step, rows, loss, train, test, optimizer, arrived, arrive)


def open_session(graph: Any, replica: Replica, target: str, chief: bool, limits: Any) -> Any:
    """A session on the servers' variables: the chief initialises them, everybody else waits until it has."""
    local: dict[str, Any] = {}
    with graph.as_default():
        initialise, ready = v1.global_variables_initializer(), v1.report_uninitialized_variables()
        if isinstance(replica.optimizer, v1.train.SyncReplicasOptimizer):
            optimizer = replica.optimizer
            local = {
                "local_init_op": optimizer.chief_init_op if chief else optimizer.local_step_init_op,
                "ready_for_local_init_op": optimizer.ready_for_local_init_op,
            }
        # By default it looks every 30 s whether the chief is done.
        sessions = v1.train.SessionManager(graph=graph, ready_op=ready, recovery_wait_secs=0.2, **local)
        if chief:
            return sessions.prepare_session(target, initialise, config=limits)
        return sessions.wait_for_session(target, config=limits)


def meet(session: Any, replica: Replica, size: int) -> None:
    """Wait for all: whoever came first would train alone otherwise, and its speed would say little."""
    session.run(replica.arrive)
    while session.run(replica.arrived) < size:
        time.sleep(0.002)


def watch(session: Any, replica: Replica, steps: int, workers: int, options: argparse.Namespace) -> None:
    """The chief's part: it trains on nothing itself, and tests what the workers have made after every epoch."""
    for epoch in range(1, options.epochs + 1):
        if options.consistency == "synchronous":
            # Takes the mean of all workers' gradients, once they are there; changes the variables; then gives each
            # worker a token, without which it may not go on. Usually a thread does this, at no known moment.
            (update,) = replica.optimizer.get_chief_queue_runner().enqueue_ops
            for _ in range(steps):
                session.run(update)
        else:
            while session.run(replica.global_step) < epoch * steps * workers:
                time.sleep(0.005)  # nobody waits for the chief
        step = int(session.run(replica.global_step))
        test_loss, accuracy = session.run(replica.test)
        place.report(step=step, test_loss=test_loss, accuracy=accuracy, epoch=epoch)


def batches_of(worker: int, workers: int, steps: int, options: argparse.Namespace) -> list[np.ndarray]:
    """The rows of each of this worker's batches: every `workers`-th image of each shuffled epoch."""
    count = place.load("train").count
    batches: list[np.ndarray] = []
    for epoch in range(1, options.epochs + 1):
        order = tf.random.experimental.stateless_shuffle(tf.range(count), (options.seed, epoch)).numpy()
        batches += np.split(order[worker::workers][: steps * options.batch_size], steps)
    return batches


def work(session: Any, replica: Replica, batches: list[np.ndarray], delay: float, epochs: int) -> None:
    """A worker's part: one batch after the other, each `delay` seconds late."""
    since = time.perf_counter()
    for step, batch in enumerate(batches, 1):
        time.sleep(delay)
        # A synchronous step ends when the chief has given a token, an asynchronous one when the servers have
        # applied this worker's gradient.
        loss, _ = session.run([replica.loss, replica.train], {replica.rows: batch})
        epoch = (step - 1) * epochs // len(batches) + 1
        if step == 1:  # the servers and this worker have prepared the graph now, so the clock starts here
            place.report(step=step, loss=loss, epoch=epoch, device=place.here().device)
            since = time.perf_counter()
        elif step % max(1, len(batches) // 20) == 0:
            speed = (step - 1) * len(batch) / (time.perf_counter() - since)
            place.report(step=step, loss=loss, samples_per_second=speed, epoch=epoch)


def main() -> None:
    here = place.here()
    options = parse()
    config = place.tf_config()
    if config is None or not {"chief", "ps", "worker"} <= set(config["cluster"]):
        sys.exit("TF_CONFIG must name a cluster of a chief, parameter servers (ps) and workers")
    tf.get_logger().setLevel("ERROR")
    cluster, workers = config["cluster"], len(config["cluster"]["worker"])
    device = f"/job:{here.role}/task:{here.index}"
    tf.config.set_visible_devices([], "GPU")  # what runs outside the session is small
    limits = server_options(here)
    server = tf.distribute.Server(cluster, here.role, here.index, "grpc", limits)
    if here.role == "ps":
        place.serve_until_chief_leaves()
        return

    share = place.load("train").count // workers
    steps = share // options.batch_size  # an epoch; the remainder is dropped; the next epoch shuffles again
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {workers} workers has only {share} images")
    batches = batches_of(here.index, workers, steps, options) if here.role == "worker" else []
    graph, replica = build(cluster, device, options)
    with open_session(graph, replica, server.target, here.role == "chief", limits) as session:
        if here.role == "chief":
            for variable in replica.weights:
                print(f"variable {variable.op.name} on {variable.device}")
            place.report(step=0, test_loss=session.run(replica.test)[0], epoch=0)
        meet(session, replica, 1 + workers)
        if here.role == "worker":
            delay = options.slow_seconds if here.index == options.slow_worker else 0
            work(session, replica, batches, delay, options.epochs)
            return
        watch(session, replica, steps, workers, options)
        w1, b1, w2, b2 = session.run(replica.weights)
    here.model_folder.mkdir(parents=True, exist_ok=True)
    np.savez(here.model_folder / "model.npz", w1=w1, b1=b1, w2=w2, b2=b2)


if __name__ == "__main__":
    main()
