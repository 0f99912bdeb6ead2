"""One rank of the benchmark `model_parallel`: takes steps of our pipelines and blocks, and of PyTorch's.

mpirun starts it, so that one set of processes has a gloo group and our communicator. Ours and theirs have the same
model, the same microbatches, and take their steps in turn.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed
import torch.distributed.nn
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from workshop_utils.comm import shared_memory
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, cross_entropy, manual
from workshop_utils.parallel.pipeline import ModuleStage, run
from workshop_utils.parallel.schedule import schedule_of
from workshop_utils.parallel.tensor import Region, parallelize

SIZES = GPTSizes(layers=4, width=144, heads=12, sequence=48)
MICROBATCHES, MICROBATCH = 8, 2
SAMPLES, STEPS_A_SAMPLE = 9, 1

Step = Callable[[], object]


def main() -> None:
    """Measure, and let rank 0 write `{subject: {way: [seconds of a step, ...]}}`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ports", type=int, nargs=2, required=True)
    parser.add_argument("--secret", required=True)
    parser.add_argument("--results", type=Path, required=True)
    options = parser.parse_args()
    rank, size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size
    torch.set_num_threads(1)
    gloo, own = (f"127.0.0.1:{port}" for port in options.ports)
    torch.distributed.init_process_group("gloo", f"tcp://{gloo}", rank=rank, world_size=size)
    with shared_memory.connect(rank, size, own, options.secret.encode()) as communicator:
        contests = {
            "GPipe": {"ours": our_pipeline("gpipe", communicator), "theirs": their_pipeline(ScheduleGPipe)},
            "1F1B": {
                "ours": our_pipeline("one_f_one_b", communicator),
                "theirs": their_pipeline(Schedule1F1B),
            },
            "tensor-parallel blocks": {"ours": our_blocks(communicator), "theirs": their_blocks()},
        }
        seconds = {subject: in_turn(ways, communicator) for subject, ways in contests.items()}
        if rank == 0:
            options.results.write_text(json.dumps(seconds))
        communicator.barrier()
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def in_turn(ways: dict[str, Step], communicator: Communicator) -> dict[str, list[float]]:
    """Seconds of a step of each way, a sample after the other: of the slowest rank."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for sample in range(SAMPLES):
        for way in ways if sample % 2 else reversed(ways):
            ways[way]()
            communicator.barrier()
            start = time.perf_counter()
            for _ in range(STEPS_A_SAMPLE):
                ways[way]()
            slowest = np.array([(time.perf_counter() - start) / STEPS_A_SAMPLE])
            ring_all_reduce(communicator, slowest, "max")
            seconds[way].append(float(slowest[0]))
    return seconds


def whole_batch() -> tuple[Tensor, Tensor]:
    """Tokens and targets of all microbatches."""
    return batch_of(manual(), 1, MICROBATCHES * MICROBATCH, SIZES.sequence)


def own_part(rank: int, size: int) -> nn.Module:
    """The stage of `rank`."""
    return GPT(SIZES).stages(size)[rank]


def our_pipeline(name: str, communicator: Communicator) -> Step:
    """A forward and backward pass of all microbatches through our pipeline."""
    rank, size = communicator.rank, communicator.size
    tokens, targets = (each.chunk(MICROBATCHES) for each in whole_batch())

    def loss_of(logits: Tensor, microbatch: int) -> Tensor:
        return cross_entropy(logits, targets[microbatch]) / MICROBATCHES

    module = own_part(rank, size)
    stage = ModuleStage(module, tokens.__getitem__, loss_of if rank == size - 1 else None)
    schedule, message = schedule_of(name, size, MICROBATCHES), (MICROBATCH, SIZES.sequence, SIZES.width)

    def step() -> None:
        module.zero_grad()
        run(schedule, {rank: stage}, communicator, message)

    return step


def their_pipeline(kind: type[ScheduleGPipe] | type[Schedule1F1B]) -> Step:
    """The same through `torch.distributed.pipelining`."""
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    tokens, targets = whole_batch()
    module = own_part(rank, size)
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = kind(stage, MICROBATCHES, loss_fn=cross_entropy)

    def step() -> None:
        module.zero_grad()
        if rank == 0:
            schedule.step(tokens)
        elif rank == size - 1:
            schedule.step(target=targets, losses=[])
        else:
            schedule.step()

    return step


def our_blocks(communicator: Communicator) -> Step:
    """Forward and backward through all blocks, each cut between all ranks."""
    return partial(_through, parallelize(_blocks(), Region(communicator)), _activations())


def their_blocks() -> Step:
    """The same blocks, cut by `parallelize_module`."""
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    plan = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel()}
    plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    blocks = _blocks()
    for block in blocks:
        parallelize_module(block, mesh, plan)
    return partial(_through, blocks, _activations())


def _blocks() -> nn.Sequential:
    return nn.Sequential(*list(GPT(SIZES).layers)[1:-1])


def _activations() -> Tensor:
    shape = (MICROBATCHES * MICROBATCH, SIZES.sequence, SIZES.width)
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()


def _through(blocks: nn.Module, activations: Tensor) -> None:
    blocks.zero_grad()
    activations.grad = None
    blocks(activations).square().mean().backward()


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()
