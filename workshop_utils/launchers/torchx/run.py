"""A job that TorchX runs: the same Run as everywhere."""

from __future__ import annotations

import json
import re
import signal
from collections import defaultdict
from pathlib import Path
from typing import Any

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import hang
from workshop_utils.processes.group import Event, Process, ProcessGroup
from workshop_utils.processes.ports import PortReservation
from workshop_utils.runs import Run, RunState

QUEUE_SECONDS = 30 * 24 * 3600.0  # the longest that a run on a cluster is followed
LAST_LINES = 12  # of a worker that failed, in the message
# By which torchrun's lines tell their ranks apart (see `components.LINE_PREFIX`).
TAG = re.compile(r"\[worker-(\d+)\]: ?")
# What torchrun says of a failure. Source: torch 2.13, distributed/elastic/multiprocessing/errors, `ChildFailedError`.
FAILURE = re.compile(r"\s+(time|rank|exitcode)\s+: (\S+)")
# What ranks say that fail because another did.
VICTIM = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|recvBytes|DistNetworkError|DistStoreError"
)


class NodeLog:
    """The log of one node, in which torchrun has marked each rank's part, taken apart again.

    torchrun reads a rank's output while it is written. A line that it meets half-written comes in two parts, each
    marked, and another rank's line may stand in between; only the last part of a line is at an end.
    """

    def __init__(self) -> None:
        self._torn: dict[int, str] = {}

    def lines(self, text: str) -> list[tuple[int | None, str]]:
        """What is complete with this line of the log: rank and text; the rank is None for torchrun's own."""
        before, *parts = TAG.split(text)
        said: list[tuple[int | None, str]] = [(None, before)] if before or not parts else []
        marked = [(int(rank), part) for rank, part in zip(parts[::2], parts[1::2], strict=True)]
        for rank, part in marked[:-1]:
            self._torn[rank] = self._torn.get(rank, "") + part
        return said + [(rank, self._torn.pop(rank, "") + part) for rank, part in marked[-1:]]

    def rest(self) -> list[tuple[int | None, str]]:
        """What has no end, and will get none."""
        left: list[tuple[int | None, str]] = list(self._torn.items())
        self._torn = {}
        return left


class TorchXRun(Run):
    """A run of TorchX: its nodes are processes of this machine, or pods; its `handle` is TorchX's name for it.

    A run that could not be deleted on its cluster has failed, and says so, since it may still run.

    Lines that a node's torchrun printed itself are those of `node-0`, `node-1`, ...
    """

    def __init__(
        self,
        job: TrainingJob,
        nodes: int,
        process: Process,
        scratch: Path,
        files: dict[str, str],
        reservation: PortReservation,
        on_cluster: bool,
    ) -> None:
        super().__init__(job.name, tuple(f"worker-{rank}" for rank in range(job.workers)))
        self.handle: str | None = None
        self.nodes = tuple(f"node-{node}" for node in range(nodes))
        self._job, self._reservation = job, reservation
        self._ended: dict[str, Any] = {}
        self._on_cluster = on_cluster
        self._left = ""
        self._cancelled = False
        self._process_states: dict[int, str] = {}
        self._logs: dict[tuple[int, str], NodeLog] = defaultdict(NodeLog)
        self._group = ProcessGroup(
            [process],
            self._on_event,
            # A cluster ends its pods itself; how long they wait for their turn is for the queue to say.
            timeout_seconds=QUEUE_SECONDS if on_cluster else job.timeout_seconds,
            scratch=scratch,
            files=files,
        )

    def _request_stop(self) -> None:
        self._group.stop()

    def _on_event(self, event: Event) -> None:
        kind = event["event"]
        if kind == "line" and event["stream"] == "stdout" and event["text"].startswith('{"event": '):
            self._hear(json.loads(event["text"]))
        elif kind == "line":
            self._receive_line("torchx", event["text"], "stderr")
        elif kind == "silent":
            self._process_states = {int(pid): state for pid, state in event["processes"].items()}
        elif kind == "ended":
            for (node, stream), log in self._logs.items():
                self._say(node, stream, log.rest())
            self._reservation.release()
            self._finish(*self._verdict(event))

    def _hear(self, told: dict[str, Any]) -> None:
        """Take in an event of the driver."""
        if told["event"] == "submitting":
            self.handle = told["handle"]
        elif told["event"] == "cancelled":
            self._cancelled = True
        elif told["event"] == "left":
            self._left = told["said"]
        elif told["event"] == "ended":
            self._ended = told
        else:
            node, stream = told["node"], told["stream"]
            self._say(node, stream, self._logs[node, stream].lines(told["text"]))

    def _say(self, node: int, stream: str, said: list[tuple[int | None, str]]) -> None:
        for rank, text in said:
            self._receive_line(f"worker-{rank}" if rank is not None else self.nodes[node], text, stream)

    def _verdict(self, event: Event) -> tuple[RunState, str]:
        if event["outcome"] == "succeeded":
            return RunState.SUCCEEDED, ""
        if self._left or (self._on_cluster and self.handle and not (self._cancelled or self._ended)):
            namespace, _, job = (self.handle or "").rpartition("/")[2].partition(":")
            return RunState.FAILED, (
                f"{self.name}: {self._left or 'nobody knows whether it was cancelled'}. Delete it with kubectl delete "
                f"jobs.batch.volcano.sh {job} --namespace {namespace}"
            )
        if event["outcome"] == "stopped":
            return RunState.STOPPED, ""
        if event["outcome"] == "timeout":
            return RunState.FAILED, (
                f"{self.name} did not end within its timeout of {self._job.timeout}. "
                f"{hang.diagnosis(self, self._process_states)}{hang.shown_stacks(self)}"
            )
        return RunState.FAILED, self._blame(event)

    def _blame(self, event: Event) -> str:
        """Who failed, how, and what it printed last."""
        if event.get("reason"):
            return f"{self.name} could not be started: {event['reason']}"
        if event["code"] is None:
            return f"{self.name} failed: the process that watches over it was killed; its workers were ended with it"
        said = self._ended.get("said", "")
        found = self._first_failure()
        if found is None:
            name = next((name for name in ("torchx", *self.nodes) if self._last_lines(name)), "torchx")
            how = f": {said}" if said else f": TorchX says {self._ended.get('state', 'nothing')}."
            return f"{self.name} failed{how}{self._shown(name) if not said else ''}"
        rank, code = found
        how = f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"
        others = "; the others were stopped" if len(self.workers) > 1 else ""
        return (
            f"{self.name} failed: worker-{rank} (rank {rank}) {how}{others}.{self._shown(f'worker-{rank}')}"
        )

    def _first_failure(self) -> tuple[int, int] | None:
        """Rank and exit code of the worker that failed first, as torchrun on its node tells it."""
        failures = []
        for node in self.nodes:
            values: dict[str, str] = {}
            for line in self.logs(worker=node):
                if match := FAILURE.match(line.text):
                    values[match[1]] = match[2]
                    if match[1] == "exitcode":  # the last of the three
                        failures.append(dict(values))
        if not failures:
            return None
        # Times are in whole seconds; of those that are equal, one that lost its peer was not the first.
        first = min(failures, key=lambda each: (each["time"], self._is_victim(each["rank"])))
        return int(first["rank"]), int(first["exitcode"])

    def _is_victim(self, rank: str) -> bool:
        return any(VICTIM.search(line) for line in self._last_lines(f"worker-{rank}"))

    def _last_lines(self, name: str) -> list[str]:
        return [line.text for line in self.logs(worker=name)][-LAST_LINES:]

    def _shown(self, name: str) -> str:
        last = self._last_lines(name)
        return " Its last lines:\n  " + "\n  ".join(last) if last else " It had printed nothing."


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"
