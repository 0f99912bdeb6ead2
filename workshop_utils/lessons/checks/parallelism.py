"""Checks of lesson 02, data and model parallelism; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from itertools import product
from numbers import Real
from typing import Any

import numpy as np

from workshop_utils.comm.communicator import Communicator
from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    exercise,
    expect,
    explain,
    is_missing,
    listed,
    mistakes,
    number_of,
    recognise,
    refuse,
    result_of,
)
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import NETWORK, on_threads, values_on_ranks
from workshop_utils.scaling.published import PEAK_FLOPS_PER_SECOND

Answer = Callable[..., Any]
RankResult = tuple[Any, int]  # what a rank returned, and the bytes that it sent
Spoiled = tuple[int | slice, float]  # where a gradient is spoiled, and by which value

# FLOP/s, dense in bf16, and bytes/s each way by NVLink 4 and InfiniBand NDR: peaks by NVIDIA's data sheets.
A100, H100 = PEAK_FLOPS_PER_SECOND["A100"], PEAK_FLOPS_PER_SECOND["H100"]
NVLINK, INFINIBAND = 450e9, 50e9
GPT_3_WIDTH = 49_152  # 4 · 12,288: Brown et al. 2020, section 2.1

WIDE, FEWEST_BATCHES = 640, 3  # units of the lesson's network; batches that show how it goes between them


@measured
def half_of_the_core(results: Any) -> float:
    """The examples of a rank with which it does half of what its core does alone, interpolated between batches.

    `results` are runs of `wide_steps(communicator, wide, batches, rounds)`. As in the lesson's figure the slower rank
    counts, and the fastest round.
    """
    alone, seconds = 0.0, dict[int, float]()
    for run in runs_of(results, "wide_steps", ranks=2, network="200Mbit"):
        refuse(run.arguments["wide"] != WIDE, f"`wide` is {run.arguments['wide']}; it must be {WIDE}.")
        batches = [int(each) for each in run.arguments["batches"]]
        first, *others = np.max([of_rank for of_rank, _ in run.values], axis=0).min(axis=0)
        alone = max(alone, max(batches) / first)
        for batch, each in zip(batches, others, strict=True):
            seconds[batch] = min(each, seconds.get(batch, math.inf))
    few = f"you measured {number_of(len(seconds), 'batch', 'es')}; take at least {FEWEST_BATCHES}, different ones."
    refuse(len(seconds) < FEWEST_BATCHES, few)
    tried = sorted(seconds)
    shares = [batch / seconds[batch] / alone for batch in tried]
    reached = (
        f"with {tried[0]:,} to {tried[-1]:,} examples your ranks did {shares[0]:.0%} to {shares[-1]:.0%}"
    )
    around = f"{reached} of what a core does alone: take batches around 50 %, on a quiet machine"
    refuse(not shares[0] < 0.5 < shares[-1], f"{around}.")
    above = next(index for index, share in enumerate(shares) if share > 0.5)
    # Without overlap these odds are in proportion to the batch.
    odds = [min(share, 0.99) / (1 - min(share, 0.99)) for share in shares[above - 1 : above + 1]]
    return float(np.interp(1, odds, tried[above - 1 : above + 1]))


@exercise
def uneven_step(answer: Answer) -> str:
    """`answer(communicator, weights, gradient, count, learning_rate)` is one step by the gradient of all images."""
    for counts in ((30, 10), (5, 5), (3,), (40_001, 170), (170, 170, 160), (40, 9, 0, 1), (0, 2, 4)):
        weights, rate = _start(counts)
        slopes = [_slope(rank, count, weights.size) for rank, count in enumerate(counts)]
        expected = weights - rate * np.average(np.nan_to_num(slopes), axis=0, weights=counts)
        on_processes = counts == (40, 9, 0, 1)
        for where, outcomes in _tried(_step, answer, len(counts), {"counts": counts}, on_processes):
            case = f"{where} with {listed(counts)} images"
            total, because = np.tensordot(counts, slopes, axes=1), "all ranks take the same step, in float64"
            for rank, (got, _) in enumerate(outcomes):
                if 0 not in counts and len(counts) > 1:
                    ours = weights, rate, slopes, counts, total
                    explain(got, mistakes(__name__, "uneven_step"), *ours, where=f"{case}: ")
                lost = np.size(got) and np.asarray(got).dtype.kind == "f" and np.isnan(got).any()
                nan = "a rank without images has a gradient of NaN, and 0 · NaN is NaN too"
                refuse(lost, f"{case}, rank {rank} gets NaN: {nan}. Let it contribute zeros.")
                expect(got, expected, f"{case}, the weights of rank {rank}", because, 1e-9)
    counts = (2, 40, 0, 1)
    weights, rate = _start(counts)
    spoils: list[Spoiled] = [(place, np.nan) for place in (slice(None), slice(3), *range(weights.size))]
    spoils += [(-1, value) for value in (np.inf, -np.inf, 1e9)]
    for rank, spoiled in product((0, 1, 3), spoils):
        slopes = [
            _slope(each, count, weights.size, spoiled if each == rank else None) * count
            for each, count in enumerate(counts)
            if count
        ]
        expected = weights - rate * np.sum(slopes, axis=0) / sum(counts)
        arguments = {"counts": counts, "spoiled": spoiled, "spoiled_rank": rank}
        for _, outcomes in _tried(_step, answer, len(counts), arguments, False):
            hidden = f"a shard with images has {spoiled[1]:g} in its gradient, and your step hides it"
            advice = "nobody would notice. Replace only the gradient of a rank with count 0."
            refuse(not all(_shows(got, expected) for got, _ in outcomes), f"{hidden}: {advice}")
    return (
        "each image counts the same, on threads and on four processes, one of which had no image at all; "
        "all ranks keep the same weights, to 1e-9."
    )


def _shows(got: Any, expected: np.ndarray) -> bool:
    """Whether weights are as expected. NaN or infinity is shown by either, there alone or in all weights."""
    values = np.asarray(got, dtype=float)
    lost = ~np.isfinite(expected)
    return bool(np.all(np.where(lost, ~np.isfinite(values), np.isclose(values, expected)))) or (
        bool(lost.any()) and not np.isfinite(values).any()
    )


def _slope(rank: int, count: int, length: int, spoiled: Spoiled | None = None) -> np.ndarray:
    """A shard's gradient, NaN without images."""
    slope = np.random.default_rng(rank).normal(size=length) if count else np.full(length, np.nan)
    if spoiled is not None:
        place, value = spoiled
        slope[place] = value
    return slope


def _start(counts: tuple[int, ...]) -> tuple[np.ndarray, float]:
    """Weights and a learning rate, others for each case."""
    images = sum(counts)
    length = (1, 12, 4, 7, 3, 1000, 1)[images % 7]
    return np.random.default_rng(100 + images).normal(size=length), 0.3 / len(counts)


def _step(
    communicator: Communicator,
    answer: Answer,
    counts: tuple[int, ...],
    spoiled: Spoiled | None = None,
    spoiled_rank: int | None = None,
) -> Any:
    """A rank's weights after its step, where the gradient of `spoiled_rank` is `spoiled`."""
    rank, (weights, rate) = communicator.rank, _start(counts)
    slope = _slope(rank, counts[rank], weights.size, spoiled if rank == spoiled_rank else None)
    return result_of(answer, communicator, weights, slope, counts[rank], rate)


@exercise
def row_block(answer: Answer) -> str:
    """`answer(communicator, inputs, w1, w2, bias, d_outputs)` is a block cut by columns, then by rows.

    It returns the outputs, the gradient of the inputs, and those of the rank's own `w1` and `w2`.
    """
    names = ("the outputs", "the gradient of the inputs", "the gradient of w1", "the gradient of w2")
    for size, units in ((1, 7), (2, 30), (3, 61), (3, 600), (4, 3)):
        parts = [_block_of(rank, size, units) for rank in range(size)]
        inputs, _, _, bias, d_outputs = parts[0]
        w1, w2 = np.hstack([part[1] for part in parts]), np.vstack([part[2] for part in parts])
        hidden = np.maximum(inputs @ w1, 0)
        d_hidden = d_outputs @ w2.T * (hidden > 0)
        whole = hidden @ w2 + bias, d_hidden @ w1.T
        for where, outcomes in _tried(_block, answer, size, {"units": units}, units == 61):
            for rank, (got, _) in enumerate(outcomes):
                four = isinstance(got, tuple | list) and len(got) == len(names)
                arrays = f"{where}, rank {rank} returns {type(got).__name__}; return the four arrays"
                refuse(not four, f"{arrays}.")
                own = np.array_split(np.arange(units), size)[rank]
                right = (*whole, inputs.T @ d_hidden[:, own], hidden[:, own].T @ d_outputs)
                for kind, mine, value in zip(("outputs", "d_inputs"), got, right, strict=False):
                    wrong = mistakes(__name__, f"row_block_{kind}", block=_alone)
                    for part in parts:  # what a rank has alone explains more than one mistake
                        explain(mine, wrong, value, bias, size, part, parts, where=f"{where}, ")
                for name, mine, value in zip(names, got, right, strict=True):
                    expect(mine, value, f"{where}, {name} on rank {rank}", tolerance=1e-9)
            _judge_bytes(sum(sent for _, sent in outcomes), size, inputs.nbytes + d_outputs.nbytes, where)
    return (
        "outputs and gradients are right on threads and on three processes. You sent no more than if each rank sent "
        "its parts of the outputs and of the inputs' gradient to all others, which does not grow with the hidden units."
    )


def _block_of(rank: int, size: int, units: int) -> tuple[np.ndarray, ...]:
    """A rank's inputs, w1, w2, bias and d_outputs."""
    draw = np.random.default_rng(0)
    rows, entering, leaving = 5 + size, 4 + size, 7 - size
    inputs, w1 = draw.normal(size=(rows, entering)), draw.normal(size=(entering, units))
    w2, bias, d_outputs = (draw.normal(size=shape) for shape in ((units, leaving), leaving, (rows, leaving)))
    # One unit that is hardly active and one that is almost: the mask's limit is 0.
    w1[:, :2] *= np.array([0.005, -0.0005]) / (inputs[0] @ w1[:, :2])
    own = np.array_split(np.arange(units), size)[rank]
    return inputs, w1[:, own], w2[own], bias, d_outputs


def _block(communicator: Communicator, answer: Answer, units: int) -> Any:
    return result_of(answer, communicator, *_block_of(communicator.rank, communicator.size, units))


def _alone(part: tuple[np.ndarray, ...], is_masked: bool = True) -> tuple[np.ndarray, np.ndarray]:
    """Outputs without the bias and the gradient of the inputs, of a rank's hidden units alone."""
    inputs, w1, w2, _, d_outputs = part
    hidden = np.maximum(inputs @ w1, 0)
    return hidden @ w2, (d_outputs @ w2.T * (hidden > 0 if is_masked else 1)) @ w1.T


def _judge_bytes(sent: int, size: int, nbytes: int, where: str) -> None:
    """Sending K bytes to all others needs N (N − 1) K, all ranks together; an all-reduce 2 (N − 1) K."""
    most = size * (size - 1) * nbytes
    enough = f"{most:,} bytes are enough even if each rank sends its parts to all others"
    why = "sum parts of the outputs and of the inputs' gradient, and send nothing else"
    too_many = sent > most + 64  # room for the single bytes of a barrier
    refuse(too_many, f"{where}, all ranks together send {sent:,} bytes; {enough}: {why}.")


@exercise
def roofline(answer: tuple[Answer, Answer]) -> str:
    """`answer` is the fewest tokens of a data-parallel rank, and the most ranks of a tensor-cut layer.

    Gradients may take as long as the backward pass, the first all-reduce of a layer as its forward pass; values have
    2 bytes. Austin et al., "How To Scale Your Model", on training, has the same bounds for many ranks.
    """
    if not isinstance(answer, tuple | list) or len(answer) != 2:
        raise Wrong("give two functions: (smallest_batch, most_ranks).")
    batches = [(H100, NVLINK, 8), (H100, INFINIBAND, 1024), (A100, 300e9, 2)]
    widths = [
        (H100, NVLINK, GPT_3_WIDTH),
        (H100, INFINIBAND, GPT_3_WIDTH),
        (A100, 1.25e9, 4096),
        (A100, 25e9, 20_480),
    ]
    for own, right, name, cases, because in (
        (answer[0], _smallest_batch, "smallest_batch", batches, "round up, or not at all"),
        (answer[1], _most_ranks, "most_ranks", widths, "round down"),
    ):
        if is_missing(own):
            raise NotYet(f"write `{name}`, then run this again.")
        given = [result_of(own, *case) for case in cases]
        recognise(own, cases, mistakes(__name__, name))
        for got, case in zip(given, cases, strict=True):
            expected = right(*case)
            rounded_up = isinstance(got, Real) and got == math.ceil(expected)
            call = f"{name}({', '.join(f'{each:g}' for each in case)})"
            expect(got, got if rounded_up else expected, call, because)
    tokens, ranks = (
        [f"{math.ceil(right(H100, link, last)):,}" for link in (NVLINK, INFINIBAND)]
        for right, last in ((_smallest_batch, 8), (_most_ranks, GPT_3_WIDTH))
    )
    return (
        f"8 H100s need {tokens[0]} tokens each over NVLink, and {tokens[1]} behind NICs of their own. Feed-forward "
        f"layers as wide as GPT-3's, {GPT_3_WIDTH:,}, could be cut among {ranks[0]} over NVLink, among {ranks[1]} over "
        "NICs: tensor parallelism stays where NVLink is. A machine of 8 sums gradients inside first, so its NICs need "
        f"{math.ceil(H100 / 8 / INFINIBAND):,} tokens a GPU at most."
    )


def _smallest_batch(flops: float, bandwidth: float, ranks: int) -> float:
    """4 P FLOP a token in `flops` take as long as 2 (N − 1)/N · P values of 2 bytes by `bandwidth`."""
    return (ranks - 1) / ranks * flops / bandwidth


def _most_ranks(flops: float, bandwidth: float, width: int) -> int:
    """4 D F/N FLOP a token take as long as one all-reduce, 2 (N − 1)/N · D values of 2 bytes."""
    return math.floor(1 + width * bandwidth / flops)


def _tried(
    program: Callable[..., Any], answer: Answer, size: int, arguments: dict[str, Any], on_processes: bool
) -> Iterator[tuple[str, list[RankResult]]]:
    """Where `program(communicator, answer, ...)` ran, and each rank's outcome: on threads, then on real processes."""
    whole = {"program": program, "answer": answer, **arguments}
    where = f"with {number_of(size, 'rank')}"
    yield where, on_threads(where, size, functools.partial(_counted, **whole))
    if on_processes:
        where = f"on {size} processes behind links of {NETWORK}/s"
        yield where, values_on_ranks(where, size, _counted, whole, network=NETWORK)


def _counted(
    communicator: Communicator, program: Callable[..., Any], answer: Answer, **arguments: Any
) -> RankResult:
    got = program(communicator, answer, **arguments)
    return got, int(communicator.traffic.bytes_sent.sum())
