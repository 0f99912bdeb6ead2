"""Checks of lesson 14, Spark; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import pickle
import random
import socket
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from workshop_utils.launchers.spark import local_session
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, expect, is_missing, result_of
from workshop_utils.lessons.checks.open_question import OpenQuestion

ROWS = ((7, 0, 4), (0, 0, 1, 30, 2), (5,), (3, 3, 0, 3, 3, 3, 3))  # examples in each partition
WEIGHTS = np.array([1.0, -2.0, 0.5])  # of the line
TREES = 6  # of each, drawn at random
PATIENCE_SECONDS = 5.0

step_ratio = OpenQuestion(
    "times",
    (3, 1e3),
    "the gradient costs the same in both; the rest is what surrounds it. In every step the driver plans a job, pickles "
    "its functions, sends tasks out and reads results, and Python's workers prepare themselves and read their cached "
    "partitions again, while the ring's processes keep links and data and send 5 kB. That price depends on the data "
    "held and not on the batch, so it is nearly all of a step of milliseconds, and is lost in one of minutes. "
    "The ratio itself is rough: a busy machine changes it several times over.",
    predictable=(0.1, 1e6),
)


@exercise
def gradient_in_a_tree(answer: tuple[Any, ...]) -> str:
    """`answer` is (weights, zero, seq_op, comb_op, finish): mean gradient and loss, from sums in any tree."""
    weights, zero, seq_op, comb_op, finish = answer
    if zero is ... or any(is_missing(part) for part in (weights, seq_op, comb_op, finish)):
        raise NotYet("write zero, seq_op, comb_op and finish, then run this again.")
    if not np.array_equal(weights, WEIGHTS):
        raise Wrong(f"`weights_of_line` must stay {WEIGHTS.tolist()}: the gradient depends on them.")
    weights = WEIGHTS
    few, many = (reduce(seq_op, _examples(size, len(weights), 0), copy.deepcopy(zero)) for size in (20, 200))
    if is_missing(many):
        raise NotYet("`seq_op` gave nothing: write it, then run this again.")
    if len(pickle.dumps(many)) > 2 * len(pickle.dumps(few)):
        raise Wrong("a total of 200 examples is larger than one of 20: so all data would reach the driver.")
    totals = [reduce(seq_op, _examples(5, len(weights), seed), copy.deepcopy(zero)) for seed in range(40)]
    few, many = (_tree(totals[:count], comb_op, None) for count in (4, 40))
    if len(pickle.dumps(many)) > 2 * len(pickle.dumps(few)):
        raise Wrong(
            "a total of 40 partitions is larger than one of 4: so every total would reach the driver."
        )
    for sizes in ROWS:
        parts = [_examples(size, len(weights), seed) for seed, size in enumerate(sizes)]
        sums = [reduce(seq_op, part, copy.deepcopy(zero)) for part in parts]
        _compare_means(finish(_tree(sums, comb_op, None)), weights, parts, sizes, "added from left to right")
        for seed in range(TREES):
            means = finish(_tree(sums, comb_op, random.Random(seed)))
            _compare_means(means, weights, parts, sizes, "added in another tree")
    parts = [_examples(size, len(weights), seed) for seed, size in enumerate((3, 0, 1, 8, 0, 0, 5, 2, 1))]
    context = local_session().sparkContext
    rows = context.parallelize(parts, len(parts)).flatMap(lambda part: part)
    means = finish(rows.treeAggregate(zero, seq_op, comb_op, depth=2))
    _compare_means(means, weights, parts, tuple(map(len, parts)), "on Spark")
    return "sums and counts may be added in any tree, here and on Spark; only at the end is there a division."


def _examples(count: int, width: int, seed: int) -> list[tuple[np.ndarray, float]]:
    generator = np.random.default_rng(seed)
    return [(generator.normal(size=width), float(generator.normal())) for _ in range(count)]


def _tree(sums: Sequence[Any], add: Callable[[Any, Any], Any], generator: random.Random | None) -> Any:
    """All of `sums`, of each a copy as it travels, added from left to right, or in a tree drawn by `generator`."""
    left = [copy.deepcopy(each) for each in sums]
    while len(left) > 1:
        first, second = (0, 1) if generator is None else generator.sample(range(len(left)), 2)
        total = add(left[first], left[second])
        if is_missing(total) and not (left[first] is None is left[second]):
            raise NotYet("`comb_op` gave nothing: write it, then run this again.")
        rest = [each for index, each in enumerate(left) if index not in (first, second)]
        left = [total, *rest]
    return left[0]


def _compare_means(
    means: Any, weights: np.ndarray, parts: Sequence[list[Any]], sizes: Sequence[int], how: str
) -> None:
    if is_missing(means):
        raise NotYet("`finish` gave nothing: write it, then run this again.")
    if not isinstance(means, tuple | list) or len(means) != 2:
        raise Wrong("`finish` must return two things: (mean gradient, mean loss).")
    each = [[((weights @ x - y) * x, (weights @ x - y) ** 2 / 2) for x, y in part] for part in parts]
    every = [pair for part in each for pair in part]
    where = f"with partitions of {tuple(sizes)} examples, {how}: "
    of_parts = [np.mean([loss for _, loss in part]) for part in each if part]
    loss, right = means[1], np.mean([loss for _, loss in every])
    if (
        np.size(loss) == 1
        and np.isclose(float(loss), np.mean(of_parts))
        and not np.isclose(float(loss), right)
    ):
        raise Wrong(
            f"{where}a mean of the partitions' means counts a small partition as much as a large one."
        )
    expect(loss, right, f"{where}the mean loss")
    expect(means[0], np.mean([gradient for gradient, _ in every], axis=0), f"{where}the mean gradient")


class _Sum:
    """A partial sum: the stage that made its first part, and the stage and task that added to it last.

    `arrived` are those that this process has received from another.
    """

    arrived: ClassVar[list[_Sum]] = []

    def __init__(self, value: int, made: int, added: tuple[int, int] | None = None) -> None:
        self.value, self.made, self.added = value, made, added

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (self.value, self.made, self.added)


def _arrive(*state: Any) -> _Sum:
    _Sum.arrived.append(_Sum(*state))
    return _Sum.arrived[-1]


def _task() -> tuple[int, int] | None:
    """Stage and task in which this runs, or None in the driver."""
    from pyspark import TaskContext

    context = TaskContext.get()
    return (context.stageId(), context.partitionId()) if context else None


def _part(index: int) -> _Sum:
    return _Sum(3**index, (_task() or (0,))[0])


def _add(left: _Sum, right: _Sum) -> _Sum:
    if not isinstance(left, _Sum) or not isinstance(right, _Sum):
        raise TypeError("`add` takes two sums of the RDD")
    return _Sum(left.value + right.value, left.made, _task())


@exercise
def tree_sum(answer: Callable[[Any, Callable[[Any, Any], Any], int], Any]) -> str:
    """`answer(sums, add, groups)` adds an RDD with one sum in each partition, `groups` of which reach the driver."""
    context = local_session().sparkContext
    for partitions, groups in ((8, 3), (10, 4)):
        _Sum.arrived.clear()
        total = result_of(answer, context.parallelize(range(partitions), partitions).map(_part), _add, groups)
        where, arrived = f"with {partitions} partitions and {groups} groups", list(_Sum.arrived)
        if not isinstance(total, _Sum):
            raise Wrong(f"{where} it gave {type(total).__name__}; return the sum itself, added by `add`.")
        if len(arrived) == partitions:
            raise Wrong(f"{where}, all {partitions} sums reached the driver: add within the groups before.")
        expect(total.value, (3**partitions - 1) // 2, f"{where} the sum")
        if len(arrived) != groups:
            raise Wrong(f"{where}, {len(arrived)} sums reached the driver; it must be {groups}.")
        if any(each.added and each.added[0] == each.made for each in arrived):
            raise Wrong(
                f"{where} there is one stage, of few tasks that compute several partitions each: shuffle."
            )
        least, *_, most = sorted(np.base_repr(each.value, 3).count("1") for each in arrived)
        if most > least + 1:
            raise Wrong(
                f"{where} one group has {most} sums, another {least}: make them as equal as possible."
            )
        if len({each.added for each in arrived}) < groups:
            raise Wrong(
                f"{where} one task added several groups: `reduceByKey(add, groups)` has one for each."
            )
    return "each group was added in a task of the second stage, and only its sum reached the driver."


class _Tasks:
    """The tasks of a barrier stage as threads, each on a host of its own."""

    def __init__(self, count: int) -> None:
        self._together = threading.Barrier(count)
        self._messages = [""] * count
        self.hosts = [f"10.0.{index}.{7 + index}" for index in range(count)]

    def context(self, rank: int) -> Any:
        def wait() -> None:
            try:
                self._together.wait(PATIENCE_SECONDS)
            except threading.BrokenBarrierError:
                raise Wrong(
                    "some tasks wait in a barrier that others never reach: all must call it."
                ) from None

        def all_gather(message: str = "") -> list[str]:
            if not isinstance(message, str):
                raise TypeError(f"allGather takes a string, and got {message!r}")
            self._messages[rank] = message
            wait()
            messages = list(self._messages)
            wait()
            return messages

        infos = [SimpleNamespace(address=f"{host}:39999") for host in self.hosts]  # the executor's own port
        return SimpleNamespace(
            partitionId=lambda: rank, getTaskInfos=lambda: infos, allGather=all_gather, barrier=wait
        )


@exercise
def ring_neighbour(answer: Callable[[Any, int], Any]) -> str:
    """`answer(context, port)` is host and port of the right neighbour; this task listens at `port`."""
    for count in (3, 1, 4):
        tasks, results = _Tasks(count), [None] * count
        ports = [41000 + 7 * (5 * rank % count) for rank in range(count)]
        threads = [
            threading.Thread(target=_keep, args=(results, rank, answer, tasks.context(rank), ports[rank]))
            for rank in range(count)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for result in sorted(results, key=lambda each: isinstance(each, Wrong)):
            if isinstance(result, Exception):
                raise result
        for rank, result in enumerate(results):
            _compare_neighbour(result, rank, tasks.hosts, ports)
    context = local_session().sparkContext
    sums = context.parallelize(range(4), 4).barrier().mapPartitions(_ring_of(answer)).collect()
    if sums != [6] * 4:
        raise Wrong(
            f"on Spark the tasks passed 0, 1, 2 and 3 around, and got {sums}; it must be 6 everywhere."
        )
    return "on Spark, four tasks of a barrier stage met, and passed their numbers around the ring."


def _keep(results: list[Any], rank: int, answer: Callable[..., Any], context: Any, port: int) -> None:
    try:
        results[rank] = answer(context, port)
    except BaseException as error:
        results[rank] = error if isinstance(error, Exception) else Wrong(f"task {rank} ended with {error!r}.")


def _compare_neighbour(result: Any, rank: int, hosts: Sequence[str], ports: Sequence[int]) -> None:
    count = len(hosts)
    if is_missing(result):
        raise NotYet("your function gave nothing: write it, then run this again.")
    if not isinstance(result, tuple | list) or len(result) != 2:
        raise Wrong(f"task {rank} got {result!r}; return two things: host and port.")
    host, port = result
    right, where = (rank + 1) % count, f"task {rank} of {count} got {host}:{port}"
    if str(port) == "39999":
        raise Wrong(f"{where}: that is the executor's own port; the neighbour tells its port by allGather.")
    if str(host) == hosts[rank - 1] and count > 2 and hosts[rank - 1] != hosts[right]:
        raise Wrong(f"{where}: that is its left neighbour.")
    if str(host) != hosts[right] or str(port) != str(ports[right]):
        raise Wrong(f"{where}; its right neighbour, task {right}, listens at {hosts[right]}:{ports[right]}.")


def _ring_of(answer: Callable[[Any, int], Any]) -> Callable[[Iterable[int]], Iterator[int]]:
    """What a task does: it meets its neighbours by `answer`, and adds what comes around."""

    def run(_: Iterable[int]) -> Iterator[int]:
        from pyspark import BarrierTaskContext

        context = BarrierTaskContext.get()
        rank, total = context.partitionId(), context.partitionId()
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(PATIENCE_SECONDS)
            host, port = answer(context, listener.getsockname()[1])
            with socket.create_connection((host, int(port)), PATIENCE_SECONDS) as right:
                left, _address = listener.accept()
                with left:
                    left.settimeout(PATIENCE_SECONDS)
                    passing = rank
                    for _step in range(len(context.getTaskInfos()) - 1):
                        right.sendall(bytes([passing]))
                        passing = left.recv(1)[0]
                        total += passing
        yield total

    return run
