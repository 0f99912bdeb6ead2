"""Whether types of placement reject a planted bug: `spmd_types`, on ranks that need not exist.

    verdict("bias_before_the_sum")                 # "caught"
    right, wrong = source("bias_before_the_sum")   # the mistake in the vocabulary of spmd_types
    rejection(wrong, ["tensor"])                   # what the type checker says of it

Our collectives run on NumPy arrays, inside autograd functions, where the type checker sees nothing. So each bug that
can be said in placements is restated in `types.yaml`: a short right program, and the same with the faulty line. What
cannot be said is outside, with the reason.

Programs are checked in the stricter of the package's two modes, which knows the dimension that each rank has a part of.
It follows the forward pass alone. Here programs go on with what comes after the backward pass, where most code is not
checked, and begin with a gradient as the package's table has it: that of a replicated parameter (R) is partial (P), a
sum that is still to be made. So "caught" means: if people write their types down as far as this.

Source: spmd_types 0.3.1, https://meta-pytorch.org/spmd_types/
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Literal

import spmd_types as spmd
import torch
import yaml
from spmd_types.checker import typecheck
from torch import Tensor, distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.nn import functional

AXES = "data", "context", "experts", "tensor", "pipeline"
PLACEMENTS = {"R": spmd.R, "I": spmd.I, "V": spmd.V, "P": spmd.P, "S": spmd.S}

Verdict = Literal["caught", "missed", "outside"]


@cache
def restatements() -> dict[str, Any]:
    """`types.yaml`: programs by what they do, and for each bug its program and line, or why there is none."""
    restated: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return restated


def source(name: str) -> tuple[str, str]:
    """The right and the wrong program that stand for the bug `name`.

    Raises:
        KeyError: for no bug's name.
        ValueError: if the bug is outside.
    """
    row = restatements()["bugs"][name]
    if "outside" in row:
        raise ValueError(f"{name} has no placements: {row['outside']}")
    right = restatements()["programs"][row["program"]]["source"]
    if right.count(row["old"]) != 1:
        raise ValueError(f"{name}: {row['old']!r} does not stand once in {row['program']}")
    return right, right.replace(row["old"], row["new"])


def verdict(name: str) -> Verdict:
    """Whether the type checker catches the bug: it accepts the right program and rejects the wrong one.

    Raises:
        KeyError: for no bug's name.
        RuntimeError: if it rejects the right program.
    """
    row = restatements()["bugs"][name]
    if "outside" in row:
        return "outside"
    axes = restatements()["programs"][row["program"]]["axes"]
    of_right, of_wrong = (rejection(each, axes) for each in source(name))
    if of_right is not None:
        raise RuntimeError(f"the right program of {name} is rejected: {of_right}")
    return "missed" if of_wrong is None else "caught"


def rejection(program: str, axes: Sequence[str]) -> str | None:
    """What the type checker says against `program`; None if it accepts it.

    Args:
        program: statements. They have `torch`, `functional`, `spmd`, the placements R, I, V, P and S(dimension), and
            three makers of local tensors of a shape, replicated but on axes that are named: `tensor(4, 8, data=S(0))`;
            `parameter`, which wants a gradient; `integers`. `gradient(parameter)` is placed as that of a parameter.
        axes: those of AXES that it names, in this order; there are two ranks along each.

    Raises:
        Exception: of any other kind than the checker's, if the program does not run.
    """

    def placed(local: Tensor, placements: dict[str, Any]) -> Any:
        return spmd.assert_type(local, {axis: placements.get(axis, spmd.R) for axis in axes})

    def gradient(parameter: Tensor) -> Any:
        kinds = {axis: kind.backward_type() for axis, kind in spmd.get_local_type(parameter).items()}
        own = torch.randn(parameter.shape)
        return spmd.assert_type(own, kinds, partition_spec=spmd.get_partition_spec(parameter))

    makers = {
        "gradient": gradient,
        "tensor": lambda *shape, **placements: placed(torch.randn(shape), placements),
        "parameter": lambda *shape, **placements: placed(torch.randn(shape, requires_grad=True), placements),
        "integers": lambda *shape, **placements: placed(torch.randint(4, shape), placements),
    }
    names = {"torch": torch, "functional": functional, "spmd": spmd, **PLACEMENTS, **makers}
    with _imagined_ranks(2 ** len(AXES)), warnings.catch_warnings(category=FutureWarning, action="ignore"):
        # Always the same mesh, so that an axis has one name in all messages.
        mesh = init_device_mesh("cpu", (2,) * len(AXES), mesh_dim_names=AXES)
        try:
            with spmd.set_current_mesh(mesh[tuple(axes)]), typecheck(local=False):
                exec(program, names)
        except spmd.SpmdTypeError as error:
            return str(error)
    return None


@contextmanager
def _imagined_ranks(count: int) -> Iterator[None]:
    """PyTorch's fake process group: this process is rank 0, and collectives do nothing. It must be the only group."""
    # It reports each placement that the checker tries in vain.
    tried = logging.getLogger("torch._subclasses.fake_tensor")
    tried.disabled = True
    distributed.init_process_group("fake", rank=0, world_size=count)
    try:
        yield
    finally:
        distributed.destroy_process_group()
        tried.disabled = False
