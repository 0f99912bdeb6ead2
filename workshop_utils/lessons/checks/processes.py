"""A learner's function on ranks: on threads, on real processes, and there beside a collective of the workshop's own."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import COLLECTIVES, CommunicationError, Communicator
from workshop_utils.lessons.checks import NotYet, Wrong, listed, refuse
from workshop_utils.ranks import RanksFailed, on_ranks

NETWORK = "100Mbit"
BLOCKED = (
    ": if all ranks send first, all may wait for each other to receive. A send returns at once only as long as its "
    "message fits into the buffers on its way; `send_recv` sends and receives at once"
)
Collective = Callable[..., None]


class Stuck(Wrong):
    """An answer is wrong: with it, a rank cannot send or receive."""


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
    """What `program(group, **arguments)`, which never returns None, returns on each of `size` real processes.

    `network`, `framework` and `timeout` are those of `ranks.on_ranks`.

    Raises:
        Wrong: if a rank fails, or leaves by SystemExit; it begins with `where`.
        Wrong, NotYet: what `program` raises on a rank, on the first that does.
    """
    failed = None
    try:
        judged = {**arguments, "judged": program}
        values = on_ranks(size, _judged, judged, network, framework, timeout).values
    except RanksFailed as error:
        failed, values = error, error.results.values
    for value in values:
        if isinstance(value, Wrong | NotYet):
            raise value
    refuse(failed, f"{where}: {failed}")
    missing = [rank for rank, value in enumerate(values) if value is None]
    refuse(missing, f"{where}, rank {listed(missing[:1])} ended with SystemExit.")
    return values


def _judged(group: Any, judged: Callable[..., Any], **arguments: Any) -> Any:
    """On a rank: what a program returns, or the Wrong or NotYet that it raises, to be raised where it was called."""
    try:
        return judged(group, **arguments)
    except (Wrong, NotYet) as verdict:
        return verdict


def on_threads(
    where: str,
    size: int,
    program: Callable[[Communicator], Any],
    timeout_seconds: float = 5.0,
    is_buffered: bool = False,
) -> list[Any]:
    """What `program(communicator)` returns on each of `size` ranks, which are threads; see `threads.run`.

    Raises:
        Stuck: if a rank cannot send or receive; it begins with `where`.
    """
    try:
        return threads.run(size, program, timeout_seconds, is_buffered=is_buffered)
    except CommunicationError as failure:
        blocked = BLOCKED if "to receive what it sent" in str(failure) else ""
        raise Stuck(f"{where}: {failure}{blocked}.") from None


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
