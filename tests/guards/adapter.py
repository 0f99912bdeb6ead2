"""All that the guards know of the package's inside. When the package is rearranged, only this file changes.

Everything else in this folder goes through what people use: the command `workshop`, job folders, YAML files, notebooks.
"""

from __future__ import annotations

import contextlib
import io
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from workshop_utils import cli
from workshop_utils.comm import (
    central,
    double_tree,
    halving_doubling,
    hierarchical,
    parameter_server,
    ring,
    simulated,
    threads,
    tree,
)

PACKAGE = "workshop_utils"
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Answer:
    """What a command said: its exit code, both streams, and the traceback where it broke."""

    code: int
    out: str
    err: str
    traceback: str = ""


def workshop(*arguments: object) -> Answer:
    """`workshop ARGUMENTS`, in this process, as if it had been typed; nothing can be read from standard input."""
    out, err, broken, code = io.StringIO(), io.StringIO(), "", 0
    typed, sys.argv = sys.argv, ["workshop", *map(str, arguments)]
    keyboard, sys.stdin = sys.stdin, io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            cli.main()
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        code, broken = 1, traceback.format_exc()
    finally:
        sys.argv, sys.stdin = typed, keyboard
    return Answer(code, out.getvalue(), err.getvalue(), broken)


def problems_of_manifest(described: dict[str, Any]) -> list[str]:
    """What a cluster would have against the Kubernetes object `described`: of its schema, or else of its operator."""
    from workshop_utils.launchers.kubernetes import check

    return check.problems_of(described)


# Collectives: (communicator, array) → None, each of them a sum in place. Broadcasts begin at rank 0.
ALL_REDUCES: dict[str, Callable[[Any, Any], object]] = {
    "ring": ring.ring_all_reduce,
    "tree": tree.tree_all_reduce,
    "double tree": double_tree.double_tree_all_reduce,
    "double tree of one segment": partial(double_tree.double_tree_all_reduce, segments=1),
    "halving and doubling": halving_doubling.halving_doubling_all_reduce,
    "hierarchical in groups of 2": partial(hierarchical.hierarchical_all_reduce, group_size=2),
    "hierarchical in groups of 3": partial(hierarchical.hierarchical_all_reduce, group_size=3),
    "hierarchical in groups of 4": partial(hierarchical.hierarchical_all_reduce, group_size=4),
    "central": central.central_all_reduce,
}
REDUCES_AT_RANK_0: dict[str, Callable[[Any, Any], object]] = {"tree reduce": tree.tree_reduce}
BROADCASTS: dict[str, Callable[[Any, Any], object]] = {"tree broadcast": tree.tree_broadcast}


def on_threads(size: int, program: Callable[[Any], Any]) -> list[Any]:
    """What each of `size` ranks, threads of this process, returns from `program(communicator)`."""
    return threads.run(size, program)


def on_the_simulated_clock(size: int, program: Callable[[Any], Any]) -> list[Any]:
    """The same in virtual time."""
    return simulated.simulate(size, program).results


def sent_by(communicator: Any, act: Callable[[], Any]) -> tuple[Any, tuple[int, int]]:
    """What `act` returns, and the messages and bytes that this rank sends meanwhile."""
    communicator.traffic.reset()
    result = act()
    return result, (int(communicator.traffic.messages_sent.sum()), int(communicator.traffic.bytes_sent.sum()))


def descend(communicator: Any, servers: int, steps: int, target: Any, rate: float) -> Any:
    """Train towards `target` with synchronous parameter servers, the first ranks; the parameters of this rank."""
    parameters = np.zeros_like(target)

    def update(part: Any, gradient: Any) -> None:
        part -= rate * gradient

    arrangement = parameter_server.Arrangement(servers, communicator.size - servers, steps)
    parameter_server.train(communicator, arrangement, parameters, lambda now, step: now - target, update)
    return parameters
