"""The parameter server that the toolkit runs beside the script on every host: `python parameter_server.py TF_CONFIG`.

It holds variables on the processor and leaves when the master does. The script never sees it. Source:
sagemaker-tensorflow-training-toolkit, training.py (`_run_ps`, `_wait_until_master_is_down`).
"""

import os
import sys
import threading

from workshop_utils import place

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")


def main() -> None:
    """Serve until the master's port, having answered, answers no more."""
    os.environ["TF_CONFIG"] = sys.argv[1]
    # TensorFlow 2 knows no master, and this calls it chief; the toolkit's TensorFlow 1 server does not mind.
    config = place.tf_config()
    assert config is not None
    # From the beginning: the master cannot end before this server serves, and so is seen before it has gone.
    watch = threading.Thread(target=place.serve_until_chief_leaves)
    watch.start()
    import tensorflow as tf

    # Several threads to run operations in: one that waits for a peer holds its own.
    threads = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=16
    )
    _server = tf.distribute.Server(config["cluster"], "ps", config["task"]["index"], "grpc", threads)
    watch.join()


if __name__ == "__main__":
    main()
