"""Virtual time: that it computes what the transports compute, and takes as long as it should."""

import numpy as np
import pytest

from workshop_utils.comm.central import central_all_reduce
from workshop_utils.comm.communicator import Event, Mismatch
from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.comm.hierarchical import hierarchical_all_reduce
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.simulated import Deadlock, Link, Shape, Topology, simulate
from workshop_utils.comm.tree import tree_all_reduce

ALL_REDUCES = [
    ring_all_reduce,
    central_all_reduce,
    tree_all_reduce,
    halving_doubling_all_reduce,
    hierarchical_all_reduce,
]
LINK = Link(latency_seconds=1e-3, bandwidth_bytes_per_second=1e6)


# What it computes.


@pytest.mark.parametrize("all_reduce", ALL_REDUCES)
def test_a_shape_takes_the_same_time_and_bytes_as_an_array(all_reduce):
    def bytes_of(make):
        def program(communicator):
            all_reduce(communicator, make((2, 501), np.float32))
            return communicator.traffic.bytes_sent.tolist()

        return program

    with_shapes, with_arrays = (simulate(5, bytes_of(make), LINK) for make in (Shape, np.zeros))
    np.testing.assert_array_equal(with_shapes.finish_seconds, with_arrays.finish_seconds)
    assert with_shapes.results == with_arrays.results


def test_a_shape_has_no_contents_whatever_its_size():
    shape = Shape((1 << 20, 1 << 10), np.float64)
    assert (shape.nbytes, shape.reshape(-1).size, shape.dtype) == (1 << 33, 1 << 30, np.float64)
    part = shape.reshape(-1)[10:20]
    part[:] = 7
    part += 1
    assert isinstance(part * 2, Shape)
    assert isinstance(np.zeros_like(part), Shape)
    assert repr(part) == "Shape((10,), float64)"
    for needs_contents in (np.sum, np.sort):
        with pytest.raises(TypeError, match="needs contents"):
            needs_contents(part)


# How long it takes.


def send_one(communicator):
    if communicator.rank == 0:
        communicator.send(1, Shape(1000, np.uint8))
    elif communicator.rank == 1:
        communicator.recv(0, Shape(1000, np.uint8))


def test_ranks_of_one_machine_share_its_nic_and_reach_each_other_without_it():
    def program(communicator):
        peer = (communicator.rank + 2) % 4
        communicator.send_recv(peer, Shape(1000, np.uint8), peer, Shape(1000, np.uint8))

    machines = Topology(Link(0.5, 1000), ranks_per_machine=2)
    assert simulate(4, program, machines).seconds == 2.5
    assert simulate(4, send_one, machines).seconds == 0
    assert simulate(4, send_one, Topology(machines.link, 2, inside=Link(0.25, 2000))).seconds == 0.75


def test_a_trace_says_what_each_rank_did_when():
    def program(communicator):
        communicator.trace = []
        communicator.sleep(1.0)
        ring_all_reduce(communicator, Shape(2, np.uint8))
        return communicator.trace

    assert simulate(2, program, Link.of("8bit", "1s")).results[0][:4] == [
        Event("compute", None, 0, 0.0, 1.0, ""),
        Event("send", 1, 1, 1.0, 2.0, "ring_all_reduce"),
        Event("recv", 1, 1, 1.0, 3.0, "ring_all_reduce"),
        Event("combine", None, 1, 3.0, 3.0, "ring_all_reduce"),
    ]


# What goes wrong.


def test_a_deadlock_names_who_waits_for_whom():
    def program(communicator):
        if communicator.rank == 3:
            return
        communicator.recv((communicator.rank + 1) % 4, np.zeros(1))

    with pytest.raises(Deadlock) as raised:
        simulate(4, program)
    assert str(raised.value) == (
        "3 of 4 ranks wait for ever: rank 0 waits for rank 1, in recv; rank 1 waits for rank 2, in recv; "
        "rank 2 waits for rank 3, which has finished, in recv"
    )
    with pytest.raises(Deadlock, match=r"100 of 100 ranks wait .* rank 7 waits for rank 0, .*; and 92 more"):
        simulate(100, lambda communicator: communicator.recv((communicator.rank == 0) * 1, np.zeros(1)))
    with pytest.raises(Deadlock, match=r"rank 0 waits for any of the ranks \[1, 2\]"):
        simulate(3, lambda communicator: communicator.rank == 0 and communicator.recv([2, 1], np.zeros(1)))


@pytest.mark.parametrize(
    ("made", "said"),
    [
        ((np.zeros(3), np.zeros(4)), "rank 1 sent 4 × float64 where rank 0 expects 3 × float64, in tree"),
        ((Shape(3, np.int32), Shape(3, np.float32)), "sent 3 × float32 where rank 0 expects 3 × int32"),
        ((np.zeros(1), Shape(1, np.float64)), "sent a Shape, without contents"),
    ],
    ids=["sizes", "dtypes", "contents"],
)
def test_arrays_that_differ_are_named(made, said):
    with pytest.raises(Mismatch, match=said):
        simulate(2, lambda communicator: tree_all_reduce(communicator, made[communicator.rank]))


def test_collectives_that_differ_are_named():
    def program(communicator):
        (ring_all_reduce, tree_all_reduce)[communicator.rank](communicator, np.zeros(2))

    with pytest.raises(
        Mismatch, match=r"in (ring|tree)_all_reduce while rank . is in (ring|tree)_all_reduce"
    ):
        simulate(2, program)


def test_what_a_rank_raises_comes_out_with_its_number_and_the_others_are_let_go():
    let_go = []

    def program(communicator):
        try:
            ring_all_reduce(communicator, np.zeros(4))
            if communicator.rank == 2:
                raise RuntimeError("out of gradients")
            communicator.recv(2, np.zeros(1))
        finally:
            let_go.append(communicator.rank)

    with pytest.raises(RuntimeError, match="out of gradients") as raised:
        simulate(4, program)
    assert raised.value.__notes__ == ["raised on simulated rank 2 of 4"]
    assert sorted(let_go) == [0, 1, 2, 3]
