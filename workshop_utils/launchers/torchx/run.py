"""What torchrun prints, as the log of a run: the lines of each rank, and which of them failed first."""

from __future__ import annotations

import re
from typing import Any

from workshop_utils.launchers import output
from workshop_utils.launchers.local.run import ProcessRun
from workshop_utils.runs import Run, RunState

# How torchrun is asked to mark a rank's line.
LINE_PREFIX_VARIABLE, LINE_PREFIX = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "[worker-${rank}]: "
RANK = re.compile(r"\[worker-(\d+)\]: ?")
# What torchrun prints about a failure: its time, the rank and the exit code. Source: torch 2.13,
# distributed/elastic/multiprocessing/errors, `ChildFailedError`.
FAILURE = re.compile(
    r"^ +time +: (\S+)\n(?: +host .*\n)? +rank +: (\d+).*\n +exitcode +: (-?\d+)", re.MULTILINE
)
# The last words of a rank that fails because another one did.
VICTIM = re.compile(
    r"Connection (closed by peer|reset by peer|refused)|Broken pipe|recvBytes|DistNetworkError|DistStoreError"
)


class TorchrunRun(Run):
    """A run each of whose nodes is a torchrun, which marks the lines of its ranks.

    torchrun reads a rank's output while it is being written. A half-written line comes in several parts, each marked,
    and other ranks' lines may stand in between; only the last part on a line ends one. The log of the run has each
    whole line with its worker; lines that torchrun printed itself are those of the node.

    Attributes:
        handle: what TorchX calls the run; on a cluster, the handle that `torchx status` takes.
        nodes: node-0, node-1, ...
    """

    def __init__(self, handle: str, nodes: int, *arguments: Any) -> None:
        self.handle, self.nodes = handle, tuple(f"node-{node}" for node in range(nodes))
        self._torn: dict[tuple[str, str, str], str] = {}  # by node, stream and rank
        super().__init__(*arguments)

    def _receive_line(self, worker: str, text: str, stream: str = "stdout") -> None:
        own, *parts = RANK.split(text)
        if own or not parts:
            super()._receive_line(worker, own, stream)
        for rank, part in zip(parts[::2], parts[1::2], strict=True):
            key = (worker, stream, rank)
            self._torn[key] = self._torn.get(key, "") + part
        if parts:
            super()._receive_line(f"worker-{rank}", self._torn.pop(key), stream)

    def _finish(self, state: RunState, reason: str = "") -> None:
        for (_, stream, rank), text in self._torn.items():  # these will never be whole
            super()._receive_line(f"worker-{rank}", text, stream)
        super()._finish(state, reason and (self._first_failure() or reason))

    def _first_failure(self) -> str:
        """Which worker failed first, how, and what it printed last; empty if torchrun has not said."""
        reports = ["\n".join(line.text for line in self.logs(worker=node)) for node in self.nodes]
        failures = []
        for time, rank, code in (failure for report in reports for failure in FAILURE.findall(report)):
            texts = [line.text for line in self.logs(worker=f"worker-{rank}")]
            # Times are in whole seconds; of those that are equal, one that lost its peer was not the first.
            is_victim = any(map(VICTIM.search, texts[-output.LAST_LINES :]))
            failures.append((time, is_victim, int(rank), code, texts))
        if not failures:
            return ""
        _, _, rank, code, texts = min(failures)
        others = "; the others were stopped" if len(self.workers) > 1 else ""
        who = f"worker-{rank} (rank {rank}) {output.how(int(code))}"
        return f"{self.name} failed: {who}{others}. {output.last_lines(texts)}"


class TorchXRun(TorchrunRun, ProcessRun):
    """A run of TorchX's scheduler `local_cwd`: the processes that it describes, under a supervisor."""
