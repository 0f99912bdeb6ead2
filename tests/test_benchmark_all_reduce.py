"""What the benchmark of all-reduce makes of its measurements: the rows, their bars, and the copy limit."""

import pytest

from workshop_utils.benchmarks import all_reduce

WAYS = (
    "gloo",
    "OpenMPI",
    "copy",
    "TCP",
    "Unix sockets",
    "plain TCP",
    "shared memory",
    "shared memory, allocated",
    "shared memory, allocated, ring",
    "shared memory, allocated, pipelined ring",
)


def rows(size, nbytes, **seconds):
    """The rows by what they compare, where every way takes a second but those named."""
    samples = {way: (seconds.get(way, 1.0),) * 3 for way in WAYS}
    return {row.subject.split(": ")[1]: row for row in all_reduce.comparisons(size, nbytes, samples)}


def test_a_copy_counts_for_what_an_all_reduce_must_move():
    row = rows(4, 1 << 24, copy=0.5)["shared memory, allocated, beside copy limit"]
    assert row.ratio.median == pytest.approx(0.5 * 2 * 3 / 4)
    assert row.unit == "ms"
    assert row.theirs == (750.0,) * 3


@pytest.mark.parametrize(
    ("nbytes", "bars"),
    [
        (4096, {"Unix sockets, beside gloo": 3.0, "shared memory, allocated, beside OpenMPI": 1 / 3}),
        (65536, {"Unix sockets, beside gloo": 3.0}),
        (1 << 20, {"Unix sockets, beside gloo": 1.8}),
        (
            1 << 24,
            {
                "Unix sockets, beside gloo": 1.0,
                "shared memory, allocated, beside gloo": 2.0,
                "shared memory, allocated, beside OpenMPI": 1.5,
                "shared memory, allocated, beside copy limit": 0.8,
            },
        ),
        (
            1 << 26,
            {
                "Unix sockets, beside gloo": 1.0,
                "shared memory, allocated, beside gloo": 2.0,
                "shared memory, allocated, beside OpenMPI": 1.5,
                "shared memory, allocated, beside copy limit": 0.7,
            },
        ),
    ],
)
def test_every_bar_stands_where_it_was_set(nbytes, bars):
    assert {name: row.bar.low for name, row in rows(2, nbytes).items() if row.bar is not None} == bars


@pytest.mark.parametrize(("seconds", "met"), [(0.3, True), (0.6, False)])
def test_a_bar_is_held_against_times_faster(seconds, met):
    row = rows(2, 65536, **{"Unix sockets": seconds})["Unix sockets, beside gloo"]
    assert row.ratio.median == pytest.approx(1 / seconds)
    assert row.is_met is met
