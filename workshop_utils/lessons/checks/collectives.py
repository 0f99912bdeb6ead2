"""What a learner's function does with PyTorch's collectives: what it begins, and what it waits for."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any
from unittest import mock

NAMES = "broadcast", "scatter", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
FORMS = "", "_into_tensor", "_tensor", "_single"


class Work:
    """A collective under way, as its caller sees it; `finish` is called once, when it is waited for."""

    def __init__(
        self, work: Any, finish: Callable[[], Any] = lambda: None, waits: Callable[[], None] = lambda: None
    ) -> None:
        self._work, self._finish, self._waits = work, finish, waits
        self.is_done = False

    def wait(self, *timeout: Any) -> bool:
        self._waits()
        self._work.wait(*timeout)
        self._end()
        return True

    def is_completed(self) -> bool:
        if done := bool(self._work.is_completed()):
            self._end()
        return done

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda done: self._end() or done.value())

    def _end(self) -> Any:
        done, self.is_done = self.is_done, True
        return None if done else self._finish()


def noted(dist: Any, works: list[Work]) -> Any:
    """Note in `works` the collectives that are begun with `async_op=True` while the block runs.

    Their results come with `wait`. Before that, what others' values are to fill is NaN.
    """

    def noting(real: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(real)

        def collective(*arguments: Any, **options: Any) -> Any:
            call = signature.bind(*arguments, **options)
            if not call.arguments.get("async_op"):
                return real(*arguments, **options)
            name, outputs = next(iter(call.arguments.items()))
            is_list = isinstance(outputs, list | tuple)
            tensors = [each.detach() for each in (outputs if is_list else [outputs])]
            copies = [each.clone() for each in tensors]
            for each in tensors if name != "tensor" else ():  # `tensor` is what a rank gives, too
                each.fill_(math.nan if each.is_floating_point() else 0)

            def finish() -> None:
                for tensor, copy in zip(tensors, copies, strict=True):
                    tensor.copy_(copy)

            call.arguments[name] = copies if is_list else copies[0]
            works.append(Work(real(*call.args, **call.kwargs), finish))
            return works[-1]

        return collective

    names = [f"{collective}{form}" for collective in NAMES for form in FORMS]
    # Some names are new in PyTorch 2.13.
    stand_ins: dict[str, Any] = {name: noting(getattr(dist, name)) for name in names if hasattr(dist, name)}
    return mock.patch.multiple(dist, **stand_ins)
