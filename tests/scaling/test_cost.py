"""Closed forms beside the algorithms' own text in virtual time."""

import functools

import numpy as np
import pytest

from workshop_utils.comm.hierarchical import hierarchical_all_reduce
from workshop_utils.comm.parameter_server import Arrangement, train
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.shape import Shape
from workshop_utils.comm.simulated import simulate
from workshop_utils.comm.topology import Link, Topology
from workshop_utils.parallel.schedule import predict, schedule_of
from workshop_utils.scaling import catalogue, cost

LINK = Link(1e-4, 1e8)


@pytest.mark.parametrize("algorithm", cost.CLOSED_FORMS)
def test_arrays_are_broadcast_and_give_what_numbers_give(algorithm):
    sizes, nbytes = np.array([[1], [2], [4], [8]]), np.array([320_000, 3_200_000])
    each = [[cost.all_reduce_seconds(algorithm, n, b, LINK) for b in nbytes] for n in sizes[:, 0]]
    assert cost.all_reduce_seconds(algorithm, sizes, nbytes, LINK).tolist() == each


@pytest.mark.parametrize(("machines", "per_machine"), [(1, 8), (4, 4), (8, 2)])
def test_rings_over_machines_take_about_what_the_simulated_cluster_says(machines, per_machine):
    size, inside, nic = machines * per_machine, Link(1e-5, 1e9), Link(2e-4, 1e8)
    cluster = Topology(nic, per_machine, inside)
    nbytes = 4 * 100 * size * 100

    nested = functools.partial(hierarchical_all_reduce, group_size=per_machine)
    for form, algorithm in ((cost.flat_ring_seconds, ring_all_reduce), (cost.hierarchical_seconds, nested)):
        run = simulate(size, lambda rank, reduce=algorithm: reduce(rank, Shape(nbytes // 4)), cluster)
        assert form(size, nbytes, cluster) == pytest.approx(run.seconds, rel=0.05)


@pytest.mark.parametrize("workers", [1, 6])
def test_a_synchronous_step_takes_what_the_server_s_own_text_takes(workers):
    arrangement = Arrangement(1, workers, 1)
    together = 1.0  # when all workers push: after the initial parameters have come

    def program(communicator):
        def gradient_of(parameters, step):
            communicator.sleep(together - communicator.seconds)
            return parameters

        train(communicator, arrangement, np.zeros(60_000, np.float32), gradient_of, lambda *_: None)

    step = simulate(arrangement.size, program, LINK).seconds - together
    assert cost.synchronous_server_seconds(workers, 240_000, LINK) == pytest.approx(step, rel=0.05)


@pytest.mark.parametrize("all_reduce", [0.001, 0.4])
@pytest.mark.parametrize("buckets", [1, 4])
def test_overlap_is_what_a_network_that_takes_bucket_after_bucket_gives(buckets, all_reduce):
    forward, backward, free = 0.1, 0.2, 0.0
    for bucket in range(1, buckets + 1):
        free = max(free, forward + bucket * backward / buckets) + all_reduce
    assert cost.data_parallel_step_seconds(forward, backward, all_reduce, buckets) == pytest.approx(free)


@pytest.mark.parametrize(("name", "message"), [("gpipe", 0.01), ("one_f_one_b", 0.0)])
def test_a_pipeline_s_step_is_that_of_its_timetable(name, message):
    end = max(timed.end for timed in predict(schedule_of(name, 4, 8), 0.1, 0.2, message))
    assert cost.pipeline_step_seconds(4, 8, 0.3, message) == pytest.approx(end)


@pytest.mark.parametrize("ranks", [1, 2, 3, 8])
def test_a_block_of_a_gpt_exchanges_for_two_ninths_of_what_ranks_over_width_give(ranks):
    gpt = catalogue.Transformer(name="GPT", layers=1, width=4096, heads=32, sequence=1, vocabulary=1)
    peak, bandwidth = 1e15, 2e12
    block = cost.tensor_parallel_seconds(gpt, ranks, peak, bandwidth)
    assert block.sent / block.compute == pytest.approx(
        2 / 9 * (ranks - 1) / 4096 * peak / bandwidth, rel=1e-3
    )
    assert block.hidden == pytest.approx(block.sent / 2)  # all of f: the products are long enough


def test_what_tensor_parallelism_can_hide_is_at_most_the_products_beside_it():
    gpt = catalogue.Transformer(name="GPT", layers=1, width=1024, heads=8, sequence=64, vocabulary=1)
    block = cost.tensor_parallel_seconds(gpt, np.array([8, 64]), 1e15, 1e10)
    assert block.hidden.tolist() == pytest.approx((2 * 7 * 1024**2 / (np.array([8, 64]) * 1e15)).tolist())
    with pytest.raises(ValueError, match="ranks is 0; it must be at least 1"):
        cost.tensor_parallel_seconds(gpt, 0, 1e15, 1e10)
