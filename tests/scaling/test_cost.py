"""Closed forms beside the algorithms' own text in virtual time, and beside each other."""

import numpy as np
import pytest

from workshop_utils.comm import hierarchical, ring
from workshop_utils.comm.cluster import Cluster, Link
from workshop_utils.comm.direct import direct_all_reduce
from workshop_utils.comm.parameter_server import Arrangement, train
from workshop_utils.comm.shape import Shape
from workshop_utils.comm.simulated import simulate
from workshop_utils.parallel.schedule import predict, schedule_of
from workshop_utils.scaling import cost
from workshop_utils.scaling.communication import ALL_REDUCES
from workshop_utils.scaling.cost import Hierarchy, Path

LINK = Link(1e-4, 1e8)
PATH = Path.of(LINK)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("algorithm", ["ring", "tree", "halving_doubling"])
def test_an_all_reduce_with_adding_costs_what_its_own_text_costs_in_virtual_time(algorithm, size):
    program = ALL_REDUCES[algorithm]
    seconds = simulate(
        size, lambda communicator: program(communicator, Shape(80_000)), LINK, combine_bytes_per_second=5e8
    ).seconds
    path = Path(LINK.latency_seconds, LINK.bandwidth_bytes_per_second, combine_bytes_per_second=5e8)
    assert cost.all_reduce_seconds(algorithm, size, 320_000, path) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("algorithm", list(cost.ALL_REDUCE_COSTS))
def test_arrays_give_what_their_numbers_give(algorithm):
    sizes, nbytes = np.array([[1], [2], [3], [8]]), np.array([4.0, 1e6, 1e9])
    path = Path(1e-5, 1e9, 1e10, congestion=2.0)
    table = cost.all_reduce_seconds(algorithm, sizes, nbytes, path)
    one_by_one = [[cost.all_reduce_seconds(algorithm, int(n), b, path) for b in nbytes] for n in sizes[:, 0]]
    assert table == pytest.approx(np.array(one_by_one))
    assert (table[0] == 0).all()  # one rank sends nothing


def test_a_direct_all_reduce_adds_what_all_others_send():
    seconds = simulate(4, lambda communicator: direct_all_reduce(communicator, Shape(1000)), LINK).seconds
    # Messages follow each other without waiting for the latency of each: the form is an upper bound.
    assert (
        seconds
        <= cost.all_reduce_seconds("direct", 4, 4000, PATH)
        <= seconds + 2 * LINK.latency_seconds + 1e-9
    )


def test_a_ring_s_two_halves_are_the_ring():
    path = Path(1e-5, 1e9, 4e9)
    halves = cost.reduce_scatter_seconds(8, 1e6, path) + cost.all_gather_seconds(8, 1e6, path)
    assert halves == pytest.approx(cost.all_reduce_seconds("ring", 8, 1e6, path))


def test_the_fastest_all_reduce_is_a_tree_s_for_few_bytes_and_a_ring_s_for_many():
    seconds, names = cost.best_all_reduce(8, np.array([4.0, 1e9]), PATH, ("tree", "ring"))
    assert list(names) == ["tree", "ring"]
    assert seconds[1] == cost.all_reduce_seconds("ring", 8, 1e9, PATH)
    assert cost.best_all_reduce(8, 4.0, PATH, ("ring", "tree"))[1] == "tree"


def test_congestion_is_less_bandwidth_and_no_more_latency():
    shared = Path(LINK.latency_seconds, LINK.bandwidth_bytes_per_second, congestion=4)
    assert shared.seconds(0) == PATH.seconds(0)
    assert shared.seconds(1e8) == pytest.approx(LINK.latency_seconds + 4.0)


def test_where_nothing_is_shared_a_hierarchy_is_comm_s_hierarchical_all_reduce():
    # There every rank has a link of its own to other groups; one rank a group, or no bytes, makes that no difference.
    for group, nbytes in ((1, 1_600_000), (4, 0)):
        machines = Hierarchy(Path(1e-6, 1e9), Path(1e-4, 1e8), ranks_per_machine=group)
        expected = hierarchical.hierarchical_seconds(16, nbytes, 1e-4, 1e8, group, 1e-6, 1e9)
        assert machines.all_reduce_seconds(16, nbytes) == pytest.approx(expected)


@pytest.mark.parametrize(("machines", "per_machine"), [(2, 2), (4, 4), (8, 2), (2, 8)])
def test_rings_over_machines_take_about_what_the_simulated_cluster_says(machines, per_machine):
    size, inside, nic = machines * per_machine, Link(1e-5, 1e9), Link(2e-4, 1e8)
    cluster = Cluster(nic, per_machine, inside)
    model = Hierarchy(Path.of(inside), Path.of(nic), per_machine)
    nbytes = 4 * 100 * size * 100

    def flat(communicator):
        ring.ring_all_reduce(communicator, Shape(nbytes // 4))

    def nested(communicator):
        hierarchical.hierarchical_all_reduce(communicator, Shape(nbytes // 4), group_size=per_machine)

    assert model.ring_seconds(size, nbytes) == pytest.approx(simulate(size, flat, cluster).seconds, rel=0.05)
    assert model.all_reduce_seconds(size, nbytes) == pytest.approx(
        simulate(size, nested, cluster).seconds, rel=0.05
    )


def test_one_machine_uses_no_nic():
    model = Hierarchy(Path(1e-6, 1e9), Path(1.0, 1.0), ranks_per_machine=8)
    alone = cost.all_reduce_seconds("ring", 8, 1e6, model.inside)
    assert model.ring_seconds(8, 1e6) == pytest.approx(alone)
    assert model.all_reduce_seconds(8, 1e6) == pytest.approx(alone)
    assert model.all_reduce_seconds(np.array([1, 4]), 1e6).shape == (2,)


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (1, 2), (1, 6), (2, 6), (3, 3)])
def test_a_synchronous_step_takes_what_the_servers_own_text_takes(servers, workers):
    arrangement = Arrangement(servers, workers, 1)
    together = 1.0  # when all workers push: after the initial parameters have come

    def program(communicator):
        def gradient_of(parameters, step):
            communicator.compute(together - communicator.now())
            return parameters

        train(communicator, arrangement, np.zeros(60_000, np.float32), gradient_of, lambda *_: None)

    step = simulate(arrangement.size, program, LINK).seconds - together
    # Parts follow each other, a message each, and the last one pays latency alone.
    parts = (servers - 1) * LINK.latency_seconds
    assert cost.synchronous_server_seconds(workers, 240_000, PATH, servers) == pytest.approx(
        step, rel=0.05, abs=2 * parts
    )


def test_a_server_on_every_machine_moves_a_ring_s_bytes():
    bytes_alone = Path(0.0, 1e9)
    for workers in (1, 2, 8):
        servers = cost.synchronous_server_seconds(workers, 1e6, bytes_alone, workers, co_located=True)
        assert servers == pytest.approx(cost.all_reduce_seconds("ring", workers, 1e6, bytes_alone))
    assert cost.synchronous_server_seconds(8, 1e6, bytes_alone, 1, co_located=True) == pytest.approx(2 * 7e-3)


@pytest.mark.parametrize("all_reduce", [0.001, 0.05, 0.4])
@pytest.mark.parametrize("buckets", [1, 4, 10])
def test_overlap_is_what_a_network_that_takes_bucket_after_bucket_gives(buckets, all_reduce):
    forward, backward, free = 0.1, 0.2, 0.0
    for bucket in range(1, buckets + 1):
        free = max(free, forward + bucket * backward / buckets) + all_reduce
    assert cost.data_parallel_step_seconds(forward, backward, all_reduce, buckets) == pytest.approx(free)


def test_tensor_parallelism_all_reduces_four_times_a_layer():
    once = cost.all_reduce_seconds("ring", 4, 1e6, PATH)
    assert cost.tensor_parallel_seconds(4, 24, 1e6, PATH) == pytest.approx(96 * once)
    assert cost.tensor_parallel_seconds(1, 24, 1e6, PATH) == 0


@pytest.mark.parametrize(("name", "chunks", "message"), [("gpipe", 1, 0.01), ("one_f_one_b", 1, 0.0)])
def test_a_pipeline_s_step_is_that_of_its_timetable(name, chunks, message):
    timeline = predict(schedule_of(name, 4, 8, chunks), 0.1, 0.2, message)
    expected = max(timed.end for timed in timeline)
    assert cost.pipeline_step_seconds(4, 8, 0.3, message, chunks) == pytest.approx(expected)


def test_a_hundred_thousand_layouts_are_one_call():
    ranks = np.full(100_000, 64)
    model = Hierarchy(Path(1e-6, 1e9), Path(1e-5, 1e8), ranks_per_machine=8)
    assert model.all_reduce_seconds(ranks, 1e9).shape == ranks.shape


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Path(-1.0), "latency_seconds is -1"),
        (lambda: Path(0.0, 0.0), "bandwidth_bytes_per_second is 0.0; it must be more than 0"),
        (lambda: Path(congestion=0.5), "congestion is 0.5; it must be at least 1"),
        (lambda: Path(float("nan")), "latency_seconds is nan"),
        (
            lambda: cost.all_reduce_seconds("rings", 2, 1, PATH),
            "algorithm is 'rings'; it must be one of ring, tree",
        ),
        (lambda: cost.all_reduce_seconds("ring", 0, 1, PATH), "size is 0; it must be at least 1"),
        (lambda: Hierarchy(PATH, PATH, 8).all_reduce_seconds(12, 1), "size is 12; it must be a multiple"),
        (lambda: cost.synchronous_server_seconds(2, 1, PATH, 3, co_located=True), "servers is 3; co-located"),
        (lambda: cost.synchronous_server_seconds(0, 1, PATH), "workers is 0"),
    ],
)
def test_numbers_that_cannot_be_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
