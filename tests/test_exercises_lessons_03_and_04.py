"""The checks of lessons 03 and 04 say which step goes wrong."""

import numpy as np
import pytest

from workshop_utils.comm.communicator import chunk
from workshop_utils.comm.ring import ring_all_gather, ring_all_reduce, ring_reduce_scatter
from workshop_utils.exercises import parameter_server
from workshop_utils.exercises import ring as ring_checks


def ring(to=1, first=0, second=1, steps=-1, divisions=1, whole=False, second_adds=False):
    """A ring's mean with mistakes to choose from."""

    def answer(communicator, array):
        rank, size = communicator.rank, communicator.size
        right, left = (rank + to) % size, (rank - to) % size

        def part(index):
            return array if whole else chunk(array, index, size)

        for step in range(size + steps):
            incoming = np.empty_like(part(rank - step - 1 + first))
            communicator.send_recv(right, part(rank - step + first), left, incoming)
            part(rank - step - 1 + first)[:] += incoming
        for step in range(size - 1):
            incoming = np.empty_like(part(rank + second - step - 1))
            communicator.send_recv(right, part(rank + second - step), left, incoming)
            if second_adds:
                part(rank + second - step - 1)[:] += incoming
            else:
                part(rank + second - step - 1)[:] = incoming
        array /= size**divisions

    return answer


@pytest.mark.parametrize(
    "right",
    [
        ring(),
        lambda communicator, array: ring_all_reduce(communicator, array, "mean"),
        ring(first=2, second=3),  # a ring may begin with any chunk
    ],
)
def test_a_ring_is_right_whatever_chunk_it_begins_with(right):
    verdict = ring_checks.ring_all_reduce(right)
    assert verdict.state == "right", verdict


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (ring(whole=True), "whole tensors sent"),
        (ring(to=2), "wrong neighbour: with 4 ranks and 4 elements, rank 0 sends message 1 to rank 2"),
        (ring(divisions=2), "divided twice"),
        (ring(divisions=0), "never divided"),
        (
            ring(second=0),
            "the wrong chunk: with 4 ranks and 4 elements, in all-gather step 1 rank 0 sends chunk 0",
        ),
        (ring(steps=0), "the wrong chunk|messages; it must send"),
        (ring(second_adds=True), "counts more than once that of rank"),
        (lambda c, a: ring_reduce_scatter(c, a, "mean"), "sends 3 messages; it must send 6"),
        (lambda c, a: ring_all_gather(c, a), "it must send"),
        (lambda c, a: c.recv((c.rank - 1) % c.size, a) if c.size > 1 else None, "waited 1 s for rank"),
        (lambda c, a: a.no_such_thing, "has no attribute 'no_such_thing' (line 1 of your function)"),
        (lambda c, a: ring()(c, a.copy()), "the array that was handed over is as it was on every rank"),
    ],
)
def test_a_wrong_ring_is_told_which_step_goes_wrong(mistake, said):
    verdict = ring_checks.ring_all_reduce(mistake)
    assert verdict.state == "wrong"
    assert any(each in verdict.text for each in said.split("|")), verdict


@pytest.mark.parametrize(
    "unsolved", [None, ..., lambda communicator, array: ..., lambda communicator, array: None]
)
def test_an_unsolved_ring_is_not_yet_there(unsolved):
    assert ring_checks.ring_all_reduce(unsolved).state == "not yet"


def test_the_rule_of_stale_synchronous_steps_is_checked_at_the_bound():
    def rule(pushes, worker, bound):
        return pushes[worker] - min(pushes.values()) <= bound

    assert parameter_server.stale_synchronous(rule).state == "right"
    strict = parameter_server.stale_synchronous(lambda p, w, b: p[w] - min(p.values()) < b)
    assert strict.state == "wrong"
    assert "is 0 ahead of the slowest, so it may go on" in strict.text
    never = parameter_server.stale_synchronous(lambda p, w, b: True)
    assert "so it must wait" in never.text
    assert parameter_server.stale_synchronous(lambda p, w, b: ...).state == "not yet"


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (parameter_server.seconds_through_one_server, 10.24),
        (parameter_server.servers_for_a_second, 11),
        (parameter_server.staleness_of_equals, 15),
        (parameter_server.workers_for_a_full_link, 10),
        (ring_checks.ring_megabytes, 700),
        (ring_checks.ring_messages, 1998),
        (ring_checks.central_over_ring, 8),
    ],
)
def test_the_numbers_are_what_the_formulas_give(check, answer):
    assert check(answer).state == "right"
    assert check(2 * answer).state == "wrong"
    assert check(...).state == "not yet"


@pytest.mark.parametrize(
    ("rule", "said"),
    [
        (lambda pushes, worker, bound: True, "that is asynchronous"),
        (lambda pushes, worker, bound: False, "nobody would ever go on"),
        (lambda p, w, b: p[w] - min(p.values()) < b, "but that much is allowed"),
        (lambda p, w, b: p[w] <= b, "the slowest tells"),
        (lambda p, w, b: max(p.values()) - p[w] <= b, "how far behind the fastest"),
        (lambda p, w, b: max(p.values()) - min(p.values()) <= b, "whether any two workers are too far apart"),
        (lambda p, w, b: p[w] == min(p.values()), "as if the bound were 0"),
        (lambda p, w, b: p[7] <= b, "KeyError: 7 (line 1 of your function)"),
    ],
)
def test_a_well_known_wrong_rule_is_told_apart(rule, said):
    verdict = parameter_server.stale_synchronous(rule)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (parameter_server.seconds_through_one_server, 5.12, "that is one way"),
        (parameter_server.seconds_through_one_server, 1.28, "a byte has 8 bits"),
        (parameter_server.servers_for_a_second, 10, "10 servers take 1.024 s"),
        (parameter_server.staleness_of_equals, 16, "its own push does not make it stale"),
        (parameter_server.staleness_of_equals, 0, "that is synchronous training"),
        (parameter_server.workers_for_a_full_link, 8, "a worker's round includes its push and its pull"),
        (parameter_server.workers_for_a_full_link, 23, "one goes round in 2.56 s"),
        (ring_checks.ring_megabytes, 350, "that is the reduce-scatter alone"),
        (ring_checks.ring_megabytes, 2800, "that is a parameter server's link"),
        (ring_checks.ring_messages, 999, "one of the two phases"),
        (ring_checks.ring_messages, 2000, "N − 1 in each phase, not N"),
        (ring_checks.central_over_ring, 7, "compare like with like"),
    ],
)
def test_a_typical_wrong_number_is_told_where_it_comes_from(check, answer, said):
    verdict = check(answer)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict
