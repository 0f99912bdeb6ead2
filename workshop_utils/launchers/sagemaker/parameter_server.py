"""The parameter server that the toolkit runs beside the script on every host: `python parameter_server.py TF_CONFIG`.

It holds variables on the processor and leaves when the master does. The script never sees it. Source:
sagemaker-tensorflow-training-toolkit, training.py (`_run_ps`, `_wait_until_master_is_down`).
"""

import json
import os
import socket
import sys
import threading
import time

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

POLL_SECONDS = 0.1  # the toolkit looks every ten seconds; nobody here pays for the wait


def main() -> None:
    """Serve until the master's port, having answered, answers no more."""
    config = json.loads(sys.argv[1])
    (master,) = config["cluster"]["master"]
    # From the beginning: the master cannot end before this server serves, and so is seen before it has gone.
    watch = threading.Thread(target=until_gone, args=(master,))
    watch.start()
    import tensorflow as tf

    # Several threads to run operations in: one that waits for a peer holds its own.
    threads = tf.compat.v1.ConfigProto(
        device_count={"GPU": 0}, intra_op_parallelism_threads=1, inter_op_parallelism_threads=16
    )
    # TensorFlow 2 knows no master; the name belongs to the toolkit, whose TensorFlow 1 server does not mind.
    cluster = {("chief" if role == "master" else role): hosts for role, hosts in config["cluster"].items()}
    _server = tf.distribute.Server(cluster, "ps", config["task"]["index"], "grpc", threads)
    watch.join()


def until_gone(address: str) -> None:
    """Return once `address`, having answered, answers no more."""
    while not answers(address):
        time.sleep(POLL_SECONDS)
    while answers(address):
        time.sleep(POLL_SECONDS)


def answers(address: str) -> bool:
    """Whether somebody listens at `address`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
