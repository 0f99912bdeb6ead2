"""Message passing through memory that the ranks of one machine share: a neighbour reads straight out of its peer's.

    with shared_memory.connect(rank, size, "127.0.0.1:4000", secret) as communicator:
        gradient = communicator.allocate(1_000_003)
        ring_all_reduce(communicator, gradient, "mean")

A message is put into the slots of the sender's mailbox (`mailbox`), piece by piece. If it lies in memory from
`allocate`, only its place is posted: the receiver reads, or reduces, out of the sender's own array, and the sender
waits until it has. So such an array must not be changed by other threads meanwhile, as with every message. What all
ranks read from all goes past the mailboxes' channels, see `board`.

Counters as *flags*: the receiver looks at `posted` until it has grown. This is right only where one processor's stores
are seen by the others in their order, and loads are made in theirs, as x86 does. Elsewhere each change of a counter is
told by a *token*, a frame on the control link: the kernel's locks then put memory in order. It costs two system calls,
and there is no board.

The memory has no name (`segments`); its descriptor is handed over a Unix socket. Nothing is left when processes die.
"""

from __future__ import annotations

import os
import platform
import select
import socket
import struct
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from workshop_utils.comm import frames
from workshop_utils.comm.board import ROOM, Board, SharedWindow, reads
from workshop_utils.comm.communicator import Array, CommunicationError, FrameError, PeerDied
from workshop_utils.comm.control import ControlledCommunicator
from workshop_utils.comm.mailbox import (
    CHANNEL,
    HEADS,
    POSTED,
    SLEEPS,
    STEPS,
    TAKEN,
    Channel,
    Receiving,
    Sending,
    counters,
    head,
    head_of_place,
    place_in,
)
from workshop_utils.comm.rendezvous import Links, Run, meet
from workshop_utils.comm.segments import Segment, mapped

# Bytes from which on a message from shared memory is read in place: below, a copy is faster than to wait.
IN_PLACE_FROM = 32 * 1024

# How often a rank looks again, giving way to others in between, before it sleeps.
SPINS = 50
# A sleeper may miss being woken, as x86 lets a load overtake an earlier store; so it looks by itself after this time.
NAP_SECONDS = 0.002

ORDERED = platform.machine().lower() in ("x86_64", "amd64", "i686", "i386")


def connect(
    rank: int,
    size: int,
    coordinator: str,
    secret: bytes,
    timeout_seconds: float = 60.0,
    flags: bool = ORDERED,
) -> SharedMemoryCommunicator:
    """This process's communicator in a run of `size` ranks on this machine; returns when all have come.

    Args and errors are those of `tcp.connect`. `flags`: whether counters are read in memory or told by tokens.
    """
    run = Run.starting(rank, size, secret, timeout_seconds)
    links = meet(run, coordinator, "unix", ("control",))
    return SharedMemoryCommunicator(rank, size, links["control"], timeout_seconds, flags)


class SharedMemoryCommunicator(ControlledCommunicator):
    """A rank that shares memory with the others."""

    def __init__(self, rank: int, size: int, control: Links, timeout_seconds: float, flags: bool) -> None:
        super().__init__(rank, size, control, timeout_seconds)
        self._flags = self.has_windows = flags
        self._own: list[Segment] = []
        self._shown: set[tuple[int, int]] = set()  # to which rank, which of them
        self._theirs: dict[tuple[int, int], np.ndarray] = {}  # by rank and number
        self._descriptors: list[int] = []  # received, not yet mapped
        self._seen = {(peer, of): [0] * HEADS for peer in control for of in ("posted", "taken")}  # by tokens
        self._staging: Array | None = None
        self._poll = select.poll()
        self._poll.register(self._watch, select.POLLIN)
        self._pauses, self._deadline = 0, 0.0
        self._last_named = rank  # by `wait_any`

        mailbox = self._segment(size * CHANNEL)
        for peer in control:
            self._show(peer, mailbox)
        mailboxes = [mailbox.memory if other == rank else self._their(other, 1) for other in range(size)]
        self._outgoing = {peer: Channel(mailbox.memory, peer, self._look(peer, "taken")) for peer in control}
        self._incoming = {
            peer: Channel(mailboxes[peer], rank, self._look(peer, "posted")) for peer in control
        }
        self._sleeps = counters(mailbox.memory, rank)
        self._sleeps_of = {peer: counters(mailboxes[peer], peer) for peer in control}
        self._sending, self._receiving = Sending(self._publish), Receiving(self._publish, self._located)
        self._board = Board(self, mailboxes)

    def allocate(self, shape: int | tuple[int, ...], dtype: Any = np.float32) -> Array:
        """An array of zeros that other ranks can read in place. Its memory is kept until `close`."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        return self._segment(max(nbytes, 1)).memory[:nbytes].view(dtype).reshape(shape)

    def shares(self, array: Array) -> bool:
        return self._place(array) is not None

    def close(self) -> None:
        """Let go of links and memory; arrays from `allocate` stay usable in this process."""
        for descriptor in (*self._descriptors, *(segment.descriptor for segment in self._own)):
            os.close(descriptor)
        self._own, self._descriptors = [], []
        self._outgoing, self._incoming, self._theirs, self._sleeps_of = {}, {}, {}, {}
        super().close()

    def everyones(self, array: Array) -> list[Array]:
        if not self._flags or array.nbytes > ROOM:
            return super().everyones(array)
        if self._failure is not None:
            raise self._failure
        return self._board.everyones(array)

    @contextmanager
    def window(self, array: Array) -> Iterator[SharedWindow]:
        if self._failure is not None:
            raise self._failure
        place = self._place(array)
        mine = array if place else self._staged(array)
        segment, offset = self._place(mine) or (0, 0)  # which it always has
        for peer in self._control:
            self._show(peer, self._own[segment - 1])
        before = {peer: reads(channel) for peer, channel in self._outgoing.items()}
        window = SharedWindow(self, self._board, self._board.arrays(mine, segment, offset))
        yield window
        if not place:
            array[:] = mine
        window.fence()
        for peer, channel in self._outgoing.items():
            (nbytes, times), (nbytes_before, times_before) = reads(channel), before[peer]
            self.traffic.count_sent(peer, nbytes - nbytes_before, times - times_before)

    def wait_any(self, sources: Sequence[int]) -> int:
        self._pauses = 0
        # Whoever comes after the last that was named is looked at first: nobody starves behind a busy low rank.
        in_turn = sorted(sources, key=lambda source: (source - self._last_named - 1) % self.size)
        while True:
            hopeless = self._gone(sources)
            for source in in_turn:
                channel = self._incoming[source]
                if channel.look[POSTED] > channel.number:
                    self._awake()
                    self._last_named = source
                    return source
            self._pause(hopeless, in_turn)

    def _exchange(
        self, to: int | None, outgoing: Array, source: int | None, incoming: Array, reduce: Any = None
    ) -> None:
        if self._failure is not None:
            raise self._failure
        sending, receiving = self._sending, self._receiving
        if to is not None:
            self._start_sending(to, outgoing)
        if source is not None:
            expected = head(self.collective, incoming.dtype, incoming.nbytes)
            receiving.start(source, self._incoming[source], incoming, expected, reduce)
        while True:
            hopeless = None
            if self._ended or self._pauses >= SPINS:  # and only then, since to find out takes time
                hopeless = self._hopeless(to, outgoing, source, incoming)
            moved = sending.busy and sending.move()
            moved = (receiving.busy and receiving.move()) or moved
            if moved and self._pauses:
                self._awake()
            if not (sending.busy or receiving.busy):
                return
            if not moved:
                self._pause(hopeless, self._needed(to, source)[:1])

    def _start_sending(self, to: int, array: Array) -> None:
        place = self._place(array) if array.nbytes >= IN_PLACE_FROM else None
        own_head = head(self.collective, array.dtype, array.nbytes)
        if place is not None:
            own_head = head_of_place(self.collective, array.dtype, array.nbytes, *place)
            self._show(to, self._own[place[0] - 1])
        self._sending.start(to, self._outgoing[to], array, own_head, place is not None)

    def _needed(self, to: int | None, source: int | None) -> list[Any]:
        """From whom something must still come: a message, or room for one."""
        return [source] * self._receiving.busy + [to] * self._sending.busy

    # Waiting.

    def _gone(self, peers: Sequence[int]) -> CommunicationError | None:
        """The error that nothing more can come from `peers`, once what is there has been looked at."""
        gone = self._ended and self._ended.intersection(peers)
        return PeerDied(gone.pop(), self.collective) if gone else None

    def _hopeless(
        self, to: int | None, outgoing: Array, source: int | None, incoming: Array
    ) -> CommunicationError | None:
        """The same for an exchange; nothing comes either from a rank that waits for this one at the board."""
        needed = self._needed(to, source)
        for peer, array in ((source, incoming), (to, outgoing)):
            if peer is None or peer not in needed or not self._flags:
                continue
            if shown := self._board.shown_ahead(peer):
                expected = head(self.collective, array.dtype, array.nbytes)
                return self._difference(peer, shown, expected, array.dtype)
        return self._gone(needed)

    def _pause(self, hopeless: CommunicationError | None, peers: list[Any]) -> None:
        """Nothing has come from `peers`; `hopeless` if that was already certain before this rank has looked."""
        if hopeless is not None:
            self._fail(hopeless)
        self._pauses += 1
        if self._flags and self._pauses < SPINS:
            os.sched_yield()
        elif self._flags and self._pauses == SPINS:
            self._sleeps[SLEEPS] = 1  # and look once more, since something may have come just now
        else:
            self._sleep(peers)

    def _sleep(self, peers: list[int]) -> None:
        now = time.monotonic()
        self._deadline = self._deadline or now + self.timeout_seconds
        if now > self._deadline:
            self._silent(peers)
        seconds = min(NAP_SECONDS, self._deadline - now) if self._flags else self._deadline - now
        self._waiting_for = peers[0]
        self._poll.poll(seconds * 1000)
        self._heed()
        self._pauses = SPINS - 1  # to be woken again

    def _awake(self) -> None:
        if self._pauses >= SPINS:
            self._sleeps[SLEEPS] = 0
        self._pauses, self._deadline = 0, 0.0

    def _await_step(self, peer: int, theirs: memoryview, steps: int) -> None:
        """Return once `peer` has come to step `steps`, which its counters say."""
        while True:
            hopeless = self._gone([peer])
            if theirs[STEPS] >= steps:
                break
            self._pause(hopeless, [peer])
        if self._pauses:
            self._awake()

    def _publish(self, peer: int, channel: Channel, counter: int) -> None:
        """Let `peer` know that `channel.number` pieces have now been posted, or taken."""
        if not self._flags:
            self._tell(peer, frames.control(frames.POSTED if counter == POSTED else frames.TAKEN))
            return
        channel.counters[counter] = channel.number
        sleeps = self._sleeps_of[peer]
        if sleeps[SLEEPS]:
            self._wake(peer, sleeps)

    def _wake(self, peer: int, sleeps: memoryview) -> None:
        sleeps[SLEEPS] = 0
        self._tell(peer, frames.control(frames.WAKE))

    # Memory, and how it is handed over.

    def _segment(self, nbytes: int) -> Segment:
        segment = Segment(len(self._own) + 1, nbytes)
        self._own.append(segment)
        return segment

    def _place(self, array: Array) -> tuple[int, int] | None:
        """Where others can read `array`: segment and offset; None if it does not lie in memory from `allocate`."""
        for segment in self._own:
            offset = segment.offset_of(array)
            if offset is not None:
                return segment.number, offset
        return None

    def _staged(self, array: Array) -> Array:
        """A copy of `array` in memory that others can read; the same memory at every call, until it is too small."""
        if self._staging is None or self._staging.nbytes < array.nbytes:
            self._staging = self.allocate(array.nbytes, np.uint8)
        copy = self._staging[: array.nbytes].view(array.dtype)
        copy[:] = array
        return copy

    def _show(self, peer: int, segment: Segment) -> None:
        """Let `peer` map a segment, if it cannot already."""
        if (peer, segment.number) not in self._shown:
            frame = frames.control(frames.SEGMENT, segment.number)
            socket.send_fds(self._control[peer], [frame], [segment.descriptor])
            self._shown.add((peer, segment.number))

    def _their(self, peer: int, number: int) -> np.ndarray:
        """Memory that `peer` has shown, or is showing: its frame is on its way before any message that lies there."""
        deadline = time.monotonic() + self.timeout_seconds
        while (peer, number) not in self._theirs:
            seconds = max(0.0, deadline - time.monotonic())
            if peer in self._ended:
                self._fail(PeerDied(peer, self.collective))
            if not select.select([self._control[peer]], [], [], seconds)[0]:
                self._silent([peer])
            self._read_control(peer)
        return self._theirs[peer, number]

    def _located(self, source: int, their_head: bytes, expected: bytes, like: Array) -> Array:
        """The array where it lies in its rank's memory. Raises if it is not the one that is due."""
        if their_head[: frames.HEADER.size] != expected[: frames.HEADER.size]:
            self._fail(self._difference(source, their_head, expected, like.dtype))
        number, offset = place_in(their_head)
        memory = self._their(source, number)[offset : offset + like.nbytes]
        if memory.nbytes != like.nbytes:
            self._fail(FrameError(f"rank {source} sent a message that lies outside the memory it has shown"))
        return memory.view(like.dtype)

    def _difference(self, source: int, found: bytes, expected: bytes, dtype: np.dtype) -> CommunicationError:
        size = frames.HEADER.size
        return frames.difference(found[:size], source, expected[:size], self.rank, dtype)

    def _control_bytes(self, peer: int, nbytes: int) -> bytes:
        room = socket.CMSG_SPACE(struct.calcsize("i"))
        try:
            data, attached, _, _ = self._control[peer].recvmsg(nbytes, room, socket.MSG_WAITALL)
        except ConnectionError:
            data, attached = b"", []
        for _, kind, content in attached:
            if kind == socket.SCM_RIGHTS:
                self._descriptors.append(struct.unpack("i", content)[0])
        return self._whole(peer, data, nbytes)

    def _act(self, peer: int, kind: int, number: int) -> None:
        if kind == frames.POSTED:
            self._seen[peer, "posted"][POSTED] += 1
        elif kind == frames.TAKEN:
            self._seen[peer, "taken"][TAKEN] += 1
        elif kind == frames.SEGMENT and self._descriptors:
            descriptor = self._descriptors.pop()
            self._theirs[peer, number] = mapped(descriptor)
            os.close(descriptor)
        elif kind != frames.WAKE:
            super()._act(peer, kind, number)

    def _look(self, peer: int, at: str) -> Any:
        """Where a counter of `peer`'s is seen: in its memory (None) or as its tokens have told."""
        return None if self._flags else self._seen[peer, at]
