"""How training scales: efficiency against workers, and where the time goes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style

NAMES = {"workshop_parameter_server": "parameter server", "torch_ddp": "DDP (PyTorch)"}
PARTS = {
    "compute_seconds": ("computing", "compute"),
    "transfer_seconds": ("sending, receiving", "send"),
    "waiting_seconds": ("waiting for others", "#F2C49B"),
    "other_seconds": ("other", "wait"),
}


def name_of(strategy: str) -> str:
    """What a figure calls a strategy."""
    return NAMES.get(strategy, strategy)


Line = tuple[npt.ArrayLike, npt.ArrayLike]


def efficiency(rows: pd.DataFrame, theory: Mapping[str, Line], finding: str, detail: str) -> Figure:
    """Efficiency against workers: points measured, with the range of their repeats; lines theory.

    `rows` are those of `efficiency.scaling`; `theory` has workers and efficiency by strategy.
    """
    _, axes = style.figure(7.2, 4.2)
    axes.axhline(1, color=style.colour_of("ideal"), linewidth=1.2, linestyle=(0, (4, 2)), zorder=1)
    for index, (strategy, own) in enumerate(rows.groupby("strategy", sort=False)):
        colour, name = str(strategy), name_of(str(strategy))
        own = own.sort_values("workers")
        if strategy in theory:
            workers, line = (np.asarray(values, dtype=float) for values in theory[colour])
            style.theory(axes, workers, line, name, colour=colour)
            name = "_measured"
        work = own["efficiency"] * own["step_seconds"]
        axes.vlines(
            own["workers"],
            work / own["highest"],
            work / own["lowest"],
            color=style.colour_of(colour),
            linewidth=1.2,
            zorder=2,
        )
        places, reached = own[["workers", "efficiency"]].to_numpy(float).T
        style.measured(axes, places, reached, name, colour=colour, marker=style.MARKERS[index % 8])
    counts = {int(count) for count in rows["workers"]}
    counts |= {int(count) for line in theory.values() for count in np.asarray(line[0]) if count in _POWERS}
    style.power_axis(axes, sorted(counts))
    axes.set(xlabel="workers", ylabel="efficiency", ylim=(0, 1.08))
    style.percent_axis(axes.yaxis)
    return style.finish(axes, finding, detail)


_POWERS = {2**power for power in range(11)}


def where_time_goes(rows: pd.DataFrame, finding: str, detail: str) -> Figure:
    """One step as a stacked bar for each strategy and number of workers; on the right, communication's share.

    `rows` are those of `efficiency.scaling`.
    """
    order = pd.CategoricalDtype([*rows["strategy"].unique()])  # in the order in which they come
    rows = rows.astype({"strategy": order}).sort_values(["strategy", "workers"]).astype({"strategy": str})
    _, axes = style.figure(8.6, 1.3 + 0.34 * len(rows))
    left = np.zeros(len(rows))
    places = np.arange(len(rows)) + 0.5 * rows["strategy"].ne(rows["strategy"].shift()).cumsum().to_numpy()
    for part, (label, colour) in PARTS.items():
        seconds = rows[part].clip(lower=0).to_numpy(float)
        look = {"color": style.colour_of(colour), "edgecolor": "white", "label": label}
        axes.barh(places, seconds, 0.78, left=left, **look)
        left += seconds
    for place, end, share in zip(places, left, rows["communication_share"], strict=True):
        style.note(axes, f"{share:.0%}", (end, place), (5, 0), va="center", fontsize=9)
    style.rows(axes, [*(rows["strategy"].map(name_of) + ", " + rows["workers"].astype(str))], places=places)
    axes.set(xlabel="time of one step", xlim=(0, 1.1 * left.max()))
    style.unit_axis(axes.xaxis, "s")
    axes.legend(ncols=4, loc="upper right", bbox_to_anchor=(1, -0.9 / (0.34 * len(rows) + 0.6)), fontsize=9)
    return style.finish(axes, finding, detail)


MODELS = {"resnet50": "ResNet-50", "resnet101": "ResNet-101", "vgg16": "VGG-16", "bert-base": "BERT-base"}


def throughput(rows: pd.DataFrame, colours: Mapping[str, str] = {}) -> Figure:
    """Throughput over that of one device, a panel a model: points measured on emulated devices, lines closed forms.

    `rows` are those of `scale_model.headline`; a row without `efficiency` is of a line alone. `colours` are of
    strategies, where those of `style` mean something else beside the figure.
    """
    models = list(rows["model"].unique())
    figure, grid = style.figure(9.6, 4.4, columns=len(models), sharex=True, sharey=True, squeeze=False)
    for axes, model in zip(grid.flat, models, strict=True):
        own = rows[rows["model"] == model]
        emulated = own.dropna(subset=["efficiency"])
        first, reached = own.iloc[0], list[str]()
        counts = np.unique([1, *emulated["workers"]])  # by any strategy: where the axes have ticks
        ends = np.array([0, counts.max()])
        style.theory(axes, ends, ends, "perfect", colour="ideal", linestyle=(0, (1.5, 1.5)))
        for index, (strategy, points) in enumerate(own.groupby("strategy", sort=False)):
            name, each = str(strategy), points["workers"]
            colour = colours.get(name, name)
            style.theory(axes, each, each * points["predicted"], name_of(name), colour=colour)
            measured = points.dropna(subset=["efficiency"])
            if measured.empty:
                continue
            times = (measured["workers"] * measured["efficiency"]).to_numpy(float)
            places = measured["workers"].to_numpy(float)
            style.measured(axes, places, times, colour=colour, marker=style.MARKERS[index])
            how = {"ring": "a ring", "workshop_parameter_server": "one server"}.get(name, name_of(name))
            unit = "" if reached else " devices"
            reached.append(f"{times[-1]:.{1 if times[-1] > 2 else 2}f}{unit} with {how}")
        axes.set(xlabel="workers, on emulated devices", xticks=counts, yticks=counts)
        axes.set(xlim=(0, None), ylim=(0, None))
        finding = f"{MODELS.get(model, model)}: {counts.max()} workers are worth\n{', '.join(reached)}"
        ratio = f"{first['gradient_nbytes'] / 1e6:.0f} MB of gradients for "
        ratio += f"{first['device_seconds']:.2f} s of computing; lines: formulas"
        style.finish(axes, finding, ratio)
    grid.flat[0].set_ylabel("times the throughput of one device")
    return figure
