"""A layer of experts whose router has a favourite: a step over slow links beside its prediction."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from communication import measured
from comparison import Bar, Row
from torch import Tensor, nn

from workshop_utils.comm.all_to_all import uneven_all_to_all_seconds
from workshop_utils.comm.communicator import Communicator
from workshop_utils.network import Network
from workshop_utils.parallel.experts import Experts, cut_experts, rows_between
from workshop_utils.ranks import on_ranks

RANKS, TOKENS, WIDTH = 4, 1024, 128  # of a rank
ROW_SECONDS = 2e-4  # of a device, forward; backward takes two: without a favourite as long as the exchanges
BIASES = (0.0, 0.1, 0.25, 1.0)  # of the favourite
NETWORK = "25Mbit"
WITHIN_5_PERCENT = Bar(0.95, 1.05)


class Compute(torch.autograd.Function):
    """Rows as they are, after the time that a device would take; then all ranks go on together."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, communicator: Communicator) -> Tensor:
        ctx.device = len(rows) * ROW_SECONDS, communicator
        communicator.sleep(len(rows) * ROW_SECONDS)
        communicator.barrier()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        seconds, communicator = ctx.device
        communicator.sleep(2 * seconds)
        communicator.barrier()
        return gradients[0], None


class Device(nn.Module):
    """An expert on an emulated device."""

    def __init__(self, communicator: Communicator) -> None:
        super().__init__()
        self.communicator = communicator

    def forward(self, rows: Tensor) -> Tensor:
        given: Tensor = Compute.apply(rows, self.communicator)
        return given


def steps(communicator: Communicator, biases: list[float]) -> list[tuple[float, list[int]]]:
    """Seconds of a step with each bias of expert 0, and what this rank's tokens ask of each expert."""
    torch.manual_seed(0)  # the same router on all ranks
    layer = Experts(WIDTH, [Device(communicator) for _ in range(communicator.size)], k=1)
    cut_experts(layer, communicator)
    torch.manual_seed(communicator.rank)
    x, taken = torch.randn(TOKENS, WIDTH, requires_grad=True), []
    for bias in biases:
        layer.router.bias[0] = bias
        layer.load.zero_()
        communicator.barrier()
        start = communicator.now()
        layer(x).sum().backward()
        taken.append((communicator.now() - start, layer.load.tolist()))
    return taken


def experts(quick: bool) -> Iterator[Row]:
    """Bytes and errors, as of `attention`; then steps with a favourite."""
    for workers in (4,) if quick else (2, 3, 4):
        sent = measured("experts_bytes", workers, 1 if quick else 5, 301)
        yield Row(f"experts among {workers}: kernel's bytes, beside the formula", sent, "B", Bar(0.98, 1.02))
        errors = measured("experts_error", workers, 1, 301)
        yield Row(f"experts among {workers}: error, beside 1e-12", errors, "ppt", Bar(high=1))
    yield from skewed(quick)


def skewed(quick: bool) -> Iterator[Row]:
    """Of the slowest rank; predicted by the busiest link of four all-to-alls and the most rows on a rank."""
    biases, repeats = (BIASES[1:2], 1) if quick else (BIASES, 3)
    asked = [0.0, *[bias for bias in biases for _ in range(repeats)]]  # connections open in the first step
    by_rank = on_ranks(RANKS, steps, {"biases": asked}, network=NETWORK, timeout="120s").values
    pairs = []
    for ranks in list(zip(*by_rank, strict=True))[1:]:
        loads = torch.tensor([load for _, load in ranks])
        nbytes = 4 * WIDTH * rows_between(loads)
        exchange = uneven_all_to_all_seconds(nbytes, 0.0, Network.parse(NETWORK).goodput)
        predicted = 4 * exchange + 3 * ROW_SECONDS * loads.sum(dim=0).max().item()
        share = 100 * loads[:, 0].sum().item() / loads.sum().item()
        pairs.append((share, max(seconds for seconds, _ in ranks), predicted))
    for number in range(len(biases)):
        some = pairs[number * repeats : (number + 1) * repeats]
        subject = f"experts over {NETWORK}, {some[0][0]:.0f} % of tokens on one of {RANKS}, beside theory"
        yield Row(subject, [(seconds, theory) for _, seconds, theory in some], "s", WITHIN_5_PERCENT)
