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

Rule = Callable[[dict[int, int], int, int], bool]

_CASES: tuple[tuple[dict[int, int], int, int], ...] = (
    ({0: 1, 1: 1, 2: 1}, 0, 0),
    ({0: 2, 1: 1, 2: 1}, 0, 0),
    ({0: 2, 1: 1, 2: 1}, 1, 0),
    ({0: 4, 1: 1, 2: 3}, 0, 3),
    ({0: 5, 1: 1, 2: 4}, 0, 3),
    ({0: 5, 1: 1, 2: 4}, 2, 3),
    ({0: 9, 1: 7, 2: 9}, 2, 1),
    ({0: 1, 1: 0, 2: 0}, 0, 2),
    ({0: 8, 1: 7, 2: 9}, 0, 2),
)
_OTHER_RULES: dict[str, Rule] = {
    "it lets everybody go on at once, always: that is asynchronous": lambda *_: True,
    "it lets everybody wait, always, so nobody would ever go on": lambda *_: False,
    "it lets nobody be a full `bound` ahead, but that much is allowed": (
        lambda pushes, worker, bound: pushes[worker] - min(pushes.values()) < bound
    ),
    "it looks at the worker's own pushes alone; how far ahead it is, the slowest tells": (
        lambda pushes, worker, bound: pushes[worker] <= bound
    ),
    "it measures how far behind the fastest a worker is; the bound is about how far ahead of the slowest": (
        lambda pushes, worker, bound: max(pushes.values()) - pushes[worker] <= bound
    ),
    "it asks whether any two workers are too far apart; only this one is to be let on, or not": (
        lambda pushes, worker, bound: max(pushes.values()) - min(pushes.values()) <= bound  # noqa: ARG005
    ),
    "it lets only the slowest go on, as if the bound were 0": (
        lambda pushes, worker, bound: pushes[worker] == min(pushes.values())  # noqa: ARG005
    ),
}


@exercise
def stale_synchronous(answer: Rule) -> str:
    """`answer(pushes, worker, bound)`: may `worker` go on, if each worker has pushed so often (by its number)?"""
    given = [answer(dict(pushes), worker, bound) for pushes, worker, bound in _CASES]
    if any(is_missing(got) for got in given):
        raise NotYet("your rule gave nothing: write it, then run this again.")
    for got, (pushes, worker, bound) in zip(given, _CASES, strict=True):
        ahead = pushes[worker] - min(pushes.values())
        if bool(got) is not (ahead <= bound):
            raise Wrong(
                f"with pushes {pushes} and bound {bound}, worker {worker} is {ahead} ahead of the slowest, so it "
                f"{'may go on' if ahead <= bound else 'must wait'}; your rule says the opposite."
                + _known([bool(got) for got in given])
            )
    return "bound 0 waits for everybody at every step, and an endless bound never waits."


def _known(decisions: list[bool]) -> str:
    """What is to be said of a rule that decides all cases as a well-known wrong one does."""
    for said, rule in _OTHER_RULES.items():
        if decisions == [rule(*case) for case in _CASES]:
            return f" In all, {said}."
    return ""


seconds_through_one_server = number(
    2 * 16 * 400e6 / 1.25e9,
    "s",
    "16 gradients of 400 MB come in, and 16 answers go out, at 1.25 GB/s each way",
    {
        5.12: "that is one way; a synchronous server takes in all gradients first, and then answers all",
        0.64: "that is one worker's push and pull; all 16 pass the same link",
        0.32: "that is one worker's push; all 16 pass the same link, and then 16 answers",
        1.28: "a link of 10 Gbit/s carries 1.25 GB in a second, not 10: a byte has 8 bits",
        81.92: "gigabytes and gigabits are mixed: 400 MB at 1.25 GB/s take 0.32 s",
        0.6: "in a ring each link would carry 1.875 · 400 MB; here one link carries what all 16 workers send",
    },
)
servers_for_a_second = number(
    11,
    "servers",
    "k servers divide 10.24 s by k, and 10 of them still take a little more than a second",
    {
        10: "10 servers take 1.024 s; *less* than a second is asked for",
        10.24: "nearly: there are whole servers only, and it must be less than a second",
        6: "6 are enough for one way; gradients come in, and then answers go out: 10.24 s with one server",
        5: "5 servers take 10.24 / 5 s, that is 2.05 s",
        16: "one for each worker works, but fewer do",
        12: "fewer do: 10.24 s / k",
    },
)
staleness_of_equals = number(
    15,
    "updates",
    "between a worker's pull and its push each of the 15 others pushes once",
    {
        16: "its own push does not make it stale: count the others'",
        0: "that is synchronous training; here nobody waits, and the others push meanwhile",
        1: "one update by each of the others, in the time in which it computes its own",
        7.5: "the others push once in a *whole* round, and so long does a worker compute between pull and push",
        8: "the others push once in a *whole* round, and so long does a worker compute between pull and push",
        30: "each of the others pushes once a round, not twice",
    },
)
workers_for_a_full_link = number(
    10,
    "workers",
    "one goes round in 2.56 s and twice 0.32 s, and the link has 0.32 s of work for each: 3.2 / 0.32",
    {
        8: "2.56 / 0.32 leaves out that a worker's round includes its push and its pull, 0.32 s each",
        9: "a round includes the push *and* the pull: 2.56 + 2 · 0.32 s",
        5: "in and out are two directions of the link, used at the same time: 0.32 s of each for a worker",
    },
)
