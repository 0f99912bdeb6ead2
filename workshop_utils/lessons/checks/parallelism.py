"""Checks of lesson 02, data and model parallelism; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import CommunicationError, Communicator
from workshop_utils.lessons.checks import Wrong, exercise, expect, explain, result_of
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.lessons.checks.processes import NETWORK, values_on_ranks

Answer = Callable[..., Any]
RankResult = tuple[Any, int]  # what a rank returned, and the bytes that it sent
Spoiled = tuple[int | slice, float]  # where a gradient is spoiled, and by which value

equal_time = question(__name__, "equal_time")


@exercise
def uneven_step(answer: Answer) -> str:
    """`answer(communicator, weights, gradient, count, learning_rate)` is one step by the gradient of all images."""
    for counts in ((30, 10), (5, 5), (3,), (40_001, 170), (170, 170, 160), (40, 9, 0, 1), (0, 2, 4)):
        weights, rate = _start(counts)
        slopes = [_slope(rank, count, weights.size) for rank, count in enumerate(counts)]
        expected = weights - rate * np.average(np.nan_to_num(slopes), axis=0, weights=counts)
        for where, outcomes in _tried(
            _step, answer, len(counts), {"counts": counts}, counts == (40, 9, 0, 1)
        ):
            case = f"{where} with {_and(counts)} images"
            if 0 not in counts and len(counts) > 1:
                for got, _ in outcomes:
                    explain(got, {f"{case}: {why}": value for why, value in _wrong_steps(slopes, counts)})
            for rank, (got, _) in enumerate(outcomes):
                if np.size(got) and np.asarray(got).dtype.kind == "f" and np.isnan(got).any():
                    because = "a rank without images has a gradient of NaN, and 0 · NaN is NaN too"
                    raise Wrong(f"{case}, rank {rank} gets NaN: {because}. Let it contribute zeros.")
                expect(
                    got,
                    expected,
                    f"{case}, the weights of rank {rank}",
                    "all ranks take the same step, in float64",
                    1e-9,
                )
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
            if not all(_shows(got, expected) for got, _ in outcomes):
                hidden = f"a shard with images has {spoiled[1]:g} in its gradient, and your step hides it"
                raise Wrong(
                    f"{hidden}: nobody would notice. Replace only the gradient of a rank with count 0."
                )
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


def _wrong_steps(slopes: list[np.ndarray], counts: tuple[int, ...]) -> Iterator[tuple[str, np.ndarray]]:
    """What typical mistakes give where no shard is empty, each with a sentence."""
    total, (weights, rate) = np.tensordot(counts, slopes, axes=1), _start(counts)
    yield "the gradient must be subtracted.", weights + rate * total / sum(counts)
    yield "the sum of the images' gradients was never divided by their number.", weights - rate * total
    yield "divided by the ranks; divide by the number of all images.", weights - rate * total / len(counts)
    yield (
        "that is the sum of the shards' means; it must be their weighted mean.",
        weights - rate * sum(slopes),
    )
    yield "nothing was exchanged: that is the step of one shard.", weights - rate * slopes[0]
    if len(set(counts)) > 1:
        why = "that is the plain mean; weight each shard by its number of images."
        yield why, weights - rate * np.mean(slopes, axis=0)


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
                if not isinstance(got, tuple | list) or len(got) != len(names):
                    raise Wrong(f"{where}, rank {rank} returns {type(got).__name__}; return the four arrays.")
                own = np.array_split(np.arange(units), size)[rank]
                right = (*whole, inputs.T @ d_hidden[:, own], hidden[:, own].T @ d_outputs)
                _explain_block(got, right, parts, where)
                for name, mine, expected in zip(names, got, right, strict=True):
                    expect(mine, expected, f"{where}, {name} on rank {rank}", tolerance=1e-9)
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


def _explain_block(
    got: Any, right: tuple[np.ndarray, ...], parts: list[tuple[np.ndarray, ...]], where: str
) -> None:
    """Raise Wrong if a typical mistake explains what a rank `got`."""
    size, bias = len(parts), parts[0][3]
    outputs, d_inputs = right[:2]
    forward, backward, unmasked = [], [], []
    for inputs, w1, w2, _, d_outputs in parts:
        hidden = np.maximum(inputs @ w1, 0)
        forward.append(hidden @ w2)
        backward.append((d_outputs @ w2.T * (hidden > 0)) @ w1.T)
        unmasked.append(d_outputs @ w2.T @ w1.T)
    explain(got[0], {f"{where}, the bias is missing from the outputs.": outputs - bias})
    mask = "the gradient must not pass units that the ReLU has set to zero: multiply by `hidden > 0`"
    explain(got[1], {f"{where}, {mask}.": sum(unmasked)})
    if size == 1:
        return
    times = f"{where}, the bias was added {size} times; add it once, after the sum."
    explain(got[0], {times: outputs + (size - 1) * bias})
    for part in forward:
        alone = f"{where}, the outputs hold the part of one rank alone; sum all ranks' parts."
        explain(got[0], {alone: part + bias})
    alone = (
        f"{where}, the gradient of the inputs holds the part of one rank alone: every hidden unit contributes to it, "
        "so the backward pass needs a sum over the ranks too."
    )
    for part in [*backward, *unmasked]:
        explain(got[1], {alone: part})
    for value, what in (
        ((outputs - bias) / size + bias, "outputs"),
        (d_inputs / size, "gradient of the inputs"),
    ):
        explain(
            got[what != "outputs"],
            {f"{where}, the {what} must be the sum of the parts, not the mean.": value},
        )


def _judge_bytes(sent: int, size: int, nbytes: int, where: str) -> None:
    """Sending K bytes to all others needs N (N − 1) K, all ranks together; an all-reduce 2 (N − 1) K."""
    most = size * (size - 1) * nbytes
    if sent > most + 64:  # room for the single bytes of a barrier
        enough = f"{most:,} bytes are enough even if each rank sends its parts to all others"
        why = "sum parts of the outputs and of the inputs' gradient, and send nothing else"
        raise Wrong(f"{where}, all ranks together send {sent:,} bytes; {enough}: {why}.")


def _tried(
    program: Callable[..., Any], answer: Answer, size: int, arguments: dict[str, Any], on_processes: bool
) -> Iterator[tuple[str, list[RankResult]]]:
    """Where `program(communicator, answer, ...)` ran, and each rank's outcome: on threads, then on real processes."""
    whole = {"program": program, "answer": answer, **arguments}
    where = f"with {size} rank{'s' * (size > 1)}"
    try:
        yield where, threads.run(size, functools.partial(_counted, **whole), 5.0, is_buffered=False)
    except CommunicationError as failure:
        raise Wrong(f"{where}: {failure}.") from None
    if on_processes:
        where = f"on {size} processes behind links of {NETWORK}/s"
        yield where, values_on_ranks(where, size, _counted, whole, network=NETWORK)


def _counted(
    communicator: Communicator, program: Callable[..., Any], answer: Answer, **arguments: Any
) -> RankResult:
    got = program(communicator, answer, **arguments)
    return got, int(communicator.traffic.bytes_sent.sum())


def _and(counts: tuple[int, ...]) -> str:
    return " and ".join(filter(None, (", ".join(map(str, counts[:-1])), str(counts[-1]))))
