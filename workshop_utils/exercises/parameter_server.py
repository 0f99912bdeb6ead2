"""Checks of lesson 03, parameter servers; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable

from workshop_utils.exercises import (
    NotYet,
    Wrong,
    exercise,
    is_missing,
    number,
)


@exercise
def stale_synchronous(answer: Callable[[dict[int, int], int, int], bool]) -> str:
    """`answer(pushes, worker, bound)`: may `worker` go on, if each worker has pushed so often (by its number)?"""
    cases: tuple[tuple[dict[int, int], int, int], ...] = (
        ({0: 1, 1: 1, 2: 1}, 0, 0),
        ({0: 2, 1: 1, 2: 1}, 0, 0),
        ({0: 2, 1: 1, 2: 1}, 1, 0),
        ({0: 4, 1: 1, 2: 3}, 0, 3),
        ({0: 5, 1: 1, 2: 4}, 0, 3),
        ({0: 5, 1: 1, 2: 4}, 2, 3),
        ({0: 9, 1: 7, 2: 9}, 2, 1),
    )
    for pushes, worker, bound in cases:
        got = answer(dict(pushes), worker, bound)
        if is_missing(got):
            raise NotYet("your rule gave nothing: write it, then run this again.")
        ahead = pushes[worker] - min(pushes.values())
        if bool(got) is not (ahead <= bound):
            raise Wrong(
                f"with pushes {pushes} and bound {bound}, worker {worker} is {ahead} ahead of the slowest, so it "
                f"{'may go on' if ahead <= bound else 'must wait'}; your rule says the opposite."
            )
    return "bound 0 waits for everybody at every step, and an endless bound never waits."


seconds_through_one_server = number(
    2 * 16 * 400e6 / 1.25e9,
    "s",
    "16 gradients of 400 MB come in, and 16 answers go out, at 1.25 GB/s each way",
)
servers_for_a_second = number(
    11, "servers", "k servers divide 10.24 s by k, and 10 of them still take a little more than a second"
)
staleness_of_equals = number(
    15, "updates", "between a worker's pull and its push each of the 15 others pushes once"
)
workers_for_a_full_link = number(
    10,
    "workers",
    "one goes round in 2.56 s and twice 0.32 s, and the link has 0.32 s of work for each: 3.2 / 0.32",
)
