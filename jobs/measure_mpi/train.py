"""Measure MPI's all-reduce among real processes, as measure_all_reduce does the workshop's. Trains nothing.

Reports for each size and repeat, and from each rank: `all_reduce_seconds` (for all `--calls`), and `error`, the
largest relative difference from the sum that must come out.

The library chooses algorithm and protocol; variables in the job's environment overrule it. Behind links of 100 Mbit/s,
with 4 MB between 2 and 4 ranks, Open MPI 5.0.11 took 1.9 times as long as a ring's bytes need. With
`OMPI_MCA_btl_tcp_flags=1`, which has it only send and never put into a peer's memory, and a ring
(`OMPI_MCA_coll_tuned_use_dynamic_rules=1`, `OMPI_MCA_coll_tuned_allreduce_algorithm=4`) it took 1.0 to 1.2 times.
"""

import argparse
import sys
import time

import numpy as np
from mpi4py import MPI

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

    world = MPI.COMM_WORLD
    for nbytes in sizes:
        array, total = np.full(nbytes // 4, world.rank + 1, np.float32), np.zeros(nbytes // 4, np.float32)
        expected = world.size * (world.size + 1) / 2
        for repeat in range(options.repeats):
            world.Barrier()  # so that all begin together
            start = time.perf_counter()
            for _ in range(options.calls):
                world.Allreduce(array, total, op=MPI.SUM)
            seconds = time.perf_counter() - start
            error = float(np.abs(total / expected - 1).max(initial=0))
            place.report(step=repeat, nbytes=nbytes, all_reduce_seconds=seconds, error=error)
    world.Barrier()


if __name__ == "__main__":
    main()
