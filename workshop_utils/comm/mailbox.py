"""A rank's mailbox, memory that every rank of a machine maps: what lies where in it, and how a message passes through.

A mailbox has a *channel* for each rank:

| in a channel | bytes | in that to another rank | in that to itself, which all others read |
| --- | --- | --- | --- |
| line 0 | 64 | pieces posted | whether the rank sleeps |
| line 1 | 64 | pieces taken | steps that the rank has come (`board`) |
| line 2 | 64 | bytes and times that the other rank has read in windows | – |
| heads | 64 each | of what is in the slots | of what is shown, by turns |
| slots | 4 of 128 KB, at the end | pieces of messages | arrays that are shown, by turns |

Counters that different ranks write are never in one line of a cache.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from workshop_utils.comm import frames
from workshop_utils.comm.communicator import Array

SLOTS = 4
PIECE = 128 * 1024  # bytes of a slot

_LINE = 8  # of 8 bytes each
POSTED, TAKEN, READ = 0 * _LINE, 1 * _LINE, 2 * _LINE
SLEEPS, STEPS = 0 * _LINE, 1 * _LINE
HEADS = 4 * _LINE * 8
_HEAD = 64  # bytes kept for a head: the header, and the place of what is read where it lies
CHANNEL = 4096 + SLOTS * PIECE

_PLACE = struct.Struct("<QQ")  # number of the segment, 0 for "in the slots"; offset in it
_HEAD_USED = frames.HEADER.size + _PLACE.size

Publish = Callable[[int, "Channel", int], None]  # (peer, channel, POSTED or TAKEN)
Locate = Callable[[int, bytes, bytes, Array], Array]  # (source, head, the one that is due, an array like it)


def counters(memory: np.ndarray, index: int) -> memoryview:
    """The counters of channel `index` of a mailbox; each is read and written whole."""
    start = index * CHANNEL
    return memory[start : start + HEADS].data.cast("Q")


def heads(memory: np.ndarray, index: int) -> list[memoryview]:
    """The heads of channel `index`, one for each slot."""
    start = index * CHANNEL + HEADS
    return [head[:_HEAD_USED].data for head in memory[start : start + SLOTS * _HEAD].reshape(SLOTS, _HEAD)]


def slots(memory: np.ndarray, index: int, count: int = SLOTS) -> np.ndarray:
    """The memory of the slots of channel `index`, as `count` of them."""
    end = (index + 1) * CHANNEL
    return memory[end - SLOTS * PIECE : end].reshape(count, SLOTS * PIECE // count)


@functools.lru_cache(4096)
def head(collective: str, dtype: np.dtype, nbytes: int) -> bytes:
    """The head of an array that lies in the slots. The counters number the messages, so its sequence is 0."""
    return frames.message(collective, dtype, 0, nbytes) + _PLACE.pack(0, 0)


def head_of_place(collective: str, dtype: np.dtype, nbytes: int, segment: int, offset: int) -> bytes:
    """The head of an array that is read where it lies, `offset` bytes into a segment of its rank."""
    return frames.message(collective, dtype, 0, nbytes) + _PLACE.pack(segment, offset)


def place_in(head: bytes) -> tuple[int, int]:
    """Segment and offset that a head tells."""
    return _PLACE.unpack_from(head, frames.HEADER.size)


class Channel:
    """Slots from one rank to another, in the mailbox of the first.

    `number` pieces have been posted, or taken, by the rank that has this object; of the other's it hears by `look`.
    """

    def __init__(self, memory: np.ndarray, index: int, look: Any = None) -> None:
        self.counters = counters(memory, index)
        self.look = self.counters if look is None else look
        self.heads = heads(memory, index)
        self._slots = slots(memory, index)
        self._views: dict[np.dtype, list[np.ndarray]] = {}
        self.number = 0

    def slots(self, dtype: np.dtype) -> list[np.ndarray]:
        """The slots as arrays of as many whole elements as there is room for."""
        views = self._views.get(dtype)
        if views is None:
            room = PIECE // dtype.itemsize * dtype.itemsize
            views = self._views[dtype] = [slot[:room].view(dtype) for slot in self._slots]
        return views


class Sending:
    """A message on its way out, through the slots or, if its head tells a place, from there."""

    busy = False

    def __init__(self, publish: Publish) -> None:
        self._publish = publish

    def start(self, to: int, channel: Channel, array: Array, head: bytes, in_place: bool) -> None:
        """The next message, to rank `to`."""
        self._to, self._channel, self._array, self._at = to, channel, array, 0
        self._slots = channel.slots(array.dtype)
        self._head, self._in_place = head, in_place
        self._posted = False
        self.busy = True

    def move(self) -> bool:
        """Post the next piece; False if there is no room, or what has been posted is still being read."""
        channel = self._channel
        if self._posted:
            self.busy = channel.look[TAKEN] < channel.number
            return not self.busy
        number = channel.number
        if number - channel.look[TAKEN] >= SLOTS:
            return False
        slot = number % SLOTS
        if not self._at:
            channel.heads[slot][:] = self._head
        if not self._in_place:
            room = self._slots[slot]
            part = self._array[self._at : self._at + room.size]
            room[: part.size] = part
            self._at += part.size
            self.busy = self._at < self._array.size
        channel.number = number + 1
        self._publish(self._to, channel, POSTED)
        self._posted = self._in_place
        return True


class Receiving:
    """A message on its way in: into an array or, with `reduce`, combined with one."""

    busy = False

    def __init__(self, publish: Publish, locate: Locate) -> None:
        self._publish, self._locate = publish, locate

    def start(self, source: int, channel: Channel, array: Array, expected: bytes, reduce: Any) -> None:
        """The next message, from rank `source`, which comes with the head `expected`."""
        self._source, self._channel, self._array, self._at = source, channel, array, 0
        self._slots = channel.slots(array.dtype)
        self._expected, self._reduce = expected, reduce
        self.busy = True

    def move(self) -> bool:
        """Take the next piece, or the whole message where it lies; False if there is none yet."""
        channel = self._channel
        if channel.look[POSTED] <= channel.number:
            return False
        slot = channel.number % SLOTS
        piece = self._slots[slot]
        if not self._at and channel.heads[slot] != self._expected:
            piece = self._locate(self._source, bytes(channel.heads[slot]), self._expected, self._array)
        part = self._array[self._at : self._at + piece.size]
        piece = piece[: part.size]
        if self._reduce is None:
            part[:] = piece
        else:
            self._reduce(part, piece, out=part)
        self._at += part.size
        self.busy = self._at < self._array.size
        channel.number += 1
        self._publish(self._source, channel, TAKEN)
        return True
