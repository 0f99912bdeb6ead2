"""One rank of the benchmarks of communication: ours and PyTorch's in turn, in the same processes.

Reports, sample by sample, the milliseconds of `ours` and `theirs`, or what a case gives in a unit of its own. Both have
the same model, values and batches.
"""

import argparse
import copy
import ctypes
import gc
import itertools
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

# Later, this import would keep the group's threads alive: see jobs/mnist_torch_ddp.
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleZBVZeroBubble
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.all_to_all import direct_all_to_all
from workshop_utils.comm.communicator import Communicator, buffer, collective
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel import context, experts, gpt
from workshop_utils.parallel.data import MEBIBYTE, OverlappedDataParallel
from workshop_utils.parallel.fully_sharded import FullySharded
from workshop_utils.parallel.pipeline import EmulatedStage, ModuleStage, run
from workshop_utils.parallel.schedule import bubble, predict, schedule_of
from workshop_utils.parallel.tensor import Region, parallelize
from workshop_utils.training.tcp_bytes import count_bytes

BATCH = 32
SIZES = gpt.GPTSizes(layers=4, width=144, heads=12, sequence=48)
MICROBATCHES, MICROBATCH = 8, 2

Step = Callable[[], object]


def main() -> None:
    """Measure one case by turns."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--case", required=True, help="a key of CASES")
    parser.add_argument("--amount", type=int, default=0, help="bytes to reduce, or width of the layers")
    parser.add_argument("--samples", type=int, required=True)
    parser.add_argument("--calls", type=int, default=1, help="in one sample, which is their median")
    parser.add_argument("--store", required=True, help="a file by which the gloo group comes together")
    options = parser.parse_args()
    here = place.here()
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", f"file://{options.store}", rank=here.rank, world_size=here.world_size)
    with tcp.connect(*place.rendezvous()) as communicator:
        ours, theirs = CASES[options.case](communicator, options.amount)
        ways = {"ours": ours, "theirs": theirs}
        for sample in range(-2, options.samples):  # two to settle
            order = ways if sample % 2 else reversed(ways)
            values = {way: value_of(ways[way], communicator, options.calls) for way in order}
            if sample >= 0 and here.rank == 0:
                place.report(step=sample, **values)
        communicator.barrier()
        if isinstance(model := getattr(ours, "model", None), OverlappedDataParallel | FullySharded):
            model.close()
        del ours, theirs, ways, model  # DDP holds the process group
    dist.barrier()
    dist.destroy_process_group()


def value_of(step: Step, communicator: Communicator, calls: int) -> float:
    """Milliseconds of a step, or what it returns: the median of `calls` begun together, the mean of ranks."""
    values = []
    for _ in range(calls):
        communicator.barrier()
        started = time.perf_counter()
        returned = step()
        values.append(1000 * (time.perf_counter() - started) if returned is None else returned)
    mean = np.array([statistics.median(values)])
    ring_all_reduce(communicator, mean, "mean")
    return float(mean[0])


def all_reduce(algorithm: Callable[..., None], communicator: Communicator, nbytes: int) -> tuple[Step, Step]:
    """Sum zeros, which can be summed again and again."""
    array = np.zeros(nbytes // 4, np.float32)
    return partial(algorithm, communicator, array), partial(dist.all_reduce, torch.from_numpy(array))


def all_to_all(is_uneven: bool, communicator: Communicator, nbytes: int) -> tuple[Step, Step]:
    """Exchange the parts of an array; if uneven, rank r sends rank r + 1 seven times as much as any other rank."""
    rank, size = communicator.rank, communicator.size
    weights = np.ones((size, size)) + 6 * is_uneven * np.roll(np.eye(size), 1, axis=1)
    counts = (nbytes // 4 * weights / weights.sum(1)).astype(int)
    sent, received = counts[rank].tolist(), counts[:, rank].tolist()
    outgoing, incoming = np.zeros(sum(sent), np.float32), np.empty(sum(received), np.float32)
    parts = (
        np.split(array, np.cumsum(each)[:-1]) for array, each in ((outgoing, sent), (incoming, received))
    )
    tensors, splits = map(torch.from_numpy, (incoming, outgoing)), (received, sent) if is_uneven else ()
    return partial(direct_all_to_all, communicator, *parts), partial(
        dist.all_to_all_single, *tensors, *splits
    )


@collective
def direct_all_reduce(communicator: Communicator, array: np.ndarray) -> None:
    """Sum in one step: every rank sends its array to every other one, and each adds for itself."""
    rank, size = communicator.rank, communicator.size
    copies = [buffer(communicator, array, f"of rank {each}") for each in range(size)]
    copies[rank][:] = array
    for distance in range(1, size):
        to, source = (rank + distance) % size, (rank - distance) % size
        communicator.send_recv(to, array, source, copies[source])
    array[:] = copies[0]
    for replica in copies[1:]:
        communicator.combine(array, replica)


class TrainingStep:
    """A step of SGD with momentum."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self._optimizer = torch.optim.SGD(model.parameters(), 0.01, momentum=0.9)
        self._images, self._labels = torch.rand(BATCH, 64), torch.randint(10, (BATCH,))

    def __call__(self) -> None:
        self._optimizer.zero_grad()
        cross_entropy(self.model(self._images), self._labels).backward()
        if isinstance(self.model, OverlappedDataParallel):
            self.model.synchronise()
        self._optimizer.step()


def data_parallel(communicator: Communicator, width: int) -> tuple[Step, Step]:
    """A perceptron of four hidden layers; buckets of 1 MB of which gradients are views."""

    def module() -> nn.Module:
        torch.manual_seed(0)
        pairs = itertools.pairwise([64, width, width, width, width])
        hidden = [layer for pair in pairs for layer in (nn.Linear(*pair), nn.ReLU())]
        return nn.Sequential(*hidden, nn.Linear(width, 10))

    theirs = DistributedDataParallel(module(), bucket_cap_mb=1, gradient_as_bucket_view=True)
    return TrainingStep(OverlappedDataParallel(module(), communicator, bucket_bytes=MEBIBYTE)), TrainingStep(
        theirs
    )


def gpt_batch(width: int) -> tuple[gpt.GPTSizes, tuple[Tensor, Tensor]]:
    sizes = gpt.GPTSizes(layers=6, width=width, heads=8, sequence=64)
    return sizes, gpt.batch_of(gpt.manual(), 1, 8, sizes.sequence)


def wrapped(communicator: Communicator, sizes: gpt.GPTSizes, is_ours: bool) -> Any:
    """A GPT by block, either way as it comes."""
    model = gpt.GPT(sizes)
    if is_ours:
        return FullySharded(model, communicator, units=model.layers)
    for module in (*model.layers, model):
        fully_shard(module, mesh=init_device_mesh("cpu", (communicator.size,)))
    return model


class GPTStep:
    """A step of Adam on a GPT, sharded by block."""

    def __init__(self, communicator: Communicator, width: int, is_ours: bool) -> None:
        sizes, self._batch = gpt_batch(width)
        self.model = wrapped(communicator, sizes, is_ours)
        self._optimizer = torch.optim.Adam(self.model.parameters(), 1e-3)

    def __call__(self) -> None:
        self._optimizer.zero_grad()
        gpt.cross_entropy(self.model(self._batch[0]), self._batch[1]).backward()
        self._optimizer.step()


def sharded(communicator: Communicator, width: int) -> tuple[Step, Step]:
    """A GPT of six blocks."""
    return GPTStep(communicator, width, True), GPTStep(communicator, width, False)


def sharded_memory(communicator: Communicator, width: int) -> tuple[Step, Step]:
    """By how many MB the process grows at most, with two steps of a GPT that did not exist before."""
    for option, value in ((-3, 65536), (-1, 65536), (-8, 1)):
        ctypes.CDLL(None).mallopt(option, value)  # give freed memory back at once

    def peak(is_ours: bool) -> float:
        gc.collect()
        step = GPTStep(communicator, width, is_ours)
        held = sum(
            each.to_local().nbytes if hasattr(each, "to_local") else each.nbytes
            for each in step.model.parameters()
        )
        before = resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak is now what there is
        step()
        step()
        if is_ours:
            step.model.close()
        return held / 1e6 + resident("VmHWM") - before

    return partial(peak, True), partial(peak, False)


def resident(what: str) -> float:
    """MB of memory, at present (VmRSS) or at most (VmHWM)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) * 1024 / 1e6


def pipeline(name: str, theirs: type[Any], communicator: Communicator, _: int) -> tuple[Step, Step]:
    """Forward and backward through a GPT, one stage a rank, or as many as the schedule has."""
    schedule = schedule_of(name, communicator.size, MICROBATCHES)
    batch = gpt.batch_of(gpt.manual(), 1, MICROBATCHES * MICROBATCH, SIZES.sequence)
    tokens, targets = (each.chunk(MICROBATCHES) for each in batch)
    sizes = replace(SIZES, layers=max(SIZES.layers, schedule.stages))
    own, last = schedule.stages_of(communicator.rank), schedule.stages - 1

    def loss_of(logits: Tensor, microbatch: int) -> Tensor:
        return gpt.cross_entropy(logits, targets[microbatch]) / MICROBATCHES

    def parts() -> nn.ModuleDict:
        return nn.ModuleDict((str(each), gpt.GPT(sizes).stages(schedule.stages)[each]) for each in own)

    mine, other = parts(), parts()
    stages = {
        each: ModuleStage(
            mine[str(each)], tokens.__getitem__, loss_of if each == last else None, schedule.is_split
        )
        for each in own
    }
    message = MICROBATCH, sizes.sequence, sizes.width
    theirs_stages = [
        PipelineStage(other[str(each)], each, schedule.stages, torch.device("cpu")) for each in own
    ]
    given = theirs_stages if schedule.chunks > 1 else theirs_stages[0]
    theirs_schedule = theirs(given, MICROBATCHES, loss_fn=gpt.cross_entropy)
    inputs = (batch[0],) if 0 in own else ()
    ends = {"target": batch[1], "losses": []} if last in own else {}

    def our_step() -> None:
        mine.zero_grad()
        run(schedule, stages, communicator, message)

    def their_step() -> None:
        other.zero_grad()
        theirs_schedule.step(*inputs, **ends)

    return our_step, their_step


def working_share(name: str, other: str, communicator: Communicator, _: int) -> tuple[Step, Step]:
    """Per cent of the ranks' time in which they run a pass, on emulated devices: measured, twice.

    Without an `other` schedule the second is what is predicted.
    """
    seconds = 0.06

    def measured(name: str) -> float:
        plan = schedule_of(name, communicator.size, MICROBATCHES)
        forward, message = seconds / plan.chunks, np.zeros(65536, np.uint8)
        stage = EmulatedStage(communicator, forward, 2 * forward, message, forward * plan.is_split)
        stages = dict.fromkeys(plan.stages_of(communicator.rank), stage)
        timeline = run(plan, stages, communicator, message.shape, message.dtype)
        ends = np.array([-timeline[0].start, timeline[-1].end])
        ring_all_reduce(communicator, ends, "max")
        return 100 * sum(timed.end - timed.start for timed in timeline) / float(ends.sum())

    def predicted() -> float:
        return 100 * (1 - bubble(predict(schedule_of(name, communicator.size, MICROBATCHES), 1, 2)))

    return partial(measured, name), partial(measured, other) if other else predicted


def tensor_parallel(communicator: Communicator, _: int) -> tuple[Step, Step]:
    """Forward and backward through all blocks of a GPT, each cut between all ranks."""
    mesh = init_device_mesh("cpu", (communicator.size,))
    plan = {"attention.qkv": ColwiseParallel(), "attention.out": RowwiseParallel()}
    plan |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    mine, other = (nn.Sequential(*list(gpt.GPT(SIZES).layers)[1:-1]) for _ in range(2))
    for block in other:
        parallelize_module(block, mesh, plan)
    shape = (MICROBATCHES * MICROBATCH, SIZES.sequence, SIZES.width)
    activations = torch.randn(shape, generator=torch.Generator().manual_seed(0)).requires_grad_()

    def through(blocks: nn.Module) -> None:
        blocks.zero_grad()
        activations.grad = None
        blocks(activations).square().mean().backward()

    return partial(through, parallelize(mine, Region(communicator))), partial(through, other)


def attention(how: str, what: str, communicator: Communicator, length: int) -> tuple[Step, Step]:
    """Forward and backward: the kernel's bytes and the formula's, or the error in 1e-12 and 1."""
    ways = {
        "ring": (context.ring_attention, context.ring_attention_bytes_sent),
        "ulysses": (context.ulysses_attention, context.ulysses_bytes_sent),
    }
    (attend, formula), size = ways[how], communicator.size
    own = context.own_tokens(length, communicator.rank, size, zig_zag=how == "ring")
    generator = torch.Generator().manual_seed(0)
    *whole, gradient = torch.randn(4, 1, 12, length, 12, dtype=torch.float64, generator=generator)
    leaves = [each.clone().requires_grad_() for each in whole]
    mixed = gpt.causal_attention(*leaves)
    right = mixed.detach(), *torch.autograd.grad(mixed, leaves, gradient)

    def ours() -> float:
        mine = [each[:, :, own].requires_grad_() for each in whole]
        with count_bytes(communicator.barrier) as counted:
            mixed = attend(*mine, communicator)
            mixed.backward(gradient[:, :, own])
        if what == "bytes":
            return counted.sent
        got = mixed.detach(), *(each.grad for each in mine)
        pairs = zip(got, right, strict=True)
        errors = [(one - other[:, :, own]).abs().max() / other.abs().max() for one, other in pairs]
        return 1e12 * float(max(errors))

    return ours, lambda: formula(size, whole[1].nbytes // size) if what == "bytes" else 1.0


def experts_layer(what: str, communicator: Communicator, tokens: int) -> tuple[Step, Step]:
    """As `attention`, of a layer of experts; ranks have `tokens` each, and their number more."""
    width, rank = 64, communicator.rank
    torch.manual_seed(0)
    mlps = [nn.Sequential(nn.Linear(width, 9), nn.GELU(), nn.Linear(9, width)) for _ in range(12)]
    whole = experts.Experts(width, mlps, k=2).double()
    shares = torch.randn(sum(counts := [tokens + each for each in range(communicator.size)]), width).split(
        counts
    )
    x = torch.cat(shares).double().requires_grad_()
    right = whole(x)
    (gradient,) = torch.autograd.grad(right.sin().sum(), [x])
    chosen = [whole.router(share.double()).chosen.flatten() for share in shares]
    loads = torch.stack([torch.bincount(each, minlength=12) for each in chosen])
    part = experts.cut_experts(copy.deepcopy(whole), communicator)

    def ours() -> float:
        mine = shares[rank].double().requires_grad_()
        with count_bytes(communicator.barrier) as counted:
            got = part(mine)
            got.sin().sum().backward()
        if what == "bytes":
            return counted.sent
        pairs = (got, right), (mine.grad, gradient)
        errors = [(one - other.split(counts)[rank]).abs().max() / other.abs().max() for one, other in pairs]
        return 1e12 * float(max(errors))

    formula = experts.expert_bytes_sent(loads, 8 * width)[rank].item()
    return ours, lambda: formula if what == "bytes" else 1.0


CASES: dict[str, Callable[[Communicator, int], tuple[Step, Step]]] = {
    "ring": partial(all_reduce, ring_all_reduce),
    "direct": partial(all_reduce, direct_all_reduce),
    "all_to_all": partial(all_to_all, False),
    "uneven_all_to_all": partial(all_to_all, True),
    "ddp": data_parallel,
    "fsdp": sharded,
    "fsdp_memory": sharded_memory,
    "gpipe": partial(pipeline, "gpipe", ScheduleGPipe),
    "one_f_one_b": partial(pipeline, "one_f_one_b", Schedule1F1B),
    "zbv": partial(pipeline, "zbv", ScheduleZBVZeroBubble),
    "zb_h1 as predicted": partial(working_share, "zb_h1", ""),
    "zbv as predicted": partial(working_share, "zbv", ""),
    "zbv beside one_f_one_b": partial(working_share, "zbv", "one_f_one_b"),
    "tensor": tensor_parallel,
    "experts_bytes": partial(experts_layer, "bytes"),
    "experts_error": partial(experts_layer, "error"),
    "ring_attention_bytes": partial(attention, "ring", "bytes"),
    "ring_attention_error": partial(attention, "ring", "error"),
    "ulysses_attention_bytes": partial(attention, "ulysses", "bytes"),
    "ulysses_attention_error": partial(attention, "ulysses", "error"),
}


if __name__ == "__main__":
    main()
