"""Measure an all-reduce among real processes: how long it takes, and how many bytes each rank sends. Trains nothing.

Reports for each size and repeat, and from each rank: `all_reduce_seconds` (for all `--calls`), `bytes_sent`,
`messages_sent`, and `error`, the largest relative difference from the mean that must come out.
"""

import argparse
import sys
import time

import numpy as np

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.central import central_all_reduce
from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.tree import tree_all_reduce

ALGORITHMS = {
    "ring": ring_all_reduce,
    "central": central_all_reduce,
    "tree": tree_all_reduce,
    "halving_doubling": halving_doubling_all_reduce,
}


def main() -> None:
    place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="ring")
    parser.add_argument("--nbytes", default="1000000", help="size of an array; several, separated by commas")
    parser.add_argument("--calls", type=int, default=1, help="all-reduces in a row, timed together")
    parser.add_argument("--repeats", type=int, default=5, help="how often each size is measured")
    options = parser.parse_args()
    sizes = [int(text) for text in str(options.nbytes).split(",")]
    if any(nbytes % 4 for nbytes in sizes):
        sys.exit(f"nbytes is {options.nbytes}; each must be a multiple of 4, the size of a float32")

    with tcp.connect(*place.rendezvous()) as communicator:
        all_reduce, size = ALGORITHMS[options.algorithm], communicator.size
        for nbytes in sizes:
            array = np.zeros(nbytes // 4, np.float32)
            for repeat in range(options.repeats):
                array[:] = communicator.rank + 1
                communicator.barrier()  # so that all begin together
                communicator.traffic.reset()
                start = time.perf_counter()
                for _ in range(options.calls):
                    all_reduce(communicator, array, "mean")
                seconds = time.perf_counter() - start
                expected = (size + 1) / 2  # after the first call; the mean of equals is the same again
                place.report(
                    step=repeat,
                    nbytes=nbytes,
                    all_reduce_seconds=seconds,
                    bytes_sent=int(communicator.traffic.bytes_sent.sum()),
                    messages_sent=int(communicator.traffic.messages_sent.sum()),
                    error=float(np.abs(array / expected - 1).max(initial=0)),
                )
        communicator.barrier()


if __name__ == "__main__":
    main()
