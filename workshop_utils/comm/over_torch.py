"""Message passing over PyTorch's process group: for targets that start its ranks, and no others.

A message of gloo holds the header that `tcp` sends, and the array, so that ranks that disagree are told how. Only what
is longer than its receiver expects is refused by gloo itself, which aborts that process.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from workshop_utils.comm import frames
from workshop_utils.comm.communicator import Array, CommunicationError, Communicator


class TorchCommunicator(Communicator):
    """This process's rank in the default process group, which `torch.distributed.init_process_group` has made."""

    def __init__(self, timeout_seconds: float = 60.0) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), timeout_seconds)

    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        pending: list[Any] = []
        try:
            if to is not None:
                parts = self._header(outgoing), outgoing.view(np.uint8)
                pending.append(dist.isend(torch.from_numpy(np.concatenate(parts)), to))
            if source is not None:
                expected = self._header(incoming)
                message = np.empty(expected.size + incoming.nbytes, np.uint8)
                pending.append(dist.irecv(torch.from_numpy(message), source))
            for work in pending:
                work.wait(timedelta(seconds=self.timeout_seconds))
        except RuntimeError as error:
            peers = " and ".join(str(peer) for peer in (to, source) if peer is not None)
            raise CommunicationError(f"rank {self.rank} cannot go on with rank {peers}: {error}") from None
        if source is not None:
            header, content = np.split(message, [expected.size])
            if not np.array_equal(header, expected):
                raise frames.difference(header.tobytes(), source, expected.tobytes(), self.rank)
            np.copyto(incoming, content.view(incoming.dtype))

    def _header(self, array: Array) -> np.ndarray:
        # No message is counted, since gloo keeps their order.
        return np.frombuffer(frames.message(self._collective, 0, array), np.uint8)

    def _first_of(self, sources: Sequence[int]) -> int:
        if len(sources) == 1:
            return sources[0]
        raise CommunicationError(f"gloo cannot wait for several ranks, {list(sources)}: receive from one")
