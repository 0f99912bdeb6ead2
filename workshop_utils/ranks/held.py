"""What ranks that stay hold of the notebook, so that a call sends what has changed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Mapping
from types import FunctionType, ModuleType
from typing import Any

from workshop_utils.ranks import packing


class Held:
    """What ranks that stay hold of the notebook's variables and modules."""

    def __init__(self) -> None:
        self._values: dict[str, Any] = {}  # as the notebook had them when they were sent, or bound on a rank
        self._digests: dict[str, bytes] = {}
        self._bound: set[str] = set()  # those that a rank has bound since
        self._rebound: set[str] = set()  # those that the notebook has assigned since
        self._attributes: dict[str, dict[str, bytes]] = {}
        self._sources: dict[str, bytes] = {}

    def missing(
        self, cargo: packing.Cargo, rebound: Collection[str]
    ) -> tuple[dict[str, Any], dict[str, tuple[bool, dict[str, bytes]]]]:
        """Variables, and attributes of modules, that are to be sent; a line names what the ranks had already."""
        self._rebound |= {*rebound}
        edited = {each for each, text in self._sources.items() if packing.source_of(each) != text}
        modules = {}
        for module in sorted(edited):
            print(
                f"{module} was edited: ranks import it anew; what they made of it before keeps its old code"
            )
        for module, pickles in packing.attributes_of(set[str]().union(*cargo.homes.values())).items():
            before = {} if module in edited else self._attributes.get(module, {})
            changed = {name: each for name, each in pickles.items() if before.get(name) != each}
            modules[module] = (module in edited, changed)
        variables, again, kept = {}, [], []
        for name, value in cargo.variables.items():
            is_new, is_module = name not in self._values, isinstance(value, ModuleType)
            is_code = isinstance(value, FunctionType | type) and cargo.homes[name] & edited
            if (
                is_new
                or self._values[name] is not value
                or is_code
                or (name in self._rebound and not is_module)
            ):
                variables[name] = value
                again += [] if is_new else [name]
            elif name not in self._bound:
                digests = {self._digests[name], packing.digest(value)}
                kept += [name] if len(digests) == 2 and b"" not in digests else []
        if again:
            print(f"Sent to the ranks again, as the notebook has it now: {', '.join(again)}")
        if kept:
            print(
                f"The ranks still have the old value, until the notebook assigns it again: {', '.join(kept)}"
            )
        return self._with_sharers(variables), modules

    def _with_sharers(self, variables: dict[str, Any]) -> dict[str, Any]:
        """`variables` with those held that share objects with them, as an optimizer does with its model."""
        main, waiting = vars(sys.modules["__main__"]), [*variables] if self._values else []
        objects_of = functools.cache(lambda name: packing.objects_in(self._values[name]))
        for name in waiting:  # which grows
            own = packing.objects_in(variables[name])
            for other, value in self._values.items():
                is_here = other not in variables and other in main and main[other] is value
                if own and is_here and own.keys() & objects_of(other).keys():
                    if other in self._bound:
                        print(f"On the ranks, {other} is a different object, and shares nothing with {name}")
                        continue
                    print(f"Sent to the ranks again, since {name} shares objects with it: {other}")
                    variables[other] = value
                    waiting.append(other)
        return variables

    def note_sent(
        self, variables: Mapping[str, Any], modules: Mapping[str, tuple[bool, dict[str, bytes]]]
    ) -> None:
        """Note what the ranks have got."""
        self._values |= variables
        self._digests |= {name: packing.digest(value) for name, value in variables.items()}
        self._bound -= variables.keys()
        self._rebound -= variables.keys()
        for module, (_, attributes) in modules.items():
            self._attributes.setdefault(module, {}).update(attributes)
            self._sources[module] = packing.source_of(module)

    def note_bound(self, bound: Collection[str]) -> None:
        """Note the names that ranks have bound: their values count until the notebook binds them."""
        main = vars(sys.modules["__main__"])
        self._values |= {name: main.get(name) for name in bound}
        self._bound.update(bound)
