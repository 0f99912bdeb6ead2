"""What a step of PyTorch holds in memory, operation by operation.

def training(batch):
    model = ...
    optimizer = ...

    def step(memory):
        memory.phase = "forward"
        loss = ...
        memory.phase = "backward"
        loss.backward()
        memory.phase = "update"
        ...

    return step, model, optimizer

on_ranks(1, follow, {"training": training, "sizes": (1024,), "warm_up": (64,)}, framework="torch")
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1  # of mallopt, man 3 mallopt


def keep_freed_memory(keep: bool) -> None:
    """Have the C library keep what this process frees, or return it to the operating system at once.

    By default glibc decides by a threshold that moves with the sizes that were freed. Then the same step takes longer
    or shorter, and the process's memory shows what was once needed, not what is. Other C libraries are left alone.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        # 32 MiB is glibc's largest. 8 KiB is two pages: smaller blocks would waste much of theirs.
        libc.mallopt(_MMAP_THRESHOLD, 2**25 if keep else 2**13)
        libc.mallopt(_TRIM_THRESHOLD, 2**30 if keep else 2**13)


def resident_nbytes() -> int:
    """What this process has in memory now, by the operating system's count."""
    return psutil.Process().memory_info().rss


def follow(
    _group: Any, training: Callable[..., Any], sizes: tuple[Any, ...], warm_up: tuple[Any, ...]
) -> list[dict[str, Any]]:
    """The second step of `training(*sizes)`: the optimizer's state appears in the first.

    For `on_ranks`, which gives it a fresh process, and a group that it does not need.

    Args:
        training: returns a step, which takes the `StepMemory` that sees it, the model, and its optimizer.
        warm_up: small sizes to train with first, since libraries take memory for themselves once.

    Returns:
        The rows of `StepMemory.table`, which count the process's bytes from before the model was made.
    """
    keep_freed_memory(False)  # so that the process has what its tensors need
    torch.set_num_threads(1)
    _follow(training, warm_up)
    return _follow(training, sizes)


def _follow(training: Callable[..., Any], sizes: tuple[Any, ...]) -> list[dict[str, Any]]:
    start = resident_nbytes()
    step, model, optimizer = training(*sizes)
    for _ in range(2):
        state = [tensor for each in optimizer.state.values() for tensor in each.values()]
        with StepMemory({"parameters": model.parameters(), "optimizer's state": state}) as seen:
            step(seen)
    return [row | {"process": row["process"] - start} for row in seen.table()]


@dataclass
class _Storage:
    nbytes: int
    kind: str  # of what there was before; "" for what an operation made
    made: int = 0  # the index of the operation after which it was first seen,
    freed: int | None = None  # and of that after which it was gone


class StepMemory(TorchDispatchMode):
    """Sees each operation between `with` and its end, and the memory of all tensors that are alive after it.

    What an operation allocates for itself and frees before it returns is not seen; on a CPU PyTorch's backward pass
    runs in the thread that asks for it, so it is seen like the rest.

    Attributes:
        phase: "forward", "backward" or "update": what is being done; to be set before each.
    """

    def __init__(self, before: Mapping[str, Iterable[torch.Tensor]]) -> None:
        """`before` are the tensors that are there beforehand, by kind."""
        super().__init__()
        self.phase = ""
        self._operations: list[tuple[str, str, int]] = []
        self._storages: dict[StorageWeakRef, _Storage] = {}
        for kind, tensors in before.items():
            for tensor in tensors:
                self._note(tensor, kind)

    def _note(self, tensor: torch.Tensor, kind: str = "") -> None:
        storage = tensor.untyped_storage()
        made = _Storage(storage.nbytes(), kind, len(self._operations))
        self._storages.setdefault(StorageWeakRef(storage), made)

    def __torch_dispatch__(self, operation: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        result = operation(*arguments, **(options or {}))
        for each in tree_iter(result):
            if isinstance(each, torch.Tensor):
                self._note(each)
        for reference, storage in self._storages.items():
            if storage.freed is None and reference.expired():
                storage.freed = len(self._operations)
        name = str(operation).split(".")[1]  # aten.mm.default
        self._operations.append((self.phase, name, resident_nbytes()))
        return result

    def table(self) -> list[dict[str, Any]]:
        """A row for each operation after which the tensors hold more or fewer bytes than before it.

        A phase's first operation has one in any case. A row has the `phase`, the `operation`, the `process`'s resident
        bytes, and in `tensors` those of all tensors by kind. What the forward pass made and kept are activations, what
        the backward pass did gradients; the rest of what the backward pass made are gradients of activations, and what
        else was there for a while is temporary.
        """
        rows: list[dict[str, Any]] = []
        for index, (phase, operation, process) in enumerate(self._operations):
            tensors: Counter[str] = Counter()
            for storage in self._storages.values():
                if storage.made <= index and (storage.freed is None or index < storage.freed):
                    tensors[self._kind(storage)] += storage.nbytes
            row = {"phase": phase, "operation": operation, "process": process, "tensors": dict(tensors)}
            last: dict[str, Any] = rows[-1] if rows else {"phase": "", "tensors": {}}
            if phase != last["phase"] or sum(tensors.values()) != sum(last["tensors"].values()):
                rows.append(row)
        return rows

    def _kind(self, storage: _Storage) -> str:
        made_in = self._operations[storage.made][0]
        is_kept = storage.freed is None or self._operations[storage.freed][0] != made_in
        if made_in == "backward" and not storage.kind:
            return "gradients" if is_kept else "gradients of activations"
        return storage.kind or ("activations" if is_kept and made_in == "forward" else "temporary")
