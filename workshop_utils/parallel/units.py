"""How a module is divided into units, whose parameters are gathered together (for `sharded.FullySharded`)."""

from __future__ import annotations

from typing import Any

import torch
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
        """Give what is on "meta" memory and its initial values. Raises ValueError where a layer cannot."""
        fresh: dict[Tensor, Any] = {}
        for _, layer, attribute in self.own:
            old = layer.get_parameter(attribute)
            if old.is_meta:
                made = nn.Parameter(torch.empty_like(old, device="cpu"), old.requires_grad)
                setattr(layer, attribute, fresh.setdefault(old, made))
        for name, layer in self.layers:
            for attribute, buffer in layer.named_buffers(recurse=False):
                if buffer.is_meta:
                    setattr(
                        layer, attribute, fresh.setdefault(buffer, torch.empty_like(buffer, device="cpu"))
                    )
            changed = {*layer.parameters(recurse=False), *layer.buffers(recurse=False)} & {*fresh.values()}
            if changed and not hasattr(layer, "reset_parameters"):
                raise ValueError(
                    f"layer {name!r}, a {type(layer).__name__}, is on the device 'meta' and has no reset_parameters "
                    "to give it initial values; make the module on the CPU"
                )
            if changed:
                layer.reset_parameters()  # type: ignore[operator]


def divide(module: nn.Module) -> list[Unit]:
    """The units of `module` that have parameters or buffers: its children, and what none or several of them have.

    Raises:
        ValueError: if two units share parameters on "meta".
    """
    rest = Unit(module)
    units = [rest, *(Unit(child) for child in module.children())]
    unit_of = {module: rest}
    for unit in units[1:]:
        for layer in unit.module.modules():
            unit_of[layer] = rest if layer in unit_of else unit
    where: dict[nn.Parameter, set[Unit]] = {}
    for layer, unit in unit_of.items():
        for parameter in layer.parameters(recurse=False):
            where.setdefault(parameter, set()).add(unit)
    for name, layer in module.named_modules():
        unit_of[layer].layers.append((name, layer))
        for attribute, parameter in layer.named_parameters(recurse=False):
            full_name = f"{name}.{attribute}" if name else attribute
            shared = len(where[parameter]) > 1
            if shared and parameter.is_meta:
                raise ValueError(
                    f"{full_name} is shared by two units and on the device 'meta'; make the module on the CPU"
                )
            owner = rest if shared else unit_of[layer]
            owner.own.append((full_name, layer, attribute))
    return [unit for unit in units if unit.own or unit.buffers()]


def of_one_kind(parameters: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """`parameters` in groups of one dtype that are all trainable, or all frozen."""
    groups: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((parameter.dtype, parameter.requires_grad), {})[name] = parameter
    return list(groups.values())
