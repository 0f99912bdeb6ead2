"""The lessons on a machine without Horovod: its names over PyTorch's process group, and recorded outputs.

    on_horovod(4, program)          # program(hvd) on four ranks

A cell whose first line is the comment `# needs Horovod` runs as any other where Horovod is installed. Elsewhere it
shows the outputs that it has in the committed lesson (`register`).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NoReturn

from workshop_utils import optional
from workshop_utils.ranks import on_ranks
from workshop_utils.ranks.results import Results
from workshop_utils.setup import horovod_build, install

MARK = "# needs Horovod"
HOW = "`workshop install horovod` compiles it in minutes (on Linux or macOS with a C++ compiler)"
MISSING = "needs Horovod, which is not installed"
RECORDED = "Recorded with Horovod, which is not installed here (`workshop install horovod`):"


@functools.cache
def has_horovod() -> bool:
    """Whether this kernel has Horovod; what arrives later is for the next one, since cells build on each other."""
    return optional.is_installed("horovod")


class HorovodOverTorch:
    """What lesson 05 uses of `horovod.torch`, over PyTorch's process group: the same results, but nothing is fused."""

    Average, Sum = "mean", "sum"
    Compression = SimpleNamespace(none=None, fp16="float16")

    def __init__(self, dist: Any) -> None:
        self._dist, self.barrier = dist, dist.barrier
        self.rank = self.local_rank = dist.get_rank
        self.size = self.local_size = dist.get_world_size

    def init(self) -> None:
        """Nothing: `on_ranks` has made the process group."""

    def allreduce(
        self, tensor: Any, name: str | None = None, compression: str | None = None, op: str = Average
    ) -> Any:
        import torch

        total = tensor.to(getattr(torch, compression) if compression else tensor.dtype, copy=True)
        self._dist.all_reduce(total)
        return total.to(tensor.dtype) / (self.size() if op == self.Average else 1)

    def broadcast_parameters(self, parameters: Mapping[str, Any], root_rank: int) -> None:
        for tensor in parameters.values():
            self._dist.broadcast(tensor, root_rank)

    def broadcast_object(self, thing: Any, root_rank: int = 0) -> Any:
        things = [thing]
        self._dist.broadcast_object_list(things, root_rank)
        return things[0]

    def broadcast_optimizer_state(self, optimizer: Any, root_rank: int) -> None:
        optimizer.load_state_dict(self.broadcast_object(optimizer.state_dict(), root_rank))

    def DistributedOptimizer(  # noqa: N802
        self, optimizer: Any, named_parameters: Any = None, **options: Any
    ) -> Any:
        """An optimizer over the same parameters and state; its `step` all-reduces their gradients first."""
        import torch

        for option in options.keys() - {"compression", "op"}:
            _say_missing(f"DistributedOptimizer(…, {option}=…)")

        def average(*_: Any) -> None:
            for each in (each for group in optimizer.param_groups for each in group["params"]):
                if each.requires_grad:
                    gradient = torch.zeros_like(each) if each.grad is None else each.grad
                    each.grad = self.allreduce(gradient, **options)

        wrapped = copy.copy(optimizer)  # shares all but the hooks
        wrapped.register_step_pre_hook(average)
        for method in ("synchronize", "skip_synchronize"):
            setattr(wrapped, method, functools.partial(_say_missing, f"DistributedOptimizer(…).{method}"))
        return wrapped

    def __getattr__(self, name: str) -> Any:
        _say_missing(name)


def _say_missing(name: str) -> NoReturn:
    raise AttributeError(f"hvd.{name} {MISSING}; {HOW}")


def over_torch(dist: Any, program: Callable[..., Any], **arguments: Any) -> Any:
    """On a rank: `program(hvd, **arguments)`, where `hvd` speaks through PyTorch's process group `dist`."""
    return program(HorovodOverTorch(dist), **arguments)


def call(program: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """For `on_ranks`, what calls `program(hvd, **arguments)` with Horovod or, where that is missing, its names."""
    if has_horovod():
        return {"program": program, "arguments": dict(arguments), "framework": "horovod"}

    @functools.wraps(program)
    def by_torch(dist: Any, **arguments: Any) -> Any:
        return program(HorovodOverTorch(dist), **arguments)

    return {"program": by_torch, "arguments": dict(arguments), "framework": "torch"}


def on_horovod(
    ranks: int,
    program: Callable[..., Any],
    arguments: Mapping[str, Any] | None = None,
    network: str | None = None,
) -> Results:
    """`on_ranks(…, framework="horovod")`; without Horovod PyTorch's process group under the same names."""
    return on_ranks(ranks, **call(program, arguments or {}), network=network)


def say_if_missing() -> None:
    """Where Horovod is missing, say what the lesson shows; compile it meanwhile in the workshop's own environment."""
    if has_horovod():
        return
    print(
        "Horovod is not installed: cells that begin with `# needs Horovod` show recorded outputs, and the others train "
        f"over PyTorch's process group, under Horovod's names. {HOW}."
    )
    if install.is_for_lab_alone() and not horovod_build.missing_build_tools():
        print(_building())


@functools.cache
def _installation() -> install.Installation:
    return install.Installation("horovod")


def _building() -> str:
    """How the build goes that this kernel has begun; the first call begins it."""
    if _installation().is_running():
        how = (
            install.in_progress()
            or "It is being compiled in the background, for as long as this kernel lives"
        )
        return f"{how}. Run this cell again to see how far it is."
    if _installation().has_failed():
        return f"It could not be compiled. {_installation().reason()}"
    return "Now it is installed: restart the kernel to have it."


def register(shell: Any) -> None:
    """Let the notebook `shell` show recorded outputs in place of running cells that need Horovod, if it is missing."""
    if _recorded_instead not in shell.input_transformers_cleanup:
        shell.input_transformers_cleanup.append(_recorded_instead)


def _recorded_instead(lines: list[str]) -> list[str]:
    if lines and lines[0].strip() == MARK and not has_horovod():
        return [f"from {__name__} import show_recorded; show_recorded({''.join(lines)!r})\n"]
    return lines


def show_recorded(source: str) -> None:
    """Display the outputs of the committed cell with this `source`."""
    from IPython.display import display

    from workshop_utils.lessons import selection

    for path in sorted((selection.lessons_folder() / selection.NOTEBOOKS).glob(selection.LESSONS)):
        for cell in selection.read_notebook(path).cells if MARK in path.read_text(encoding="utf-8") else ():
            if cell.cell_type == "code" and cell.source.strip() == source.strip():
                if cell.outputs:
                    print(RECORDED)
                for output in cell.outputs:
                    if output.output_type == "stream":
                        print(output.text, end="")
                    else:
                        display(output.data, raw=True)
                return
    print(f"This cell needs Horovod, which is not installed: {HOW}.")
