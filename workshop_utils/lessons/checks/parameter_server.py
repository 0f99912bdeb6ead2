"""Checks of lesson 03, parameter servers; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.comm import parameter_server, threads
from workshop_utils.comm.communicator import CommunicationError, Communicator
from workshop_utils.comm.parameter_server import Mode, State, has_newer
from workshop_utils.comm.simulated import Link, simulate
from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    compare,
    exercise,
    explain,
    is_missing,
    mistakes,
    recognise,
)
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.lessons.checks.processes import refuse_callers
from workshop_utils.ranks import RanksFailed, on_ranks

Rule = Callable[..., bool]

largest_staleness = question(__name__, "largest_staleness")


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
    if rules(answer).state == "right":
        return answer
    print("Your two rules are not right yet, so ours are run.")
    return _may_go_on, _is_fresh


def _may_go_on(state: Any, worker: int, bound: int) -> bool:
    return bool(state.pushes[worker] - min(state.pushes[each] for each in state.active) <= bound)


def _is_fresh(state: Any, worker: int) -> bool:
    return bool(state.has[worker] == state.version)


def _state(version: int, has: tuple[int, ...], pushes: tuple[int, ...], active: tuple[int, ...]) -> Any:
    state: Any = State(range(1, len(has) + 1))
    state.version, state.active = version, set(active)
    state.has, state.pushes = dict(enumerate(has, 1)), dict(enumerate(pushes, 1))
    # The lesson's state has a log, in which a rule may count.
    state.log = [
        push for worker, count in state.pushes.items() for push in [(0.01, worker, 0, False)] * count
    ]
    return state


def _has(made: tuple[int, ...]) -> tuple[int, ...]:
    """Versions that workers may have: none before the first push; then an older one than the pushes have made."""
    return tuple(max(0, sum(made) - 1 - 3 * worker % 5) if count else -1 for worker, count in enumerate(made))


def _held_cases() -> list[tuple[Any, ...]]:
    pushes = (
        (0, 0, 0),
        (1, 1, 1),
        (2, 1, 1),
        (4, 1, 3),
        (5, 1, 4),
        (9, 7, 9),
        (1, 0, 0),
        (3, 5, 6),
        (9, 3, 3),
    )
    few = [
        (_state(sum(made), _has(made), made, active), worker, bound)
        for made, active, bound in itertools.product(pushes, ((1, 2, 3), (1, 3), (2,)), range(7))
        for worker in active
    ]
    many = (
        (0,) * 4,
        (5, 1, 4, 2),
        (12, 30, 2, 21),
        (60, 41, 70, 40, 52),
        (3, 997, 500, 4, 1004, 7, 250, 8, 666),
    )
    far = []  # more workers and larger leads: a rule for few of them would do above
    for made in many:
        workers = range(1, len(made) + 1)
        for active in (tuple(workers), tuple(workers[1:])):
            slowest = min(made[each - 1] for each in active)
            leads = sorted({made[each - 1] - slowest for each in active})
            far += [
                (_state(sum(made), _has(made), made, active), worker, bound)
                for bound in {max(0, lead + more) for lead in leads for more in (-1, 0, 1)}
                for worker in active
            ]
    return few + far


def _fresh_cases() -> list[tuple[Any, ...]]:
    versions = ((0, (0, 0)), (3, (3, 2)), (7, (1, 7)), (2, (2, 2)), (5, (4, 3)), (90, (90, 89)))
    few = [
        (_state(version, has, pushes, (1, 2)), worker)
        for (version, has), pushes in itertools.product(versions, ((4, 3), (3, 8), (7, 7), (0, 0), (0, 1)))
        for worker in (1, 2)
    ]
    many = []  # more workers, any age, first gradients, too
    for age, worker in itertools.product(range(120), range(1, 6)):
        has = tuple(120 - age if each <= worker else 120 for each in range(1, 6))
        many.append((_state(120, has, (0, 7, 0, age, 120), (1, 2, 3, 4, 5)), worker))
    return few + many


def _judge(name: str, answer: Rule, cases: list[tuple[Any, ...]], right: Rule) -> None:
    """Raise Wrong unless the rule `answer` says what `right` says in all cases."""
    given = []
    for state, *rest in cases:
        # In its fields nothing else can be changed, so no deep copy is needed, which takes 50 times as long.
        own = copy.copy(state)
        vars(own).update((field, copy.copy(value)) for field, value in vars(state).items())
        given.append(answer(own, *rest))
        if vars(own) != vars(state):
            raise Wrong(f"`{name}` changes the state; a rule only reads it.")
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
            explain(
                [bool(one) for one in given],
                {f"{text}: {why}": [bool(rule(*one)) for one in cases] for why, rule in others},
            )
            raise Wrong(f"{text}.")


@exercise
def workers_for_a_full_link(answer: Callable[[float, float, float], float]) -> str:
    """`answer(compute_seconds, nbytes, bandwidth)` is (c + 2s) / s with s = K / B."""

    def right(seconds: float, nbytes: float, bandwidth: float) -> float:
        return (seconds + 2 * nbytes / bandwidth) / (nbytes / bandwidth)

    cases = [(0.1, 1e6, 1e7), (2.5, 4e8, 1.25e9), (0.0, 1e6, 1e7), (0.037, 1e6, 1e8)]
    recognise(answer, cases, mistakes(__name__, "workers_for_a_full_link"))
    what = "with {0} s of computing, {1:g} bytes and {2:g} bytes/s"
    compare(
        answer,
        right,
        [(what, "compare one worker's round with the link's work in it", *case) for case in cases],
    )
    return "W* = (c + 2s) / s: the round of one worker, divided by the link's time for one push."


class _Trial(NamedTuple):
    """What a server did: its parameters, its version, of each push worker, staleness and whether it was dropped, and
    when it came; then, of each worker, the versions and the last parameters that it was sent."""

    parameters: np.ndarray
    version: int
    pushes: list[tuple[int, int, bool]]
    seconds: list[float]
    answers: list[tuple[list[int], np.ndarray]]


_TARGETS = {  # by mode: what the parameters are drawn to; a server must take any length and type
    "synchronous": np.array([1.0, -2.0, 3.0, 0.5]),
    "1 backup worker": np.array([1.0, -2.0]),
    "stale synchronous": np.array([0.25, 1.0, -2.0, 3.0, 0.5, -1.0, 4.0]),
    "asynchronous": np.array([0.25, 1.0, -2.0, 3.0, 0.5], np.float32),
    "a mode of our own": np.array([1.0, -2.0, 3.0, 0.5]),
}
_UPDATES = 12
_MOST_MESSAGES = 5_000  # of a server; a loop that never ends sends more


def _modes(workers: int) -> dict[str, Mode]:
    modes = (
        Mode(has_newer, workers, _is_fresh),
        Mode(has_newer, max(1, workers - 1), _is_fresh),
        Mode(lambda state, worker: _may_go_on(state, worker, 1)),
        Mode(lambda *_: True),
        Mode(
            lambda state, worker: worker == 1 or state.version > 0,
            2,
            lambda state, worker: (state.pushes[worker] + worker) % 3 != 0,
        ),
    )
    return dict(zip(_TARGETS, modes, strict=True))


def _momentum(parameters: np.ndarray) -> Callable[[np.ndarray, np.ndarray], None]:
    """An `update` that remembers: it must be called once for each step, with the mean, and nothing else will do."""
    velocity = np.zeros_like(parameters)

    def update(parameters: np.ndarray, gradient: np.ndarray) -> None:
        velocity[:] = 0.5 * velocity + gradient
        parameters -= 0.1 * velocity

    return update


def _train(communicator: Communicator, server: Any, name: str, delay: float) -> Any:
    """A server in the mode `name`, or one of workers that take differently long.

    Returns its `_Trial`, or the versions and parameters that a worker got.
    """
    parameters, rank = np.zeros_like(_TARGETS[name]), communicator.rank
    if rank == 0:
        mode = _modes(communicator.size - 1)[name]

        def done(state: Any) -> bool:
            if name == "asynchronous":  # then an update is a push
                return bool(sum(state.pushes.values()) >= 2 * _UPDATES)
            return bool(state.version >= _UPDATES)

        sent = itertools.count()

        def watch(*_: Any) -> None:
            if server is not _reference:
                refuse_callers({parameter_server.serve.__code__}, "write the loop yourself")
            if next(sent) > _MOST_MESSAGES:
                raise Wrong("the server goes on for ever: tell a worker to stop where `done(state)`.")

        communicator.watch = watch
        communicator.sleep(20 * delay)  # so that the clock does not begin with the server
        state = server(communicator, parameters, _momentum(parameters), mode, done)
        if not hasattr(state, "version") or not hasattr(state, "log"):
            raise Wrong("the server returned no state: end with `return state`.")
        pushes = [(each[1], each[2], bool(each[3])) for each in state.log]
        return _Trial(parameters, state.version, pushes, [float(each[0]) for each in state.log], [])
    steps = np.random.default_rng(rank)

    version, versions = np.zeros(1, np.int64), []
    while True:
        communicator.recv(0, version)
        communicator.recv(0, parameters)
        versions.append(int(version[0]))
        if version[0] < 0:
            return versions, parameters
        communicator.sleep(delay * rank * steps.choice([1, 1, 1, 6]))
        communicator.send(0, parameters - rank * _TARGETS[name])


def _reference(communicator: Communicator, parameters: Any, update: Any, mode: Mode, done: Any) -> Any:
    """The workshop's own server, as the lesson calls its own."""
    workers, start = range(1, communicator.size), communicator.now()
    log = parameter_server.serve(
        communicator, workers, parameters, update, mode, lambda state, _: done(state)
    )
    seconds = [when - start for when in log.seconds]
    pushes = zip(seconds, log.worker, log.staleness, log.dropped, strict=True)
    return SimpleNamespace(version=log.version, log=list(pushes))


@exercise
def server(answer: Callable[..., Any]) -> str:
    """`answer(communicator, parameters, update, mode, done)` serves as the lesson's `serve`, and returns its state."""

    def on_processes(communicator: Communicator) -> list[_Trial | None]:
        trials = []
        for name in _TARGETS:
            trials.append(_train(communicator, answer, name, 0.0005))
            communicator.watch = None
            communicator.barrier()
        return trials

    real, failure = [], None
    try:
        real = on_ranks(4, on_processes, timeout="8s").values[0]
    except RanksFailed as error:
        failure = error
        if "NotImplementedError" in str(error):
            raise NotImplementedError from None
        if "did not end" in str(error):
            raise Wrong(
                "on real processes your server does not end. Receive only from workers that are active and do not "
                "wait, ask again for each that waits after each push, and send `version` before `parameters`."
            ) from None
    for workers in (1, 2, 3, 4):
        for name in _TARGETS:
            case = f"{name}, {workers} worker{'s' * (workers > 1)}"
            mine = _simulated(answer, name, workers, case)
            _compare(case, mine, _simulated(_reference, name, workers, case))
    if "in barrier" in str(failure):  # where the workers are that have finished
        raise Wrong(
            "in simulated time your server is right; on real processes it waits for workers that have finished: "
            "receive only from those that are active."
        )
    if failure is not None:
        raise Wrong(f"in simulated time your server is right; on real processes {failure}")
    for name, trial in zip(_TARGETS, real, strict=True):
        _plausible(f"{name}, 3 real processes", trial)
    for name in _TARGETS:
        run = functools.partial(_train, server=answer, name=name, delay=0.0)
        _plausible(f"{name}, 3 threads", threads.run(4, run, 5.0, is_buffered=False)[0])
    return (
        "in all four modes, and in one of our own, with 1 to 4 workers, parameters, versions and log are those of "
        "the lesson's server; and on threads and on real processes it ends, whoever comes first."
    )


def _simulated(server: Any, name: str, workers: int, case: str) -> _Trial:
    try:
        program = functools.partial(_train, server=server, name=name, delay=0.01)
        trial, *answers = simulate(1 + workers, program, Link(1e-4)).results
    except CommunicationError as error:
        raise Wrong(f"{case}: {error}. Who may be answered, and who is still to push?") from None
    return trial._replace(answers=answers)


def _compare(case: str, mine: _Trial, right: _Trial) -> None:
    for number, (got, expected) in enumerate(zip(mine.pushes, right.pushes, strict=False), 1):
        if got == expected:
            continue
        if got[0] != expected[0]:
            raise Wrong(
                f"{case}: push {number} comes from worker {got[0]}; it must come from {expected[0]}. Somebody was "
                "answered too early or too late."
            )
        if got[1] != expected[1]:
            raise Wrong(
                f"{case}: push {number} has staleness {got[1]}; it must be {expected[1]}, the updates since the worker "
                "was answered."
            )
        verb = "counts" if expected[2] else "is dropped"
        raise Wrong(f"{case}: push {number} {verb}; ask `mode.counts` before anything else changes.")
    if len(mine.pushes) != len(right.pushes) or mine.version != right.version:
        numbers = f"{len(mine.pushes)} pushes and {mine.version} updates"
        raise Wrong(f"{case}: {numbers}; it must be {len(right.pushes)} and {right.version}.")
    tolerance = 1e-9 if right.parameters.dtype == np.float64 else 1e-5
    if not np.allclose(mine.parameters, right.parameters, rtol=tolerance):
        raise Wrong(
            f"{case}: the parameters end at {np.round(mine.parameters, 4)}; it must be "
            f"{np.round(right.parameters, 4)} (off by up to {np.abs(mine.parameters - right.parameters).max():.1g}). "
            "Call `update` once for each step, with the mean of the gradients that count since the last one."
        )
    if not np.allclose(mine.seconds, right.seconds, atol=0.004):
        raise Wrong(f"{case}: `state.log` must hold the seconds from `start` to each push.")
    for worker, (sent, right_sent) in enumerate(zip(mine.answers, right.answers, strict=True), 1):
        if sent[0] != right_sent[0]:
            raise Wrong(
                f"{case}: worker {worker} is sent the versions {sent[0]}; it must be {right_sent[0]}."
            )
        if not np.allclose(sent[1], right_sent[1], rtol=tolerance):
            raise Wrong(
                f"{case}: worker {worker} is told to stop too early or too late: that, too, is an answer, so ask "
                "`mode.may_answer` first."
            )


def _plausible(case: str, trial: _Trial | None) -> None:
    assert trial is not None
    counted = sum(not dropped for *_, dropped in trial.pushes)
    needed = {"synchronous": 3, "1 backup worker": 2, "a mode of our own": 2}.get(case.partition(",")[0], 1)
    if trial.version < _UPDATES or counted // needed != trial.version:
        raise Wrong(f"{case}: {counted} gradients count, and there are {trial.version} updates.")
    if trial.seconds != sorted(trial.seconds) or trial.seconds[0] < 0 or trial.seconds[-1] == 0:
        raise Wrong(
            f"{case}: the log's times are not when gradients came; they begin with {trial.seconds[:3]}."
        )
    if any(staleness < 0 for _, staleness, _ in trial.pushes):
        raise Wrong(f"{case}: a staleness is negative; count the updates since the worker was answered.")
    if case.startswith("synchronous"):  # where it does not matter who comes first
        right = np.zeros_like(_TARGETS["synchronous"])
        update = _momentum(right)
        for _ in range(_UPDATES):
            update(right, right - 2 * _TARGETS["synchronous"])  # the mean of 1, 2 and 3 times the target
        if not np.allclose(trial.parameters, right, rtol=1e-9):
            raise Wrong(f"{case}: the parameters end at {trial.parameters}, not at {right}.")
