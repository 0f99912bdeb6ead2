"""Horovod's timeline: what rank 0 did with each gradient, and when; read and counted.

    spans = read_timeline(folder / "timeline.json")
    timeline.messages(spans)                         # the all-reduces that were really made, with what was in each

Horovod writes Chrome's trace format, which https://ui.perfetto.dev opens, with each gradient as a process of its own. A
gradient first waits until every rank has it (NEGOTIATE_ALLREDUCE); then it is copied into the fusion buffer, sent and
added up with all that is in there, and copied back.

Sources: Horovod 0.28.1, docs/timeline.rst and horovod/common/timeline.cc; "Trace Event Format", Google 2016.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

NEGOTIATE, COPY_IN, COPY_OUT = "NEGOTIATE_ALLREDUCE", "MEMCPY_IN_FUSION_BUFFER", "MEMCPY_OUT_FUSION_BUFFER"
MESSAGES = ("GLOO_ALLREDUCE", "MPI_ALLREDUCE", "MPI_ADASUM_ALLREDUCE")


class TimelineSpan(NamedTuple):
    """What happened to one gradient from `start` to `end`, in seconds since the timeline's first event."""

    tensor: str
    activity: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


def read_timeline(path: str | Path) -> list[TimelineSpan]:
    """The activities in a timeline, in the order in which they began. What had not ended is left out.

    Raises:
        OSError: if there is no such file.
        ValueError: if it is not what Horovod writes.
    """
    text = Path(path).read_text(encoding="utf-8")
    try:
        return _spans(json.loads(text))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{path} is not a timeline of Horovod: {error!r}") from None


def _spans(events: Sequence[dict[str, Any]]) -> list[TimelineSpan]:
    named = [event for event in events if event["ph"] == "M" and event["name"] == "process_name"]
    names = {event["pid"]: event["args"]["name"] for event in named if "name" in event["args"]}
    first = min(event["ts"] for event in events if "ts" in event)
    open_now: dict[int, list[tuple[str, float]]] = {pid: [] for pid in names}
    spans = []
    for event in events:
        if event["ph"] not in ("B", "E"):
            continue
        pid, seconds = event["pid"], (event["ts"] - first) / 1e6
        if event["ph"] == "B":
            open_now[pid].append((event["name"], seconds))
        elif open_now[pid]:  # else it began before the recording did
            activity, start = open_now[pid].pop()
            spans.append(TimelineSpan(names[pid], activity, start, seconds))
    return sorted(spans, key=lambda span: span.start)


def messages(spans: Sequence[TimelineSpan]) -> list[list[str]]:
    """The gradients in each all-reduce, in the order in which these were made.

    Horovod makes one after the other, so gradients whose all-reduces overlap were in the same.
    """
    made: list[list[str]] = []
    end = 0.0
    for span in sorted((span for span in spans if span.activity in MESSAGES), key=lambda span: span.start):
        if not made or span.start >= end:
            made.append([])
        made[-1].append(span.tensor)
        end = max(end, span.end)
    return made


def steps(spans: Sequence[TimelineSpan]) -> list[list[TimelineSpan]]:
    """The activities of each training step: a step begins when a gradient is handed over for another time."""
    found: list[list[TimelineSpan]] = []
    seen: set[str] = set()
    for span in spans:
        if span.activity == NEGOTIATE:
            if not found or span.tensor in seen:
                found.append([])
                seen = set()
            seen.add(span.tensor)
        if found:
            found[-1].append(span)
    return found
