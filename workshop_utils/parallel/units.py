"""How a module is divided into units, whose parameters are gathered together (for `sharded.FullySharded`)."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor, nn


class Unit:
    """The layers that are gathered together around `module`, with those of their parameters that no other unit has."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.layers: list[tuple[str, nn.Module]] = []
        self.own: list[tuple[str, nn.Module, str]] = []  # name in the whole module, layer, name in the layer

    def parameters(self) -> dict[str, nn.Parameter]:
        """By name, each once."""
        found: dict[nn.Parameter, str] = {}
        for name, layer, attribute in self.own:
            found.setdefault(layer.get_parameter(attribute), name)
        return {name: parameter for parameter, name in found.items()}

    def buffers(self) -> list[Tensor]:
        """Of its layers."""
        return [buffer for _, layer in self.layers for buffer in layer.buffers(recurse=False)]

    def materialise(self) -> None:
        """Give layers on "meta" memory and initial values. Raises ValueError if a layer cannot."""
        for name, layer in self.layers:
            tensors = itertools.chain(layer.parameters(recurse=False), layer.buffers(recurse=False))
            if not any(tensor.is_meta for tensor in tensors):
                continue
            if not hasattr(layer, "reset_parameters"):
                raise ValueError(
                    f"layer {name!r}, a {type(layer).__name__}, is on the device 'meta' and has no reset_parameters "
                    "to give it initial values; make the module on the CPU"
                )
            layer.to_empty(device="cpu", recurse=False)
            layer.reset_parameters()  # type: ignore[operator]


def divide(module: nn.Module) -> list[Unit]:
    """The units of `module` that have parameters or buffers: its children, and what none or several of them have.

    Raises:
        ValueError: if two layers share a parameter on "meta".
    """
    rest = Unit(module)
    units = [rest, *(Unit(child) for child in module.children())]
    unit_of = {module: rest}
    for unit in units[1:]:
        for layer in unit.module.modules():
            unit_of[layer] = rest if layer in unit_of else unit
    layers_of: dict[nn.Parameter, list[nn.Module]] = {}
    for layer in unit_of:
        for parameter in layer.parameters(recurse=False):
            layers_of.setdefault(parameter, []).append(layer)
    for name, layer in module.named_modules():
        unit_of[layer].layers.append((name, layer))
        for attribute, parameter in layer.named_parameters(recurse=False):
            full_name = f"{name}.{attribute}" if name else attribute
            if parameter.is_meta and len(layers_of[parameter]) > 1:
                raise ValueError(
                    f"{full_name} is shared by two layers and on the device 'meta'; make the module on the CPU"
                )
            owners = {unit_of[each] for each in layers_of[parameter]}
            owner = rest if len(owners) > 1 else unit_of[layer]
            owner.own.append((full_name, layer, attribute))
    return [unit for unit in units if unit.own or unit.buffers()]


def of_one_kind(parameters: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """`parameters` in groups of one dtype that are all trainable, or all frozen."""
    groups: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((parameter.dtype, parameter.requires_grad), {})[name] = parameter
    return list(groups.values())
