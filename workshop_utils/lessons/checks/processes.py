"""A learner's function on ranks: on threads, on real processes, and there beside a collective of the workshop's own."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import CommunicationError, Communicator
from workshop_utils.comm.subset import Subset
from workshop_utils.jobs.quantities import seconds_of
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


class Observed(Subset):
    """`inner`, of which `observe(to, array)` hears before each message; None for `to`: it only receives.

    A learner writes a collective with it: calling one of the workshop's own raises Wrong, but for those in `allowed`.
    """

    def __init__(
        self,
        inner: Communicator,
        observe: Callable[[int | None, Any], object],
        allowed: Collection[str] = (),
    ) -> None:
        super().__init__(inner, range(inner.size))
        self._observe, self._allowed = observe, allowed

    def _exchange(self, to: int | None, outgoing: Any, source: int | None, incoming: Any) -> None:
        name = self._collective
        because = "sends messages of its own: leave it out; a rank that receives waits anyway"
        refuse(name == "barrier", f"`barrier` {because}.")
        parts = listed(f"`{each}`" for each in self._allowed or ["send_recv"])
        refuse({name} - {"", *self._allowed}, f"`{name}` is the workshop's own: write yours from {parts}.")
        self._observe(to, outgoing)
        if to is not None and source is not None and np.shares_memory(outgoing, incoming):
            raise Wrong(
                "`send_recv` received into the array that it sends: give it two, or one may overwrite the other."
            )
        super()._exchange(to, outgoing, source, incoming)


def values_on_ranks(
    where: str,
    size: int,
    program: Callable[..., Any],
    arguments: dict[str, Any],
    *,
    network: str | None = None,
    framework: str | None = None,
    timeout: str = "30s",
    may_die: Collection[int] = (),
) -> list[Any]:
    """What `program(group, **arguments)`, which never returns None, returns on each of `size` real processes.

    `network`, `framework`, `timeout` and `may_die` are those of `ranks.on_ranks`; a rank that has died gives None.

    Raises:
        Wrong: if a rank fails, or leaves by SystemExit; it begins with `where`.
        Wrong, NotYet: what `program` raises on a rank, on the first that does.
        NotYet: if time is up before `program` has begun on all ranks.
    """
    failed, deadline = None, time.time() + seconds_of(timeout)
    with tempfile.TemporaryDirectory() as folder:
        judged = {**arguments, "judged": program, "begun": folder}
        try:
            values = on_ranks(size, _judged, judged, network, framework, timeout, may_die=may_die).values
        except RanksFailed as error:
            failed, values = error, error.results.values
            # Ranks are asked for their stacks after the deadline, and may begin, and even return, meanwhile.
            begun = [each for each in Path(folder).iterdir() if each.stat().st_mtime < deadline]
            if "did not end within" in str(error) and len(begun) < size:
                busy = f"{where}: {timeout} were not enough to start the ranks, on a busy machine"
                raise NotYet(f"{busy}; run this again.") from None
    for value in values:
        if isinstance(value, Wrong | NotYet):
            raise value
    if failed and "Horovod has been shut down" in str(failed):
        ended = [rank for rank, value in enumerate(values) if value is not None]
        where += f", {f'rank {listed(ended)}' if ended else 'a rank'} ends while others wait for it in a collective"
    refuse(failed, f"{where}: {failed}")
    missing = [rank for rank, value in enumerate(values) if value is None and rank not in may_die]
    refuse(missing, f"{where}, rank {listed(missing[:1])} ended with SystemExit.")
    return values


def _judged(group: Any, judged: Callable[..., Any], begun: str, **arguments: Any) -> Any:
    """On a rank: what a program returns, or the Wrong or NotYet that it raises, to be raised where it was called."""
    os.close(tempfile.mkstemp(dir=begun)[0])
    try:
        return judged(group, **arguments)
    except (Wrong, NotYet) as verdict:
        return verdict


def on_threads(
    where: str,
    size: int,
    program: Callable[[Communicator], Any],
    timeout_seconds: float = 10.0,
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

    mine = _outcome(Observed(communicator, lambda *_: None), answer, elements)
    return mine, _outcome(communicator, reference, elements, "mean")


def _outcome(communicator: Communicator, collective: Collective, elements: int, *options: Any) -> _Outcome:
    array = np.random.default_rng(communicator.rank).standard_normal(elements)
    communicator.traffic.reset()
    collective(communicator, array, *options)
    traffic = communicator.traffic
    return _Outcome(array, int(traffic.messages_sent.sum()), int(traffic.bytes_sent.sum()))


def on_two_and_three_ranks(program: Callable[..., Any], answer: Any) -> None:
    """Run `program(dist, answer, where)`, which judges `answer` there, on 2 and on 3 ranks of PyTorch."""
    for size in (2, 3):
        where = f"on {size} ranks"
        arguments = {"answer": answer, "where": where}
        values_on_ranks(where, size, program, arguments, framework="torch")
