"""The figures to play with of lesson 04 compute what the ring does, and what the lesson's formulas say."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.plots import playable
from workshop_utils.plots.communication import contributions

NOTEBOOK = Path(__file__).parents[2] / "notebooks" / "04_ring_all_reduce.ipynb"
FUNCTIONS = {name: getattr(math, name) for name in ("ceil", "floor", "log", "pow", "sqrt")}
FUNCTIONS |= {"LN2": math.log(2), "max": max, "min": min, "round": round}


def calculated(name, settings, **data):
    """A row's fields after the figure's transforms, or None if a filter drops it. Its expressions are Python, too."""
    row = SimpleNamespace(**data)
    for transform in playable.figure(name).specification["transform"]:
        scope = FUNCTIONS | settings | {"datum": row}
        if "calculate" in transform:
            value = eval(transform["calculate"], scope)
            setattr(row, transform["as"], value)
        elif "filter" in transform and not eval(transform["filter"].replace("&&", "and"), scope):
            return None
    return vars(row)


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_grid_holds_what_a_real_ring_held_after_every_step(size):
    held = np.count_nonzero(contributions(ring_all_reduce, size), axis=3)
    for step in range(2 * size - 1):
        rows = [calculated("ring", {"N": size, "step": step}, cell=cell) for cell in range(64)]
        shown = {(row["rank"], row["chunk"]): row for row in rows if row}
        assert len(shown) == size**2
        for (rank, chunk), row in shown.items():
            assert row["contributions"] == held[rank, step, chunk]
            assert row["arrived"] == (step > 0 and held[rank, step, chunk] != held[rank, step - 1, chunk])


def lesson_s_formulas():
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    (source,) = ("".join(cell["source"]) for cell in cells if cell["id"] == "closed-forms")
    scope = {"np": np}
    exec(source.partition("\nalgorithms = ")[0], scope)
    return scope["all_reduce_seconds"]


@pytest.mark.parametrize("size", [4, 7, 8, 12, 100, 256])
def test_the_curves_are_the_lesson_s_formulas(size):
    seconds = lesson_s_formulas()
    settings = {"N": size, "gigabits": 10, "microseconds": 20}
    for power in (2, 4.5, 6, 9):
        row = calculated("collectives", settings, power=power)
        for name in ("ring", "recursive doubling", "halving-doubling", "double tree"):
            shown = row[name if name in row else f"{name}, estimate"]
            assert shown == pytest.approx(seconds(name, size, 10**power, 20e-6, 1.25e9))
