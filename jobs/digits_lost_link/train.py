"""Train over the workshop's own ring until, after some steps of the job's first life, one rank is heard of no more.

| `--failure` | what becomes of the last rank | what the others' machines are told |
| --- | --- | --- |
| none | it trains on | |
| kill | its process is killed | at once, by its kernel: the link has ended |
| link | its network card is switched off, as if somebody had pulled the cable | nothing |

Where the last rank has no network card of its own (no emulated network, or stamped links), it falls silent instead,
which is the same to the others. Each of them says at the end what it has learnt, and after how many seconds.
"""

import argparse
import fcntl
import os
import signal
import socket
import struct
import sys
import time

import numpy as np

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.communicator import CommunicationError, Communicator
from workshop_utils.comm.ring import ring_all_reduce

FAILING_STEP = 5
SIOCSIFFLAGS, SIOCGIFADDR = 0x8914, 0x8915  # ioctl(2) requests for a network card, see netdevice(7)
CARD = b"eth0"


def has_own_card() -> bool:
    """Whether CARD is that of an emulated network, whose hosts are named by their card's address."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("16s16x", CARD))
        except OSError:
            return False  # there is no such card
    return socket.inet_ntoa(answer[20:24]) == socket.gethostname()


def lose_link(patience: float) -> None:
    """Switch this rank's card off; where it has none of its own, only wait while the others lose patience."""
    if has_own_card():
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as card:
            fcntl.ioctl(card, SIOCSIFFLAGS, struct.pack("16sh14x", CARD, 0))  # without the flag for "up"
        print("my card is switched off", flush=True)
    else:
        print("I have no card of my own, so I fall silent", flush=True)
        time.sleep(3 * patience)


def train(communicator: Communicator, options: argparse.Namespace) -> None:
    examples = place.load("train")
    images = np.frombuffer(examples.images, np.uint8).reshape(examples.count, -1) / np.float32(255)
    labels = np.frombuffer(examples.labels, np.uint8)
    rank, size = communicator.rank, communicator.size
    weights = np.zeros((images.shape[1], 10), np.float32)
    for step in range(1, options.steps + 1):
        rows = (np.arange(32) * size + rank + step * 32 * size) % len(images)
        scores = np.exp(images[rows] @ weights)
        scores /= scores.sum(axis=1, keepdims=True)
        loss = -np.log(scores[np.arange(32), labels[rows]]).mean()
        scores[np.arange(32), labels[rows]] -= 1
        gradient = (images[rows].T @ scores / 32).astype(np.float32)
        since = time.perf_counter()
        try:
            ring_all_reduce(communicator, gradient, "mean")
        except CommunicationError as error:
            seconds = time.perf_counter() - since
            place.report(step=step, detected_seconds=seconds)
            sys.exit(f"{type(error).__name__} after {seconds:.1f} s: {error}")
        weights -= np.float32(0.5) * gradient
        place.report(step=step, loss=loss)
        if rank == size - 1 and step == FAILING_STEP and place.restart_count() == 0:
            if options.failure == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif options.failure == "link":
                lose_link(options.patience)


def main() -> None:
    place.here()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--failure", choices=["none", "kill", "link"], default="link")
    parser.add_argument("--patience", type=float, default=2.0, help="seconds that a message may take")
    options = parser.parse_args()

    with tcp.connect(*place.rendezvous()) as communicator:
        communicator.timeout_seconds = options.patience
        train(communicator, options)
        communicator.barrier()


if __name__ == "__main__":
    main()
