"""A job that was started: its state, its logs, its metrics, and the way to stop it.

Every target gives the same Run. Workers print metrics as JSON lines (`place.report`), so their metrics come home with
their logs.

    with launcher.launch(job) as run:
        for line in run.logs(follow=True):
            print(line.worker, line.text)
    run.metrics     # a table: worker, rank, step, seconds, loss, accuracy, samples_per_second, ...
"""

from __future__ import annotations

import contextlib
import json
import re
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from workshop_utils.jobs import PlainError
from workshop_utils.logs import RunLog

if TYPE_CHECKING:
    import pandas as pd

METRIC_COLUMNS = ("worker", "rank", "step", "seconds", "loss", "accuracy", "samples_per_second", "bytes_sent")

# Rank 1 under `mpirun --tag-output` (Open MPI 4 and 5) is [1,1]<stdout>: and [1,mpirank:1,algo-1]<stdout>: on
# SageMaker; under our own drivers it is [worker-1]<stdout>:
_TAG = re.compile(
    r"\[(?:[^\],]*,(?:mpirank:)?(?P<rank>\d+)(?:,algo-\d+)?|(?P<name>worker-\d+))\]"
    r"<(?P<stream>stdout|stderr)>: ?(?P<text>.*)"
)
# mpirun and its child both put the child into a process group; the second one is refused, and prints this. And PyTorch
# looks for names of the addresses in a network namespace, where nobody has one. And a bar of tqdm's within another goes
# up a line after each of its states.
_NOISE = re.compile(
    r"\[\S+\] plm:ssh: Warning: setpgid\(|.*\[c10d\] The hostname of the client socket cannot be retrieved"
    r"|(.*\d/\d+ \[.*)?\x1b\[A$"
)
STACK = "stack"  # the stream of what processes print when they are asked where they stand
Record = dict[str, Any]
RECORD_NUMBERS = {
    "metric": ("time", "step"),
    "start": ("time", "pid"),
    "device": ("time", "passes", "host_share", "late_share"),
}  # what each kind must have, as numbers


class RunState(StrEnum):
    """Where a run is in its life. The last three are final."""

    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    STOPPED = "stopped"


class RunFailed(PlainError, RuntimeError):
    """A run that ended badly; the message names the worker, how it ended and its last lines."""


@dataclass(frozen=True)
class LogLine:
    """One line that a worker printed, `seconds` after the launch."""

    worker: str
    text: str
    seconds: float
    stream: str = "stdout"

    def __str__(self) -> str:
        return f"[{self.worker}] {self.text}"


class Run(ABC):
    """A started job. Leaving its `with` block stops whatever still runs.

    Attributes:
        keeps_logs: whether every process's log is a file; at the end `outputs` gets a copy (see `logs`).
        waits_for: what the job is still waiting for, such as free nodes; empty once it runs.
        device: what device is emulated; None where there is none.
        notices: what the target has warned of so far, such as why a pod cannot start; each is in the log, too.
        remark: what is wrong with measurements on emulated devices, once the run has ended; "" if nothing is.
    """

    keeps_logs: bool = True
    waits_for: str = ""
    notices: Sequence[str] = ()
    device: str | None = None
    remark: str = ""

    def __init__(self, name: str, workers: tuple[str, ...], outputs: str | None = None) -> None:
        self.name = name
        self.workers = workers
        self.launched_at = time.time()
        self._ended_at: float | None = None
        self._state = RunState.RUNNING
        self._reason = ""
        self._arrived: list[LogLine | Record] = []
        self._records: list[Record] = []
        self._log = RunLog(name, outputs)
        self._changed = threading.Condition()

    # What a target implements.

    @abstractmethod
    def _request_stop(self) -> None:
        """Ask the target to end everything; `_finish` follows once it has."""

    def _receive_lines(self, worker: str, texts: Sequence[str], stream: str) -> None:
        """Take in lines that have come together."""
        with self._changed:
            for text in texts:
                self._receive_line(worker, text, stream)
            self._log.flush()

    def _receive_line(self, worker: str, text: str, stream: str = "stdout") -> None:
        """Take in a line that a worker, or what has started workers, has printed: metric records, or lines of a log."""
        for name, line, origin in attributed(worker, text, stream):
            record, seconds = _parse_record(line) if origin == "stdout" else None, self.seconds
            with self._changed:
                self._records += [record] if record else []
                self._arrived.append(
                    record or LogLine(name, line, seconds, self._stream_of(worker, name, line, origin))
                )
                try:
                    if self.keeps_logs:
                        self._log.write(name, line)
                except OSError as error:
                    problem = (
                        f"no more of its log is kept: {error.filename or self._log.folder}: {error.strerror}"
                    )
                    self._arrived.append(LogLine(self.name, problem, seconds, "stderr"))
                self._changed.notify_all()

    def _stream_of(self, process: str, worker: str, text: str, stream: str) -> str:
        """The stream of a worker's line, which `process` has printed; what is no output of the script has its own."""
        return stream

    def _finish(self, state: RunState, reason: str = "") -> None:
        """Enter a final state, once the logs are in the outputs; all that the run started must be gone by now."""
        ended_at = time.time()
        with self._changed:
            self._log.close()
        self._log.hand_over()  # perhaps to a slow share: meanwhile others may read the run
        with self._changed:
            if self._state is RunState.RUNNING:
                self._state, self._reason, self._ended_at = state, reason, ended_at
            self._changed.notify_all()

    # What users call.

    @property
    def state(self) -> RunState:
        """Where the run is now."""
        return self._state

    @property
    def reason(self) -> str:
        """Why it failed, in a sentence for people; empty otherwise."""
        return self._reason

    @property
    def seconds(self) -> float:
        """Seconds since the launch, up to the run's end."""
        return (self._ended_at or time.time()) - self.launched_at

    @property
    def log_folder(self) -> Path | None:
        """Where the log of each process is, as `worker-0.log`; None before anything was printed."""
        return self._log.folder

    @property
    def records(self) -> list[Record]:
        """Every metric record so far, as the workers printed them."""
        return self._records_of("metric")

    @property
    def starts(self) -> list[Record]:
        """When each worker reported that it had started, with its process id."""
        return self._records_of("start")

    @property
    def devices(self) -> list[Record]:
        """What each rank with an emulated device told: its `passes`, `host_share` of a core and `late_share`."""
        return self._records_of("device")

    def _records_of(self, kind: str) -> list[Record]:
        return [each for each in list(self._records) if each["workshop"] == kind]

    @property
    def metrics(self) -> pd.DataFrame:
        """The metrics so far, one row a report, in the order in which they came.

        Columns: worker, rank, step, seconds since the launch, loss, accuracy, samples_per_second, bytes_sent,
        then whatever else the script reported. What a report did not name is NaN.
        """
        import pandas as pd  # here, since it takes longer to import than a launch may take

        table = pd.DataFrame(self.records)
        if "time" in table:
            table["seconds"] = table["time"] - self.launched_at
        others = [name for name in table.columns if name not in {*METRIC_COLUMNS, "workshop", "time"}]
        return table.reindex(columns=[*METRIC_COLUMNS, *others])

    def logs(self, follow: bool = False, worker: str | None = None) -> Iterator[LogLine]:
        """The lines that the workers (or one of them) printed; with `follow`, until the run ends.

        Metric records are not among them. An interrupt while following stops the run.
        """
        lines = (each for each in self.arrivals(follow) if isinstance(each, LogLine))
        return (line for line in lines if worker in (None, line.worker))

    def arrivals(self, follow: bool = False, start: int = 0) -> Iterator[LogLine | Record]:
        """Lines of all workers and records of all kinds as they came, from number `start` on; `follow` as in `logs`."""
        position = start
        with stopped_by_interrupts(self):
            while True:
                with self._changed:
                    if follow and position == len(self._arrived) and self._state is RunState.RUNNING:
                        self._changed.wait(timeout=0.5)
                    fresh, running = self._arrived[position:], self._state is RunState.RUNNING
                position += len(fresh)
                yield from fresh
                if not fresh and not (follow and running):
                    return

    def wait(self, timeout_seconds: float | None = None) -> Self:
        """Return once the run has ended well. An interrupt while waiting stops the run.

        Raises:
            RunFailed: if it failed; the message says which worker, how, and what it printed last.
            TimeoutError: if `timeout_seconds` pass first; the run goes on.
        """
        deadline = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        with stopped_by_interrupts(self), self._changed:
            while self._state is RunState.RUNNING:
                if deadline is not None and time.monotonic() >= deadline:
                    raise TimeoutError(f"{self.name} still runs after {timeout_seconds:g} s")
                # A short wait, since a long one cannot be interrupted on every platform.
                self._changed.wait(timeout=0.5)
        if self._state is RunState.FAILED:
            raise RunFailed(self._reason)
        return self

    def stop(self) -> None:
        """End the run now; returns when nothing of it is left. Does nothing to a run that has ended."""
        if self._state is RunState.RUNNING:
            self._request_stop()
        with self._changed:
            self._changed.wait_for(lambda: self._state is not RunState.RUNNING)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"<Run {self.name}: {self.state}, {self.seconds:.1f} s>"


@contextlib.contextmanager
def stopped_by_interrupts(run: Run) -> Iterator[None]:
    """Let Ctrl-C in the block stop `run`; a notebook shows that in a sentence, without our frames."""
    try:
        yield
    except KeyboardInterrupt as error:
        run.stop()
        text = f"KeyboardInterrupt: {run.name}: {run.state}, nothing is left running"
        error._render_traceback_ = lambda: [text]  # type: ignore[attr-defined]  # see `jobs.PlainError`
        raise


@contextlib.contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Let Ctrl-C, however often it comes, interrupt only at the end of the block; once, if it did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if came and not isinstance(sys.exc_info()[1], KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def attributed(name: str, text: str, stream: str) -> Iterator[tuple[str, str, str]]:
    """Worker, text and stream of what a line of the process `name` holds: usually itself, or a tagged worker's.

    mpirun and an elastic driver print the lines of the processes that they start, each with a tag. Where a rank's
    output ends, Open MPI writes a zero and no new line; then one line holds several ranks' output.
    """
    *ended, last = text.split("\0")
    for part in (*ended, last):
        tagged = _TAG.match(part)
        if tagged:
            name = tagged["name"] or f"worker-{tagged['rank']}"
            part, stream = tagged["text"], tagged["stream"]
        if "\r" in part:  # of a progress bar, the last state
            part = part.rstrip("\r").rpartition("\r")[2]
        if (part or not ended) and not _NOISE.match(part):
            yield name, part, stream


def _parse_record(text: str) -> Record | None:
    """The record in `text`, or None for a line of the log, even one that only looks like a record."""
    if not text.startswith('{"workshop": '):
        return None
    try:
        record: Record = json.loads(text)
    except (ValueError, RecursionError):
        return None
    numbers = RECORD_NUMBERS.get(str(record["workshop"]), ("",))
    numbers += () if record.get("rank", "") is None else ("rank",)
    whole = isinstance(record.get("worker"), str) and all(_is_number(record.get(name)) for name in numbers)
    return record if whole else None


def _is_number(value: object) -> bool:
    # 2⁵³: beyond it a table's 64-bit numbers no longer hold it exactly.
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 2**53
