"""What a learner's function does with PyTorch's collectives: what it begins, waits for, sends, and keeps.

Both ways to look are needed. `noted` sees the calls of `torch.distributed`, and so who waits; a `tracer` sees what
PyTorch's dispatcher runs, however it was called, and so what is sent and what memory is made.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple
from unittest import mock

from workshop_utils.lessons.checks import NotYet, Wrong, number_of, refuse

NAMES = "broadcast", "scatter", "all_reduce", "all_gather", "reduce_scatter", "all_to_all"
FORMS = "", "_into_tensor", "_tensor", "_single"


class Work:
    """A collective under way, as its caller sees it: once it is waited for, `tensors` have the values of `copies`."""

    def __init__(self, work: Any, tensors: list[Any], copies: list[Any], waits: Callable[[], object]) -> None:
        self._work, self._tensors, self._copies, self._waits = work, tensors, copies, waits
        self._before = [each.clone() for each in tensors]
        self.is_done = False
        self.is_changed = False  # under way, by the caller

    def wait(self, *timeout: Any) -> bool:
        self._waits()
        self._work.wait(*timeout)
        self._end()
        return True

    def is_completed(self) -> bool:
        return bool(self._work.is_completed() and self._end())

    def get_future(self) -> Any:
        return self._work.get_future().then(lambda _: self._end())

    def _end(self) -> list[Any]:
        if not self.is_done:
            self.is_done = True
            for tensor, before, copy in zip(self._tensors, self._before, self._copies, strict=True):
                self.is_changed |= not tensor.allclose(before, 0, 0, equal_nan=True)
                tensor.copy_(copy)
        return self._tensors


def noted(
    dist: Any,
    works: list[Work],
    begins: Callable[[str, dict[str, Any]], object] = lambda *_: None,
    waits: Callable[[], object] = lambda: None,
) -> Any:
    """Note in `works` the collectives that are begun with `async_op=True` while the block runs.

    Their results come with `wait`. Before that, the memory that other ranks' values will fill is NaN. `begins` hears of
    each collective its name and arguments, `waits` when somebody is about to wait for one.
    """

    def noting(called: str, real: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(real)

        def collective(*arguments: Any, **options: Any) -> Any:
            call = signature.bind(*arguments, **options)
            name, outputs = next(iter(call.arguments.items()))
            is_list = isinstance(outputs, list | tuple)
            tensors = [each.detach() for each in (outputs if is_list else [outputs])]
            begins(called, call.arguments)
            if not call.arguments.get("async_op"):
                waits()
                return real(*arguments, **options)
            copies = [each.clone() for each in tensors]
            for each in tensors if name != "tensor" else ():  # `tensor` is what a rank gives, too
                each.fill_(math.nan if each.is_floating_point() else 0)
            call.arguments[name] = copies if is_list else copies[0]
            works.append(Work(real(*call.args, **call.kwargs), tensors, copies, waits))
            return works[-1]

        return collective

    names = [f"{collective}{form}" for collective in NAMES for form in FORMS]
    # Some names are new in PyTorch 2.13.
    stand_ins: dict[str, Any] = {
        name: noting(name, getattr(dist, name)) for name in names if hasattr(dist, name)
    }
    return mock.patch.multiple(dist, **stand_ins)


def judge_works(works: list[Work], where: str) -> None:
    """Raise Wrong if one of `works` was never waited for, or its tensor changed before; forget them."""
    never = sum(not work.is_done for work in works)
    for work in works:
        work.wait()
    changed = sum(work.is_changed for work in works)
    works.clear()
    refuse(never, f"{where}: {number_of(never, 'collective')} never waited for; results come with `wait`.")
    refuse(changed, f"{where}: {number_of(changed, 'tensor')} changed while under way; wait first.")


@contextlib.contextmanager
def agreed(dist: Any) -> Iterator[None]:
    """Let all ranks raise the Wrong or NotYet that one raises in the block, so that nobody waits for it in vain."""
    verdict = None
    try:
        yield
    except (Wrong, NotYet) as error:
        verdict = error
    verdicts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(verdicts, verdict)
    for each in filter(None, verdicts):
        raise each


class Message(NamedTuple):
    """A collective that a rank takes part in."""

    name: str  # in PyTorch's dispatcher, such as "allgather_"
    nbytes: int  # of the longest that goes in or comes out


def tracer() -> Any:
    """A context that notes in `messages` what is sent; `held` counts numbers made in it that somebody still holds."""
    from torch import Tensor, nn
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves

    def tensors(things: Any) -> list[Tensor]:
        return [each for each in tree_leaves(things) if type(each) in (Tensor, nn.Parameter)]

    class Tracer(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.messages: list[Message] = []
            self._itemsizes: Any = weakref.WeakKeyDictionary()  # by storage

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            made = func(*args, **(kwargs or {}))
            library, _, name = func.name().partition("::")
            if "c10d" in library and not name.startswith(("barrier", "recv", "wait", "_wrap")):
                sizes = [sum(each.nbytes for each in tensors(things)) for things in (*args, made)]
                self.messages.append(Message(name.partition(".")[0], max(sizes)))
            given = {each.untyped_storage().data_ptr() for each in tensors(args)}
            for each in tensors(made):
                if each.untyped_storage().data_ptr() not in given:
                    self._itemsizes[each.untyped_storage()] = each.itemsize
            return made

        def held(self, most: int) -> int:
            """How many are still held, once they are `most` or after three seconds: Gloo's threads let go late."""
            deadline = time.monotonic() + 3
            while True:
                gc.collect()
                numbers = sum(storage.nbytes() // size for storage, size in self._itemsizes.items())
                if numbers <= most or time.monotonic() > deadline:
                    return numbers
                time.sleep(0.001)

    return Tracer()
