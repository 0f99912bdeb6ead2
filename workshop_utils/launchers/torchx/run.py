"""A job that TorchX runs on this machine: the same Run as everywhere."""

from __future__ import annotations

import re
from collections.abc import Callable

from workshop_utils.launchers import output
from workshop_utils.launchers.local.run import ProcessRun
from workshop_utils.network.ports import PortReservation
from workshop_utils.runs import Run, RunState

NODE = re.compile(r"\[(node-\d+)\]<(stdout|stderr)>: (.*)")  # as `follow` marks a line
RANK = re.compile(r"\[worker-(\d+)\]: ?")  # as torchrun does (see `components.LINE_PREFIX`)
# What torchrun prints about a failure. Source: torch 2.13, distributed/elastic/multiprocessing/errors,
# `ChildFailedError`.
FAILURE = re.compile(r"\s+(time|rank|exitcode)\s+: (\S+)")
# The last words of a rank that fails because another one did.
VICTIM = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|recvBytes|DistNetworkError|DistStoreError"
)


class NodeLogs:
    """Takes the logs of nodes apart again: torchrun has marked the lines of each rank there.

    torchrun reads a rank's output while it is being written. A half-written line comes in several parts, each marked,
    and other ranks' lines may stand in between; only the last part on a line ends one. `receive` gets each whole line
    with its worker; lines that torchrun printed itself are those of the node.
    """

    def __init__(self, receive: Callable[[str, str, str], None]) -> None:
        self._receive = receive
        self._torn: dict[tuple[str, str, str], str] = {}  # by node, stream and rank
        self._failure: dict[str, dict[str, str]] = {}  # being told, by node
        self.failures: list[dict[str, str]] = []  # `time`, `rank` and `exitcode` of each

    def take(self, node: str, text: str, stream: str) -> None:
        """Take in a line of the node's log."""
        own, *parts = RANK.split(text)
        if own or not parts:
            self._receive(node, own, stream)
            if match := FAILURE.match(own):
                self._failure.setdefault(node, {})[match[1]] = match[2]
                if match[1] == "exitcode":  # the last of the three
                    self.failures.append(self._failure.pop(node))
        for rank, part in zip(parts[::2], parts[1::2], strict=True):
            key = (node, stream, rank)
            self._torn[key] = self._torn.get(key, "") + part
        if parts:
            self._receive(f"worker-{rank}", self._torn.pop(key), stream)

    def end(self) -> None:
        """Pass on the lines that will never be whole."""
        for (_, stream, rank), text in self._torn.items():
            self._receive(f"worker-{rank}", text, stream)

    def reason(self, run: Run) -> str:
        """Which worker of `run` failed first, how, and what it printed last; empty if torchrun has not said."""

        def texts(failure: dict[str, str]) -> list[str]:
            return [line.text for line in run.logs(worker=f"worker-{failure['rank']}")]

        def order(failure: dict[str, str]) -> tuple[str, bool]:
            # Times are in whole seconds; of those that are equal, one that lost its peer was not the first.
            return failure["time"], any(map(VICTIM.search, texts(failure)[-output.LAST_LINES :]))

        if not self.failures:
            return ""
        first = min(self.failures, key=order)
        who = f"worker-{first['rank']} (rank {first['rank']}) {output.how(int(first['exitcode']))}"
        others = "; the others were stopped" if len(run.workers) > 1 else ""
        return f"{run.name} failed: {who}{others}. {output.last_lines(texts(first))}"


class TorchXRun(ProcessRun):
    """A run of TorchX's scheduler `local_cwd`; `handle` is TorchX's name for it, `nodes` are node-0, node-1, ..."""

    handle: str | None = None
    nodes: tuple[str, ...] = ()

    def __init__(self, name: str, workers: tuple[str, ...], reservation: PortReservation) -> None:
        super().__init__(name, workers, reservation)
        self._logs = NodeLogs(self._receive_line)

    def _take_line(self, name: str, text: str, stream: str) -> None:
        if match := NODE.match(text):
            node, stream, text = match.groups()
            self._logs.take(node, text, stream)
        elif text.startswith("local_cwd://"):
            self.handle = text
        else:
            self._receive_line(name, text, stream)

    def _finish(self, state: RunState, reason: str = "") -> None:
        self._logs.end()
        super()._finish(state, reason)

    def _blame(self, name: str, code: int) -> str:
        return self._logs.reason(self) or super()._blame(name, code)
