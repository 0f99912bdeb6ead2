"""What the ranks of one call returned, printed and sent, and how a notebook shows it: side by side."""

from __future__ import annotations

import html
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from workshop_utils.comm.communicator import Event

MOST_TEXT = 400  # characters of a value that are shown


@dataclass(frozen=True)
class RankResult:
    """What came of one rank.

    Attributes:
        value: what the program returned.
        lines: what it printed.
        messages: how many it sent through the workshop's communicator; None with another framework.
        bytes_sent: the payload of these messages; with another framework, what the kernel counted on the rank's TCP
            connections (`training.tcp_bytes`).
        seconds: from the program's start on this rank to its end.
        trace: the last 10,000 events of the communicator.
    """

    rank: int
    value: Any
    lines: tuple[str, ...]
    messages: int | None
    bytes_sent: float
    seconds: float
    trace: tuple[Event, ...] = field(default=(), repr=False)


@dataclass(frozen=True, repr=False, eq=False)
class Results(Sequence[RankResult]):
    """Of all ranks, in their order.

    Attributes:
        network: the links between them, and how they were emulated; None at full speed.
        warm: whether they were forked from a process that had imported the framework.
        seconds: from the call until all had ended.
    """

    ranks: tuple[RankResult, ...]
    network: str | None
    warm: bool
    seconds: float
    lines_are_shown: bool = False  # they were printed while they came

    @property
    def values(self) -> list[Any]:
        """What each rank returned."""
        return [each.value for each in self.ranks]

    @overload
    def __getitem__(self, rank: int) -> RankResult: ...
    @overload
    def __getitem__(self, rank: slice) -> Sequence[RankResult]: ...
    def __getitem__(self, rank: int | slice) -> RankResult | Sequence[RankResult]:
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
        head = "".join(f"<th>rank {rank}</th>" for rank in range(len(self.ranks)))
        rows = [f"<tr><th></th>{head}</tr>"]
        for label, texts in self._rows():
            cells = "".join(
                f'<td colspan="{len(ranks)}" style="text-align: center"><pre>{html.escape(text)}</pre></td>'
                for ranks, text in _folded(texts)
            )
            rows.append(f"<tr><th>{label}</th>{cells}</tr>")
        return f"<table><caption>{html.escape(self._summary())}</caption>{''.join(rows)}</table>"

    def _summary(self) -> str:
        start = "" if self.warm else ", started cold"
        return f"{len(self.ranks)} ranks, {self.seconds:.2f} s{start}" + (
            f"; {self.network}" if self.network else ""
        )

    def _rows(self) -> Iterator[tuple[str, list[str]]]:
        """What is shown: a label, and a text of each rank."""
        if any(each.value is not None for each in self.ranks):
            yield "returned", [_short(repr(each.value)) for each in self.ranks]
        if not self.lines_are_shown:
            for texts in itertools.zip_longest(*(each.lines for each in self.ranks), fillvalue=""):
                yield "printed", list(texts)
        yield "sent", [_sent(each) for each in self.ranks]
        yield "took", [f"{each.seconds:.3f} s" for each in self.ranks]


def _folded(texts: Sequence[str]) -> Iterator[tuple[list[int], str]]:
    """Neighbours with the same text as one: their ranks, and the text."""
    for text, group in itertools.groupby(enumerate(texts), key=lambda each: each[1]):
        yield [rank for rank, _ in group], text


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _short(text: str) -> str:
    return text if len(text) <= MOST_TEXT else f"{text[: MOST_TEXT - 3]}..."


def _sent(result: RankResult) -> str:
    count = (
        f"{result.messages} message{'s' * (result.messages != 1)}, " if result.messages is not None else ""
    )
    return f"{count}{result.bytes_sent:,.0f} bytes"
