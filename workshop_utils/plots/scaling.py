"""How training scales on a scale model of a cluster."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from workshop_utils.plots import style

NAMES = {
    "workshop_parameter_server": "one server",
    "sharded_servers": "a server per machine",
    "torch_ddp": "DDP (PyTorch)",
}


def name_of(strategy: str) -> str:
    """What a figure calls a strategy."""
    return NAMES.get(strategy, strategy)


MODELS = {"resnet50": "ResNet-50", "resnet101": "ResNet-101", "vgg16": "VGG-16", "bert-base": "BERT-base"}


def throughput(rows: pd.DataFrame, published: pd.DataFrame | None = None) -> Figure:
    """Throughput over that of one device, a panel a model: points measured on emulated devices, lines closed forms.

    Args:
        rows: those of `scale_model.headline`; a row without `efficiency` is of a line alone.
        published: what others measured, drawn hollow: rows of `published.scaling_series`.
    """
    models = list(rows["model"].unique())
    figure, grid = style.figure(
        (4.8 if published is None else 5.6) * len(models),
        4.4,
        columns=len(models),
        sharex=True,
        sharey=True,
        squeeze=False,
    )
    for axes, model in zip(grid.flat, models, strict=True):
        own = rows[rows["model"] == model]
        emulated = own.dropna(subset=["efficiency"])
        first, reached, strategies = own.iloc[0], list[str](), set(own["strategy"])
        most = emulated["workers"].max()  # by any strategy
        ends, quarter = np.array([0, most]), max(4, most // 4)
        counts = np.union1d([1, most], np.arange(quarter, most + 1, quarter))
        style.theory(axes, ends, ends, "perfect", colour="ideal", linestyle=(0, (1.5, 1.5)))
        for index, (strategy, points) in enumerate(own.groupby("strategy", sort=False)):
            name, each = str(strategy), points["workers"]
            look = {"linestyle": style.DASHES[1], "zorder": 2.5} if name == "sharded_servers" else {}
            if name == "ring" and "sharded_servers" in strategies:  # the two lie close together
                look = {"linewidth": 4, "alpha": 0.4}
            style.theory(axes, each, each * points["predicted"], name_of(name), colour=name, **look)
            measured = points.dropna(subset=["efficiency"])
            if measured.empty:
                continue
            times = (measured["workers"] * measured["efficiency"]).to_numpy(float)
            places = measured["workers"].to_numpy(float)
            style.measured(axes, places, times, colour=name, marker=style.MARKERS[index])
            how = "a ring" if name == "ring" else name_of(name)
            unit = "" if reached else " devices"
            reached.append(f"{times[-1]:.{1 if times[-1] > 2 else 2}f}{unit} with {how}")
        others = [] if published is None else published[published["model"] == model].to_dict("records")
        for row in others:
            times, by = row["throughput"] / row["one_device"], row["strategy"].split(" (")[0]
            label = f"published: {times:.1f}, {by}"
            style.measured(axes, [row["devices"]], [times], label, colour="server", marker="D", hollow=True)
        axes.set(xlabel="workers, on emulated devices", xticks=counts, yticks=counts)
        axes.set(xlim=(0, None), ylim=(0, None))
        finding = f"{MODELS.get(model, model)}: {most} workers are worth\n{', '.join(reached)}"
        ratio = f"{first['gradient_nbytes'] / 1e6:.0f} MB for "
        ratio += f"{first['device_seconds']:.2f} s of computing; lines: formulas"
        ratio += "; hollow: published" if others else ""
        style.finish(axes, finding, ratio)
    grid.flat[0].set_ylabel("times the throughput of one device")
    return figure
