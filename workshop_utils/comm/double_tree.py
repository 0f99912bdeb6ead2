"""Double binary tree all-reduce: a ring's bytes in logarithmically many steps.

In one binary tree half of the ranks are leaves, which send nothing down. So take two trees in which the leaves of one
have children in the other, and let each carry one half of the array, in pieces that follow each other. Every edge gets
a colour, 0 or 1, so that the edges into a rank differ, and so do the edges out of it: at even steps the edges of colour
0 carry a piece, at odd steps those of colour 1. At each step a rank then sends one piece and receives one.

Sanders, Speck, Träff (2009), "Two-tree algorithms for full bandwidth broadcast, reduction and scan"; the trees are
those of NCCL (Jeaugey 2019, "Massively scale your deep learning training with NCCL 2.4").
"""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

from workshop_utils.comm.communicator import Array, Communicator, Operation, buffer, chunk, collective, finish


class Edge(NamedTuple):
    """`parent` sends to `child` in tree 0 or 1 on the way down, and receives from it on the way up."""

    tree: int
    parent: int
    child: int


class Turn(NamedTuple):
    """What a rank does at one step of the way down: `received` and `sent` are pieces of the array."""

    parent: int | None
    received: int
    child: int | None
    sent: int


@collective
def double_tree_all_reduce(
    communicator: Communicator, array: Array, operation: Operation = "sum", segments: int = 4
) -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks; each tree carries `segments` pieces.

    The way up is the way down, run backwards.
    """
    pieces = 2 * segments
    turns = schedule(communicator.size, segments)[communicator.rank]
    for parent, sent, child, received in reversed(turns):
        accumulator = chunk(array, received, pieces)
        incoming = buffer(communicator, accumulator)
        communicator.send_recv(parent, chunk(array, sent, pieces), child, incoming)
        if child is not None:
            communicator.combine(accumulator, incoming, operation)
    for parent, received, child, sent in turns:
        outgoing, incoming = chunk(array, sent, pieces), chunk(array, received, pieces)
        communicator.send_recv(child, outgoing, parent, incoming)
    finish(array, operation, communicator.size)


@functools.lru_cache(maxsize=64)
def edges(size: int) -> tuple[Edge, ...]:
    """Both trees, each from its root downwards.

    Tree 0 is the binary tree in which the ranks stand in order: odd ranks are its leaves. Tree 1 is its mirror
    image where N is even, and shifted by one rank where N is odd, so that odd and even ranks change roles.
    """
    return tuple(
        Edge(tree, _rank(parent, size, tree), _rank(child, size, tree))
        for tree in (0, 1)
        for parent, child in _in_order_tree(0, 1, size - 1)  # place 0 is the root, and has one child
    )


def _rank(place: int, size: int, tree: int) -> int:
    if tree == 0:
        return place
    return size - 1 - place if size % 2 == 0 else (place + 1) % size


def _in_order_tree(parent: int, first: int, last: int) -> Iterator[tuple[int, int]]:
    """(parent, child) for the places from `first` to `last` below `parent`: the roundest of them is on top."""
    if first <= last:
        top = max(range(first, last + 1), key=lambda place: place & -place)
        yield parent, top
        yield from _in_order_tree(top, first, top - 1)
        yield from _in_order_tree(top, top + 1, last)


def _colours(all_edges: tuple[Edge, ...]) -> dict[Edge, int]:
    """A colour for each edge: no two edges out of one rank share it, and no two edges into one rank.

    At most two edges meet at such an end, so one colour decides its neighbours' along a path or an even cycle.
    """
    meeting = defaultdict(list)
    for edge in all_edges:
        meeting["out of", edge.parent].append(edge)
        meeting["into", edge.child].append(edge)
    colours: dict[Edge, int] = {}
    for start in all_edges:
        undecided = [(start, 0)]
        while undecided:
            edge, colour = undecided.pop()
            if edge not in colours:
                colours[edge] = colour
                neighbours = meeting["out of", edge.parent] + meeting["into", edge.child]
                undecided += [(neighbour, 1 - colour) for neighbour in neighbours if neighbour != edge]
    return colours


@functools.lru_cache(maxsize=64)
def _first_steps(size: int) -> dict[Edge, int]:
    """The step at which an edge carries its tree's first piece; the next pieces follow every second step."""
    colours = _colours(edges(size))
    steps: dict[Edge, int] = {}
    reached: dict[tuple[int, int], int] = {}  # when a rank has its first piece: a tree's root, from the start
    for edge in edges(size):
        earliest = reached.get((edge.tree, edge.parent), -1) + 1
        steps[edge] = earliest + (colours[edge] - earliest) % 2
        reached[edge.tree, edge.child] = steps[edge]
    return steps


def best_segments(size: int, nbytes: float, latency_seconds: float, bandwidth_bytes_per_second: float) -> int:
    """In how many pieces each tree carries its half, so that `double_tree_seconds` is least."""
    ahead, array_seconds = 2 * (size - 1).bit_length() - 2, nbytes / bandwidth_bytes_per_second
    if size <= 2:
        return 1
    if not latency_seconds:
        return max(1, int(nbytes // 8))  # as small as they can be, of float32
    return max(1, round(math.sqrt(ahead * array_seconds / (4 * latency_seconds))))


def double_tree_seconds(
    size: int, nbytes: float, latency_seconds: float, bandwidth_bytes_per_second: float
) -> float:
    """2 (L + 2 (s − 1)) (α + K/2sB), with the best s pieces a tree, and L = 2 ⌈log₂ N⌉.

    L is how many steps the first piece takes from the root to the last leaf: at every level it waits for its edge's
    colour, one step at the most. From 4 pieces a tree on, within 30 % of what `simulated` says. Fewer wait less: with
    2 or 3 pieces it is up to 1.5 times too long, with one 1.7 times, and for two ranks twice. Source: Sanders,
    Speck, Träff (2009).
    """
    if size == 1:
        return 0.0
    pieces = best_segments(size, nbytes, latency_seconds, bandwidth_bytes_per_second)
    steps = 2 * (size - 1).bit_length() + 2 * (pieces - 1)
    return 2 * steps * (latency_seconds + nbytes / (2 * pieces) / bandwidth_bytes_per_second)


@functools.lru_cache(maxsize=64)
def schedule(size: int, segments: int) -> tuple[tuple[Turn, ...], ...]:
    """For each rank what it does on the way down, in order; piece p belongs to tree p // segments."""
    turns: list[dict[int, Turn]] = [{} for _ in range(size)]
    idle = Turn(None, 0, None, 0)
    for edge, first in _first_steps(size).items():
        for segment in range(segments):
            step, piece = first + 2 * segment, edge.tree * segments + segment
            sender, receiver = turns[edge.parent], turns[edge.child]
            sender[step] = sender.get(step, idle)._replace(child=edge.child, sent=piece)
            receiver[step] = receiver.get(step, idle)._replace(parent=edge.parent, received=piece)
    return tuple(tuple(turn for _, turn in sorted(of_rank.items())) for of_rank in turns)
