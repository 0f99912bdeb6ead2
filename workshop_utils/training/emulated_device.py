"""What a rank computes on in an emulated cluster: a device that takes its time, and no core.

`place.here()` switches it on where the launch asks for it. In PyTorch it acts from outside: hooks on every layer sleep
until the layer's part of the pass is over, so gradients become ready one after the other during the backward pass, as
on a real device. The gradients themselves are real; the time that the host takes for them is a part of the device's.
Other code says what the device computes with `place.computing`.
"""

from __future__ import annotations

import math
import random
import time
from typing import Any

FORWARD = 1 / 3  # of a step; the backward pass has twice as many products (Kaplan et al. 2020, section 2.1)


class EmulatedDevice:
    """A device that needs `seconds` for one forward and backward pass of a whole model, whatever the batch.

    With `jitter`, each step takes exp(jitter · z) times as long, with z normal and drawn from `seed`. A pass without
    gradients, such as an evaluation, takes no time.
    """

    def __init__(self, seconds: float, jitter: float = 0.0, seed: int = 0) -> None:
        self.seconds, self.steps = seconds, 0
        self._jitter, self._random, self._factor = jitter, random.Random(seed), 1.0
        self._free = 0.0  # when the device has done what it was given
        self._marks = [_clocks()]  # at the start, then at the second step and the last

    def begin_step(self) -> None:
        """A forward pass begins, now that the host has come to it."""
        self.steps += 1
        if self.steps > 1:  # in the first one connections open up and libraries are imported
            self._marks = [*self._marks[: self.steps > 2], _clocks()]
        self._factor = math.exp(self._jitter * self._random.gauss(0, 1)) if self._jitter else 1.0
        self.begin_pass()

    def begin_pass(self) -> None:
        """The device waited until now."""
        self._free = time.perf_counter()

    def compute(self, share: float) -> None:
        """Return when `share` of a step's work is done, counted from when the work before it was."""
        self._free += share * self.seconds * self._factor
        left = self._free - time.perf_counter()
        if left > 0:
            time.sleep(left)

    def host_share(self) -> float:
        """The part of the time, from the second step to the last, in which this process kept a core busy.

        Of a process that computes nothing, such as a parameter server, since its start; 0 for too few steps.
        """
        if self.steps in (1, 2):
            return 0.0
        (began, before), (ended, after) = [*self._marks, _clocks()][:2]
        return (after - before) / (ended - began)


def _clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def attach_to_pytorch(device: EmulatedDevice) -> None:
    """From now on every module of PyTorch computes on `device`.

    The time of a pass is spread over the layers, which are the modules with parameters of their own, in proportion to
    their multiplications; a layer's attribute `emulated_cost` takes precedence. The first forward pass, in which these
    are counted, takes its time at its end. A part of the model that is called by itself, such as a pipeline's stage or
    a block that is computed again, takes its share of the largest pass so far.
    """
    import torch
    from torch.nn.modules import module as hooks

    depth, whole = 0, 0.0  # of nested calls; the largest pass, in units of cost
    costs: list[float] = []  # of this pass's layers; empty once its backward pass has begun

    def before(_: Any, __: Any) -> None:
        nonlocal depth, costs
        if depth == 0 and torch.is_grad_enabled():
            costs = []
            device.begin_step()
        depth += 1

    def after(module: Any, _: Any, output: Any) -> None:
        nonlocal depth, whole
        depth -= 1
        result = output if isinstance(output, torch.Tensor) else next(iter(_tensors(output)), None)
        if result is None or not result.requires_grad:
            return
        if any(each is not None for each in module._parameters.values()):
            cost = _cost(module, result)
            costs.append(cost)
            if whole:
                device.compute(FORWARD * cost / whole)
            result.register_hook(backward(cost, costs))
        if depth == 0 and not whole:
            device.compute(FORWARD)
        if depth == 0:
            whole = max(whole, sum(costs))

    def backward(cost: float, of_pass: list[float]) -> Any:
        def compute(_: Any) -> None:
            if of_pass:
                of_pass.clear()
                device.begin_pass()
            device.compute((1 - FORWARD) * cost / whole)

        return compute

    hooks.register_module_forward_pre_hook(before)
    hooks.register_module_forward_hook(after, always_call=True)


def _tensors(output: Any) -> list[Any]:
    values = (
        output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    )
    return [value for value in values if hasattr(value, "requires_grad") and value.requires_grad]


def _cost(module: Any, output: Any) -> float:
    """Multiplications of one layer's forward pass."""
    if (cost := getattr(module, "emulated_cost", None)) is not None:
        return float(cost)
    weight = next(each for each in module._parameters.values() if each is not None)
    is_table = type(module).__name__.startswith("Embedding")
    return float(output.numel() * (1 if is_table or not weight.ndim else weight.numel() / weight.shape[0]))
