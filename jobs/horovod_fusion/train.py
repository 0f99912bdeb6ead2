"""Measure how long Horovod takes to average many gradients, as a backward pass hands them over. Trains nothing.

Reports for each repeat, and from each rank, `all_reduce_seconds` for all `--tensors`. What Horovod does with them is
set by its variables HOROVOD_FUSION_THRESHOLD and HOROVOD_CYCLE_TIME.
"""

import argparse
import os
import sys
import time

import horovod.torch as hvd
import torch

from workshop_utils import place

SETTLING_REPEATS = 3  # in the first, ranks also agree on names and sizes, which Horovod then remembers


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--tensors", type=int, default=100, help="how many gradients there are")
    parser.add_argument("--nbytes", type=int, default=10_000, help="size of each")
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--timeline", type=int, default=0, help="record so many repeats, the last ones")
    options = parser.parse_args()
    if options.nbytes <= 0 or options.nbytes % 4:
        sys.exit(f"nbytes is {options.nbytes}; it must be a multiple of 4, the size of a float32")
    if not 0 <= options.timeline <= options.repeats:
        sys.exit(f"timeline is {options.timeline}; there are {options.repeats} repeats to record")
    if options.timeline:  # asked for before init, since its writer keeps a core busy all the time
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    hvd.init()

    gradients = [torch.full((options.nbytes // 4,), float(hvd.rank())) for _ in range(options.tensors)]
    expected = (hvd.size() - 1) / 2  # the mean of 0 … N − 1
    for repeat in range(-SETTLING_REPEATS, options.repeats):
        if options.timeline and repeat == options.repeats - options.timeline:
            hvd.start_timeline(str(here.model_folder / "timeline.json"))
        hvd.barrier()  # so that all begin together; it is a message, too, so a cycle has just begun
        start = time.perf_counter()
        handles = [
            hvd.allreduce_async(gradient, name=f"gradient {number}", op=hvd.Average)
            for number, gradient in enumerate(gradients)
        ]
        averages = [hvd.synchronize(handle) for handle in handles]
        seconds = time.perf_counter() - start
        wrong = [number for number, average in enumerate(averages) if not torch.all(average == expected)]
        if wrong:
            sys.exit(f"gradients {wrong} came back with other values than {expected}")
        if repeat >= 0:
            place.report(step=repeat, nbytes=options.nbytes, all_reduce_seconds=seconds)
    if options.timeline:
        hvd.barrier()
        hvd.stop_timeline()
    hvd.shutdown()


if __name__ == "__main__":
    main()
