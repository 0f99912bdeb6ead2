"""Measure an all-reduce among real processes: how long it takes, by size. Trains nothing.

`--algorithm` is one of lesson 04's over the workshop's own message passing (`job.yaml`), or PyTorch's, `library`: NCCL
between GPUs, gloo between CPUs (`torch.yaml`). With `--maxbytes` sizes double from 8 bytes on.

Rank 0 prints the table of NVIDIA's nccl-tests, for the sum in place: `algbw` is size by time, and `busbw` that times
2 (N − 1)/N: what each link carries under a ring, for any number N of ranks (nccl-tests, doc/PERFORMANCE.md). A time is
the median over `--repeats` of the slowest rank's, for one of `--calls` in a row, after others to warm up. `#wrong`
counts elements. Below it are α and B of α + size/B, and as lesson 15 fits a ring's.

Reports for each size and repeat, and from each rank: `all_reduce_seconds` (of all `calls`) and `error`, the largest
difference from the sum of 1 that must come out; of the workshop's own also `bytes_sent` and `messages_sent`.
"""

import argparse
import sys
import time
from typing import Any

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
ITEM_NBYTES = {"float32": 4, "bfloat16": 2}
WARM_UP_CALLS, MOST_CALLS, REPEAT_SECONDS = 5, 1000, 0.1


class Workshop:
    """One of lesson 04's algorithms, among arrays of NumPy."""

    def __init__(self, algorithm: str) -> None:
        self.name, self.reduce = algorithm, ALGORITHMS[algorithm]
        self.communicator = tcp.connect(*place.rendezvous())
        self.rank, self.size = self.communicator.rank, self.communicator.size

    def zeros(self, count: int, datatype: str) -> Any:
        return np.zeros(count, datatype)

    def begin(self) -> None:
        """Return once all are here; count what is sent from now on."""
        self.communicator.barrier()
        self.communicator.traffic.reset()

    def all_reduce(self, array: Any) -> None:
        self.reduce(self.communicator, array, "sum")

    def end(self) -> dict[str, int]:
        """Return once this rank is done, with what it has sent."""
        traffic = self.communicator.traffic
        sent = {"bytes_sent": traffic.bytes_sent, "messages_sent": traffic.messages_sent}
        return {name: int(count.sum()) for name, count in sent.items()}

    def greatest(self, value: float) -> float:
        """The greatest `value` of all ranks."""
        values = np.array([value])
        central_all_reduce(self.communicator, values, "max")
        return float(values[0])

    def close(self) -> None:
        self.communicator.barrier()
        self.communicator.close()


class Library:
    """PyTorch's all-reduce, among tensors on each rank's device."""

    def __init__(self) -> None:
        import torch
        import torch.distributed

        here = place.here()
        self.torch, self.dist, self.name = torch, torch.distributed, here.backend
        self.device = torch.device(here.device)
        own = self.device if self.device.type == "cuda" else None
        if own:
            torch.cuda.set_device(own)
        self.dist.init_process_group(self.name, device_id=own)
        self.rank, self.size = self.dist.get_rank(), self.dist.get_world_size()

    def zeros(self, count: int, datatype: str) -> Any:
        return self.torch.zeros(count, dtype=getattr(self.torch, datatype), device=self.device)

    def begin(self) -> None:
        self.dist.barrier()
        self.end()

    def all_reduce(self, tensor: Any) -> None:
        self.dist.all_reduce(tensor)

    def end(self) -> dict[str, int]:
        if self.device.type == "cuda":  # where a call only asks for the work
            self.torch.cuda.synchronize()
        return {}

    def greatest(self, value: float) -> float:
        tensor = self.torch.tensor(value, dtype=self.torch.float64, device=self.device)
        self.dist.all_reduce(tensor, self.dist.ReduceOp.MAX)
        return float(tensor)

    def close(self) -> None:
        self.dist.barrier()
        self.dist.destroy_process_group()


def measure(group: Workshop | Library, nbytes: int, options: argparse.Namespace) -> tuple[float, int]:
    """Seconds of one call, and the number of wrong elements on the worst rank; reports each repeat."""
    array = group.zeros(nbytes // ITEM_NBYTES[options.datatype], options.datatype)
    array[group.rank :: group.size] = 1  # so that each element's sum is 1, in any type and for any N
    group.all_reduce(array)
    errors = abs(array - 1)
    wrong, error = int((errors != 0).sum()), float(errors.max()) if len(errors) else 0.0
    array[:] = 0  # however often it is summed

    def seconds_of(calls: int) -> tuple[float, dict[str, int]]:
        group.begin()
        start = time.perf_counter()
        for _ in range(calls):
            group.all_reduce(array)
        sent = group.end()
        return time.perf_counter() - start, sent

    calls = options.calls
    if not calls:  # an idle link may let a first burst through for nothing, which has to count little
        one = group.greatest(seconds_of(WARM_UP_CALLS)[0]) / WARM_UP_CALLS
        calls = max(1, min(MOST_CALLS, round(REPEAT_SECONDS / one)))
    slowest = []
    for repeat in range(options.repeats):
        seconds, sent = seconds_of(calls)
        place.report(step=repeat, nbytes=nbytes, calls=calls, all_reduce_seconds=seconds, error=error, **sent)
        slowest.append(group.greatest(seconds) / calls)
    return float(np.median(slowest)), int(group.greatest(wrong))


def fitted(sizes: list[int], seconds: list[float], ranks: int) -> str:
    """α + size/B with the least squares of relative errors, in words; `seconds` are those of `sizes` in bytes."""
    columns = np.stack([np.ones(len(sizes)), sizes], axis=1) / np.array(seconds)[:, None]
    alpha, slope = np.linalg.lstsq(columns, np.ones(len(sizes)), rcond=None)[0]
    if min(alpha, slope) <= 0:
        return "# fit: time does not grow as α + size/B does; measure larger arrays (--maxbytes)"
    messages, bandwidth = 2 * (ranks - 1), 1e-9 / slope
    path = f"α = {1e6 * alpha / messages:.3g} us, B = {bandwidth * messages / ranks:.3g} GB/s"
    return (
        f"# fit: time = {1e6 * alpha:.3g} us + size / ({bandwidth:.3g} GB/s)\n"
        f"# as lesson 15 fits it, 2 (N - 1) (α + size / (N B)): {path}; for its cluster it assumes 20 us, 12.5 GB/s"
    )


def main() -> None:
    place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--algorithm", choices=[*ALGORITHMS, "library"], default="ring")
    parser.add_argument("--nbytes", default="1000000", help="size of an array; several, separated by commas")
    parser.add_argument("--maxbytes", type=int, default=0, help="instead: 8, and twice as much up to this")
    parser.add_argument("--datatype", choices=[*ITEM_NBYTES], default="float32")
    parser.add_argument("--calls", type=int, default=0, help="timed together; 0: what takes 0.1 s")
    parser.add_argument("--repeats", type=int, default=5, help="how often each size is measured")
    options = parser.parse_args()
    sizes = [int(text) for text in str(options.nbytes).split(",")]
    if options.maxbytes:
        sizes = [8, *(2**power for power in range(4, 64) if 2**power <= options.maxbytes)]
    if any(nbytes % 4 for nbytes in sizes):
        sys.exit(f"nbytes is {options.nbytes}; each must be a multiple of 4, the size of a float32")
    if options.repeats < 1:
        sys.exit(f"repeats is {options.repeats}; it must be at least 1")
    if options.datatype != "float32" and options.algorithm != "library":
        sys.exit(f"datatype is {options.datatype!r}; NumPy has none: use float32, or --algorithm library")

    group = Library() if options.algorithm == "library" else Workshop(options.algorithm)
    times = []
    if group.rank == 0:
        print(f"# all-reduce, in place: {group.name}, {group.size} ranks")
        print("#        size      count      type  redop      time     algbw     busbw  #wrong")
        print("#         (B) (elements)                       (us)    (GB/s)    (GB/s)", flush=True)
    for nbytes in sizes:
        seconds, wrong = measure(group, nbytes, options)
        times.append(seconds)
        rate, count = nbytes / seconds / 1e9, nbytes // ITEM_NBYTES[options.datatype]
        if group.rank == 0:
            speeds = f"{1e6 * seconds:9.1f} {rate:9.3g} {rate * 2 * (group.size - 1) / group.size:9.3g}"
            print(f"{nbytes:13} {count:10} {options.datatype:>9}    sum {speeds} {wrong:7}", flush=True)
    if group.rank == 0 and len(sizes) > 1 and group.size > 1:
        print(fitted(sizes, times, group.size), flush=True)
    group.close()


if __name__ == "__main__":
    main()
