"""Measure what MultiWorkerMirroredStrategy makes of `bytes_per_pack`, its hint on fusion. Trains nothing.

All workers all-reduce the same list of tensors, which stand for a model's gradients, by TensorFlow's ring. Reports
for each hint and repeat, and from each rank: `collectives` (all-reduces in the graph) and `all_reduce_seconds`.
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

import tensorflow as tf

from workshop_utils import place


def collectives(graph: tf.Graph) -> int:
    """How many all-reduces `graph` holds, in its functions too."""
    definition = graph.as_graph_def()
    nodes = [*definition.node, *(node for body in definition.library.function for node in body.node_def)]
    return sum(node.op.startswith("CollectiveReduce") for node in nodes)


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tensors", type=int, default=64, help="how many there are")
    parser.add_argument("--nbytes", type=int, default=4000, help="size of each")
    parser.add_argument(
        "--bytes-per-pack", default="1,0", help="several, separated by commas; 0: TensorFlow decides"
    )
    parser.add_argument("--repeats", type=int, default=20, help="how often each hint is measured")
    options = parser.parse_args()
    hints = [int(text) for text in options.bytes_per_pack.split(",")]
    if min(options.tensors, options.nbytes, options.repeats) < 1 or options.nbytes % 4 or min(hints) < 0:
        sys.exit("tensors and repeats must be at least 1, nbytes a multiple of 4, and no hint below 0")

    tf.get_logger().setLevel("ERROR")
    tf.config.set_visible_devices([], "GPU")
    tf.config.threading.set_intra_op_parallelism_threads(1)  # the workers may share one machine's cores
    place.tf_config()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    gradients = [tf.ones(options.nbytes // 4) for _ in range(options.tensors)]

    for bytes_per_pack in hints:
        hint = tf.distribute.experimental.CommunicationOptions(
            bytes_per_pack=bytes_per_pack,
            implementation=tf.distribute.experimental.CommunicationImplementation.RING,
        )

        def all_reduce(hint: tf.distribute.experimental.CommunicationOptions = hint) -> list[tf.Tensor]:
            context = tf.distribute.get_replica_context()
            summed: list[tf.Tensor] = context.all_reduce(tf.distribute.ReduceOp.SUM, gradients, hint)
            return summed

        function = tf.function(lambda all_reduce=all_reduce: strategy.run(all_reduce))
        count = collectives(function.get_concrete_function().graph)
        for repeat in range(options.repeats + 1):
            start = time.perf_counter()
            summed = function()
            seconds = time.perf_counter() - start
            if float(summed[-1][-1]) != here.world_size:
                sys.exit(f"the sum over {here.world_size} workers came out as {float(summed[-1][-1])}")
            if repeat:  # the first prepares the graph
                place.report(
                    step=repeat,
                    bytes_per_pack=bytes_per_pack,
                    collectives=count,
                    all_reduce_seconds=seconds,
                )
    place.leave_last()


if __name__ == "__main__":
    main()
