"""Memory of one process that others can map. It has no name, so that nothing is left of it when processes die."""

from __future__ import annotations

import mmap
import os
import tempfile

import numpy as np

from workshop_utils.comm.communicator import Array


class Segment:
    """`nbytes` bytes of zeros; who is given the descriptor can map them. `number` tells a rank's segments apart."""

    def __init__(self, number: int, nbytes: int) -> None:
        self.number = number
        if hasattr(os, "memfd_create"):
            self.descriptor = os.memfd_create("workshop")
        else:
            with tempfile.TemporaryFile() as file:  # has no name either
                self.descriptor = os.dup(file.fileno())
        os.ftruncate(self.descriptor, nbytes)
        self.memory = mapped(self.descriptor)
        self._address = self.memory.__array_interface__["data"][0]

    def offset_of(self, array: Array) -> int | None:
        """Where `array` lies in this segment, in bytes; None if it does not."""
        offset = array.__array_interface__["data"][0] - self._address
        return offset if 0 <= offset <= self.memory.nbytes - array.nbytes else None


def mapped(descriptor: int) -> np.ndarray:
    """The memory behind `descriptor`, as bytes."""
    return np.frombuffer(mmap.mmap(descriptor, os.fstat(descriptor).st_size), np.uint8)
