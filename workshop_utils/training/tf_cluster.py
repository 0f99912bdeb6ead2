"""How the tasks of a TensorFlow cluster end in order: servers after their chief, the first task after all others."""

from __future__ import annotations

import socket
import sys
import time

from workshop_utils.place import TRAINING_ROLES, join_seconds, tf_config


def serve_until_chief_leaves(poll_seconds: float = 0.5, patience_seconds: float | None = None) -> None:
    """Return once the chief's port, having answered, answers no more.

    For parameter servers and workers under a coordinator: `tf.distribute.Server.join()` never returns, so
    without this the platform would have to kill them.

    Raises:
        TimeoutError: if the chief has not answered within `patience_seconds`; by default two minutes, or
            `join_seconds` if that is more.
    """
    if patience_seconds is None:
        patience_seconds = max(120.0, join_seconds())
    config = tf_config()
    if config is None or not config["cluster"].get("chief"):
        raise ValueError("TF_CONFIG names no chief, so there is nobody to wait for")
    chief = config["cluster"]["chief"][0]
    deadline = time.monotonic() + patience_seconds
    while not _answers(chief):
        if time.monotonic() > deadline:
            raise TimeoutError(f"the chief at {chief} did not answer within {patience_seconds:.0f} s")
        time.sleep(poll_seconds)
    while _answers(chief):
        time.sleep(poll_seconds)


def leave_last(poll_seconds: float = 0.1, patience_seconds: float = 120.0) -> None:
    """Return once TF_CONFIG's chief and workers have all come here; on the first of them, once no other answers.

    A worker that ends right after its last collective may close a connection from which another one still reads.
    And the first task hosts TensorFlow's coordination service. If it ended before the others, one of them that is still
    ending would log that the service is gone. One that has not ended after `patience_seconds` is not waited for.
    """
    config = tf_config()
    if config is None:
        return
    tasks = [
        (role, index, address)
        for role in TRAINING_ROLES
        for index, address in enumerate(config["cluster"].get(role, []))
    ]
    if len(tasks) > 1 and "tensorflow" in sys.modules:
        from tensorflow.python.eager import context

        if context.context().coordination_service is not None:
            context.context().wait_at_barrier("leave", int(patience_seconds * 1000))
    if not tasks or tasks[0][:2] != (config["task"]["type"], config["task"]["index"]):
        return
    deadline = time.monotonic() + patience_seconds
    for _, _, address in tasks[1:]:
        while _answers(address) and time.monotonic() < deadline:
            time.sleep(poll_seconds)


def _answers(address: str) -> bool:
    """Whether somebody listens at `address`, that is `host:port`."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError:
        return False
    return True
