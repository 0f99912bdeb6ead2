"""A learner's collective on real processes, behind slow links, beside the workshop's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.comm.communicator import COLLECTIVES, Communicator
from workshop_utils.lessons.checks import Wrong
from workshop_utils.ranks import RanksFailed, on_ranks

NETWORK = "100Mbit"
Collective = Callable[..., None]


class _Outcome(NamedTuple):
    array: np.ndarray
    messages: int
    nbytes: int


def refuse_collectives(communicator: Communicator) -> None:
    """Raise Wrong if a message is sent by a collective of this package, however that was called."""
    if communicator._collective == "barrier":
        raise Wrong("`barrier` sends messages of its own: leave it out; a rank that receives waits anyway.")
    refuse_callers(COLLECTIVES, "write yours from `send_recv`")


@contextmanager
def watching(communicator: Communicator, watch: Callable[[int | None, np.ndarray], None]) -> Iterator[None]:
    """Call `watch` before each message, while a learner's code runs, which may not leave another there."""
    communicator.watch = watch
    yield
    if communicator.watch is not watch:
        raise Wrong("`communicator.watch` is the check's: leave it as it is.")
    communicator.watch = None


def refuse_callers(own: Container[CodeType], advice: str) -> None:
    """Raise Wrong if the code that calls this was itself called by one of the workshop's `own` functions."""
    frame, names = inspect.currentframe(), []
    while frame is not None:
        names += [frame.f_code.co_name] if frame.f_code in own else []
        frame = frame.f_back
    if names:
        raise Wrong(f"`{names[-1]}` is the workshop's own: {advice}.")


def values_on_ranks(
    where: str,
    size: int,
    program: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    network: str | None = None,
    framework: str | None = None,
    timeout: str = "30s",
) -> list[Any]:
    """What `program`, which never returns None, returns on each rank.

    Raises:
        Wrong: if a rank fails, or leaves by SystemExit; it begins with `where`.
    """
    try:
        values = on_ranks(size, program, arguments, network, framework, timeout).values
    except RanksFailed as error:
        raise Wrong(f"{where}: {error}") from None
    if None in values:
        raise Wrong(f"{where}, rank {values.index(None)} ended with SystemExit.")
    return values


def compare_on_processes(answer: Collective, reference: Collective, size: int, elements: int) -> None:
    """Raise Wrong unless `answer(communicator, array)` does on real processes what `reference` does with "mean".

    That is the same values on each of `size` ranks, to a relative 1e-9, by as many messages and bytes; `size` divides
    `elements`.
    """
    where = f"on {size} processes behind links of {NETWORK}/s"
    arguments = {"answer": answer, "reference": reference, "elements": elements}
    outcomes = values_on_ranks(where, size, _both, arguments, network=NETWORK)
    for rank, (mine, right) in enumerate(outcomes):
        if not np.allclose(mine.array, right.array, rtol=1e-9, atol=0):
            place = int(np.argmax(~np.isclose(mine.array, right.array, rtol=1e-9, atol=0)))
            values = f"{mine.array[place]:.10g}; it must be {right.array[place]:.10g}"
            raise Wrong(f"{where}, element {place} of rank {rank} is {values}.")
        for count, what in ((1, "messages"), (2, "bytes")):
            if mine[count] != right[count]:
                numbers = f"{mine[count]:,} {what}; it must be {right[count]:,}"
                raise Wrong(f"{where}, rank {rank} sends {numbers}.")


def _both(
    communicator: Communicator, answer: Collective, reference: Collective, elements: int
) -> tuple[_Outcome, _Outcome]:
    """What a rank gets of each, and what it sends."""

    def watch(*_: object) -> None:
        refuse_collectives(communicator)

    with watching(communicator, watch):
        mine = _outcome(communicator, answer, elements)
    return mine, _outcome(communicator, reference, elements, "mean")


def _outcome(communicator: Communicator, collective: Collective, elements: int, *options: Any) -> _Outcome:
    array = np.random.default_rng(communicator.rank).standard_normal(elements)
    communicator.traffic.reset()
    collective(communicator, array, *options)
    traffic = communicator.traffic
    return _Outcome(array, int(traffic.messages_sent.sum()), int(traffic.bytes_sent.sum()))
