"""Checks of lesson 00, welcome; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Any

import numpy as np

from workshop_utils.comm.communicator import Communicator
from workshop_utils.lessons.checks import (
    Wrong,
    exercise,
    expect,
    is_missing,
    listed,
    mistakes,
    number_of,
    refuse,
    result_of,
)
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import Observed, Stuck, on_threads, values_on_ranks
from workshop_utils.training import data

# Of the ranks, in three calls; ranks may have the same number.
NUMBERS = (
    (2.5, -1.0, 40.25, 8.0, 0.5, 1000.1, 4.12345),
    (3, 11, -7, 2.5, 100, -1, 6),  # whole and other numbers
    (2.0, 2.0, 0.0, 2.0, 0.0, 0.0, 2.0),
)
CALLED = ("", ", called a second time,", ", called a third time,")
# Numbers of workers, of those on each machine, and of images.
WORKERS, LOCAL = (2, 3, 1, 2, 4, 5, 12, 11, 7), (1, 1, 1, 2, 2, 5, 4, 11, 7)
SHARES = tuple(zip(WORKERS, LOCAL, (10, 10, 4, 10, 2, 1500, 16, 15, 61), strict=True))
STEPS = 200, 100  # of a training, at normal and at small size
NEW = 3, 3, 11  # on processes, with a count that is new: what earlier calls have left helps nobody there


@exercise
def total(answer: Callable[[Communicator, float], float]) -> str:
    """`answer(communicator, number)`: the sum of all ranks' numbers on every rank, sending only to the right."""
    for size in (2, 3, 4, 5, 6, 7, 1):
        where = f"with {number_of(size, 'rank')}"
        try:
            totals = on_threads(where, size, lambda each: _totals(each, answer))
        except Stuck as stuck:
            receives = "all receive first, and no rank gets to send, or it waits for more than is sent"
            refuse("in recv" in str(stuck), f"{str(stuck)[:-1]}: {receives}.")
            raise
        _judge_totals(where, totals)
    where = "on 3 processes"
    _judge_totals(where, values_on_ranks(where, 3, _totals, {"answer": answer}))
    return (
        "every rank knows the sum, on 1 to 7 threads and 3 processes; messages went only to the right. Where ranks add "
        "in different orders, last bits may differ; lesson 04 adds each number in one place."
    )


def _totals(communicator: Communicator, answer: Callable[[Communicator, float], float]) -> list[Any]:
    """A rank's results of some calls; a message that one leaves behind spoils the next."""
    rank, size = communicator.rank, communicator.size

    def watch(to: int | None, _: object) -> None:
        right = (rank + 1) % size
        sends = f"with {size} ranks, rank {rank} sends to rank {to}"
        refuse(to not in (None, right), f"{sends}; it may send only to rank {right}.")

    return [answer(Observed(communicator, watch), numbers[rank]) for numbers in NUMBERS]


def _judge_totals(where: str, totals: Sequence[Sequence[Any]]) -> None:
    for call, numbers in enumerate(NUMBERS):
        own = numbers[: len(totals)]
        for rank, values in enumerate(totals):
            what, got = f"{where}{CALLED[call]} rank {rank}", values[call]
            if is_missing(got) and (len(totals) == 1 or not all(is_missing(each[call]) for each in totals)):
                raise Wrong(f"{what} gave nothing; every rank must return the sum.")
            got = got.item() if getattr(got, "size", 0) == 1 else got
            for sentence, mistake in mistakes(__name__, "total").items():
                if isinstance(got, float) and math.isclose(got, mistake(own, rank)) and got != sum(own):
                    raise Wrong(f"{what} gave {got}: {sentence}.")
            expect(got, sum(own), what, f"the ranks' numbers are {', '.join(map(str, own))}", 1e-12)


@exercise
def my_images(answer: Callable[[dict[str, str], int], Iterable[int]]) -> str:
    """`answer(environment, count)`: which of `count` images belong to the worker with this environment.

    Every image belongs to exactly one worker, and nobody has two more than another.
    """
    asked = [(rank, *case) for case in SHARES for rank in range(case[0])]
    shares = {case: _share(answer, *case) for case in asked}
    for case in reversed(asked):  # each worker is a process of its own, and knows nothing of earlier calls
        called = "called twice with RANK={0}, WORLD_SIZE={1} and {3} images".format(*case)
        differs = f"{called}, it returned different images; they may depend only on environment and count."
        refuse(_share(answer, *case) != shares[case], differs)
    for workers, local, count in SHARES:
        _judge_shares([shares[rank, workers, local, count] for rank in range(workers)], local, count)
    _, *others = values_on_ranks("on 3 processes", 3, _share_of_a_rank, {"answer": answer})
    _, local, count = NEW
    # Text is hashed differently here and there.
    _judge_shares([_share(answer, 0, *NEW), *others], local, count)
    return "every image belongs to one worker, and each found its own without communicating."


def _share_of_a_rank(communicator: Communicator, answer: Callable[..., Iterable[int]]) -> set[int]:
    return _share(answer, communicator.rank, *NEW)


def _share(answer: Callable[..., Iterable[int]], rank: int, workers: int, local: int, count: int) -> set[int]:
    """The images of one of the workers, of which `local` run on each machine."""
    environment = {"RANK": rank, "WORLD_SIZE": workers, "LOCAL_RANK": rank % local, "LOCAL_WORLD_SIZE": local}
    case = f"with {', '.join(f'{name}={value}' for name, value in environment.items())} and {count} images"
    try:
        share = result_of(answer, {name: str(value) for name, value in environment.items()}, count)
    except TypeError as error:
        refuse("str" in str(error), f"{case}: {error}; an environment holds text: int(...) makes a number.")
        raise
    indices = "it must give the indices of all its images, as a list"
    refuse(not isinstance(share, Iterable), f"{case} it gave {share!r}; {indices}.")
    images: set[int] = set()
    for image in islice(share, count + 1):
        is_number = hasattr(image, "__index__") and not isinstance(image, bool) and not np.ndim(image)
        refuse(not is_number, f"{case} one of its images is {image!r}; an image's number is a whole number.")
        there = f"the images have the numbers 0 to {count - 1}"
        refuse(image not in range(count), f"{case} it gave image {image}; {there}.")
        refuse(image in images, f"{case} it gave image {image} more than once.")
        images.add(operator.index(image))
    return images


def _judge_shares(shares: list[set[int]], local: int, count: int) -> None:
    each = f", {local} on each machine," if local > 1 else ""
    of = f"with {number_of(len(shares), 'worker')}{each} and {count} images"
    for index in range(count):
        ranks = [f"rank {rank}" for rank, share in enumerate(shares) if index in share]
        refuse(len(ranks) > 1, f"{of}, image {index} belongs to {' and '.join(ranks)}; one must own it.")
        advice = "; a division's remainder needs an owner, too" if count % len(shares) else ""
        if sum(map(len, shares)) > len(set().union(*shares)):
            advice = ", and another to several ranks; do all start from the same order?"
        refuse(not ranks, f"{of}, image {index} belongs to nobody{advice}.")
    sizes = [len(share) for share in shares]
    spread = max(sizes) - min(sizes)
    refuse(spread > 1, f"{of}, the ranks have {sizes} images; shares may differ by at most one.")


@measured
def averaged_at_the_end(results: Any) -> float:
    """The percentage of the test images that averaged weights recognise: the mean of runs of `train`, one a seed."""
    digits = data.arrays(data.prepare("digits"))
    is_low = digits.train_labels < 5
    halves = [np.flatnonzero(is_low).tolist(), np.flatnonzero(~is_low).tolist()]
    percentages, seeds = [], []
    for run in runs_of(results, "train", ranks=2):
        asked = {"exchange": True, **run.arguments}
        exchanged = 'these workers exchanged gradients in every step: pass `"exchange": False`'
        refuse(asked["exchange"], f"{exchanged}.")
        whole = "worker 0 must have all images of the digits 0 to 4, worker 1 all of 5 to 9"
        shares = [sorted(map(int, share)) for share in asked["shares"]]
        refuse(shares != halves, f"these workers had other images: {whole}.")
        refuse(asked["batch"] != 32, f"these workers drew {asked['batch']} images in each step, not 32.")
        refuse(asked["steps"] not in STEPS, f"these workers took {asked['steps']} steps, not {max(STEPS)}.")
        low, high = (each for _, each in run.values)
        equal = "both workers ended with the same weights: they have exchanged something"
        refuse(np.array_equal(low, high), f"{equal}.")
        alone = [_recognised(digits, each) for each in (low, high)]
        learnt = "each must have learnt its own digits, about half of the test images, and no others"
        they = f"alone, these workers recognise {alone[0]:.0f} and {alone[1]:.0f} % of the test images"
        refuse(not all(40 < each < 55 for each in alone), f"{they}; {learnt}.")
        weights = (low + high) / 2
        percentages.append(_recognised(digits, weights))
        seeds.append(asked["seed"])
    refuse(len({*seeds}) < 2, "one seed shows no spread: run at least two.")
    refuse(len({*seeds}) < len(seeds), f"of the seeds {listed(seeds)} one is there twice.")
    return float(np.mean(percentages))


def _recognised(digits: Any, weights: np.ndarray) -> float:
    """The percentage of the test images to whose digit these weights (64, 10) give the highest score."""
    return float(100 * np.mean((digits.test_images @ weights).argmax(axis=1) == digits.test_labels))
