"""Checks of lesson 14, Spark; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import pickle
import random
import socket
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import reduce
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import Communicator, PeerSilent
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, expect, is_missing, refuse, result_of
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.training import spark

ROWS = ((7, 0, 4), (0, 0, 1, 30, 2), (5,), (3, 3, 0, 3, 3, 3, 3))  # examples in each partition
WEIGHTS = np.array([1.0, -2.0, 0.5])  # of the line
TREES = 7  # of each: one from left to right, the others drawn at random
PATIENCE_SECONDS = 5.0

step_ratio = question(__name__, "step_ratio")


@exercise
def gradient_in_a_tree(answer: tuple[Any, ...]) -> str:
    """`answer` is (weights, zero, seq_op, comb_op, finish): mean gradient and loss, from sums in any tree."""
    weights, zero, seq_op, comb_op, finish = answer
    if zero is ... or any(is_missing(part) for part in (weights, seq_op, comb_op, finish)):
        raise NotYet("write zero, seq_op, comb_op and finish, then run this again.")
    stay = f"`weights_of_line` must stay {WEIGHTS.tolist()}: the gradient depends on them."
    refuse(not np.array_equal(weights, WEIGHTS), stay)

    def total(count: int, seed: int = 0) -> Any:
        added = reduce(seq_op, _examples(count, seed), copy.deepcopy(zero))
        if count and is_missing(added):
            raise NotYet("`seq_op` gave nothing: write it, then run this again.")
        return added

    def grows(few: Any, many: Any) -> bool:
        return len(pickle.dumps(many)) > 2 * len(pickle.dumps(few))

    larger = "a total of 200 examples is larger than one of 20: so all data would reach the driver."
    refuse(grows(total(20), total(200)), larger)
    few, many = (_tree([total(5, seed) for seed in range(count)], comb_op) for count in (4, 40))
    larger = "a total of 40 partitions is larger than one of 4: so every total would reach the driver."
    refuse(grows(few, many), larger)
    for sizes in ROWS:
        sums = [total(size, seed) for seed, size in enumerate(sizes)]
        for seed in range(TREES):
            how = "added in another tree" if seed else "added from left to right"
            _compare_means(finish(_tree(sums, comb_op, seed)), sizes, how)
    uneven = (3, 0, 1, 8, 0, 0, 5, 2, 1)
    parts = [_examples(size, seed) for seed, size in enumerate(uneven)]
    rows = spark.session().sparkContext.parallelize(parts, len(parts)).flatMap(lambda part: part)
    _compare_means(finish(rows.treeAggregate(zero, seq_op, comb_op, depth=2)), uneven, "on Spark")
    return "sums and counts, or their equivalent, may be added in any tree, here and on Spark."


def _examples(count: int, seed: int) -> list[tuple[np.ndarray, float]]:
    generator = np.random.default_rng(seed)
    return [(generator.normal(size=len(WEIGHTS)), float(generator.normal())) for _ in range(count)]


def _tree(sums: Sequence[Any], add: Callable[[Any, Any], Any], seed: int = 0) -> Any:
    """All of `sums`, of each a copy as it travels, added in a tree drawn by `seed`; 0: from left to right."""
    left, generator = [copy.deepcopy(each) for each in sums], random.Random(seed)
    while len(left) > 1:
        if seed:
            generator.shuffle(left)
        total = add(left[0], left[1])
        if is_missing(total) and not (left[0] is None is left[1]):
            raise NotYet("`comb_op` gave nothing: write it, then run this again.")
        left[:2] = [total]
    return left[0]


def _compare_means(means: Any, sizes: Sequence[int], how: str) -> None:
    if is_missing(means):
        raise NotYet("`finish` gave nothing: write it, then run this again.")
    two = isinstance(means, tuple | list) and len(means) == 2
    refuse(not two, "`finish` must return two things: (mean gradient, mean loss).")
    parts = [[(x, WEIGHTS @ x - y) for x, y in _examples(size, seed)] for seed, size in enumerate(sizes)]
    every = [pair for part in parts for pair in part]
    where = f"with partitions of {tuple(sizes)} examples, {how}: the mean"
    of_parts = np.mean([np.mean([residual**2 / 2 for _, residual in part]) for part in parts if part])
    slips = {"a mean of the partitions' means counts a small partition as much as a large one": of_parts}
    expect(means[1], np.mean([residual**2 / 2 for _, residual in every]), f"{where} loss", slips=slips)
    expect(means[0], np.mean([residual * x for x, residual in every], axis=0), f"{where} gradient")


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
    context = spark.session().sparkContext
    for partitions, groups in ((8, 3), (10, 4)):
        _Sum.arrived.clear()
        total = result_of(answer, context.parallelize(range(partitions), partitions).map(_part), _add, groups)
        where, arrived = f"with {partitions} partitions and {groups} groups", list(_Sum.arrived)
        kind = f"{where} it gave {type(total).__name__}; return the sum itself, added by `add`."
        refuse(not isinstance(total, _Sum), kind)
        every = f"{where}, all {partitions} sums reached the driver: add within the groups before."
        refuse(len(arrived) == partitions, every)
        expect(total.value, (3**partitions - 1) // 2, f"{where} the sum")
        reached = f"{where}, {len(arrived)} sums reached the driver; it must be {groups}."
        refuse(len(arrived) != groups, reached)
        one = f"{where} there is one stage, of few tasks that compute several partitions each: shuffle."
        refuse(any(each.added and each.added[0] == each.made for each in arrived), one)
        least, *_, most = sorted(np.base_repr(each.value, 3).count("1") for each in arrived)
        uneven = f"{where} one group has {most} sums, another {least}: make them as equal as possible."
        refuse(most > least + 1, uneven)
        several = f"{where} one task added several groups: `reduceByKey(add, groups)` has one for each."
        refuse(len({each.added for each in arrived}) < groups, several)
        stage, _ = arrived[0].added or (0, 0)
        tasks = getattr(context.statusTracker().getStageInfo(stage), "numTasks", 0)
        idle = f"{where} the second stage has {tasks} tasks: `reduceByKey(add, groups)` starts one for each group."
        refuse(tasks != groups, idle)
    return "each group was added in a task of the second stage, and only its sum reached the driver."


@exercise
def ring_neighbour(answer: Callable[[Any, int], Any]) -> str:
    """`answer(context, port)` is host and port of the right neighbour; this task listens at `port`."""
    for count in (3, 1, 4):
        hosts = [f"10.0.{index}.{7 + index}" for index in range(count)]
        ports = [41000 + 7 * (5 * rank % count) for rank in range(count)]
        try:
            results = threads.run(count, _task_of(answer, hosts, ports), PATIENCE_SECONDS)
        except PeerSilent:
            raise Wrong("some tasks wait in a barrier that others never reach: all must call it.") from None
        for rank, result in enumerate(results):
            if is_missing(result):
                raise NotYet("your function gave nothing: write it, then run this again.")
            two = isinstance(result, tuple | list) and len(result) == 2
            refuse(not two, f"task {rank} got {result!r}; return two things: host and port.")
            (host, port), right = map(str, result), (rank + 1) % count
            where = f"task {rank} of {count} got {host}:{port}"
            own = "that is the executor's own port; the neighbour tells its port by allGather"
            refuse(port == "39999", f"{where}: {own}.")
            left = host == hosts[rank - 1] != hosts[right]
            refuse(left, f"{where}: that is its left neighbour.")
            due = f"its right neighbour, task {right}, listens at {hosts[right]}:{ports[right]}"
            refuse((host, port) != (hosts[right], str(ports[right])), f"{where}; {due}.")
    context = spark.session().sparkContext
    sums = context.parallelize(range(4), 4).barrier().mapPartitions(_ring_of(answer)).collect()
    around = f"on Spark the tasks passed 0, 1, 2 and 3 around, and got {sums}; it must be 6 everywhere"
    refuse(sums != [6] * 4, f"{around}.")
    return "on Spark, four tasks of a barrier stage met, and passed their numbers around the ring."


def _task_of(
    answer: Callable[[Any, int], Any], hosts: Sequence[str], ports: Sequence[int]
) -> Callable[[Communicator], Any]:
    """What a rank among threads does as a task of a barrier stage, on a host of its own."""
    messages = [""] * len(hosts)
    infos = [SimpleNamespace(address=f"{host}:39999") for host in hosts]  # the executor's own port

    def run(communicator: Communicator) -> Any:
        def all_gather(message: str = "") -> list[str]:
            if not isinstance(message, str):
                raise TypeError(f"allGather takes a string, and got {message!r}")
            messages[communicator.rank] = message
            communicator.barrier()
            gathered = list(messages)
            communicator.barrier()
            return gathered

        context = SimpleNamespace(
            partitionId=lambda: communicator.rank,
            getTaskInfos=lambda: infos,
            allGather=all_gather,
            barrier=communicator.barrier,
        )
        return answer(context, ports[communicator.rank])

    return run


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
