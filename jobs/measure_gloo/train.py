"""Measure PyTorch's all-reduce (Gloo) among real processes, as measure_all_reduce does the workshop's. Trains nothing.

Reports for each size and repeat, and from each rank: `all_reduce_seconds` (for all `--calls`).
"""

import argparse
import sys
import time

import torch
import torch.distributed as dist

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

    dist.init_process_group("gloo")
    for nbytes in sizes:
        for repeat in range(options.repeats):
            tensor = torch.ones(nbytes // 4)
            dist.barrier()  # so that all begin together
            start = time.perf_counter()
            for _ in range(options.calls):
                dist.all_reduce(tensor)
            seconds = time.perf_counter() - start
            place.report(step=repeat, nbytes=nbytes, all_reduce_seconds=seconds)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
