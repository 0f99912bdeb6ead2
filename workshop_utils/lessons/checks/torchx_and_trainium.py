"""Checks of lesson 13, TorchX and Trainium; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import Wrong, exercise, expect, questions, result_of

__getattr__ = questions(__name__)

MASK = 4
NEURON, OLD_NEURON, EFA = "aws.amazon.com/neuron", "aws.amazon.com/neurondevice", "vpc.amazonaws.com/efa"
CORES = "aws.amazon.com/neuroncore"


@exercise
def ranks_of_nodes(answer: Callable[[int, int, int], int]) -> str:
    """`answer(node, local_rank, processes_per_node)` is the rank among all."""
    for node, local_rank, per_node in ((0, 0, 32), (0, 31, 32), (1, 0, 32), (1, 5, 32), (3, 1, 2)):
        got, right = result_of(answer, node, local_rank, per_node), node * per_node + local_rank
        of = f"process {local_rank} of node {node}, with {per_node} on each"
        if got == node + local_rank != right:
            raise Wrong(f"{of}: you gave {got}, also the rank of another process: count whole nodes before.")
        if got == local_rank * per_node + node != right:
            raise Wrong(f"{of}: you gave {got}, dealt out in turn; a node's ranks follow each other.")
        expect(got, right, of, f"{node} nodes with {per_node} ranks each come before it")
    return "so rank 32 is the first of the second node, and two ranks of one chip are neighbours."


@exercise
def limits_of_a_pod(answer: Mapping[str, Any]) -> str:
    """`answer` holds a pod's limits, by resource, for one trn1n.32xlarge with its 16 chips and 16 interfaces."""
    if not isinstance(answer, Mapping):
        raise Wrong(f"you gave {answer!r}; it must hold an amount for each resource, such as {{'cpu': 1}}.")
    if OLD_NEURON in answer:
        pending = "no node offers it, so the pod stays Pending, and only `kubectl describe pod` says why"
        raise Wrong(f"{OLD_NEURON} is a name that Neuron dropped in 2.20: {pending}.")
    if CORES in answer and NEURON not in answer:
        chips = f"a pod that takes the whole machine asks for its chips, {NEURON}"
        raise Wrong(f"{CORES} is for several pods that share a machine's cores; {chips}.")
    for name, because in (
        (NEURON, "it counts chips; a chip's two cores come with it"),
        (EFA, "a trn1n has twice the eight interfaces of a trn1, and one that is not asked for is not there"),
    ):
        if name not in answer:
            raise Wrong(f"{name} is missing: the device plugin hands out nothing that was not asked for.")
        if str(answer[name]) != "16":
            raise Wrong(f"{name} is {answer[name]!r}; it must be 16: {because}.")
    if more := sorted(set(answer) - {NEURON, EFA, "cpu", "memory"}):
        raise Wrong(f"{', '.join(more)}: no node of a Trainium cluster has that: the pod would never start.")
    return "limits of extended resources are also their requests, so one pod fills one machine."


@exercise
def hide(answer: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> str:
    """`answer(tokens, chosen, luck, others)`: the tokens as the model sees them.

    `chosen` are positions; `luck`, in [0, 1), and `others`, tokens, have one entry for each of them. Where luck is
    below 0.8, the model sees MASK; below 0.9, the other token; otherwise the token itself.
    """
    tokens = np.array([11, 12, 13, 14, 15, 16, 17])
    chosen, luck = np.array([1, 3, 4, 6]), np.array([0.1, 0.8, 0.9, 0.799])
    given = tokens.copy()
    got = np.asarray(result_of(answer, given, chosen, luck, np.array([90, 91, 92, 93])))
    if not np.array_equal(given, tokens):
        raise Wrong("it changed the tokens that it was given, and they are the labels: change a copy.")
    right = np.array([11, MASK, 13, 91, 15, 16, MASK])
    if got.shape != right.shape:
        raise Wrong(f"it gave an array of shape {got.shape}; it must be that of the tokens, {right.shape}.")
    reasons = dict(zip(chosen, ("MASK", "the other token", "what stood there", "MASK"), strict=True))
    for position in np.flatnonzero(got != right):
        gave = f"it gave {got[position]}"
        if position not in reasons:
            raise Wrong(f"position {position} was not chosen, and {gave} for {tokens[position]}.")
        at, reason = luck[chosen == position][0], f"{reasons[position]}, {right[position]}"
        raise Wrong(f"position {position} has luck {at:g}, so it must be {reason}; {gave}.")
    return "and since every sequence has as many chosen tokens, the mean of the ranks' losses is the batch's."
