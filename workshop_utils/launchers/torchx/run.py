"""A job that TorchX runs: the same Run as everywhere."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers import endings, hang
from workshop_utils.launchers.process_run import ProcessRun
from workshop_utils.processes.group import Event, Process
from workshop_utils.processes.ports import PortReservation
from workshop_utils.runs import RunState

QUEUE_SECONDS = 30 * 24 * 3600.0  # the longest that a run on a cluster is followed
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


class TorchXRun(ProcessRun):
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
        super().__init__(job.name, tuple(f"worker-{rank}" for rank in range(job.workers)), reservation)
        self.handle: str | None = None
        self.nodes = tuple(f"node-{node}" for node in range(nodes))
        self._job = job
        self._ended: dict[str, Any] = {}
        self._on_cluster = on_cluster
        self._left = ""
        self._cancelled = False
        self._process_states: dict[int, str] = {}
        self._logs: dict[tuple[int, str], NodeLog] = defaultdict(NodeLog)
        # A cluster ends its pods itself; how long they wait for their turn is for the queue to say.
        timeout_seconds = QUEUE_SECONDS if on_cluster else job.timeout_seconds
        self._start([process], timeout_seconds, scratch, files)

    def _on_event(self, event: Event) -> None:
        if event["event"] == "silent":
            self._process_states = {int(pid): state for pid, state in event["processes"].items()}
        elif event["event"] == "ended":
            for (node, stream), log in self._logs.items():
                self._say(node, stream, log.rest())
        super()._on_event(event)

    def _take_line(self, name: str, text: str, stream: str) -> None:
        if stream == "stdout" and text.startswith('{"event": '):
            self._hear(json.loads(text))
        else:
            self._receive_line(name, text, "stderr")

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
        told = self._cancelled or self._ended
        nobody_knows = self._on_cluster and self.handle and not told
        if event["outcome"] != "succeeded" and (self._left or nobody_knows):
            namespace, _, job = (self.handle or "").rpartition("/")[2].partition(":")
            return RunState.FAILED, (
                f"{self.name}: {self._left or 'nobody knows whether it was cancelled'}. Delete it with kubectl delete "
                f"jobs.batch.volcano.sh {job} --namespace {namespace}"
            )
        return super()._verdict(event)

    def _timed_out(self) -> str:
        return (
            f"{self.name} did not end within its timeout of {self._job.timeout}. "
            f"{hang.diagnosis(self, self._process_states)}{hang.shown_stacks(self)}"
        )

    def _blame(self, name: str, code: int | None, reason: str | None) -> str:
        if reason is not None:
            return endings.not_started(self.name, reason)
        if code is None:
            return endings.unwatched(self.name)
        found = self._first_failure()
        if found is not None:
            rank, code = found
            others = "; the others were stopped" if len(self.workers) > 1 else ""
            last = endings.last_lines(self._lines_of(f"worker-{rank}"))
            return f"{self.name} failed: worker-{rank} (rank {rank}) {endings.how(code)}{others}. {last}"
        if said := self._ended.get("said"):
            return f"{self.name} failed: {said}"
        texts = next(filter(None, map(self._lines_of, (name, *self.nodes))), [])
        state = self._ended.get("state", "nothing")
        return f"{self.name} failed: TorchX says {state}. {endings.last_lines(texts)}"

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
        last = self._lines_of(f"worker-{rank}")[-endings.LAST_LINES :]
        return any(VICTIM.search(line) for line in last)

    def _lines_of(self, name: str) -> list[str]:
        return [line.text for line in self.logs(worker=name)]
