"""What communication costs, in closed form: collectives, parameter servers, and the steps of parallel training.

    nic = Link.of("25Gbit", "20us")
    all_reduce_seconds("ring", 64, 100e6, nic)
    hierarchical_seconds(64, 100e6, Topology(nic, ranks_per_machine=8, inside=Link(2e-6, 250e9)))

A message of n bytes takes α + n/B (Hockney 1994); adding arrays takes no time. All functions take numbers or NumPy
arrays, which are broadcast, so that a hundred thousand layouts are one call; seconds and bytes throughout, a bandwidth
is in bytes per second and one way. Formulas that `comm` keeps beside its algorithms are taken from there. What queues
and shared links do to each other has no closed form: `comm.simulated` runs the algorithms in virtual time instead.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from workshop_utils.comm.double_tree import double_tree_seconds
from workshop_utils.comm.halving_doubling import halving_doubling_seconds
from workshop_utils.comm.ring import ring_seconds
from workshop_utils.comm.topology import Link, Numbers, Topology, check_numbers
from workshop_utils.comm.tree import tree_all_reduce_seconds
from workshop_utils.parallel.schedule import bubble_fraction
from workshop_utils.scaling.catalogue import Transformer


def plain(values: Any) -> Numbers:
    """A float for numbers, an array of floats for arrays."""
    return float(values) if np.ndim(values) == 0 else np.asarray(values, dtype=float)


def recursive_doubling_seconds(
    size: int, nbytes: float, latency_seconds: float, bandwidth_bytes_per_second: float
) -> float:
    """log₂ P steps (α + K/B), and two more if P < N, for the ranks beyond P, the largest power of two up to N.

    Exact for a power of two. For other N up to 1,000 the simulated clock says 0.66 to 1.09 times as much where
    K ≤ αB/2, since up to N = 1.5 P one of the two α is hidden, and up to 1.46 times with large arrays. Source: Thakur,
    Rabenseifner, Gropp (2005), section 4.5.
    """
    steps = size.bit_length() - 1 + 2 * (size.bit_count() > 1)
    return steps * (latency_seconds + nbytes / bandwidth_bytes_per_second)


# All-reduces by name: (size, nbytes, latency in seconds, bandwidth in bytes per
# second) to seconds. Each is for one whole number of ranks; its source stands beside the algorithm.
CLOSED_FORMS: Mapping[str, Callable[[int, int, float, float], float]] = {
    "ring": ring_seconds,
    "tree": tree_all_reduce_seconds,
    "double_tree": double_tree_seconds,
    "halving_doubling": halving_doubling_seconds,
}


def all_reduce_seconds(algorithm: str, size: Numbers, nbytes: Numbers, path: Link) -> Numbers:
    """All-reduce of `nbytes` among `size` ranks by one of CLOSED_FORMS, each rank with such a `path`.

    Raises:
        ValueError: if there is no such algorithm, or a size is below 1.
    """
    if algorithm not in CLOSED_FORMS:
        raise ValueError(f"algorithm is {algorithm!r}; it must be one of {', '.join(CLOSED_FORMS)}")
    check_numbers("size", size, 1)
    form: Callable[..., Any] = CLOSED_FORMS[algorithm]
    if algorithm != "ring":  # which takes arrays as it is
        form = np.vectorize(
            lambda ranks, *others: CLOSED_FORMS[algorithm](int(ranks), *others), otypes=[float]
        )
    return plain(form(size, nbytes, path.latency_seconds, path.bandwidth_bytes_per_second))


def half_ring_seconds(size: Numbers, nbytes: Numbers, path: Link) -> Numbers:
    """(N − 1)(α + K/NB): a ring's reduce-scatter, or its all-gather, of `nbytes` in all."""
    return plain((size - 1) * path.seconds(nbytes / size))


def flat_ring_seconds(size: Numbers, nbytes: Numbers, cluster: Topology) -> Numbers:
    """One ring through all ranks in order, of which one rank a machine sends over the NIC; every machine is full.

    The longer of two ways through its 2 (N − 1) steps: along with a chunk, over every link in turn, so that
    latencies of inside and across come in proportion; or waiting at the slowest link, which carries chunk after
    chunk. With equal links the first is the ring's own form. Source for the proportion: `ncclTopoTuneModel` in
    NCCL's src/graph/tuning.cc, which adds both ways up.
    """
    inside, across = cluster.inside, cluster.link
    machines, steps, chunk = _machines(size, cluster), 2 * (np.asarray(size) - 1), nbytes / size
    crossings = np.where(machines > 1, np.ceil(steps * machines / size), 0)
    along = crossings * across.seconds(chunk) + (steps - crossings) * inside.seconds(chunk)
    bandwidths = inside.bandwidth_bytes_per_second, across.bandwidth_bytes_per_second
    slower = np.where(machines > 1, np.minimum(*bandwidths), bandwidths[0])
    at_slowest = steps * chunk / slower + np.where(machines > 1, across.latency_seconds, 0)
    return plain(np.maximum(along, at_slowest))


def hierarchical_seconds(size: Numbers, nbytes: Numbers, cluster: Topology) -> Numbers:
    """Reduce-scatter inside, all-reduce of a g-th across, all-gather inside; every machine is full.

    Across, g rings share a NIC, and while one waits for a latency others send: of 2 (m − 1) steps each takes g
    chunks' time or one's with its latency, whichever is longer. Source: as `comm.hierarchical`.
    """
    ranks, machines = np.minimum(cluster.ranks_per_machine, size), _machines(size, cluster)
    steps, chunk = 2 * (machines - 1), nbytes / size
    bandwidth = cluster.link.bandwidth_bytes_per_second
    turns = steps * np.maximum(cluster.link.seconds(chunk), ranks * chunk / bandwidth)
    last = np.minimum(cluster.link.latency_seconds, (ranks - 1) * chunk / bandwidth)
    half = half_ring_seconds(ranks, nbytes, cluster.inside)
    return plain(half + (turns + np.where(machines > 1, last, 0)) + half)


def _machines(size: Numbers, cluster: Topology) -> npt.NDArray[Any]:
    check_numbers("size", size, 1)
    machines = np.asarray(size) / np.minimum(cluster.ranks_per_machine, size)
    if (machines % 1).any():
        ranks = f"ranks_per_machine, which is {cluster.ranks_per_machine}"
        raise ValueError(f"size is {size}; it must be a multiple of {ranks}")
    return np.asarray(machines)


def synchronous_server_seconds(workers: Numbers, nbytes: Numbers, path: Link) -> Numbers:
    """One push and one pull of all workers by one server, with computing left out: 2 (α + W · K/B)."""
    return plain(2 * path.seconds(workers * nbytes))


def data_parallel_step_seconds(
    forward_seconds: Numbers,
    backward_seconds: Numbers,
    bucket_all_reduce_seconds: Numbers,
    buckets: Numbers = 1,
) -> Numbers:
    """Forward, backward, and the part of the all-reduces that the latter does not hide: f + max(b + c, b/k + k · c).

    k equal buckets become ready one after the other during the backward pass, and are all-reduced in turn, each in
    c seconds: either the last one alone is exposed, or the network is busy from the first one on. With one bucket
    nothing overlaps: f + b + c. Source: Li et al. (2020), "PyTorch Distributed", section 3.2.3, for what is overlapped.
    """
    network_idle = backward_seconds + bucket_all_reduce_seconds
    network_busy = backward_seconds / buckets + buckets * bucket_all_reduce_seconds
    return plain(forward_seconds + np.maximum(network_idle, network_busy))


class BlockSeconds(NamedTuple):
    """Of one token in one block, forward and backward, on one of the tensor-parallel ranks.

    Attributes:
        compute: products.
        sent: all-reduces, if they come one after the other.
        hidden: the part of `sent` during which the rank can compute.
    """

    compute: Numbers
    sent: Numbers
    hidden: Numbers


def tensor_parallel_seconds(
    model: Transformer, ranks: Numbers, flops_per_second: float, bandwidth_bytes_per_second: float
) -> BlockSeconds:
    """Tensor parallelism's roofline: rings at full bandwidth, no latency, products at the peak, activations of 2 bytes.

    A block has four all-reduces of its activations, 2 (N − 1)/N · K each. Each of f's two, in the backward pass, runs
    beside the product that gives the weight gradient of the layer behind f: queries, keys and values, or the MLP's
    first layer. For g's two, in the forward pass, the next layer waits. Source: Megatron-LM,
    core/tensor_parallel/layers.py, `allreduce_dgrad`.

    Raises:
        ValueError: if `ranks` has a number below 1.
    """
    check_numbers("ranks", ranks, 1)
    rate = np.asarray(ranks) * flops_per_second
    seen = model.sequence / (2 if model.causal else 1)
    compute = (6 * model.block_matrix_parameters + 12 * model.width * seen) / rate
    all_reduce = 2 * (np.asarray(ranks) - 1) / ranks * 2 * model.width / bandwidth_bytes_per_second
    behind_f = model.width + 2 * model.kv_width, (2 if model.gated else 1) * model.mlp_width
    hidden = sum(np.minimum(all_reduce, 2 * model.width * units / rate) for units in behind_f)
    return BlockSeconds(plain(compute), plain(4 * all_reduce), plain(hidden))


def pipeline_step_seconds(
    stages: Numbers,
    microbatches: Numbers,
    microbatch_seconds: Numbers,
    message_seconds: Numbers = 0.0,
    chunks: Numbers = 1,
) -> Numbers:
    """m passes' work of one rank over 1 − bubble, and 2 v (p − 1) messages that fill and drain it, with v `chunks`.

    `microbatch_seconds` is forward and backward of one microbatch through one rank's layers. Exact for GPipe; 1F1B
    waits for more messages in its steady state, and interleaving for 2 (v p − 1), see `parallel.schedule.predict`.
    Source: as `parallel.schedule.bubble_fraction`.
    """
    busy = microbatches * microbatch_seconds
    idle = bubble_fraction(stages, microbatches, chunks)  # type: ignore[arg-type] # arrays go through
    return plain(busy / (1 - idle) + 2 * chunks * (stages - 1) * message_seconds)
