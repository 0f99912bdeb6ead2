"""What every collective computes, and how many messages and bytes each rank sends for it, stays the same.

`collectives.json` holds the counts: by algorithm, number of ranks and number of elements (float64), the messages that
each rank sends, then the bytes. They were counted on threads; the simulated clock and real processes must agree. When
an algorithm is to change, write the file again and read the difference before committing it:

    GUARDS_UPDATE=1 python -m pytest tests/guards/test_collectives.py; git diff tests/guards/collectives.json
"""

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from adapter import (
    ALL_REDUCES,
    BROADCASTS,
    REDUCES_AT_RANK_0,
    ROOT,
    descend,
    on_the_simulated_clock,
    on_threads,
    sent_by,
)

FILE = Path(__file__).with_name("collectives.json")
COLLECTIVES = ALL_REDUCES | REDUCES_AT_RANK_0 | BROADCASTS
SIZES = range(1, 10)
ELEMENTS = (0, 1, 7, 10, 1023)
STEPS, RATE = 3, 0.25
OVER_TCP = (
    "ring",
    "double tree",
    "halving and doubling",
    "hierarchical in groups of 2",
    "central",
    "tree broadcast",
)

# Name → ranks → elements → messages, bytes of each rank.
Counts = dict[str, dict[str, dict[str, list[list[int]]]]]


def contribution(rank, elements):
    """What a rank brings: small whole numbers, so that sums are exact in every order."""
    return (np.arange(elements, dtype=np.float64) * (rank + 1)) % 17 + rank


def act(communicator, name, elements):
    """What a rank has after a collective, or after some steps with synchronous parameter servers."""
    if name not in COLLECTIVES:
        return descend(communicator, int(name.split()[-1]), STEPS, contribution(0, elements), RATE)
    array = contribution(communicator.rank, elements)
    COLLECTIVES[name](communicator, array)
    return array


def play(communicator, name):
    """One rank's results and counts, for every number of elements."""
    return [sent_by(communicator, partial(act, communicator, name, elements)) for elements in ELEMENTS]


def counted(ranks):
    """Of each number of elements: the messages of each rank, then the bytes of each rank."""
    return {
        str(elements): [[rank[number][1][what] for rank in ranks] for what in (0, 1)]
        for number, elements in enumerate(ELEMENTS)
    }


def names(size):
    """What `size` ranks can do."""
    return [*COLLECTIVES, *(f"parameter server of {servers}" for servers in (1, 2, 3) if servers < size)]


def written(counts):
    """The counts with one line for each algorithm and number of ranks."""
    lines = []
    for name, sizes in sorted(counts.items()):
        rows = [
            f"    {json.dumps(size)}: {json.dumps(sizes[size], separators=(',', ':'))}"
            for size in sorted(sizes)
        ]
        lines.append(f"  {json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n  }")
    return "{\n" + ",\n".join(lines) + "\n}\n"


@pytest.fixture(scope="module")
def kept():
    return json.loads(FILE.read_text(encoding="utf-8")) if FILE.is_file() else {}


def assert_counts(kept, name, size, ranks):
    """The counts of `ranks` are those that are kept; names the first that are not."""
    now, before = counted(ranks), kept[name][str(size)]
    for elements in map(str, ELEMENTS):
        assert now[elements] == before[elements], (
            f"{name}, {size} ranks, {elements} elements: each rank now sends (messages, bytes) {now[elements]}; "
            f"kept is {before[elements]}"
        )


def assert_results(name, size, ranks):
    """The arrays of `ranks` are those that NumPy computes in one process, wherever the collective leaves one."""
    servers = 0 if name in COLLECTIVES else int(name.split()[-1])
    with_result = range(1) if name in REDUCES_AT_RANK_0 else range(servers, size)
    for number, elements in enumerate(ELEMENTS):
        arrays = [contribution(rank, elements) for rank in range(size)]
        expected = arrays[0] if servers or name in BROADCASTS else np.sum(arrays, axis=0)
        expected = expected * (1 - (1 - RATE) ** STEPS) if servers else expected
        for rank in with_result:
            where = f"{name}, rank {rank} of {size}, {elements} elements"
            tolerance = 1e-12 if servers else 0
            np.testing.assert_allclose(ranks[rank][number][0], expected, rtol=tolerance, err_msg=where)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("run", [on_threads, on_the_simulated_clock])
def test_every_rank_has_numpys_result_and_sends_as_many_messages_and_bytes_as_before(size, run, kept):
    for name in names(size):
        ranks = run(size, partial(play, name=name))
        assert_results(name, size, ranks)
        if not os.environ.get("GUARDS_UPDATE"):  # then the file is written again
            assert_counts(kept, name, size, ranks)


def test_the_counts_are_kept_for_every_collective_there_is(kept):
    if os.environ.get("GUARDS_UPDATE"):
        counts = {}
        for size in SIZES:
            for name in names(size):
                counts.setdefault(name, {})[str(size)] = counted(on_threads(size, partial(play, name=name)))
        FILE.write_text(written(counts), encoding="utf-8")
        pytest.fail(f"written: look at the difference with git diff {FILE.relative_to(ROOT)}")
    now = {(name, str(size)) for size in SIZES for name in names(size)}
    assert now == {(name, size) for name, sizes in kept.items() for size in sizes}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_real_processes_send_over_tcp_what_threads_send(size, ranks, kept):
    for name in OVER_TCP:
        results = ranks.run(size, play, name)
        assert_results(name, size, results)
        assert_counts(kept, name, size, results)
