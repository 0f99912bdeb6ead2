"""How a module is divided into units, whose parameters are gathered together (for `sharded.FullySharded`)."""

from __future__ import annotations

from collections.abc import Sequence
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


def divide(module: nn.Module, chosen: Sequence[nn.Module]) -> list[Unit]:
    """The units of `module` that have parameters or buffers: the `chosen` submodules, and the rest.

    Of a unit within a unit, the inner one has its own layers. What two of them share belongs to the rest.

    Raises:
        ValueError: if a chosen one is not a submodule; or if it has parameters on "meta" that it shares.
    """
    strangers = [unit for unit in chosen if unit not in set(module.modules())]
    if strangers:
        raise ValueError(f"units has a {type(strangers[0]).__name__} that is not a submodule of the module")
    units = {unit: Unit(unit) for unit in (module, *chosen)}
    unit_of: dict[nn.Module, Unit] = {}

    def visit(layer: nn.Module, unit: Unit) -> None:
        unit = units.get(layer, unit)
        seen = unit_of.setdefault(layer, unit)
        if seen is not unit:
            unit_of[layer] = units[module]
        for child in layer.children():
            visit(child, unit)

    visit(module, units[module])
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
                    f"{full_name} is shared by two units and on the device 'meta'; make the module on the CPU, or "
                    "leave both layers out of the units"
                )
            owner = units[module] if shared else unit_of[layer]
            owner.own.append((full_name, layer, attribute))
    return [unit for unit in units.values() if unit.own or unit.buffers()]


def of_one_kind(parameters: dict[str, nn.Parameter]) -> list[dict[str, nn.Parameter]]:
    """`parameters` in groups of one dtype that are all trainable, or all frozen."""
    groups: dict[Any, dict[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        groups.setdefault((parameter.dtype, parameter.requires_grad), {})[name] = parameter
    return list(groups.values())
