"""Runs that nobody ran, for wrong answers to open questions: what `on_ranks` would have returned."""

import numpy as np

from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.network import Network
from workshop_utils.parallel.schedule import Pass, Timed
from workshop_utils.ranks.results import RankResult, Results


def steps(
    seconds,
    network="100Mbit",
    device="emulated devices, 1.2s a step",
    program="train_together",
    images=1440,
    sent=444_000,
):
    """Lesson 01's step, `seconds` by number of workers, twice each; a gradient has `sent` bytes."""
    return [
        Results(
            tuple(
                RankResult(
                    rank, (), (duration, []), 8, 2 * sent * (workers - 1 if rank == 0 else 1), duration
                )
                for rank in range(workers)
            ),
            network,
            True,
            duration,
            device=device,
            program=program,
            arguments={"images": [0] * images, "labels": [0] * images},
            links=Network.parse(network),
        )
        for _ in range(2)
        for workers, duration in seconds.items()
    ]


def in_racks(
    seconds,
    network="bandwidth=100Mbit,racks=2,spine=100Mbit",
    program="timed",
    ranks=8,
    nbytes=1_000_000,
    all_reduce=None,
):
    """A run of lesson 04's `timed`: three all-reduces, each of so many `seconds` on the slowest of its ranks."""
    arguments = {"all_reduce": all_reduce or halving_doubling_all_reduce, "nbytes": nbytes, "repeats": 3}
    each = [
        RankResult(rank, (), [seconds - 0.001 * rank] * 3, 24, 7 * nbytes, 4 * seconds)
        for rank in range(ranks)
    ]
    links = Network.parse(network) if network else None
    return Results(tuple(each), network, True, 1.0, program=program, arguments=arguments, links=links)


def pushes(order, staleness=9, dropped=False, program="train", network="100Mbit"):
    """Lesson 03's training of four workers: who pushed, in this order, and the largest staleness."""
    log = [(0.01 * number, int(worker), 0, False) for number, worker in enumerate(order)]
    log[-1] = (log[-1][0], log[-1][1], staleness, dropped)
    values = [(log, []), None, None, None, None]
    ranks = tuple(RankResult(rank, (), value, 1, 8, 1.6) for rank, value in enumerate(values))
    return Results(ranks, network, True, 2.0, program=program, links=Network.parse(network))


def sends(
    seconds,
    times=1,
    gradients=3_158_016,
    network="100Mbit",
    device="emulated devices, 150ms a step",
    program="ddp_steps",
    ranks=3,
    **arguments,
):
    """A run of lesson 07's `ddp_steps`: three steps that send `gradients` bytes so many `times`, in four buckets."""
    asked = {"bucket_bytes": 600_000, "width": 256, "parts": 4, "no_sync": times == 1, **arguments}
    sent = [(0.5, 0.6, gradients // 4)] * 4 * times
    each = [
        RankResult(rank, (), [(0.0, 0.5, 0.6, seconds - 0.001 * rank, sent)] * 3, 24, gradients, 4 * seconds)
        for rank in range(ranks)
    ]
    links = Network.parse(network) if network else None
    return Results(
        tuple(each), network, True, 1.0, device=device, program=program, arguments=asked, links=links
    )


def fetched(
    without,
    with_prefetch,
    tokens=(32,),
    network="100Mbit",
    device="emulated devices, 600ms a step",
    program="unit_steps",
    ranks=3,
    **arguments,
):
    """A run of lesson 07's `unit_steps`: the seconds of two steps without prefetch, and of two with it."""
    both = {False: without, True: with_prefetch}
    each = [
        RankResult(
            rank,
            (),
            {(batch, way): [(both[way] - 0.001 * rank, [])] * 2 for batch in tokens for way in both},
            24,
            8,
            9.0,
        )
        for rank in range(ranks)
    ]
    links = Network.parse(network) if network else None
    asked = {"tokens": list(tokens), "width": 512, **arguments}
    return Results(
        tuple(each), network, True, 9.0, device=device, program=program, arguments=asked, links=links
    )


def passes(
    seconds,
    slow=None,
    program="emulated",
    ranks=4,
    name="one_f_one_b",
    microbatches=8,
    chunks=1,
    each_pass=0.1,
):
    """A run of lesson 08's `emulated`: two steps of so many `seconds`, by each rank's first and last pass."""
    asked = {"name": name, "microbatches": microbatches, "chunks": chunks, "repeats": 2, "slow": slow}
    each = []
    for rank in range(ranks):
        begins, ends = (Pass(kind, 0, rank) for kind in ("forward", "backward"))
        step = [
            Timed(rank, begins, 0.01 * rank, 0.01 * rank + each_pass),
            Timed(rank, ends, 0.2, seconds - 0.01 * rank),
        ]
        each.append(RankResult(rank, (), [step, step], 32, 8, 2 * seconds))
    return Results(tuple(each), None, True, 2.0, program=program, arguments=asked)


def means(scales, limit=16_376, program="scaled", ranks=4, factor=1):
    """A run of lesson 05's `scaled`: `factor` times the scales up to `limit`, and then infinite means."""
    value = [factor * scale if scale <= limit else float("inf") for scale in scales]
    each = tuple(RankResult(rank, (), value, None, 8, 0.1) for rank in range(ranks))
    return Results(each, None, True, 1.0, program=program, arguments={"scales": scales})


def stale(
    age, program="between_graph", tasks=None, steps=20, synchronous=False, seconds=(0.04, 0.04, 0.04, 0.16)
):
    """A run of lesson 06's `between_graph`, whose gradients are all of one `age`; `tasks` are counted by role."""
    log = [(number, age, 0.1 * number, True) for number in range(1, steps + 1)]
    cluster = {role: [""] * count for role, count in (tasks or {"ps": 1, "worker": 4}).items()}
    ranks = [None if role == "ps" else ([], [], [log]) for role in cluster for _ in cluster[role]]
    asked = {"synchronous": synchronous, "compute_seconds": seconds, "cluster": cluster}
    each = tuple(RankResult(rank, (), value, 0, 0.0, 5.0) for rank, value in enumerate(ranks))
    return Results(each, None, True, 5.0, program=program, arguments=asked)


def balanced(k=2, steps=40, ways=("nothing",), program="balance_runs", network=None, load=(500, 12), ranks=3):
    """A run of lesson 16's `balance_runs`, in which experts of each layer have the rows of `load`."""
    loads = np.tile(load, (steps, 2, 1))
    each = [
        RankResult(rank, (), {way: (np.ones(steps), loads) for way in ways}, 0, 8, 9.0)
        for rank in range(ranks)
    ]
    links = Network.parse(network) if network else None
    asked = {"ways": list(ways), "k": k, "steps": steps}
    return Results(tuple(each), network, True, 9.0, program=program, arguments=asked, links=links)
