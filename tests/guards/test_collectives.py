"""What every collective computes, and how many messages and bytes each rank sends for it, stays the same.

`collectives.json` holds the counts: by algorithm, number of ranks and number of elements (float64), the messages that
each rank sends, then the bytes. They were counted on threads; the simulated clock and real processes must agree. When
an algorithm is to change, write the file again and read the difference before committing it:

    GUARDS_UPDATE=1 python -m pytest tests/guards/test_collectives.py; git diff tests/guards/collectives.json
"""

import json
import os
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
SERVERS = {size: [servers for servers in (1, 2, 3) if servers < size] for size in SIZES}
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


def play(communicator, name):
    """One rank's results and counts of a collective, for every number of elements."""
    seen = []
    for elements in ELEMENTS:
        array = contribution(communicator.rank, elements)
        counts = sent_by(communicator, lambda array=array: COLLECTIVES[name](communicator, array))
        seen.append((array, counts))
    return seen


def serve(communicator, servers):
    """The same of a synchronous parameter server."""
    seen = []
    for elements in ELEMENTS:
        trained = []
        target = contribution(0, elements)
        counts = sent_by(
            communicator,
            lambda target=target, trained=trained: trained.append(
                descend(communicator, servers, STEPS, target, RATE)
            ),
        )
        seen.append((trained[0], counts))
    return seen


def counted(ranks):
    """Of each number of elements: the messages of each rank, then the bytes of each rank."""
    return {
        str(elements): [[rank[number][1][what] for rank in ranks] for what in (0, 1)]
        for number, elements in enumerate(ELEMENTS)
    }


def programs(size):
    """What `size` ranks can do, by name."""
    found = {name: lambda communicator, name=name: play(communicator, name) for name in COLLECTIVES}
    for servers in SERVERS[size]:
        found[f"parameter server of {servers}"] = lambda communicator, servers=servers: serve(
            communicator, servers
        )
    return found


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
        if servers:
            expected = arrays[0] * (1 - (1 - RATE) ** STEPS)
        else:
            expected = arrays[0] if name in BROADCASTS else np.sum(arrays, axis=0)
        for rank in with_result:
            np.testing.assert_allclose(
                ranks[rank][number][0],
                expected,
                rtol=1e-12 if servers else 0,
                err_msg=f"{name}, rank {rank} of {size}, {elements} elements",
            )


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("run", [on_threads, on_the_simulated_clock])
def test_every_rank_has_numpys_result_and_sends_as_many_messages_and_bytes_as_before(size, run, kept):
    for name, program in programs(size).items():
        ranks = run(size, program)
        assert_results(name, size, ranks)
        if not os.environ.get("GUARDS_UPDATE"):  # then the file is written again
            assert_counts(kept, name, size, ranks)


def test_the_counts_are_kept_for_every_collective_there_is(kept):
    if os.environ.get("GUARDS_UPDATE"):
        counts = {}
        for size in SIZES:
            for name, program in programs(size).items():
                counts.setdefault(name, {})[str(size)] = counted(on_threads(size, program))
        FILE.write_text(written(counts), encoding="utf-8")
        pytest.fail(f"written: look at the difference with git diff {FILE.relative_to(ROOT)}")
    now = {(name, str(size)) for size in SIZES for name in programs(size)}
    assert now == {(name, size) for name, sizes in kept.items() for size in sizes}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_real_processes_send_over_tcp_what_threads_send(size, ranks, kept):
    for name in OVER_TCP:
        results = ranks.run(size, play, name)
        assert_results(name, size, results)
        assert_counts(kept, name, size, results)
