"""What each rank of a machine shows to all the others at once, and how all wait for each other: MPI's windows.

A message in shared memory is a matter of two ranks, and each tells the other that it has been posted, and taken. Where
all ranks read from all, that would be N − 1 times the telling. Instead each rank counts its *steps*, all of them the
same ones, and a rank that has come to a step waits until the others have too. Then it may read

- copies that the others have put into their mailboxes (`everyones`): small arrays, written once and read N − 1 times;
- the others' arrays where they lie (`Window`): large ones, of which each rank reads the part that it needs.

Heads and copies stand in two places by turns. Who shows something for the third time has seen that the others had
come to the second, and so had done with the first.

Source: MPI 4.1, sections 12.2.3 (MPI_Win_allocate_shared) and 12.5.1 (MPI_Win_fence).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from workshop_utils.comm.communicator import Array
from workshop_utils.comm.mailbox import (
    PIECE,
    READ,
    SLEEPS,
    SLOTS,
    STEPS,
    Channel,
    counters,
    head,
    head_of_place,
    heads,
    slots,
)

if TYPE_CHECKING:
    from workshop_utils.comm.shared_memory import SharedMemoryCommunicator

TURNS = 2
ROOM = SLOTS * PIECE // TURNS  # bytes of the largest array that is shown as a copy
_MOST_KINDS = 256  # of copies, of which views are kept: making one takes as long as a small message


class Board:
    """Steps, heads and copies of all ranks; `mailboxes` are theirs, by rank."""

    def __init__(self, owner: SharedMemoryCommunicator, mailboxes: list[np.ndarray]) -> None:
        self._owner = owner
        of_rank = {rank: counters(mailbox, rank) for rank, mailbox in enumerate(mailboxes)}
        self._own = of_rank.pop(owner.rank)
        self._others = of_rank
        of_ranks = [heads(mailbox, rank) for rank, mailbox in enumerate(mailboxes)]
        self._heads = [[of_rank[turn] for of_rank in of_ranks] for turn in range(TURNS)]
        self._rooms = [slots(mailbox, rank, TURNS) for rank, mailbox in enumerate(mailboxes)]
        self._copies: dict[tuple[np.dtype, int], list[list[Array]]] = {}
        self._steps = self._turn = 0

    def everyones(self, array: Array) -> list[Array]:
        """What every rank has in `array`, of `ROOM` bytes at most, by rank; to be read before the next call."""
        owner, nbytes = self._owner, array.nbytes
        copies = self._copies_of(array.dtype, nbytes)[self._turn]
        copies[owner.rank][:] = array
        expected = head(owner.collective, array.dtype, nbytes)
        shown = self._show(expected)
        traffic = owner.traffic
        for peer in self._others:
            if shown[peer] != expected:
                owner._fail(owner._difference(peer, bytes(shown[peer]), expected, array.dtype))
            traffic.count_sent(peer, nbytes)
            traffic.count_received(peer, nbytes)
        return copies

    def arrays(self, mine: Array, segment: int, offset: int) -> list[Array]:
        """Every rank's array where it lies, by rank; this one's, `mine`, lies at `offset` in its `segment`."""
        owner = self._owner
        own_head = head_of_place(owner.collective, mine.dtype, mine.nbytes, segment, offset)
        shown = self._show(own_head)
        return [
            mine if rank == owner.rank else owner._located(rank, bytes(shown[rank]), own_head, mine)
            for rank in range(owner.size)
        ]

    def fence(self) -> None:
        """Come to the next step, and return once all others have."""
        self._steps = steps = self._steps + 1
        self._own[STEPS] = steps
        for peer, theirs in self._others.items():
            if theirs[SLEEPS]:
                self._owner._wake(peer, theirs)
        for peer, theirs in self._others.items():
            if theirs[STEPS] < steps:
                self._owner._await_step(peer, theirs, steps)

    def shown_ahead(self, peer: int) -> bytes:
        """The head of what `peer` shows at a step to which this rank has not come; no bytes if it is not ahead."""
        ahead = self._others[peer][STEPS] > self._steps
        return bytes(self._heads[self._turn][peer]) if ahead else b""

    def _show(self, own_head: bytes) -> list[memoryview]:
        """Show an array to all; the heads of what everybody shows, by rank, once all do."""
        turn, self._turn = self._turn, 1 - self._turn
        self._heads[turn][self._owner.rank][:] = own_head
        self.fence()
        return self._heads[turn]

    def _copies_of(self, dtype: np.dtype, nbytes: int) -> list[list[Array]]:
        """Room for copies of an array, by turn and by rank."""
        copies = self._copies.get((dtype, nbytes))
        if copies is None:
            if len(self._copies) == _MOST_KINDS:
                self._copies.clear()
            copies = self._copies[dtype, nbytes] = [
                [room[turn, :nbytes].view(dtype) for room in self._rooms] for turn in range(TURNS)
            ]
        return copies


class SharedWindow:
    """Every rank's array, to be read where it lies: see `communicator.Window`."""

    def __init__(self, owner: SharedMemoryCommunicator, board: Board, arrays: list[Array]) -> None:
        self._owner, self._board, self._arrays = owner, board, arrays
        self.mine = arrays[owner.rank]

    def read(self, source: int, part: slice) -> Array:
        owner, array = self._owner, self._arrays[source][part]
        owner._check(None, source)
        note_read(owner._incoming[source], array.nbytes)
        owner.traffic.count_received(source, array.nbytes)
        owner._record("recv", source, array, owner.now())
        return array

    def fence(self) -> None:
        self._board.fence()


def note_read(channel: Channel, nbytes: int) -> None:
    """Let the rank whose channel this is know that `nbytes` of its memory have been read once more."""
    channel.counters[READ] += nbytes
    channel.counters[READ + 1] += 1


def reads(channel: Channel) -> tuple[int, int]:
    """How many bytes of this rank's memory the other rank has read so far, and how many times."""
    return channel.counters[READ], channel.counters[READ + 1]
