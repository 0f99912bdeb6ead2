"""What communication costs, in closed form: collectives, parameter servers, and the steps of parallel training.

    nic = Path.of(Link.of("25Gbit", "20us"))
    all_reduce_seconds("ring", 64, 100e6, nic)
    best_all_reduce(np.array([8, 64, 512]), 100e6, nic)           # (seconds, names of the algorithms)
    machines = Hierarchy(inside=Path(2e-6, 250e9), across=Path(10e-6, 50e9), ranks_per_machine=8)
    machines.all_reduce_seconds(64, 100e6)

A message of n bytes takes α + n/B (Hockney 1994), each byte that is added to another 1/γ more. All functions take
numbers or NumPy arrays, which are broadcast, so that a hundred thousand layouts are one call; seconds and bytes
throughout, a bandwidth is in bytes per second and one way. Formulas that `comm` keeps beside its algorithms are taken
from there. What queues, stragglers and shared links do to each other has no closed form: `comm.simulated` and
`comm.recurrence` run the algorithms in virtual time instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from workshop_utils.comm import central, direct, double_tree, halving_doubling, ring, tree
from workshop_utils.comm.cluster import Link
from workshop_utils.comm.parameter_server import server_bytes_received
from workshop_utils.parallel.schedule import bubble_fraction
from workshop_utils.scaling.arrays import Numbers, plain


@dataclass(frozen=True)
class Path:
    """What one rank has towards another: α, B, γ, and how many flows share the way.

    Attributes:
        latency_seconds: α, of a message without bytes, all that it costs sender and receiver included.
        bandwidth_bytes_per_second: B, one way, of one rank that is alone.
        combine_bytes_per_second: γ, at which a rank adds what has come to what it has; infinite where adding is free.
        congestion: by how much less than B each rank gets while all send at once, such as the oversubscription of a
            spine, or the ranks that share a NIC; 1 where nothing is shared.

    Raises:
        ValueError: for a number that cannot be; the message names the field.
    """

    latency_seconds: Numbers = 0.0
    bandwidth_bytes_per_second: Numbers = math.inf
    combine_bytes_per_second: Numbers = math.inf
    congestion: Numbers = 1.0

    def __post_init__(self) -> None:
        _check("latency_seconds", self.latency_seconds, 0)
        _check("bandwidth_bytes_per_second", self.bandwidth_bytes_per_second, 0, open_end=True)
        _check("combine_bytes_per_second", self.combine_bytes_per_second, 0, open_end=True)
        _check("congestion", self.congestion, 1)

    @classmethod
    def of(cls, link: Link) -> Self:
        """A link of the simulated clock, with what a message costs its sender in the latency."""
        return cls(link.latency_seconds + link.overhead_seconds, link.bandwidth_bytes_per_second)

    @property
    def bandwidth(self) -> Numbers:
        """What a rank gets while all send: B over congestion."""
        return self.bandwidth_bytes_per_second / self.congestion

    def seconds(self, nbytes: Numbers) -> Numbers:
        """Of one message: α + n/B."""
        return self.latency_seconds + nbytes / self.bandwidth


class AllReduceCost(NamedTuple):
    """`seconds` is a closed form of comm: (size, nbytes, α, B); `combined` the bytes that the busiest rank adds."""

    seconds: Callable[..., Any]
    combined: Callable[..., Any]


def _each(form: Callable[..., Any]) -> Callable[..., Any]:
    """A form that is written for one whole number of ranks, for arrays."""
    return np.vectorize(lambda size, *others: form(int(size), *others), otypes=[float])


def _levels(size: Numbers) -> Numbers:
    return np.ceil(np.log2(size))


def _folded(size: Numbers) -> Numbers:
    """Rabenseifner: halving among the P ranks, and one whole array more where a rank was folded in."""
    power = 2.0 ** np.floor(np.log2(size))
    return (power - 1) / power + (power < size)


# By name, as in comm; the bytes added, on the busiest rank, are a multiple of the array's.
ALL_REDUCE_COSTS: Mapping[str, AllReduceCost] = {
    "ring": AllReduceCost(ring.ring_seconds, lambda size, nbytes: (size - 1) / size * nbytes),
    "tree": AllReduceCost(_each(tree.tree_all_reduce_seconds), lambda size, nbytes: _levels(size) * nbytes),
    "double_tree": AllReduceCost(
        _each(double_tree.double_tree_seconds), lambda size, nbytes: np.minimum(size - 1, 2) * nbytes
    ),
    "halving_doubling": AllReduceCost(
        _each(halving_doubling.halving_doubling_seconds), lambda size, nbytes: _folded(size) * nbytes
    ),
    "central": AllReduceCost(_each(central.central_seconds), lambda size, nbytes: (size - 1) * nbytes),
    "direct": AllReduceCost(direct.direct_seconds, lambda size, nbytes: (size - 1) * nbytes),
}


def all_reduce_seconds(algorithm: str, size: Numbers, nbytes: Numbers, path: Path) -> Numbers:
    """All-reduce of `nbytes` among `size` ranks by one of ALL_REDUCE_COSTS, each rank with such a `path`.

    Source of each form: the module of `comm` that has the algorithm. Adding is not overlapped with sending.

    Raises:
        ValueError: if there is no such algorithm, or a size is below 1.
    """
    if algorithm not in ALL_REDUCE_COSTS:
        raise ValueError(f"algorithm is {algorithm!r}; it must be one of {', '.join(ALL_REDUCE_COSTS)}")
    _check("size", size, 1)
    form = ALL_REDUCE_COSTS[algorithm]
    sent = form.seconds(size, nbytes, path.latency_seconds, path.bandwidth)
    return plain(sent + form.combined(size, nbytes) / path.combine_bytes_per_second)


def best_all_reduce(
    size: Numbers,
    nbytes: Numbers,
    path: Path,
    algorithms: tuple[str, ...] = ("ring", "tree", "halving_doubling"),
) -> tuple[Numbers, Any]:
    """Seconds of the fastest of `algorithms` for each size, and their names, as a library chooses them."""
    seconds = np.stack(
        np.broadcast_arrays(*(all_reduce_seconds(name, size, nbytes, path) for name in algorithms))
    )
    names = np.array(algorithms)[seconds.argmin(axis=0)]
    return plain(seconds.min(axis=0)), names if names.ndim else str(names)


def reduce_scatter_seconds(size: Numbers, nbytes: Numbers, path: Path) -> Numbers:
    """(N − 1)(α + K/NB + K/Nγ): a ring's first half, after which each rank has one chunk reduced."""
    chunk = nbytes / size
    return plain((size - 1) * (path.seconds(chunk) + chunk / path.combine_bytes_per_second))


def all_gather_seconds(size: Numbers, nbytes: Numbers, path: Path) -> Numbers:
    """(N − 1)(α + K/NB): a ring's second half; `nbytes` is the whole that each rank has afterwards."""
    return plain((size - 1) * path.seconds(nbytes / size))


@dataclass(frozen=True)
class Hierarchy:
    """Machines with several ranks: `inside` is what a rank has within its machine, `across` a machine's whole NIC.

    Consecutive ranks share a machine, and every machine is full. Oversubscription between machines is the congestion
    of `across`.

    Raises:
        ValueError: for less than one rank a machine.
    """

    inside: Path
    across: Path
    ranks_per_machine: Numbers

    def __post_init__(self) -> None:
        _check("ranks_per_machine", self.ranks_per_machine, 1)

    def ring_seconds(self, size: Numbers, nbytes: Numbers) -> Numbers:
        """One ring through all ranks in order, of which one rank a machine sends over the NIC.

        The longer of two ways through its 2 (N − 1) steps: along with a chunk, over every link in turn, so that
        latencies of inside and across come in proportion; or waiting at the slowest link, which carries chunk after
        chunk. With equal links the first is the ring's own form. Source for the proportion: `ncclTopoTuneModel` in
        NCCL's src/graph/tuning.cc, which adds both ways up.
        """
        machines, steps, chunk = self._machines(size), 2 * (np.asarray(size) - 1), nbytes / size
        crossings = np.where(machines > 1, np.ceil(steps * machines / size), 0)
        along = crossings * self.across.seconds(chunk) + (steps - crossings) * self.inside.seconds(chunk)
        slower = np.where(
            machines > 1,
            np.minimum(self.inside.bandwidth, self.across.bandwidth),
            self.inside.bandwidth,
        )
        at_slowest = steps * chunk / slower + np.where(machines > 1, self.across.latency_seconds, 0)
        combined = (size - 1) / size * nbytes / self.inside.combine_bytes_per_second
        return plain(np.maximum(along, at_slowest) + combined)

    def all_reduce_seconds(self, size: Numbers, nbytes: Numbers) -> Numbers:
        """Reduce-scatter inside, all-reduce of a g-th across, all-gather inside.

        Across, g rings share a NIC, and while one waits for a latency others send: of 2 (m − 1) steps each takes g
        chunks' time or one's with its latency, whichever is longer. Source: as `comm.hierarchical`.
        """
        ranks, machines = np.minimum(self.ranks_per_machine, size), self._machines(size)
        steps, chunk = 2 * (machines - 1), nbytes / size
        one, others = self.across.seconds(chunk), (ranks - 1) * chunk / self.across.bandwidth
        turns = steps * np.maximum(one, ranks * chunk / self.across.bandwidth)
        last = np.where(machines > 1, np.minimum(self.across.latency_seconds, others), 0)
        added = (machines - 1) * chunk / self.inside.combine_bytes_per_second
        return plain(
            reduce_scatter_seconds(ranks, nbytes, self.inside)
            + (turns + last + added)
            + all_gather_seconds(ranks, nbytes, self.inside)
        )

    def _machines(self, size: Numbers) -> npt.NDArray[Any]:
        _check("size", size, 1)
        machines = np.asarray(size) / np.minimum(self.ranks_per_machine, size)
        if (machines % 1).any():
            raise ValueError(
                f"size is {size}; it must be a multiple of ranks_per_machine, which is {self.ranks_per_machine}"
            )
        return np.asarray(machines)


def synchronous_server_seconds(
    workers: Numbers, nbytes: Numbers, path: Path, servers: Numbers = 1, co_located: bool = False
) -> Numbers:
    """One push and one pull of all workers, with computing left out: 2 (α + busiest link's bytes / B).

    A dedicated server's link carries W · K/k each way, a worker's K. A co-located server is on a worker's machine and
    spares its own part: with one on every machine that is (N − 1)/N · K each way for push and as much for pull, as in
    a ring. Adding the gradients, W · K/k at γ, comes between. Source: Li et al. (2014), section 3; Jiang et al. (2020,
    BytePS), section 3.1, for co-located servers.

    Raises:
        ValueError: for less than one worker or server, or more co-located servers than workers.
    """
    _check("workers", workers, 1)
    _check("servers", servers, 1)
    if co_located and (np.asarray(servers) > workers).any():
        raise ValueError(
            f"servers is {servers}; co-located ones can be at most as many as the {workers} workers"
        )
    received = server_bytes_received(workers, nbytes, servers)  # type: ignore[arg-type] # arrays go through
    into_server = received - nbytes / servers if co_located else received
    # A worker sends all K, less the part that stays on its machine if every machine has a server.
    from_worker = nbytes - nbytes / servers * (np.asarray(servers) == workers) if co_located else nbytes
    each_way = path.seconds(np.maximum(into_server, from_worker))
    return plain(2 * each_way + received / path.combine_bytes_per_second)


def data_parallel_step_seconds(
    forward_seconds: Numbers,
    backward_seconds: Numbers,
    bucket_all_reduce_seconds: Numbers,
    buckets: Numbers = 1,
) -> Numbers:
    """Forward, backward, and what of the all-reduces stands out behind it: f + max(b + c, b/k + k · c).

    k equal buckets become ready one after the other during the backward pass, and are all-reduced in turn, each in
    c seconds: either the last one alone stands out, or the network is busy from the first one on. With one bucket
    nothing overlaps: f + b + c. Source: Li et al. (2020), "PyTorch Distributed", section 3.2.3, for what is overlapped.
    """
    network_idle = backward_seconds + bucket_all_reduce_seconds
    network_busy = backward_seconds / buckets + buckets * bucket_all_reduce_seconds
    return plain(forward_seconds + np.maximum(network_idle, network_busy))


def tensor_parallel_seconds(
    size: Numbers, layers: Numbers, activation_nbytes: Numbers, path: Path, all_reduces_per_layer: Numbers = 4
) -> Numbers:
    """All-reduces of one microbatch through `layers`, forward and backward, between `size` tensor-parallel ranks.

    `activation_nbytes` is batch × sequence × width × bytes of a number. A layer has two all-reduces forward and two
    backward, two more where the forward pass is recomputed; sequence parallelism moves the same bytes by
    reduce-scatters and all-gathers. Nothing overlaps. Source: Shoeybi et al. (2019), "Megatron-LM", section 3.
    """
    return plain(layers * all_reduces_per_layer * all_reduce_seconds("ring", size, activation_nbytes, path))


def pipeline_step_seconds(
    stages: Numbers,
    microbatches: Numbers,
    microbatch_seconds: Numbers,
    message_seconds: Numbers = 0.0,
    chunks: Numbers = 1,
) -> Numbers:
    """m passes' work of one rank over 1 − bubble, and 2 (p − 1) messages that fill and drain the pipeline.

    `microbatch_seconds` is forward and backward of one microbatch through one rank's layers. Exact for GPipe; 1F1B
    waits for more messages in its steady state, for which see `parallel.schedule.predict`.
    `chunks` passes a rank send so many times as many messages.
    Source: as `parallel.schedule.bubble_fraction`.
    """
    busy = microbatches * microbatch_seconds
    idle = bubble_fraction(stages, microbatches, chunks)  # type: ignore[arg-type] # arrays go through
    return plain(busy / (1 - idle) + 2 * chunks * (stages - 1) * message_seconds)


def _check(name: str, value: Numbers, least: float, open_end: bool = False) -> None:
    """NaN never passes."""
    given = np.asarray(value)
    allowed = given > least if open_end else (given >= least) & np.isfinite(given)
    if not allowed.all():
        raise ValueError(f"{name} is {value}; it must be {'more than' if open_end else 'at least'} {least:g}")
