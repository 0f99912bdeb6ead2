"""Message passing over PyTorch's process group: for targets that start its ranks, and no others.

The messages are those of gloo. They carry no header, so ranks that disagree about a message fail as gloo does, or wait
for each other, where `tcp` says what was sent and what was expected.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from workshop_utils.comm.communicator import Array, CommunicationError, Communicator


class TorchCommunicator(Communicator):
    """This process's rank in the default process group, which `torch.distributed.init_process_group` has made."""

    def __init__(self, timeout_seconds: float = 60.0) -> None:
        super().__init__(dist.get_rank(), dist.get_world_size(), timeout_seconds)

    def _exchange(self, to: int | None, outgoing: Array, source: int | None, incoming: Array) -> None:
        pending = []
        if to is not None and outgoing.nbytes:
            pending.append(dist.isend(_tensor(outgoing), to))
        if source is not None and incoming.nbytes:
            pending.append(dist.irecv(_tensor(incoming), source))
        for work in pending:
            if work is not None:
                work.wait()

    def _first_of(self, sources: Sequence[int]) -> int:
        if len(sources) == 1:
            return sources[0]
        raise CommunicationError(
            f"gloo cannot wait for the first of the ranks {list(sources)}: receive from one of them"
        )


def _tensor(array: Array) -> torch.Tensor:
    return torch.from_numpy(array.view("uint8"))
