"""An all-to-all of rows through which gradients go back: of tokens to experts, and of heads for tokens."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from workshop_utils.comm.all_to_all import direct_all_to_all
from workshop_utils.comm.communicator import Communicator


def exchange_rows(rows: Tensor, sent: list[int], received: list[int], communicator: Communicator) -> Tensor:
    """Send the first `sent[0]` of `rows` to rank 0, and so on; returns `received[r]` rows of each rank r, in order.

    Second derivatives are refused.
    """
    arrived: Tensor = _Exchange.apply(rows, sent, received, communicator)
    return arrived


class _Exchange(Function):
    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, sent: list[int], received: list[int], communicator: Communicator
    ) -> Tensor:
        ctx.way_back = received, sent, communicator
        arrived = rows.new_empty(sum(received), *rows.shape[1:])
        direct_all_to_all(communicator, rows.contiguous().split(sent), arrived.split(received))
        return arrived

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return _Exchange.apply(gradients[0], *ctx.way_back), None, None, None
