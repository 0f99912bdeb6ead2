"""Lesson 11: a job on spot instances, before and after an interruption."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style


def spot(table: pd.DataFrame, checkpoint_steps: int) -> Figure:
    """Steps over time; `table` has seconds, step and, if it is known, attempt, of one rank."""
    _, axes = style.figure(6.8, 3.6)
    table = table.sort_values("seconds")
    # SageMaker does not number its restarts; there, a step that falls back tells of one.
    life = table["attempt"] if "attempt" in table else (table["step"].diff() <= 0).cumsum()
    lives = [rows for _, rows in table.groupby(life)]
    before, again = None, 0
    for number, rows in enumerate(lives):
        x, y, colour = rows["seconds"].to_numpy(), rows["step"].to_numpy(), f"worker {number}"
        style.measured(axes, x, y, colour=colour, markersize=2.5, markeredgewidth=0)
        words = "new instances" if number else "first instances"
        beside = (x[len(x) // 2], y[len(x) // 2])  # the upper end belongs to the words of the interruption
        style.note(axes, words, beside, (-8, 2), ha="right", color=style.colour_of(colour))
        if before is not None:
            style.mark(axes, before["seconds"].iloc[-1], "last step before the interruption")
            saved = before["seconds"][before["step"] == y[0] - 1]  # when, of the step that both lives share
            axes.plot([*saved, x[0]], [y[0] - 1] * (len(saved) + 1), color=style.QUIET, linestyle=":")
            style.note(
                axes, f"checkpoint of step {y[0] - 1}", (x[0], y[0] - 1), (-6, -4), ha="right", va="top"
            )
            again += before["step"].iloc[-1] - y[0] + 1
        before = rows
    axes.set(xlabel="seconds since the launch", ylabel="step", xlim=(0, None), ylim=(0, None))
    times = {1: "Not interrupted", 2: "Interrupted once"}.get(
        len(lives), f"Interrupted {len(lives) - 1} times"
    )
    finding = f"{times}: {again} of {table['step'].max()} steps were repeated"
    return style.finish(
        axes, finding, f"a checkpoint every {checkpoint_steps} steps; points: steps of rank 0"
    )
