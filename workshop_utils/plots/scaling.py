"""How throughput grows with the number of workers."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style


def throughput(measured: pd.DataFrame, cores: int) -> Figure:
    """Samples per second against workers, a line a strategy, beside what perfect scaling would give.

    `measured` has the columns of `scaling.sweep.table`; runs that failed are left out.
    """
    rows = measured[measured["state"] == "succeeded"].sort_values("workers")
    figure, axes = style.figure(7.6, 4.6)
    for index, (strategy, of_strategy) in enumerate(rows.groupby("strategy")):
        axes.plot(
            of_strategy["workers"],
            of_strategy["samples_per_second"],
            color=style.colour_of(str(strategy)),
            marker=style.MARKERS[index % len(style.MARKERS)],
            markeredgecolor="white",
            label=str(strategy),
        )
    counts = sorted(rows["workers"].unique())
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    if counts:
        axes.set_xlim(counts[0] * 0.9, counts[-1] * 1.1)
        start = rows.loc[rows["workers"] == counts[0], "samples_per_second"].median()
        style.theory(
            axes, counts, [start * count / counts[0] for count in counts], "perfect", linestyle=(0, (5, 2))
        )
    axes.set_xlabel("workers")
    axes.set_ylabel("samples per second, all workers together")
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    most = rows[(rows["workers"] == counts[-1]) & (rows["workers"] > 1)] if counts else rows
    finding = (
        f"{counts[-1]} workers on {cores} cores: {most['efficiency'].median():.0%} of perfect scaling at the median"
        if len(most)
        else "Throughput by strategy"
    )
    style.headline(axes, finding, "the digits, the same network by every strategy, batch a worker fixed")
    style.label_ends(axes)
    return figure
