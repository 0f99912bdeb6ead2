"""What a rank computes on in an emulated cluster: a device that takes its time, and no core.

The launcher asks for it in WORKSHOP_EMULATED_DEVICE, and starts the script through `launchers/local/job_script.py`,
which switches it on. In PyTorch it acts from outside: hooks on every layer sleep until the layer's part of the pass is
over, so gradients become ready one after the other during the backward pass, as on a real device. The gradients
themselves are real; the time that the host takes for them is a part of the device's. Other code says what the device
computes:

    with computing():
        gradient = gradient_of(parameters, batch)
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from workshop_utils import place

_SCHEDULED = Path("/proc/thread-self/schedstat")  # the kernel's documentation: scheduler/sched-stats
# Where it is missing, a shorter wait may have been for a core.
SHORTEST_WAIT_SECONDS = 0.0005 if _SCHEDULED.exists() else 0.005
FORWARD = 1 / 3  # of a step; the backward pass has twice as many products (Kaplan et al. 2020, section 2.1)


class EmulatedDevice:
    """A device that needs `seconds` for one forward and backward pass of a whole model."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.steps = seconds, 0
        self._free = 0.0  # when the device has done what it was given
        self._left = self._worked = 0.0  # when the host left `compute`, and its thread's `_busy_seconds` then
        self._thread = 0
        self._asked = 0.0  # seconds, of this step
        self._late, self._due = 0.0, 0.0  # seconds, of all steps that have ended
        self._marks = [_clocks()]  # at the first step, then at the second; and at the last

    def begin_step(self) -> None:
        """A forward pass begins, now that the host has come to it."""
        self.steps += 1
        if self.steps > 2:
            self._late += max(0.0, self._left - self._free)
            self._due += self._asked
        # In the first step connections open up and libraries are imported, so the second takes its place.
        self._marks = [*self._marks[: self.steps > 2], _clocks()]
        self._free, self._worked, self._asked = time.perf_counter(), _busy_seconds(), 0.0
        self._left, self._thread = self._free, threading.get_ident()

    def compute(self, share: float) -> None:
        """Return when `share` of a step's work is done.

        What the host itself has computed since the last call is a part of it, and so is its waiting for a core. What
        else it has waited for, such as another rank's activations, is not: the device waited as well.
        """
        now = time.perf_counter()
        waited = now - self._left - (_busy_seconds() - self._worked)
        if waited > SHORTEST_WAIT_SECONDS and self._thread == threading.get_ident():
            self._free += waited
        seconds = share * self.seconds
        self._asked += seconds
        self._free += seconds
        if self._free > now:
            time.sleep(self._free - now)
        self._left, self._worked = time.perf_counter(), _busy_seconds()
        self._thread = threading.get_ident()

    def late_share(self) -> float:
        """By how much of its time the device was late at the end of a step, on average; the first step is left out."""
        return self._late / self._due if self._due else 0.0

    def host_share(self) -> float:
        """The part of the time, from the second step to the last, in which this process kept a core busy.

        With two steps or fewer, from the last one until now; for a process that computes nothing, from the start.
        """
        (began, before), (ended, after) = [*self._marks, _clocks()][:2]
        return (after - before) / (ended - began)


@functools.cache
def switch_on() -> EmulatedDevice | None:
    """The device that this rank computes on, as PyTorch's modules do from the first call on; None without emulation."""
    if "WORKSHOP_EMULATED_DEVICE" not in os.environ:
        return None
    here, settings = place.from_environment(os.environ), json.loads(os.environ["WORKSHOP_EMULATED_DEVICE"])
    seconds = settings["seconds"] * settings["slower"].get(here.name, 1.0)
    if settings["pytorch"]:
        import torch  # noqa: F401  # before the device begins to count the host's time
    device = EmulatedDevice(seconds)
    if settings["pytorch"]:
        attach_to_pytorch(device)
    atexit.register(report_host_share)
    return device


def report_host_share() -> None:
    """Tell the launcher what part of the time this rank kept a core busy beside its emulated device."""
    if device := switch_on():
        shares = {"host_share": device.host_share(), "late_share": device.late_share()}
        rounded = {name: round(share, 4) for name, share in shares.items()}
        place.print_record("device", passes=device.steps, **rounded)


@contextlib.contextmanager
def computing(share: float = 1.0) -> Iterator[None]:
    """Make the block last as long as `share` of a step's forward and backward pass on the emulated device.

    For code without PyTorch, whose layers no hook sees. Where no device is emulated it does nothing.
    """
    if share < 0:
        raise ValueError(f"share is {share}; it must not be negative")
    device = switch_on()
    if device:
        device.begin_step()
    yield
    if device:
        device.compute(share)


def _busy_seconds() -> float:
    """Processor time of this thread, and the time in which it could have run and had to wait for a core."""
    return time.thread_time() + _core_wait_seconds()


def _core_wait_seconds() -> float:
    try:
        return 1e-9 * int(_SCHEDULED.read_text().split()[1])
    except FileNotFoundError:  # not on Linux
        return 0.0


def _clocks() -> tuple[float, float]:
    """The time, and the processor time of this process and of the children that it has waited for."""
    children = os.times()
    return time.perf_counter(), time.process_time() + children.children_user + children.children_system


@dataclass
class _Pass:
    """Forward calls, and the backward pass that they lead to; work in multiplications."""

    called: set[Any] = field(default_factory=set)  # modules, from outside of any other
    cost: float = 0.0
    taken: float = 0.0  # the share of a forward pass that they have lasted
    is_backward: bool = False


def attach_to_pytorch(device: EmulatedDevice) -> None:
    """From now on every module of PyTorch computes on `device`.

    The time is spread over the layers, which are the modules with parameters of their own, in proportion to their
    multiplications (`_cost`; an attribute `emulated_cost` takes precedence). A pass is what is called until the next
    backward pass, or until a module is called again. The largest so far lasts `device.seconds`, forward and backward,
    and a smaller one its share; so each micro-batch takes all of it, and so does a pipeline's stage. The first forward
    pass, in which the work is counted, takes its time at its end. Nothing takes any time without gradients, in compiled
    modules, in functions that are no modules, or in checkpoints that are reentrant.
    """
    import torch
    from torch.nn.modules import module as hooks

    current, whole = _Pass(is_backward=True), 0.0  # the largest pass
    depth = 0  # of calls inside others

    def in_backward() -> bool:
        return bool(torch._C._current_graph_task_id() != -1)

    def before(module: Any, _: Any) -> None:
        nonlocal current, depth
        is_first = depth == 0 and torch.is_grad_enabled() and not in_backward()
        if is_first and next(module.parameters(), None) is not None:
            if current.is_backward or module in current.called:
                device.begin_step()
                current = _Pass()
            current.called.add(module)
        depth += 1

    def after(module: Any, inputs: Any, output: Any) -> None:
        nonlocal depth
        depth -= 1
        results = _tensors(output) if torch.is_grad_enabled() and _parameters(module) else []
        if not results:
            return
        cost = _cost(module, inputs, results[0])
        if in_backward():
            # Computed again, for a checkpoint; its own backward pass is a part of the one under way.
            device.compute(FORWARD * cost / whole if whole else 0.0)
            return
        current.cost += cost
        if whole:
            share = min(cost / whole, 1 - current.taken)  # a larger pass than any before does not last longer
            current.taken += share
            device.compute(FORWARD * share)
        hook = _once(backward(cost, current)) if len(results) > 1 else backward(cost, current)
        for result in results:
            if result.grad_fn is not None:
                result.register_hook(hook)

    def backward(cost: float, of_forward: _Pass) -> Any:
        def compute(_: Any) -> None:
            nonlocal whole
            if not of_forward.is_backward:
                of_forward.is_backward, whole = True, max(whole, of_forward.cost)
                device.compute(FORWARD * (of_forward.cost / (whole or 1.0) - of_forward.taken))
            device.compute((1 - FORWARD) * cost / (whole or 1.0))

        return compute

    hooks.register_module_forward_pre_hook(before)
    hooks.register_module_forward_hook(after, always_call=True)


def _parameters(module: Any) -> list[Any]:
    return [each for each in module._parameters.values() if each is not None]


def _tensors(output: Any) -> list[Any]:
    """The tensors of floating-point numbers in what a layer returns."""
    if hasattr(output, "grad_fn"):
        return [output] if output.is_floating_point() else []
    parts = (
        output.values() if isinstance(output, dict) else output if isinstance(output, (tuple, list)) else ()
    )
    return [tensor for part in parts for tensor in _tensors(part)]


def _once(compute: Any) -> Any:
    """`compute`, which the gradient of only the first of several outputs sets off."""
    waiting = [compute]
    return lambda gradient: waiting.pop()(gradient) if waiting else None


def _cost(module: Any, inputs: Any, output: Any) -> float:
    """Multiplications of one layer's forward pass: positions × weights; of other layers, the numbers that come out.

    Attention's own products, of queries with keys and of these with values, are left out.
    """
    from torch import nn

    if (cost := getattr(module, "emulated_cost", None)) is not None:
        return float(cost)
    is_attention = isinstance(module, nn.MultiheadAttention)  # which uses its children without calling them
    convolves = isinstance(module, nn.modules.conv._ConvNd)
    parameters = list(module.parameters()) if is_attention else _parameters(module)
    matrices = [each for each in parameters if each.ndim == 2 or (convolves and each.ndim > 2)]
    multiplies = is_attention or next(module.children(), None) is None
    if not (matrices and multiplies) or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return float(max(output.numel(), 1))
    if convolves:
        positions = (
            inputs[0].numel() / module.in_channels
            if module.transposed
            else output.numel() / module.out_channels
        )
    else:
        positions = output.numel() / output.shape[-1]
    return max(sum(each.numel() for each in matrices) * positions, 1.0)
