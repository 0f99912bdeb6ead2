"""The header before every message between processes, and what it means when it is not the expected one.

| field | bytes | |
| --- | --- | --- |
| magic | 4 | `wsh2` |
| collective | 32 | its name; empty outside of collectives |
| dtype | 16 | its name |
| sequence | 4 | counts the messages from this sender to this receiver |
| elements | 8 | of the array that follows |
| nbytes | 8 | the same in bytes |

Little-endian throughout; names are padded with zeros, or cut. Both sides know what must come next, so the receiver
packs the header that it expects and compares: it acts upon no field before that, and never allocates by one.
"""

from __future__ import annotations

import functools
import struct

import numpy as np

from workshop_utils.comm.communicator import Array, CommunicationError, FrameError, mismatch

HEADER = struct.Struct("<4s32s16sIQQ")
_NUMBERS = struct.Struct("<IQQ")
MAGIC = b"wsh2"


@functools.cache
def _names(collective: str, dtype: np.dtype) -> bytes:
    return struct.pack("<4s32s16s", MAGIC, collective.encode(), str(dtype).encode())


def message(collective: str, sequence: int, array: Array) -> bytes:
    """The header of a message that carries `array`, from a rank in `collective`."""
    return _names(collective, array.dtype) + _NUMBERS.pack(sequence & 0xFFFFFFFF, array.size, array.nbytes)


def difference(received: bytes | bytearray, source: int, expected: bytes, rank: int) -> CommunicationError:
    """The error that says how the header `received` from `source` is not the one that `rank` expected."""
    magic, collective, dtype, sequence, elements, _ = HEADER.unpack(received)
    _, own_collective, own_dtype, own_sequence, own_elements, _ = HEADER.unpack(expected)
    if magic != MAGIC:
        return FrameError(f"rank {rank} received from rank {source} what is no message: {bytes(received)!r}")
    if sequence != own_sequence:
        due = f"where message {own_sequence} is due"
        return FrameError(f"rank {rank} received message {sequence} from rank {source} {due}")
    sent, due = f"{elements} × {text(dtype)}", f"{own_elements} × {text(own_dtype)}"
    return mismatch(rank, text(own_collective), due, source, text(collective), sent)


def text(padded: bytes) -> str:
    """What a field of a fixed length says."""
    return padded.rstrip(b"\0").decode("utf-8", "replace")
