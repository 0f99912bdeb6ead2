"""Checks of lesson 03, parameter servers; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import functools
import itertools
import os
import signal
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from workshop_utils.comm import replicated
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.parameter_server import State
from workshop_utils.comm.replicated import Keep, Push
from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.lessons.checks import (
    Check,
    NotYet,
    Wrong,
    compare,
    exercise,
    explain,
    is_missing,
    listed,
    mistakes,
    number_of,
    recognise,
    refuse,
    refuse_any,
)
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import Observed, on_threads, values_on_ranks

Rule = Callable[..., bool]
T = TypeVar("T")

_BOUND, _SLOW, _FEWEST_PUSHES = 2, 1, 20


@measured
def largest_staleness(results: Any) -> float:
    """Of four workers under a bound of 2, the first of which is always slow."""
    runs = runs_of(results, "train", ranks=5, network="100Mbit")
    return max(_largest_staleness(run.values[0][0]) for run in runs)


def _largest_staleness(log: Sequence[tuple[float, int, int, bool]]) -> int:
    """Raise Wrong unless a server's `log`, of each push seconds, worker, staleness, dropped, is of that experiment."""
    few = f"the server's log has {number_of(len(log), 'push', 'es')}; train for longer, to have {_FEWEST_PUSHES}."
    refuse(len(log) < _FEWEST_PUSHES, few)
    pushes, lead, last = dict.fromkeys(range(1, 5), 0), 0, 0
    for _, worker, _, dropped in log:
        refuse(dropped, "a gradient was dropped; with a bound alone, each of them counts.")
        pushes[worker] += 1
        lead = max(lead, pushes[worker] - min(pushes.values()))
        last += pushes[_SLOW] == min(pushes.values())
    reached = (
        f"with a bound of {_BOUND} it is answered until it is {_BOUND} ahead, and so gets to {_BOUND + 1}"
    )
    ahead = f"a worker gets {number_of(lead, 'push', 'es')} ahead of the slowest; {reached}."
    refuse(lead != _BOUND + 1, ahead)
    share = last / len(log)  # where only worker 1 is slow, nearly 1; where each is at times, about a half
    seldom = f"worker {_SLOW} has the fewest pushes for {share:.0%} of the run; let it alone be slow, in all its steps."
    refuse(share < 0.8, seldom)
    return max(staleness for _, _, staleness, _ in log)


@exercise
def rules(answer: tuple[Rule, Rule]) -> str:
    """`answer` is (stale_synchronous(state, worker, bound), is_fresh(state, worker))."""
    held, fresh = answer
    _judge("stale_synchronous", held, _held_cases(), _may_go_on)
    _judge("is_fresh", fresh, _fresh_cases(), _is_fresh)
    return (
        "with a bound of 0 nobody begins another gradient while ahead of the slowest, and nobody waits for a worker "
        "that has finished; a gradient of an old version comes too late for its step."
    )


def rules_to_run(answer: tuple[Rule, Rule]) -> tuple[Rule, Rule]:
    """The learner's two rules if they are right; otherwise ours, which is said."""
    return _or_ours(rules, answer, (_may_go_on, _is_fresh), "pair of rules")


def _or_ours(check: Check, answer: T, ours: T, what: str) -> T:
    if check(answer).state == "right":
        return answer
    print(f"Your {what} is not right yet, so ours is run.")
    return ours


def _may_go_on(state: Any, worker: int, bound: int) -> bool:
    return bool(state.pushes[worker] - min(state.pushes[each] for each in state.active) <= bound)


def _is_fresh(state: Any, worker: int) -> bool:
    return bool(state.has[worker] == state.version)


def _state(version: int, has: Sequence[int], pushes: Sequence[int], active: Iterable[int]) -> Any:
    state: Any = State(range(1, len(has) + 1))
    state.version, state.active = version, set(active)
    state.has, state.pushes = dict(enumerate(has, 1)), dict(enumerate(pushes, 1))
    # The lesson's state has a log, in which a rule may count.
    state.log = [(0.01, worker, 0, False) for worker, count in state.pushes.items() for _ in range(count)]
    return state


def _held_cases() -> list[tuple[Any, ...]]:
    """States of few and of many workers, all or some of them active, with bounds around those leads."""
    cases: list[tuple[Any, ...]] = []
    few = ((0, 0, 0), (1, 1, 1), (2, 1, 1), (4, 1, 3), (5, 1, 4), (9, 7, 9), (1, 0, 0), (3, 5, 6), (9, 3, 3))
    many = ((5, 1, 4, 2), (12, 30, 2, 21), (60, 41, 70, 40, 52), (3, 97, 50, 4, 124, 7, 25, 8, 66))
    for made in few + many:
        # Versions that workers may have: none before the first push; then an older one than the pushes have made.
        has = [max(0, sum(made) - 1 - 3 * worker % 5) if count else -1 for worker, count in enumerate(made)]
        workers = range(1, len(made) + 1)
        for active in (workers, workers[1:], workers[::2], workers[1:2]):
            state = _state(sum(made), has, made, active)
            leads = {*range(7), *map(state.ahead, active)}
            bounds = {max(0, lead + more) for lead in leads for more in (-1, 0, 1)}
            cases += itertools.product([state], active, sorted(bounds))
    return cases


def _fresh_cases() -> list[tuple[Any, ...]]:
    """Two workers, then five whose gradients are of any age; a rule may not ask who has pushed how often."""
    versions = ((0, (0, 0)), (3, (3, 2)), (7, (1, 7)), (2, (2, 2)), (5, (4, 3)), (90, (90, 89)))
    pushes = ((4, 3), (3, 8), (7, 7), (0, 0), (0, 1))
    few = [_state(*versions, made, (1, 2)) for versions, made in itertools.product(versions, pushes)]
    many = [
        _state(120, [120 - age] * worker + [120] * (5 - worker), (0, 7, 0, age, 120), range(1, 6))
        for age, worker in itertools.product(range(120), range(1, 6))
    ]
    return [(state, worker) for state in few + many for worker in state.active]


def _judge(name: str, answer: Rule, cases: list[tuple[Any, ...]], right: Rule) -> None:
    """Raise Wrong unless the rule `answer` says what `right` says in all cases."""
    own = copy.deepcopy(cases)
    given = [answer(*case) for case in own]
    changed = any(vars(mine[0]) != vars(case[0]) for mine, case in zip(own, cases, strict=True))
    refuse(changed, f"`{name}` changes the state; a rule only reads it.")
    if any(is_missing(each) for each in given):
        raise NotYet(f"`{name}` gave nothing: write it, then run this again.")
    for each, case in zip(given, cases, strict=True):
        expected = right(*case)
        if bool(each) is not expected:
            state, worker, *bound = case
            known = f"version {state.version}, has {state.has}, pushes {state.pushes}, active {state.active}"
            about = f"worker {worker}" + (f" and bound {bound[0]}" if bound else "")
            text = f"`{name}` is {bool(each)} for {about}; it must be {expected}, with {known}"
            others = mistakes(__name__, name).items()
            values = {why: [bool(rule(*one)) for one in cases] for why, rule in others}
            explain([bool(one) for one in given], values, where=f"{text}: ")
            raise Wrong(f"{text}.")


Batches = Sequence[tuple[np.ndarray, np.ndarray]]  # of each rank: row numbers, and a gradient for each


@exercise
def sparse_push(answer: Callable[..., None]) -> str:
    """`answer(communicator, part, rows, gradients)` adds each of `gradients` to its row, on the rank that has it.

    Rank r of N has rows r, r + N, r + 2N ... of the table, which are its `part`, one below the other.
    """
    random = np.random.default_rng(0)
    cases = {  # what each rank draws from, and the table's shape and type
        "3 ranks and 10 rows": ([range(10)] * 3, (10, 5), np.float32),
        "2 ranks that both draw rows of rank 0": ([range(0, 8, 2)] * 2, (8, 5), np.float32),
        "4 ranks, of which rank 0 draws no row": ([range(0), *[range(30)] * 3], (30, 5), np.float32),
        "3 ranks and values of 64 bits": ([range(10)] * 3, (10, 5), np.float64),
        "4 ranks and 3 rows": ([range(3)] * 4, (3, 5), np.float32),
        "one rank": ([range(5)], (5, 5), np.float32),
    }
    for case, (pools, shape, dtype) in cases.items():
        _judge_push(answer, f"with {case}", *_drawn(random, pools, 2 * shape[0], shape, dtype))
    size = 4
    table, batches = _drawn(random, [range(2_000)] * size, 400, (2_000, 16))
    where = "with 4 processes"
    values = values_on_ranks(where, size, _push_on, {"answer": answer, "table": table, "batches": batches})
    parts, messages, nbytes = zip(*values, strict=True)
    _compare_push(where, table, batches, parts, messages, nbytes)
    share = np.mean(nbytes) / ring_bytes_sent(size, table.nbytes)
    return (
        "each row's gradients are added up and reach the rank that has the row. On four processes, "
        f"400 draws from 2,000 rows take {np.mean(nbytes):,.0f} bytes a rank, {share:.0%} of what a ring all-reduce of "
        "the whole gradient takes."
    )


def push_to_run(answer: Callable[..., None]) -> Callable[..., None]:
    """The learner's push if it is right; otherwise ours, which is said."""
    return _or_ours(sparse_push, answer, _sparse_push, "push")


def _sparse_push(communicator: Communicator, part: Any, rows: Any, gradients: Any) -> None:
    rank, size = communicator.rank, communicator.size
    own, places = np.unique(rows, return_inverse=True)
    sums = np.zeros((len(own), part.shape[1]), part.dtype)
    np.add.at(sums, places, gradients)
    for distance in range(size):
        to, source = (rank + distance) % size, (rank - distance) % size
        numbers, values = own[own % size == to], sums[own % size == to]
        if distance:
            count = np.empty(1, np.int64)
            communicator.send_recv(to, np.array([len(numbers)]), source, count)
            theirs = np.empty(count[0], np.int64), np.empty((count[0], part.shape[1]), part.dtype)
            communicator.send_recv(to, numbers, source, theirs[0])
            communicator.send_recv(to, values, source, theirs[1])
            numbers, values = theirs
        part[numbers // size] += values


def _drawn(
    random: np.random.Generator,
    pools: Sequence[Sequence[int]],
    draws: int,
    shape: tuple[int, int],
    dtype: Any = np.float32,
) -> tuple[np.ndarray, Batches]:
    """A table, and for each of `pools` so many draws from its rows, some of them often."""
    table = random.integers(20, 90, shape).astype(dtype)
    rows = [random.choice(np.array(pool, np.int64), draws * bool(pool)) for pool in pools]
    # Whole numbers, and in float64 a little more than float32 can hold: their sums are exact in any order.
    gradients = [random.integers(1, 9, (len(each), shape[1])) * (1 + 2**-35) for each in rows]
    return table, [(each, values.astype(dtype)) for each, values in zip(rows, gradients, strict=True)]


def _judge_push(answer: Callable[..., None], where: str, table: np.ndarray, batches: Batches) -> None:
    size = len(batches)
    program = functools.partial(_push_on, answer=answer, table=table, batches=batches)
    parts, messages, nbytes = zip(*on_threads(where, size, program), strict=True)
    same = all(np.array_equal(part, table[rank::size]) for rank, part in enumerate(parts))
    if same and size > 1 and not any(messages):
        raise NotYet("nothing is sent and no row has changed: write the function, then run this again.")
    _compare_push(where, table, batches, parts, messages, nbytes)


def _push_on(communicator: Communicator, answer: Any, table: np.ndarray, batches: Batches) -> Any:
    """On a rank: its part of the table after the push, and how many messages and bytes it sent."""
    rows, gradients = batches[communicator.rank]
    part = table[communicator.rank :: communicator.size].copy()
    sent: list[int] = []
    watched = Observed(communicator, lambda to, array: sent.extend([] if to is None else [array.nbytes]))
    given = answer(watched, part, rows.copy(), gradients.copy())
    refuse(not is_missing(given), "return nothing: change `part` in place.")
    return part, len(sent), sum(sent)


def _compare_push(
    where: str,
    table: np.ndarray,
    batches: Batches,
    parts: Sequence[np.ndarray],
    messages: Sequence[int],
    nbytes: Sequence[int],
) -> None:
    size, right, got = len(batches), _added(table, batches), np.empty_like(table)
    for rank, part in enumerate(parts):
        got[rank::size] = part
    if not np.allclose(got, right):
        explain(got, _slips_of_push(table, batches, right), where=f"{where}, ")
        row, column = np.argwhere(~np.isclose(got, right))[0]
        place = f"row {row}, place {row // size} of rank {row % size}'s part"
        change = f"{got[row, column] - table[row, column]:g}; it must be {right[row, column] - table[row, column]:g}"
        raise Wrong(f"{where}, an element of {place}, changes by {change}.")
    short = not np.allclose(got, right, rtol=8 * np.finfo(table.dtype).eps, atol=0)
    refuse(short, f"{where}, the sums are rounded to fewer bits; give them `part.dtype`.")
    row_nbytes = 8 + table[0].nbytes  # its number and its values
    for rank, (rows, _) in enumerate(batches):
        away = rows[rows % size != rank]
        least, unsummed = (len(each) * row_nbytes for each in (np.unique(away), away))
        wide, most = least + len(np.unique(away)) * table[0].nbytes, least + 32 * (size - 1)
        sends = f"{where}, rank {rank} sends "
        others, own = number_of(size - 1, "other rank"), number_of(len(np.unique(away)), "row")
        slips = {
            f"{number_of(messages[rank], 'message')} to {others}; send each of them its rows together: how many, their "
            "numbers, their gradients.": messages[rank] > 6 * (size - 1),
            f"{nbytes[rank]:,} bytes: the gradients are sums of 64 bits; give them `part.dtype`.": (
                most < wide <= nbytes[rank] <= wide + most - least
            ),
            f"{nbytes[rank]:,} bytes: a row that was drawn twice is sent twice; add its gradients up first.": (
                most < unsummed <= nbytes[rank] <= unsummed + most - least
            ),
            f"{nbytes[rank]:,} bytes; its {own} on other ranks, with numbers, have {least:,}: send no rank a row that "
            "it does not have, and no row that was not drawn.": nbytes[rank] > most,
        }
        refuse_any(sends, slips)


def _added(table: np.ndarray, batches: Batches) -> np.ndarray:
    """The table with all gradients added."""
    after = table.copy()
    for rows, gradients in batches:
        np.add.at(after, rows, gradients)
    return after


def _slips_of_push(table: np.ndarray, batches: Batches, right: np.ndarray) -> dict[str, np.ndarray]:
    """What the table becomes by mistakes that people make, by the sentence on each."""
    size, last, first, mean = len(batches), table.copy(), table.copy(), table.copy()
    replaced, sender, own = table.copy(), table.copy(), table.copy()
    for rank, (rows, gradients) in enumerate(batches):
        here = rows % size == rank
        np.add.at(own, rows[here], gradients[here])
        last[rows] = last[rows] + gradients
        unique, at, places, counts = np.unique(rows, True, True, True)
        first[unique] += gradients[at]
        sums = np.zeros((len(unique), table.shape[1]), table.dtype)
        np.add.at(sums, places, gradients)
        mean[unique] += sums / counts[:, None]
        sender[unique], replaced[unique] = table[unique] + sums, sums
    twice = "of a row that was drawn twice only one gradient counts: `a[rows] += ...` keeps the last; use `np.add.at`."
    return {
        "no row has changed: add to `part` in place.": table,
        "gradients of rows that are on the rank itself are left out.": right + table - own,
        "only gradients of rows that are on the rank itself count.": own,
        "gradients of rows that are on the rank itself count twice.": right + own - table,
        "the gradients are subtracted; add them.": 2 * table - right,
        "a row that was drawn twice gets the mean of its gradients; it must be their sum.": mean,
        "the rows get the mean over all ranks; it must be the sum.": table + (right - table) / size,
        "the gradients replace the rows; add them.": replaced,
        "where two ranks send the same row, only the last one counts: add what comes from one after the other.": sender,
        twice: last,
        "of a row that was drawn twice only the first gradient counts; add them all up.": first,
    }


@exercise
def workers_for_a_full_link(answer: Callable[[float, float, float], float]) -> str:
    """`answer(compute_seconds, nbytes, bandwidth)` is (c + 2s) / s with s = K / B."""

    def right(seconds: float, nbytes: float, bandwidth: float) -> float:
        return (seconds + 2 * nbytes / bandwidth) / (nbytes / bandwidth)

    cases = [(0.1, 1e6, 1e7), (2.5, 4e8, 1.25e9), (0.0, 1e6, 1e7), (0.037, 1e6, 1e8)]
    recognise(answer, cases, mistakes(__name__, "workers_for_a_full_link"))
    what = "with {0} s of computing, {1:g} bytes and {2:g} bytes/s"
    because = "compare one worker's round with the link's work in it"
    compare(answer, right, [(what, because, *case) for case in cases])
    return "W* = (c + 2s) / s: the round of one worker, divided by the link's time for one push."


_RANGES, _VALUES, _STEPS = 6, 5, 17
_SOLVED = np.random.default_rng(0).normal(size=(2, _RANGES, _VALUES))  # where each worker's gradient is zero


@exercise
def replica(answer: tuple[Push, Keep]) -> str:
    """`answer` is (push(server, worker, r, version, gradient), keep(server, r, version, values))."""
    push, keep = answer
    for workers in (2, 3, 1):
        _judge_updates(push, workers)
        _judge_takeover(push, keep, workers)
    where, ranks = "on real processes, where five servers are killed", _RANGES + len(_SOLVED)
    arguments = {"push": push, "keep": keep}
    values = values_on_ranks(where, ranks, _train_ranges, arguments, timeout="20s", may_die=range(1, _RANGES))
    off = max(np.abs(value - _undisturbed()).max() for value in values[_RANGES:])
    advice = "count each push once, and answer nobody before the next server has what you answer"
    refuse(off > 1e-9, f"{where}, the parameters are off by {off:.2g}; {advice}.")
    return (
        "five of six servers were killed on real processes, each at another moment of its update, and the parameters "
        "are those of a run without a crash."
    )


def replica_to_run(answer: tuple[Push, Keep]) -> tuple[Push, Keep]:
    """The learner's two functions if they are right; otherwise ours, which is said."""
    return _or_ours(replica, answer, (replicated.push, replicated.keep), "replica")


def _change(row: np.ndarray, gradient: np.ndarray) -> None:
    row -= 0.1 * gradient


class _Watched(replicated.Server):
    """Server 1, with `workers` workers and nobody to talk to: `log` is what it was told to do."""

    def __init__(self, workers: int) -> None:
        communicator: Any = SimpleNamespace(rank=1, size=_RANGES + workers)
        super().__init__(communicator, np.zeros((_RANGES, _VALUES)), _change)
        self.log: list[str] = []

    def update(self, r: int) -> None:
        self.log.append(f"update({r})")
        lacking = [worker for worker in self.workers if worker not in self.pushed[r]]
        refuse(lacking, f"it updates range {r} before worker {listed(lacking[:1])} has pushed; wait for all.")
        super().update(r)

    def copy(self, r: int) -> None:
        self.log.append(f"copy({r})")

    def answer(self, worker: int, r: int) -> None:
        self.log.append(f"answer({worker}, {r})")

    def hear(self, push: Push, worker: int, r: int, version: int) -> list[str]:
        """What the server does at a push of ones."""
        self.log = []
        push(self, worker, r, version, np.ones(_VALUES))
        return self.log


def _judge_updates(push: Push, workers: int) -> None:
    """Raise Wrong unless, in five updates of a range, all push, it is updated and copied, and all get answers."""
    server, r = _Watched(workers), 1
    for version in range(5):
        first, *rest = order = np.roll(server.workers, version).tolist()
        log = server.hear(push, first, r, version)
        if not (log or server.pushed[r] or version):
            raise NotYet("your first function does nothing with a gradient: write it, then run this again.")
        where = f"with {number_of(workers, 'worker')}, at version {version}"
        for worker in rest:
            early = f"the first push already leads to `server.{log[0] if log else ''}`; wait until all have pushed"
            refuse(log, f"{where}, {early}.")
            log = server.hear(push, worker, r, version)
        _judge_order(where, log, order, r)
        wrong = server.versions[r] != version + 1 or not np.allclose(server.ranges[r], -0.1 * (version + 1))
        refuse(wrong, f"{where}, the range is not what one `server.update(r)` makes of it.")


def _judge_order(where: str, log: Sequence[str], workers: Sequence[int], r: int) -> None:
    """Raise Wrong unless `log` is an update of range `r`, then its copy, then an answer to each worker."""
    update, copied, answers = (
        f"update({r})",
        f"copy({r})",
        [each for each in log if each.startswith("answer")],
    )
    last = len(log)
    place = {each: log.index(each) for each in dict.fromkeys(log)}
    first_answer = min((place[each] for each in answers), default=last)
    slips: dict[str, object] = {
        "all have pushed, and it does not update.": update not in log,
        f"it updates {log.count(update)} times; once is enough.": log.count(update) > 1,
        "it does not copy the range: when it dies, this update dies with it.": copied not in log,
        f"it copies {log.count(copied)} times; one copy of the updated range is enough.": log.count(copied)
        > 1,
        "it copies before it updates, so the next server lacks the update that the workers are about to get.": (
            place.get(copied, last) < place.get(update, last)
        ),
        "it answers before it has updated.": first_answer < place.get(update, last),
        "it answers before it has copied: if it dies in between, a worker has an update that no server has.": (
            first_answer < place.get(copied, last)
        ),
        f"it gives {number_of(len(answers), 'answer')}; each worker waits for one, of this range.": (
            sorted(answers) != sorted(f"answer({worker}, {r})" for worker in workers)
        ),
    }
    refuse_any(f"{where}, ", slips)


def _judge_takeover(push: Push, keep: Keep, workers: int) -> None:
    """Raise Wrong unless a server that has a copy takes over the range, whatever had been answered."""
    server = _Watched(workers)
    for version in (6, 7):
        values = np.arange(_VALUES) + float(version)
        keep(server, 0, version, values)
        if not (server.log or server.ranges.any() or any(server.versions)):
            raise NotYet("your second function does nothing with a copy: write it, then run this again.")
        slips: dict[str, object] = {
            f"it notes version {server.versions[0]}; only the copy's own tells which pushes it contains.": (
                server.versions[0] != version
            ),
            "it keeps other values than those of the copy.": not np.array_equal(server.ranges[0], values),
            "it changes other ranges.": bool(server.ranges[1:].any() or any(server.versions[1:])),
            "it does more than keep the copy.": bool(server.log),
        }
        refuse_any(f"when a copy of version {version} arrives, ", slips)
    for again in server.workers:
        log = server.hear(push, again, 0, 6)
        others = [each for each in log if each.startswith("answer") and each != f"answer({again}, 0)"]
        slips = {
            "it counts twice.": f"update({0})" in log or bool(server.pushed[0]),
            "that worker waits for ever; answer it.": log.count(f"answer({again}, 0)") != 1,
            "others get an answer, too, which may have had theirs.": bool(others),
        }
        refuse_any("when a worker pushes again what the copy contains, ", slips)
    late, first = _Watched(workers), server.workers[0]
    keep(late, 0, 6, values - 1)
    if workers > 1 and not late.hear(push, first, 0, 6):
        keep(late, 0, 7, values)
        slips = {
            "its gradient counts again in the next update.": bool(late.pushed[0]),
            "that worker waits for ever; answer it.": late.log != [f"answer({first}, 0)"],
        }
        refuse_any(
            "when a worker has pushed to the successor, and the copy that contains it comes late, ", slips
        )
    for worker in server.workers:
        log = server.hear(push, worker, 0, 7)
    _judge_order("after it has taken over a range with its copy", log, server.workers, 0)
    right = server.versions[0] == 8 and np.allclose(server.ranges[0], values - 0.1)
    refuse(not right, "after it has taken over a range with its copy, the next update must change that copy.")
    made, waiting = server.versions[0], workers > 1 and not server.hear(push, first, 0, 8)
    keep(server, 0, 8, values + 1)
    too_late = server.versions[0] != made or (waiting and first not in server.pushed[0])
    when = "when a copy comes after the successor has made that update itself, it must change nothing"
    refuse(too_late, f"{when}: compare its version with `server.versions[r]`.")


class _Doomed(replicated.Server):
    """A server, but for the first, that is killed at one of five moments in an update of its own range.

    Server 1 before its update, 2 before its copy, 3 after it, 4 after its first answer, 5 after its second; each
    three updates after the last, and the first after the first.
    """

    moments = 0

    def _moment(self, r: int) -> None:
        rank = self.communicator.rank
        self.moments += r == rank
        if r == rank > 0 and self.moments == 5 * (3 * rank - 2) + rank:
            os.kill(os.getpid(), signal.SIGKILL)

    def update(self, r: int) -> None:
        self._moment(r)
        super().update(r)

    def copy(self, r: int) -> None:
        self._moment(r)
        super().copy(r)
        self._moment(r)

    def answer(self, worker: int, r: int) -> None:
        super().answer(worker, r)
        self._moment(r)


def _train_ranges(communicator: Communicator, push: Push, keep: Keep) -> np.ndarray:
    """The parameters that a worker has at the end of a training in which all servers die but the first."""
    parameters, rank = np.zeros((_RANGES, _VALUES)), communicator.rank
    if rank < _RANGES:
        replicated.serve(_Doomed(communicator, parameters, _change), push, keep)
    else:
        solved = _SOLVED[rank - _RANGES]
        replicated.work(communicator, parameters, lambda now: now**3 + now - solved, _STEPS)
    return parameters


def _undisturbed() -> np.ndarray:
    parameters = np.zeros((_RANGES, _VALUES))
    for _ in range(_STEPS):
        _change(parameters, np.mean([parameters**3 + parameters - solved for solved in _SOLVED], axis=0))
    return parameters
