"""What ranks that stay hold of the notebook, so that a call sends what has changed."""

from __future__ import annotations

import functools
import sys
from collections.abc import Collection, Iterable, Mapping
from types import FunctionType, ModuleType
from typing import Any

from workshop_utils.jobs import JobError
from workshop_utils.ranks import packing

# By module whether ranks import it anew, and its attributes as pickles.
Modules = dict[str, tuple[bool, dict[str, bytes]]]


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
        self, cargo: packing.Cargo, names: Iterable[str], rebound: Collection[str]
    ) -> tuple[dict[str, Any], Modules, list[str]]:
        """What is to be sent for a call, or a cell that uses `names`: variables, and modules.

        The sentences that come third tell of what the ranks had already.

        Raises:
            JobError: if a module was edited so that no rank can import it.
        """
        self._rebound |= {*rebound}
        modules, again, remarks = self._missing_modules(cargo)
        variables, kept, main = {}, [], vars(sys.modules["__main__"])
        for name, value in cargo.variables.items():
            is_new, is_module = name not in self._values, isinstance(value, ModuleType)
            is_code = isinstance(value, FunctionType | type)
            if (
                is_new
                or self._values[name] is not value
                or (is_code and any(modules[each][0] for each in cargo.homes[name]))
                or (name in self._rebound and not is_module)
            ):
                variables[name] = value
                again += [] if is_new else [name]
            elif name not in self._bound:
                digests = {self._digests[name], packing.digest(value)}
                kept += [name] if len(digests) == 2 and b"" not in digests else []
        sharing = self._add_sharers(variables)
        deleted = [each for each in names if each in self._values.keys() - main.keys() - self._bound]
        told = {
            "Sent to the ranks again, as the notebook has it now": again,
            "The ranks still have the old value, until the notebook assigns it again": [
                each for each in kept if each not in variables
            ],
            "The ranks still have what the notebook has deleted": deleted,
        }
        remarks += [f"{text}: {', '.join(each)}" for text, each in told.items() if each]
        return variables, modules, [*remarks, *sharing]

    def _missing_modules(self, cargo: packing.Cargo) -> tuple[Modules, list[str], list[str]]:
        """Modules, names of attributes that are sent again, and sentences."""
        modules, again, remarks = Modules(), list[str](), []
        for module, pickles in packing.attributes_of(set[str]().union(*cargo.homes.values())).items():
            is_edited = packing.source_of(module) != self._sources.get(module, packing.source_of(module))
            if is_edited:
                if problem := packing.import_problem(module):
                    raise JobError(f"{module} was edited, and ranks cannot import it: {problem}")
                remarks.append(
                    f"{module} was edited: ranks import it anew; what they made of it before keeps its old code"
                )
            before = {} if is_edited else self._attributes.get(module, {})
            changed = {name: each for name, each in pickles.items() if before.get(name) != each}
            values = vars(sys.modules[module])
            again += [
                f"{module}.{name}"
                for name in sorted(before.keys() & changed)
                if name in values and not isinstance(values[name], FunctionType | type)
            ]
            modules[module] = (is_edited, changed)
        return modules, again, remarks

    def _add_sharers(self, variables: dict[str, Any]) -> list[str]:
        """Add those held that share objects with `variables`, as an optimizer does with its model; sentences."""
        sentences, main = [], vars(sys.modules["__main__"])
        objects_of = functools.cache(lambda name: packing.objects_in(self._values[name]))
        waiting = [*variables] if self._values else []
        for name in waiting:  # which grows
            own = packing.objects_in(variables[name])
            for other, value in self._values.items():
                is_here = other not in variables and other in main and main[other] is value
                if own and is_here and own.keys() & objects_of(other).keys():
                    if other in self._bound:
                        sentences.append(
                            f"On the ranks, {other} is a different object, and shares nothing with {name}"
                        )
                        continue
                    sentences.append(f"Sent to the ranks again, since {name} shares objects with it: {other}")
                    variables[other] = value
                    waiting.append(other)
        return sentences

    def named(self, variables: Collection[str]) -> dict[int, str]:
        """The names, by their ids, of functions and classes that the ranks hold; none once one was changed in place."""
        main = vars(sys.modules["__main__"])
        names = self._values.keys() - self._bound - {*variables}
        held = {name: self._values[name] for name in names if packing.is_notebooks(self._values[name])}
        digests = {name: packing.digest(each) for name, each in held.items() if main.get(name) is each}
        # Others may use one that was changed, as subclasses do.
        if any(each != self._digests[name] for name, each in digests.items()):
            return {}
        return {id(held[name]): name for name, each in digests.items() if each}

    def note_sent(self, variables: Mapping[str, Any], modules: Modules) -> None:
        """Note what the ranks have got."""
        self._values |= variables
        self._digests |= {name: packing.digest(value) for name, value in variables.items()}
        self._bound -= variables.keys()
        self._rebound -= variables.keys()
        for module, (is_new, attributes) in modules.items():
            self._attributes[module] = ({} if is_new else self._attributes.get(module, {})) | attributes
            self._sources[module] = packing.source_of(module)

    def note_bound(self, bound: Collection[str]) -> None:
        """Note the names that ranks have bound: their values count until the notebook binds them."""
        main = vars(sys.modules["__main__"])
        self._values |= {name: main.get(name) for name in bound}
        self._bound.update(bound)
        self._rebound -= {*bound}
