"""The traces that the ranks of a run have written (`training.profiler`): as one picture, and as a table of its steps.

`merge` lays all ranks on one time axis, for Perfetto or chrome://tracing. `step_times` says how much of each step was
communication, and how much of that was exposed: communication during which the rank computed nothing.

| | with a GPU | without |
| --- | --- | --- |
| communication | NCCL's kernels, and gloo's | `gloo:...`, `mpi:...` or `ucc:...`, on threads of their own |
| computation | all other kernels | operators, `aten::...`, on any thread |

Communication lasts until the other ranks have done their part, so it includes waiting for them. On CPUs, Horovod's and
the workshop's own message passing do not go through PyTorch, and are not in its traces.

Clocks: a rank's times are those of its host's clock. The ranks of one host agree to about 0.1 ms; those of different
hosts only as well as the hosts' clocks do, which NTP keeps within a few milliseconds of each other.

Source of the format: Google, "Trace Event Format"; PyTorch's Kineto adds "cat", "args" and `baseTimeNanoseconds`, the
Unix time from which "ts" counts microseconds.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import re
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from workshop_utils.training.checkpoints import write_atomically

Event = dict[str, Any]

PATTERN = "trace-rank-*.json.gz"
GLOO = re.compile(r"(?:gloo|mpi|ucc):(\w+)")
NCCL = re.compile(r"nccl(?:Symk?)?(?:Dev)?Kernel_([A-Za-z]+)")
STEP = re.compile(r"ProfilerStep#(\d+)")

# Bytes of an element, by the names that Kineto gives types: of NCCL's messages, and of CPU operators' inputs.
ITEM_BYTES = {
    **dict.fromkeys(("double", "long", "long int"), 8),
    **dict.fromkeys(("float", "int"), 4),
    **dict.fromkeys(("half", "bfloat16", "short", "short int"), 2),
    **dict.fromkeys(("char", "signed char", "byte", "unsigned char", "bool"), 1),
}


class TraceError(ValueError):
    """A folder or file from which no traces can be read; the message names it."""


@dataclass(frozen=True)
class Trace:
    """What one rank has recorded, from `start_nanoseconds` of the Unix clock.

    `events` are Kineto's, but their "ts" are microseconds since the start. (As microseconds since 1970 they would be
    too long for a float that is right to a nanosecond.) If the block ended before its time, only the first
    `complete_steps` are whole.
    """

    path: Path
    rank: int
    world_size: int
    start_nanoseconds: int
    complete_steps: int | None
    events: list[Event]


def read_traces(folder: Path) -> list[Trace]:
    """The traces in `folder`, by rank. A rank that was killed may have left none.

    Raises:
        TraceError: if there are none, one is damaged, or they are not those of one run.
    """
    if not folder.is_dir():
        raise TraceError(f"there is no folder {folder}; a job that has profile-steps writes OUTPUTS/traces")
    traces: dict[int, Trace] = {}
    for path in sorted(folder.glob(PATTERN)):
        trace = read_trace(path)
        first = next(iter(traces.values()), trace)
        if trace.world_size != first.world_size:
            sizes = f"{path} is of a run of {trace.world_size} ranks, {first.path.name} of {first.world_size}"
            raise TraceError(f"{sizes}; keep each run's traces in a folder of their own")
        if trace.rank in traces:
            raise TraceError(f"{path} and {traces[trace.rank].path.name} are both of rank {trace.rank}")
        traces[trace.rank] = trace
    if not traces:
        raise TraceError(f"{folder} has no {PATTERN}; a job that has profile-steps writes OUTPUTS/traces")
    ends = [max(each["ts"] + each.get("dur", 0) for each in trace.events) for trace in traces.values()]
    starts = [trace.start_nanoseconds for trace in traces.values()]
    if max(starts) > min(start + 1000 * end for start, end in zip(starts, ends, strict=True)):
        raise TraceError(f"{folder} has traces of several runs, of different times; remove the old ones")
    return [traces[rank] for rank in sorted(traces)]


def read_trace(path: Path) -> Trace:
    """The trace in one file.

    Raises:
        TraceError: if the file is cut short, or is not a trace that `training.profiler` has written.
    """
    try:
        with gzip.open(path) as file:
            document = json.load(file)
        place, events = document["workshop"], document["traceEvents"]
        first = min(event["ts"] for event in events)
        return Trace(
            path,
            place["rank"] or 0,
            place["world_size"],
            document["baseTimeNanoseconds"] + round(1000 * first),
            document.get("complete_steps"),
            [{**event, "ts": event["ts"] - first} for event in events],
        )
    except (gzip.BadGzipFile, EOFError, zlib.error, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"{path} is cut short, or is not a trace that training.profiler has written"
        ) from error


def collective_of(event: Event) -> str | None:
    """The name of the collective that `event` is, with its bytes, such as "all_reduce 1.2 MB"; None if it is none.

    The bytes are those of the input of this rank: for an all-gather, of its own part.
    """
    category, args = event.get("cat"), event.get("args", {})
    if category == "kernel" and (kernel := NCCL.match(event["name"])):
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kernel[1]).lower()
        name = args.get("Collective name", name) if name == "generic" else name
        nbytes = args.get("In msg nelems", 0) * _item_bytes(args.get("dtype", ""))
    elif category == "user_annotation" and (work := GLOO.match(event["name"])):
        name = work[1]
        inputs = zip(args.get("Input Dims", ()), args.get("Input type", ()), strict=True)
        # A list of tensors has a list of shapes, and no type.
        nbytes = sum(math.prod(shape) * size for shape, dtype in inputs if (size := _item_bytes(dtype)))
    else:
        return None
    return f"{name} {_shown(nbytes)}" if nbytes else name


def _item_bytes(dtype: str) -> int:
    return ITEM_BYTES.get(dtype.removeprefix("c10::").lower(), 0)


def _shown(nbytes: int) -> str:
    unit, text = (1e6, "MB") if nbytes >= 1e6 else (1e3, "kB") if nbytes >= 1e3 else (1, "B")
    return f"{nbytes / unit:.3g} {text}"


# One picture.


def merge(traces: Sequence[Trace]) -> dict[str, Any]:
    """All ranks in one trace, which starts at 0: a rank is a process, and a thread or a GPU's stream a thread of it.

    Collectives are named as `collective_of` names them, have the category "communication", a colour of their own, and
    Kineto's name for them in "args".
    """
    origin = min(trace.start_nanoseconds for trace in traces)
    ranks = [_as_process(trace, (trace.start_nanoseconds - origin) / 1000) for trace in traces]
    return {"displayTimeUnit": "ms", "traceEvents": list(itertools.chain.from_iterable(ranks))}


def _as_process(trace: Trace, shift: float) -> list[Event]:
    """The events of a rank, `shift` microseconds later, as those of one process."""
    threads: dict[tuple[int, Any], int] = {}
    communicating: set[int] = set()
    events = [_label(trace.rank, 0, "process_name", f"rank {trace.rank} of {trace.world_size}")]
    for event in trace.events:
        # Kineto gives marks of its own processes that have words for ids.
        if not isinstance(event["pid"], int) or event["name"].startswith("process_"):
            continue
        thread = threads.setdefault((event["pid"], event["tid"]), len(threads) + 1)
        event = {**event, "pid": trace.rank, "tid": thread, "ts": round(event["ts"] + shift, 3)}
        if (name := collective_of(event)) is not None:
            args = {**event.get("args", {}), "event": event["name"]}
            event |= {"name": name, "cat": "communication", "cname": "thread_state_iowait", "args": args}
            communicating.add(thread)
        if "id" in event:  # of an arrow, which must not lead to another rank
            event["id"] = event["id"] * trace.world_size + trace.rank
        events.append(event)
    return events + [_label(trace.rank, thread, "thread_name", "communication") for thread in communicating]


def _label(rank: int, thread: int, kind: str, name: str) -> Event:
    return {"ph": "M", "name": kind, "pid": rank, "tid": thread, "ts": 0, "args": {"name": name}}


def write_merged(traces: Sequence[Trace], path: Path) -> None:
    """Write the merged trace to `path`, gzipped if its name ends in .gz; an older file is replaced at the end.

    Raises:
        TraceError: if `path` has the name of a rank's own trace.
        OSError: if it cannot be written.
    """
    if path.match(PATTERN) or path.is_dir():
        what = "a folder" if path.is_dir() else "the name of a rank's trace"
        raise TraceError(f"output is {path}, {what}; take a file such as merged.json.gz")
    content = json.dumps(merge(traces), separators=(",", ":")).encode()
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, gzip.compress(content, 6) if path.suffix == ".gz" else content)


# A table of the steps.


def step_times(traces: Sequence[Trace]) -> pd.DataFrame:
    """One row for each step and rank: `step`, `rank`, `step_ms`, `communication_ms`, `exposed_ms`.

    A step is what lies between two calls of `profiler.step()`. With C the union of the rank's communication intervals
    and K that of its computation intervals (see the module), and both cut to the step, communication is the length of
    C, and exposed communication that of C without K. A GPU runs kernels after the calls that launch them, so kernels
    that are left over from one step count towards the next.
    """
    rows = []
    for trace in traces:
        complete = [event for event in trace.events if event["ph"] == "X"]
        kernels = [event for event in complete if event.get("cat") == "kernel"]
        operators = [event for event in complete if event["name"].startswith("aten::")]
        communication = _intervals(event for event in complete if collective_of(event) is not None)
        computation = _intervals(event for event in kernels or operators if collective_of(event) is None)
        both = np.concatenate([communication, computation])
        marks = [event for event in complete if event.get("cat") == "user_annotation"]
        steps = {int(name[1]): mark for mark in marks if (name := STEP.fullmatch(mark["name"]))}
        for number in sorted(steps)[: trace.complete_steps]:
            start, end = steps[number]["ts"], steps[number]["ts"] + steps[number]["dur"]
            communicated = covered(communication, start, end)
            exposed = covered(both, start, end) - covered(computation, start, end)
            rows.append((number, trace.rank, (end - start) / 1000, communicated / 1000, exposed / 1000))
    table = pd.DataFrame(rows, columns=["step", "rank", "step_ms", "communication_ms", "exposed_ms"])
    return table.sort_values(["step", "rank"], ignore_index=True)


def _intervals(events: Iterable[Event]) -> np.ndarray:
    """Start and end of each event, in microseconds: an array of shape (events, 2)."""
    return np.array([(event["ts"], event["ts"] + event["dur"]) for event in events], float).reshape(-1, 2)


def covered(intervals: np.ndarray, begin: float, end: float) -> float:
    """The length of the union of `intervals`, of shape (n, 2), between `begin` and `end`."""
    starts, ends = np.clip(intervals[intervals[:, 0].argsort()], begin, end).T
    reached = np.maximum.accumulate(np.concatenate([[begin], ends]))[:-1]  # by the intervals before
    return float(np.maximum(ends - np.maximum(starts, reached), 0).sum())
