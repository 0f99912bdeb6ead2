"""One rank of the benchmark `all_reduce`: measures, in turn with the other ranks, every way to reduce an array.

mpirun starts it, so that one set of processes has everything: OpenMPI, a gloo group, and our communicators.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed
from mpi4py import MPI

from workshop_utils.comm import shared_memory, tcp
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import pipelined_ring_all_reduce, ring_all_reduce
from workshop_utils.comm.tuned import tuned_all_reduce

CALLS = {4096: 60, 65536: 30, 1 << 20: 8, 1 << 24: 3, 1 << 26: 1}  # in one sample, by bytes of the array
SAMPLES = 7

Reduce = Callable[[], object]


def main() -> None:
    """Measure, and let rank 0 write `{size: {way: [seconds of a call, a sample each]}}`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, nargs=5, required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    gloo, *own = (f"127.0.0.1:{port}" for port in options.ports)
    torch.set_num_threads(1)
    everywhere = os.sched_getaffinity(0)
    torch.distributed.init_process_group("gloo", f"tcp://{gloo}", rank=rank, world_size=size)
    secret = options.secret.encode()
    communicators: dict[str, Communicator] = {
        "TCP": tcp.connect(rank, size, own[0], secret),
        "Unix sockets": tcp.connect(rank, size, own[1], secret, family="unix"),
        "plain TCP": tcp.connect(rank, size, own[2], secret, plain=True),
        "shared memory": shared_memory.connect(rank, size, own[3], secret),
    }
    seconds: dict[int, dict[str, list[float]]] = {}
    most = max(CALLS)
    memory = (
        communicators["shared memory"].allocate(most, np.uint8),
        np.zeros(most, np.uint8),
        np.ones(most, np.uint8),
    )
    for nbytes, calls in CALLS.items():
        ways = ways_to_reduce(communicators, *(array[:nbytes].view(np.float32) for array in memory))
        seconds[nbytes] = {way: [] for way in ways}
        for sample in range(SAMPLES):
            for way in ways if sample % 2 else reversed(ways):
                # gloo has threads of its own, which would all be kept on one core.
                os.sched_setaffinity(
                    0, everywhere if way == "gloo" else {sorted(everywhere)[rank % len(everywhere)]}
                )
                ways[way]()
                seconds[nbytes][way].append(
                    seconds_of_a_call(ways[way], communicators["shared memory"], calls)
                )
    if rank == 0:
        options.results.write_text(json.dumps(seconds))
    for communicator in communicators.values():
        communicator.barrier()
        communicator.close()
    torch.distributed.destroy_process_group()


def seconds_of_a_call(reduce: Reduce, communicator: Communicator, calls: int) -> float:
    """The median of `calls` calls, each after a barrier, averaged over the ranks (as the OSU benchmarks do)."""
    seconds = []
    for _ in range(calls):
        communicator.barrier()
        started = time.perf_counter()
        reduce()
        seconds.append(time.perf_counter() - started)
    mean = np.array([statistics.median(seconds)])
    ring_all_reduce(communicator, mean, "mean")
    return float(mean[0])


def copy(communicator: Communicator, to: np.ndarray, source: np.ndarray) -> None:
    """Copy an array in every process, and wait for the last: they share cores, and the way to memory."""
    np.copyto(to, source)
    communicator.barrier()


def ways_to_reduce(
    communicators: dict[str, Communicator], allocated: np.ndarray, ordinary: np.ndarray, other: np.ndarray
) -> dict[str, Reduce]:
    """Every way by name. The arrays hold zeros, so that they can be summed again and again."""
    tensor = torch.from_numpy(ordinary)
    ways: dict[str, Reduce] = {
        "gloo": partial(torch.distributed.all_reduce, tensor),
        "OpenMPI": partial(MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE, ordinary),
        "copy": partial(copy, communicators["shared memory"], other, ordinary),
    }
    for name in ("TCP", "Unix sockets", "plain TCP"):
        ways[name] = partial(ring_all_reduce, communicators[name], ordinary)
    ours = communicators["shared memory"]
    ways["shared memory"] = partial(tuned_all_reduce, ours, ordinary)
    ways["shared memory, allocated"] = partial(tuned_all_reduce, ours, allocated)
    ways["shared memory, allocated, ring"] = partial(ring_all_reduce, ours, allocated)
    ways["shared memory, allocated, pipelined ring"] = partial(pipelined_ring_all_reduce, ours, allocated)
    return ways


if __name__ == "__main__":
    main()
