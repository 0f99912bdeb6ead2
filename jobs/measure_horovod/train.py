"""Measure Horovod's all-reduce among real processes, as measure_all_reduce does the workshop's. Trains nothing.

Reports for each size and repeat, and from each rank: `all_reduce_seconds` (for all `--calls`), and `error`, the
largest relative difference from the mean that must come out.
"""

import argparse
import sys
import time

import horovod.torch as hvd
import torch

from workshop_utils import place


def main() -> None:
    place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nbytes", default="1000000", help="size of an array; several, separated by commas")
    parser.add_argument("--calls", type=int, default=1, help="all-reduces in a row, timed together")
    parser.add_argument("--repeats", type=int, default=5, help="how often each size is measured")
    options = parser.parse_args()
    sizes = [int(text) for text in str(options.nbytes).split(",")]
    if any(nbytes % 4 for nbytes in sizes):
        sys.exit(f"nbytes is {options.nbytes}; each must be a multiple of 4, the size of a float32")

    hvd.init()
    expected = (hvd.size() + 1) / 2
    for nbytes in sizes:
        for repeat in range(options.repeats):
            tensor = torch.full((nbytes // 4,), hvd.rank() + 1.0)
            hvd.barrier()  # so that all begin together
            start = time.perf_counter()
            for _ in range(options.calls):
                hvd.allreduce_(tensor, name="array")  # in place; the mean, as is Horovod's default
            seconds = time.perf_counter() - start
            error = float((tensor / expected - 1).abs().amax()) if nbytes else 0.0
            place.report(step=repeat, nbytes=nbytes, all_reduce_seconds=seconds, error=error)
    hvd.barrier()
    hvd.shutdown()


if __name__ == "__main__":
    main()
