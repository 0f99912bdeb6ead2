"""A planned run as a picture: hours against dollars; and the same with sliders, where a kernel is there to answer.

    planner("llama-3.1-8b", tokens=100e9, deadline="14d", budget=50_000, instances=["p5.48xlarge", "trn1.32xlarge"])

Last in a cell, it shows sliders in Jupyter and the picture anywhere else: in a notebook that was saved, or on a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import ipywidgets as widgets
import matplotlib
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator

from workshop_utils.plots import alternative, style
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.plan import HOUR, TrainingPlan, pareto_front, plan_run

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
# At which there are ticks; an hour and six hours among them.
DAYS = (1 / 24, 0.25, 1, 3, 10, 30, 100, 365, 1_000, 3_650, 10_000, 36_500, 100_000)
LABELS = 8  # of numbers of machines, at the most, a kind


def hours_and_price(plan: TrainingPlan) -> Figure:
    """Hours against dollars for each kind of machines, what no kind beats, and the limits.

    A point is one number of machines at its best layout; an empty one breaks a limit. Numbers that another of the same
    kind beats in both are left out.
    """
    with matplotlib.rc_context(style.RC):
        _, axes = style.figure(8.0, 4.6)
        if plan.timed.empty:
            axes.set_axis_off()
            return style.finish(axes, f"{plan.model.name} fits into none of these machines")
        axes.set(xscale="log", xlabel="days of training", yscale="log", ylabel="price on demand")
        _limits(axes, plan)
        best = pareto_front(plan.timed)[["hours", "dollars"]].to_numpy().T
        style.theory(axes, *best, linestyle=style.DASHES[2], zorder=4)
        for index, (name, of_kind) in enumerate(plan.timed.groupby("instance", sort=False)):
            _kind(axes, str(name), pareto_front(of_kind), plan, index % len(style.WORKERS))
        style.log_ticks(axes.yaxis)
        style.log_ticks(axes.xaxis)
        axes.xaxis.set_major_locator(FixedLocator([24 * days for days in DAYS]))
        axes.xaxis.set_major_formatter(lambda hours, _: f"{hours / 24:,.3g}")
        axes.yaxis.set_major_formatter(lambda dollars, _: f"${dollars:,.0f}")
        return style.finish(axes, *_headline(plan))


def _headline(plan: TrainingPlan) -> tuple[str, str]:
    best = plan.best
    what = f"{plan.model.name}, {plan.tokens / 1e9:,.4g} billion tokens"
    if best is None:
        return "Nothing meets these limits", what
    finding = f"{best.machines} × {best.instance}: {best.hours / 24:,.3g} days for ${best.dollars:,.0f}"
    return finding, f"{what}; by each point its number of machines; dotted: the best of all"


def _limits(axes: Axes, plan: TrainingPlan) -> None:
    text: dict[str, Any] = {"color": style.QUIET, "fontsize": 9}
    line: dict[str, Any] = {"color": style.QUIET, "linewidth": 1.2, "linestyle": style.DASHES[1], "zorder": 1}
    if math.isfinite(plan.deadline):
        axes.axvline(plan.deadline, **line)
        axes.text(plan.deadline, 0.98, " deadline", transform=axes.get_xaxis_transform(), va="top", **text)
    if math.isfinite(plan.budget):
        axes.axhline(plan.budget, **line)
        text |= {"va": "bottom", "ha": "right"}
        axes.text(0.99, plan.budget, "budget", transform=axes.get_yaxis_transform(), **text)


def _kind(axes: Axes, name: str, rows: pd.DataFrame, plan: TrainingPlan, index: int) -> None:
    """One kind of machine: a line through its numbers of machines, fewest machines last, where its name stands."""
    colour, marker = style.WORKERS[index], style.MARKERS[index]
    look: dict[str, Any] = {"linestyle": "none", "marker": marker, "markeredgecolor": colour, "zorder": 3}
    axes.plot(rows["hours"], rows["dollars"], color=style.tint(colour, 0.5), linewidth=1.4, zorder=2)
    allowed = (rows["hours"] <= plan.deadline) & (rows["dollars"] <= plan.budget)
    for chosen, face in ((rows[allowed], colour), (rows[~allowed], "white")):
        axes.plot(chosen["hours"], chosen["dollars"], markerfacecolor=face, **look)
    words: dict[str, Any] = {"color": style.QUIET, "fontsize": 8, "ha": "center"}
    words["path_effects"] = [withStroke(linewidth=2.5, foreground="white")]
    for _, row in rows.iloc[:: math.ceil(len(rows) / LABELS)].iterrows():
        style.note(axes, f"{row['machines']}", (row["hours"], row["dollars"]), (0, 6), **words)
    axes.plot(*rows[["hours", "dollars"]].iloc[-1], color=colour, linestyle="none", label=name)


class Planner:
    """A plan that can be changed by hand: `plan` is that of the present values of the widgets in `view`.

    Args: as those of `plan_run`; `instances` are those to choose among, all looked at in the beginning.
    """

    def __init__(
        self,
        model: str,
        tokens: float,
        deadline: str | float | None = None,
        budget: float | None = None,
        instances: Sequence[str] | None = None,
    ) -> None:
        self.plan = plan = plan_run(model, tokens, deadline, budget, instances)
        # Files may have described these; the catalogue alone would not know them again.
        self._models = {**catalogue.models(), plan.model.name: plan.model}
        self._kinds = plan.instances
        self._picture = widgets.HTML()  # an Image would have no alternative text
        self._text = widgets.Textarea(disabled=True, rows=16, layout={"width": "100%"}, description="plan")
        days = plan.deadline / 24 if math.isfinite(plan.deadline) else 365.0
        dollars = plan.budget if math.isfinite(plan.budget) else 1e9
        kinds = list(plan.instances)
        self._inputs: dict[str, Any] = {
            "model": widgets.Dropdown(options=list(self._models), value=plan.model.name),
            "tokens": _log_slider(plan.tokens, 8, 14),
            "days": _log_slider(days, -1, 3),
            "dollars": _log_slider(dollars, 1, 9),
            "instances": widgets.SelectMultiple(options=kinds, value=kinds, rows=min(6, len(kinds))),
        }
        for name, each in self._inputs.items():
            each.description, each.layout.width, each.style.description_width = name, "32em", "7em"
            each.observe(self._changed, names="value")
        self.view = widgets.VBox([*self._inputs.values(), self._picture, self._text])
        self._draw()

    def __repr__(self) -> str:
        return str(self.plan)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # A front end shows the richest form that it can: sliders while a kernel answers, the picture anywhere else.
        view = self.view._repr_mimebundle_()[WIDGET_VIEW]
        data, metadata = self._bundle
        return {"text/plain": repr(self), "image/png": data["image/png"], WIDGET_VIEW: view}, metadata

    def _draw(self) -> None:
        """The present plan, for the sliders and for where there are none."""
        figure = hours_and_price(self.plan)
        self._bundle = data, metadata = alternative.bundle(figure)
        plt.close(figure)
        self._picture.value = alternative.html_image(data["image/png"], metadata["image/png"])
        self._text.value = str(self.plan)

    def _changed(self, _: Any) -> None:
        """Plan again; what cannot be planned is said in the text, and the picture stays."""
        name, tokens, days, dollars, kinds = (each.value for each in self._inputs.values())
        instances = [self._kinds[kind] for kind in kinds]
        try:
            self.plan = plan_run(self._models[name], tokens, days * 24 * HOUR, dollars, instances)
        except ValueError as error:
            self._text.value = str(error)
            return
        self._draw()


planner = Planner  # to end a cell with


def _log_slider(value: float, low: float, high: float) -> Any:
    """A slider over powers of ten, wide enough for `value`."""
    power = math.log10(value)
    look = {"step": 0.01, "readout_format": ",.4g", "continuous_update": False}
    return widgets.FloatLogSlider(value=value, min=min(low, power), max=max(high, power), **look)
