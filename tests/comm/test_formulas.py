"""Times by formula, beside the simulated clock: equal where the formula says exact, never above where it is a bound."""

import functools

import numpy as np
import pytest

from workshop_utils.comm.double_tree import best_segments, double_tree_all_reduce, double_tree_seconds
from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce, halving_doubling_seconds
from workshop_utils.comm.ring import ring_all_reduce, ring_seconds
from workshop_utils.comm.simulated import Link, Shape, simulate
from workshop_utils.comm.tree import tree_all_reduce, tree_all_reduce_seconds

LATENCY, BANDWIDTH = 50e-6, 125e6
LINK = Link(LATENCY, BANDWIDTH)
ELEMENTS = 5040 * 16  # every N up to 10 divides it, and so do the powers of two up to 256

RANKS = [1, 2, 3, 4, 5, 6, 7, 8, 9, 16]


def simulated(algorithm, size, link=LINK):
    return simulate(size, lambda communicator: algorithm(communicator, Shape(ELEMENTS, np.float64)), link)


@pytest.mark.parametrize("size", RANKS)
@pytest.mark.parametrize(
    ("algorithm", "seconds"),
    [
        (ring_all_reduce, ring_seconds),
        (halving_doubling_all_reduce, halving_doubling_seconds),
    ],
)
def test_the_simulated_clock_equals_the_closed_form(algorithm, seconds, size):
    expected = seconds(size, 8 * ELEMENTS, LATENCY, BANDWIDTH)
    assert simulated(algorithm, size).seconds == pytest.approx(expected, rel=1e-9, abs=1e-15)


def of_binary_blocks(size, latency):
    """Seconds on the simulated clock over those of the closed form."""
    seconds = simulated(halving_doubling_all_reduce, size, Link(latency, BANDWIDTH)).seconds
    return seconds / halving_doubling_seconds(size, 8 * ELEMENTS, latency, BANDWIDTH)


@pytest.mark.parametrize(("latency", "least"), [(0, 1 - 1e-9), (LATENCY, 0.98)])
def test_binary_blocks_take_their_closed_form_for_any_number_of_ranks(latency, least):
    for size in range(3, 101):
        assert least < of_binary_blocks(size, latency) < 1 + 1e-9, f"{size} ranks"


@pytest.mark.parametrize(("pieces", "most"), [(1 / 8, 1 + 1e-9), (1.98, 1.072), (1e4, 1.072)])
def test_with_a_latency_of_some_pieces_the_closed_form_of_binary_blocks_is_a_little_too_high(pieces, most):
    for size in range(3, 101):
        power = 1 << (size.bit_length() - 1)
        ratio = of_binary_blocks(size, pieces * 8 * ELEMENTS / power / BANDWIDTH)
        assert 1 / most < ratio < 1 + 1e-9, f"{size} ranks"


def test_the_largest_binary_block_sends_and_receives_the_most():
    def program(communicator):
        halving_doubling_all_reduce(communicator, Shape(ELEMENTS, np.float64))
        traffic = communicator.traffic
        return traffic.messages_sent.sum(), traffic.bytes_sent.sum(), traffic.bytes_received.sum()

    for size in range(3, 101):
        ranks = simulate(size, program).results
        power, smaller = 1 << (size.bit_length() - 1), size.bit_count() - 1
        nbytes = (2 * (power - 1) + smaller) * 8 * ELEMENTS // power
        assert set(ranks[:power]) == {(2 * (power.bit_length() - 1) + smaller, nbytes, nbytes)}
        assert all(max(sent, received) <= nbytes for _, sent, received in ranks[power:])


@pytest.mark.parametrize("size", [*RANKS, 64])
def test_a_tree_takes_its_closed_form_for_powers_of_two_and_up_to_a_tenth_less_for_others(size):
    bound = tree_all_reduce_seconds(size, 8 * ELEMENTS, LATENCY, BANDWIDTH)
    least = bound if size & (size - 1) == 0 else 0.9 * bound
    assert least * (1 - 1e-9) <= simulated(tree_all_reduce, size).seconds <= bound * (1 + 1e-9)


@pytest.mark.parametrize(
    ("elements", "low", "high"), [(16, 0.66, 0.76), (100_000, 0.97, 1.06), (5_000_000, 0.99, 1.12)]
)
@pytest.mark.parametrize("size", [6, 16, 48, 100])
def test_a_double_tree_takes_about_its_closed_form_in_several_pieces_and_less_in_one(
    size, elements, low, high
):
    def seconds(segments):
        tree = functools.partial(double_tree_all_reduce, segments=segments)
        return simulate(size, lambda communicator: tree(communicator, Shape(elements)), LINK).seconds

    best = best_segments(size, 4 * elements, LATENCY, BANDWIDTH)
    assert low < seconds(best) / double_tree_seconds(size, 4 * elements, LATENCY, BANDWIDTH) < high
    assert seconds(best) <= 1.05 * min(seconds(max(1, best // 2)), seconds(2 * best))


def test_a_double_tree_of_one_rank_costs_nothing_and_without_latency_all_pieces_are_small():
    assert double_tree_seconds(1, 1e6, LATENCY, BANDWIDTH) == 0
    assert double_tree_seconds(64, 1e6, 0, BANDWIDTH) == pytest.approx(2e6 / BANDWIDTH, rel=1e-3)
