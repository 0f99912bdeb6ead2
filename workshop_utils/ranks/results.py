"""What the ranks of one call returned, printed and sent, and how a notebook shows it: side by side."""

from __future__ import annotations

import contextlib
import html
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from reprlib import Repr
from typing import Any

import numpy as np

from workshop_utils.comm.communicator import Event
from workshop_utils.network import Network

MOST_TEXT = 400  # characters of a value, or of a line, that are shown
MOST_HTML = 100_000  # characters; a value with more is shown as text
MOST_LINES = 10  # of the first, and of the last, that are shown
MOST_COLUMNS = 16  # that a screen has room for


class _InOrder(Repr):
    """Python's short repr, but for dictionaries, whose keys it would sort."""

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        if x and level <= 0:
            return "{...}"
        parts = itertools.islice(x.items(), self.maxdict)
        shown = [f"{self.repr1(key, level - 1)}: {self.repr1(value, level - 1)}" for key, value in parts]
        return "{" + ", ".join([*shown, *["..."][: len(x) > self.maxdict]]) + "}"


# It reads only what it shows, and tolerates a `__repr__` that fails.
_REPR = _InOrder()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxdict = _REPR.maxarray = 40
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = MOST_TEXT


class _Html(str):
    """HTML, shown as it is; it does not equal a text of the same characters, which is shown as text."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Html) and str(self) == str(other)

    __hash__ = str.__hash__


@dataclass(frozen=True)
class RankResult:
    """One rank's result.

    Attributes:
        lines: what it printed.
        value: what it returned.
        messages: how many it sent through the workshop's communicator; None with another framework.
        bytes_sent: the payload of these messages; with another framework, what the kernel counted on the rank's TCP
            connections (`training.tcp_bytes`).
        seconds: from the program's start on this rank to its end; NaN, as `bytes_sent`, if the rank has failed.
        trace: the first 2,000 events of the communicator.
    """

    rank: int
    lines: tuple[str, ...]
    value: Any
    messages: int | None
    bytes_sent: float
    seconds: float
    trace: tuple[Event, ...] = field(default=(), repr=False)


@dataclass(frozen=True, repr=False, eq=False)
class Results(Sequence[RankResult]):
    """The results of all ranks, by rank.

    Attributes:
        network: the links between them, and how they were emulated; None at full speed.
        warm: whether they were forked from a process that had imported the framework.
        seconds: from the call until all had ended.
        device: what device each rank computed on; None without an emulated one.
        remark: what is wrong with measurements on emulated devices; "" if nothing is.
        died: those that might die and were killed, in the order of their deaths.
        program: the name of the function that was called; "" for a cell.
        arguments: those that it was called with, beside the group.
        links: the network that was asked for.
    """

    ranks: tuple[RankResult, ...]
    network: str | None
    warm: bool
    seconds: float
    lines_are_shown: bool = False  # they were printed while they came
    device: str | None = None
    remark: str = ""
    died: tuple[int, ...] = ()
    program: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    links: Network | None = None

    @property
    def values(self) -> list[Any]:
        """What each rank returned."""
        return [each.value for each in self.ranks]

    def __getitem__(self, rank: Any) -> Any:
        return self.ranks[rank]

    def __len__(self) -> int:
        return len(self.ranks)

    def __repr__(self) -> str:
        lines = [self._summary()]
        for label, texts in self._rows():
            for ranks, text in _folded(texts):
                lines += [f"{_named(ranks)} {label}: {line}" for line in text.splitlines()]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        table = list(self._rows(is_rich=True))
        columns = [ranks for ranks, _ in _folded([*zip(*(texts for _, texts in table), strict=True)])]
        align = "center" if len(columns) <= MOST_COLUMNS else "left"  # where one sees it without scrolling
        head = "".join(f'<th style="text-align: {align}">{_named(ranks)}</th>' for ranks in columns)
        rows, last = [f"<tr><th></th>{head}</tr>"], ""
        for label, texts in table:
            folded = _folded([texts[ranks[0]] for ranks in columns])
            cells = "".join(_cell(text, len(alike), align) for alike, text in folded)
            rows.append(f"<tr><th>{label if label != last else ''}</th>{cells}</tr>")
            last = label
        return f"<table><caption>{html.escape(self._summary())}</caption>{''.join(rows)}</table>"

    def _summary(self) -> str:
        start = "" if self.warm else ", started cold"
        head = f"{len(self)} rank{'s' * (len(self) > 1)}, {self.seconds:.2f} s{start}"
        return "; ".join(filter(None, (head, self.network, self.device, self.remark)))

    def _rows(self, is_rich: bool = False) -> Iterator[tuple[str, list[str]]]:
        """What is shown: a label, and a text of each rank; with `is_rich` that of a table is `_Html`."""
        if self.died or any(each.value is not None for each in self.ranks):
            values = [_returned(each.value, is_rich) for each in self.ranks]
            for rank in self.died:
                values[rank] = "was killed"
            yield "returned", values
        if not self.lines_are_shown:
            printed = list(itertools.zip_longest(*(each.lines for each in self.ranks), fillvalue=""))
            if (more := len(printed) - 2 * MOST_LINES) > 0:
                gap = f"... {more:,} lines more, in `results[rank].lines` ..."
                printed[MOST_LINES:-MOST_LINES] = [(gap,) * len(self)]
            yield from (("printed", [_short(text) for text in texts]) for texts in printed)
        failed = [math.isnan(each.seconds) for each in self.ranks]
        if not all(failed):
            pairs = list(zip(self.ranks, failed, strict=True))
            yield "sent", ["?" if has_failed else _sent(each) for each, has_failed in pairs]
            times = sorted(each.seconds for each, has_failed in pairs if not has_failed)
            span = f"{times[0]:.3f} to {times[-1]:.3f} s" if len(self) > MOST_COLUMNS else ""
            yield "took", [span or ("?" if no else f"{each.seconds:.3f} s") for each, no in pairs]


def _folded(texts: Sequence[Any]) -> Iterator[tuple[list[int], Any]]:
    """Neighbours with the same text, or texts, as one: their ranks, and the text."""
    for text, group in itertools.groupby(enumerate(texts), key=lambda each: each[1]):
        yield [rank for rank, _ in group], text


def _cell(text: str, columns: int, align: str) -> str:
    """A cell of the table; only the lines of an array, which have their own places, are not broken."""
    wrap = "pre" if "\n" in text else "pre-wrap; overflow-wrap: anywhere; min-width: 8ch"
    style = f"display: inline-block; text-align: left; margin: 0; white-space: {wrap}"
    pre = text if isinstance(text, _Html) else f'<pre style="{style}">{html.escape(text)}</pre>'
    return f'<td colspan="{columns}" style="text-align: {align}">{pre}</td>'


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _text(value: Any) -> str:
    """A number of NumPy as a number; other values as Python shows them, less of those that are long."""
    return str(value) if isinstance(value, np.generic) else _REPR.repr(value)


def _returned(value: Any, is_rich: bool) -> str:
    rich = _rich(value) if is_rich else ""
    return _Html(rich) if rich and len(rich) <= MOST_HTML else _short(_text(value))


def _rich(value: Any) -> str:
    """A value's own HTML; "" if there is none."""
    with contextlib.suppress(Exception):  # it has no such method, or one that fails
        rich = value._repr_html_()
        rich = rich[0] if isinstance(rich, tuple) else rich  # with metadata after it
        return rich if isinstance(rich, str) else ""
    return ""


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}..."


def _sent(result: RankResult) -> str:
    if result.messages is None:
        if math.isnan(result.bytes_sent):  # such as where a connection was closed meanwhile
            return "not known"
        return f"{result.bytes_sent:,.0f} bytes on TCP connections"
    return f"{result.messages:,} message{'s' * (result.messages != 1)}, {result.bytes_sent:,.0f} bytes"
