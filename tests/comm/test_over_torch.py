"""The Communicator over PyTorch's process group, on real processes, compared with the one on threads."""

import functools

import numpy as np
import pytest

from workshop_utils import on_ranks
from workshop_utils.comm import threads
from workshop_utils.comm.hierarchical import hierarchical_all_reduce
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.tree import tree_all_reduce
from workshop_utils.ranks import RanksFailed

pytestmark = pytest.mark.processes

# One of each pattern of messages; the guards count what every collective sends.
COLLECTIVES = (
    ring_all_reduce,
    tree_all_reduce,
    functools.partial(hierarchical_all_reduce, group_size=2),
)
CASES = [(0, np.float64, "sum"), (1, np.float16, "max"), (7, np.float32, "mean"), (7, np.bool_, "max"),
         (10_001, np.complex64, "sum")]  # fmt: skip


def work(communicator):
    """Every collective on every case: results as bytes, messages and bytes sent."""
    outcomes = {}
    for number, collective in enumerate(COLLECTIVES):
        for size, dtype, operation in CASES:
            array = np.random.default_rng(communicator.rank).integers(0, 2, size).astype(dtype)
            communicator.traffic.reset()
            collective(communicator, array, operation)
            sent = communicator.traffic.messages_sent.tolist(), communicator.traffic.bytes_sent.tolist()
            outcomes[number, size, str(dtype)] = (array.tobytes(), *sent)
    communicator.barrier()
    return outcomes


def over_torch(dist, program, *options):
    from workshop_utils.comm.over_torch import TorchCommunicator

    with TorchCommunicator(*options) as communicator:
        return program(communicator)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_every_collective_gives_what_it_gives_on_threads(size):
    results = on_ranks(size, over_torch, {"program": work}, framework="torch")
    assert results.values == threads.run(size, work)
    assert not any(each.lines for each in results)  # such as PyTorch's warnings


def failing(dist, case):
    def program(communicator):
        if communicator.rank == 1:
            if case == "dead":
                raise SystemExit(3)
            if case == "silent":
                time.sleep(60)
            elif case == "dtype":
                communicator.send(0, np.zeros(2, np.int64))
            elif case == "long":
                communicator.send(0, np.zeros(5))
                time.sleep(60)
        elif case == "any":
            communicator.recv([1, 2], np.zeros(2))
        elif case == "collective":
            ring_all_reduce(communicator, np.zeros(4), "sum")  # in messages of two
        else:
            communicator.recv(1, np.zeros(2))
        if case == "collective":
            tree_all_reduce(communicator, np.zeros(2), "sum")

    import time

    over_torch(dist, program, 2.0)


@pytest.mark.parametrize(
    ("case", "size", "message"),
    [
        ("dtype", 2, "rank 1 sent 2 × int64 where rank 0 expects 2 × float64, in send or recv"),
        ("collective", 2, r"rank \d is in \w+_all_reduce while rank \d is in \w+_all_reduce"),
        ("long", 2, "rank 0 of 2 was killed by SIGABRT"),
        ("silent", 2, "rank 0 cannot go on with rank 1: .*Timed out"),
        ("dead", 2, "rank 1 of 2 raised SystemExit: 3"),
        ("any", 3, r"gloo cannot wait for several ranks, \[1, 2\]"),
    ],
)
def test_ranks_that_disagree_or_fail_end_the_run_with_the_reason(case, size, message):
    with pytest.raises(RanksFailed, match=message):
        on_ranks(size, failing, {"case": case}, framework="torch", timeout="30s")
