"""The header that stands before every message between processes, and what it means when it is not the expected one.

| field | bytes | |
| --- | --- | --- |
| magic | 4 | `wshp` |
| version | 1 | of this format |
| kind | 1 | `DATA`, or what the control links carry |
| collective | 2 | `communicator.number_of` its name |
| dtype | 2 | see `code_of` |
| – | 2 | zero |
| sequence | 4 | counts the messages from this sender to this receiver |
| nbytes | 8 | of the payload that follows |

Little-endian throughout. Both sides know what must come next, so the receiver packs the header that it expects and
compares: no field is acted upon before it has been found right, and least of all is memory allocated by it.
"""

from __future__ import annotations

import functools
import struct
import zlib

import numpy as np

from workshop_utils.comm.communicator import COLLECTIVES, CommunicationError, FrameError, Mismatch, number_of

HEADER = struct.Struct("<4sBBHHxxIQ")
MAGIC = b"wshp"
VERSION = 1

DATA, ABORT, ASK, WAITS = range(4)

_DTYPES = [np.dtype(character) for character in "?bBhHiIlLqQefdgFD"]
_NAMES = {number: dtype.name for number, dtype in enumerate(_DTYPES, start=1)}


@functools.cache
def code_of(dtype: np.dtype) -> int:
    """The number by which a header names `dtype`: small for NumPy's own, a hash of the name for others."""
    if dtype in _DTYPES:
        return _DTYPES.index(dtype) + 1
    return zlib.crc32(str(dtype).encode()) & 0x7FFF | 0x8000


def message(collective: str, dtype: np.dtype, sequence: int, nbytes: int) -> bytes:
    """The header of a message of `nbytes` that a rank in `collective` sends."""
    number, code = number_of(collective), code_of(dtype)
    return HEADER.pack(MAGIC, VERSION, DATA, number, code, sequence & 0xFFFFFFFF, nbytes)


def control(kind: int, number: int = 0, code: int = 0, nbytes: int = 0) -> bytes:
    """A frame of a control link: `number` and `code` mean what `kind` says, `nbytes` follow."""
    return HEADER.pack(MAGIC, VERSION, kind, 0, code, number & 0xFFFFFFFF, nbytes)


def read_control(frame: bytes) -> tuple[int, int, int, int]:
    """`kind`, `number`, `code` and `nbytes` of a control frame. Raises FrameError if it is none."""
    magic, version, kind, _, code, number, nbytes = HEADER.unpack(frame)
    if (magic, version) != (MAGIC, VERSION) or kind == DATA:
        raise FrameError(f"what came on a control link is not a message of this run: {frame!r}")
    return kind, number, code, nbytes


def difference(
    received: bytes | bytearray, source: int, expected: bytes, rank: int, dtype: np.dtype
) -> CommunicationError:
    """The error that says how the header `received` from `source` is not the one that `rank` expected."""
    magic, version, kind, collective, code, sequence, nbytes = HEADER.unpack(received)
    _, _, own_kind, own_collective, own_code, own_sequence, own_nbytes = HEADER.unpack(expected)
    if (magic, version, kind) != (MAGIC, VERSION, own_kind):
        return FrameError(
            f"what rank {rank} received from rank {source} is not a message: {bytes(received)!r}"
        )
    if sequence != own_sequence:
        return FrameError(
            f"rank {rank} received message {sequence} from rank {source} where message {own_sequence} is due"
        )
    here = _name(own_collective)
    if collective != own_collective:
        return Mismatch(f"rank {source} is in {_name(collective)} while rank {rank} is in {here}")
    sent = _amount(nbytes, code)
    due = _amount(own_nbytes, own_code) if own_code in _NAMES else f"{own_nbytes // dtype.itemsize} × {dtype}"
    return Mismatch(f"rank {source} sent {sent} where rank {rank} expects {due}, in {here}")


def _name(collective: int) -> str:
    return (
        COLLECTIVES.get(collective, f"a collective with number {collective}")
        if collective
        else "send or recv"
    )


def _amount(nbytes: int, code: int) -> str:
    if code not in _NAMES:
        return f"{nbytes} bytes of a dtype that this rank does not know"
    dtype = _DTYPES[code - 1]
    return f"{nbytes / dtype.itemsize:g} × {dtype}" if nbytes < 1e15 else f"{nbytes} bytes of {dtype}"
