"""What would explain a number that is not one process's, and on which line to look for it."""

from __future__ import annotations

import inspect
import itertools
import math
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from workshop_utils.parallel.reference import Batch, Reference

FLOAT32 = 2.0**-22  # an error below it, relative, may be float32's rounding
ROUNDED = "as far off as float32 rounds: something is computed in less than float64"

Output = tuple[str, nn.Module, Tensor]  # a layer's name, the layer, the rows that it gave


def kind_of_loss(reference: Reference, loss: float, layer: str) -> str:
    """What would explain this loss; `layer` is the first whose output is wrong, if there is one."""
    limit = reference.loss_tolerance
    if layer:
        return f"{layer} is the first layer whose output differs"
    for losses, _ in reference.divided:
        if any(abs(loss - each) <= limit for each in losses):
            return f"every rank takes the same of {len(losses)} parts of the batch"
    for count, value, _ in reference.unequal:
        if abs(loss - value) <= limit:
            return _alike(count)
    return _factor(loss / reference.loss) or "the layers' outputs are right: the loss made of them is not"


def kind_of_gradient(
    reference: Reference, places: Tensor, own: Tensor, held: Tensor, together: Tensor
) -> str:
    """What would explain a rank's gradient; "" if nothing does.

    Args:
        places: which numbers of the whole model these are.
        own: the rank's; `together`: the sum over all ranks that hold them, `held` of them.
    """
    right, limit = reference.gradient[places], reference.tolerance[places]

    def explains(value: Tensor, expected: Tensor = right) -> bool:
        return bool(((value - expected).abs() <= limit * held).all())

    if not explains(own, together / held):
        if explains(together):
            return "each rank has a part of a sum, and the parts were not added up"
        if explains(together / held):
            return "each rank has its own, and no mean was taken"
    ratio = (own @ right / (right @ right)).item()
    if ratio and explains(own / ratio) and (factor := _factor(ratio)):
        return factor
    for value in (own, together, together / held):
        for count, _, gradient in reference.unequal:
            if explains(value, gradient[places]):
                return _alike(count)
    if (own - right).abs().max() <= FLOAT32 * right.abs().max():
        return ROUNDED
    if explains(own, together / held):
        return ""
    return "ranks that hold the same weights have other gradients for them"


def _alike(count: int) -> str:
    return f"a mean of the means of {count} parts of the batch, which hold unequally much"


def _factor(ratio: float) -> str:
    """In words, if it is a small whole number, or one divided by it."""
    for count in range(2, 65):
        if math.isclose(ratio, count, rel_tol=1e-9):
            return f"{count} times too large: a sum where a mean belongs, or added up once too often"
        if math.isclose(ratio, 1 / count, rel_tol=1e-9):
            return f"{count} times too small: a mean where a sum belongs, or divided once too often"
    return ""


def first_wrong_layer(
    reference: Reference, training: Any, places: Mapping[str, Tensor]
) -> tuple[str, str, torch.dtype] | None:
    """The first layer of this rank that gives rows which it does not give in one process: its name, line and dtype.

    All ranks take a step.

    A layer is known by the numbers that it has: `places` of its parameters in the whole model.
    """
    right, seen, layers, paths = (
        list[Output](),
        list[Output](),
        dict[str, nn.Module](),
        dict[nn.Module, str](),
    )
    with _outputs(dict(reference.still.named_modules()), right):
        reference.differentiated(reference.still, reference.batch)
    for name, layer in training.module.named_modules():
        names = [f"{name}.{of}".strip(".") for of, _ in layer.named_parameters(recurse=False)]
        if own := [places[each] for each in names if len(places.get(each, ()))]:
            owners = [owner.split(".")[:-1] for owner in reference.owners(torch.cat(own))]
            common = itertools.takewhile(lambda part: len({*part}) == 1, zip(*owners, strict=False))
            layers[".".join(part[0] for part in common)], paths[layer] = layer, name
    with _outputs(layers, seen):
        training.step(reference.batch)
    for name, layer, rows in seen:
        same = [each for other, _, each in right if other == name and each.shape[1] == rows.shape[1]]
        if same and len(rows):
            expected = torch.cat(same)
            off = torch.cdist(rows.double(), expected, p=math.inf).amin(dim=1).max()
            if not off <= 1e-9 * expected.abs().max():
                return name, _line_around(training.module, paths[layer]), rows.dtype
    return None


@contextmanager
def _outputs(layers: Mapping[str, nn.Module], into: list[Output]) -> Iterator[None]:
    """Note what these layers give, as long as the block goes on."""

    def noting(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def note(layer: nn.Module, _: Any, output: Any) -> None:
            output = local(output)
            if isinstance(output, Tensor) and output.dim() > 1:
                into.append((name, layer, output.detach().flatten(0, -2)))

        return note

    handles = [layer.register_forward_hook(noting(name)) for name, layer in layers.items()]
    try:
        yield
    finally:
        for each in handles:
            each.remove()


def _line_around(module: nn.Module, path: str) -> str:
    """Of the forward pass of the layer there, or of the nearest around it that is not PyTorch's."""
    parts = path.split(".") if path else []
    forwards = [
        type(module.get_submodule(".".join(parts[:end]))).forward for end in range(len(parts), -1, -1)
    ]
    return line_of(next((each for each in forwards if is_theirs(each.__code__.co_filename)), forwards[0]))


def last_change(training: Any, batch: Batch, name: str | None) -> str:
    """The line of a step after which the gradient of parameter `name` had its last value; all ranks take the step."""
    parameter: Any = dict(training.module.named_parameters()).get(name or "")
    before: list[Any] = [None, ""]  # the gradient, and the line that is being executed
    found = ""

    def look(frame: Any, _: str, __: Any) -> Any:
        nonlocal found
        gradient = None if parameter.grad is None else local(parameter.grad.detach()).clone()
        if not equal(gradient, before[0]):
            found, before[0] = before[1], gradient
        lines = [_line_in(frame)]
        while (frame := frame.f_back) and frame.f_code.co_filename not in _OURS:
            lines += [_line_in(frame)] * is_theirs(frame.f_code.co_filename)
        before[1] = ", ".join(reversed(lines[:3]))
        return look

    def enter(frame: Any, event: str, argument: Any) -> Any:
        return look(frame, event, argument) if is_theirs(frame.f_code.co_filename) else None

    tracing = sys.gettrace()
    sys.settrace(tracing if parameter is None else enter)
    try:
        training.step(batch)
    finally:
        sys.settrace(tracing)
    return found or line_of(training.step)


_OURS = [str(Path(__file__).with_name(name)) for name in ("diagnosis.py", "reference.py", "verify.py")]


@cache
def is_theirs(file: str) -> bool:
    """Whether a line of it may be the mistake: neither Python's, nor an installed package's, nor a collective's."""
    folders = (
        sysconfig.get_path("stdlib"),
        sysconfig.get_path("purelib"),
        Path(__file__).parent.parent / "comm",
    )
    is_known = file in _OURS or any(Path(file).is_relative_to(each) for each in folders)
    return "ipykernel" in file or (file.endswith(".py") and not is_known)


def line_of(function: Any) -> str:
    """Where a function begins, as "train.py:88 in Trainer.step"."""
    function = inspect.unwrap(function)
    try:
        number = inspect.getsourcelines(function)[1]
    except (OSError, TypeError):  # made in C, or typed at a prompt
        return getattr(function, "__qualname__", repr(function))
    return f"{Path(inspect.getsourcefile(function) or '').name}:{number or 1} in {function.__qualname__}"


def line_of_layers(training: Any, names: Iterable[str]) -> str:
    """Where the forward pass of the layers with these parameters begins, if they are of one kind, and not PyTorch's."""
    layers = [training.module.get_submodule(name.rpartition(".")[0]) for name in names]
    kinds: set[Any] = {type(each) for each in layers}
    forward = kinds.pop().forward if len(kinds) == 1 else None
    code = getattr(forward, "__code__", None)
    return line_of(forward) if code and is_theirs(code.co_filename) else ""


def _line_in(frame: Any) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in {frame.f_code.co_name}"


DROPOUTS = {functional.dropout, functional.dropout1d, functional.dropout2d, functional.dropout3d}


class Masks(TorchFunctionMode):
    """What dropout drops while the block goes on.

    Attributes:
        seen: for each call a number that stands for its input, and the places that were lost. Calls that may lose the
            same by chance are left out; so are those of DTensors, which on CPUs draw the same for all shards.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[float, str]] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        x = args[0].detach().clone() if function in DROPOUTS else None
        result = function(*args, **kwargs)
        if type(x) is Tensor and kwargs.get("training", True):
            lost = ((result == 0) & (x != 0)).numpy()
            all_places, few = x.numel(), int(lost.sum())
            ways = math.lgamma(all_places + 1) - math.lgamma(few + 1) - math.lgamma(all_places - few + 1)
            if ways > math.log(1e9):
                key = x.double().flatten() @ torch.arange(all_places, dtype=torch.float64).cos()
                places = np.packbits(lost).tobytes().hex()
                self.seen.append((float(f"{key:.8e}"), f"{tuple(x.shape)} {places}"))
        return result

    @property
    def lost(self) -> list[str]:
        """The places alone."""
        return [places for _, places in self.seen]


def local(tensor: Any) -> Any:
    """This rank's part of a DTensor; another one as it is."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def equal(one: Any, other: Any) -> bool:
    """Whether two tensors, or two other values, are the same."""
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(local(one), local(other))
    return type(one) is type(other) and bool(np.all(one == other))
