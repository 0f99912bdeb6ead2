"""A planned run as a picture: hours against dollars; and the same with sliders, where a kernel is there to answer.

    planner("llama-3.1-8b", tokens=100e9, deadline="14d", budget=50_000, instances=["p5.48xlarge", "trn1.32xlarge"])

Last in a cell, it shows sliders in Jupyter and the picture anywhere else: in a notebook that was saved, or on a page.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import matplotlib
import pandas as pd
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from workshop_utils.plots import alternative, style
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.plan import HOUR
from workshop_utils.scaling.plan import Plan, front_of, plan_run

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"
LABELS = 8  # of numbers of machines, at the most, a kind


def hours_and_price(plan: Plan) -> Figure:
    """Hours against dollars for each kind of machines, what no kind beats, and the limits.

    A point is one number of machines at its best layout; an empty one breaks a limit. Numbers that another of the same
    kind beats in both are left out.
    """
    with matplotlib.rc_context(style.RC):
        figure, axes = style.figure(8.0, 4.6)
        if plan.timed.empty:
            style.headline(axes, f"{plan.model.name} fits into none of these machines")
            axes.set_axis_off()
            return figure
        rows = pd.concat(
            [front_of(of_kind) for _, of_kind in plan.timed.groupby("instance", observed=True)]
        ).drop_duplicates(["instance", "machines"])
        axes.set_xscale("log")
        axes.set_yscale("log")
        _limits(axes, plan)
        front = plan.pareto
        style.theory(
            axes, front["hours"].to_numpy(), front["dollars"].to_numpy(), linestyle=style.DASHES[2], zorder=4
        )
        for index, (name, of_kind) in enumerate(rows.groupby("instance", observed=True)):
            _kind(axes, str(name), of_kind.sort_values("machines"), plan, index)
        axes.xaxis.set_major_formatter(lambda hours, _: f"{hours / 24:,.3g}")
        axes.xaxis.set_major_locator(matplotlib.ticker.FixedLocator(_days(rows["hours"])))
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.yaxis.set_major_formatter(lambda dollars, _: f"${dollars:,.0f}")
        axes.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.set_xlabel("days of training")
        axes.set_ylabel("price on demand")
        style.headline(axes, *_headline(plan))
        style.label_ends(axes)
    return figure


def _headline(plan: Plan) -> tuple[str, str]:
    best = plan.best
    what = f"{plan.model.name}, {plan.tokens / 1e9:,.4g} billion tokens"
    if best is None:
        return "Nothing meets these limits", what
    return (
        f"{best.machines} × {best.instance}: {best.hours / 24:,.3g} days for ${best.dollars:,.0f}",
        f"{what}; by each point its number of machines; dotted: the best of all",
    )


def _limits(axes: Axes, plan: Plan) -> None:
    text: dict[str, Any] = {"color": style.QUIET, "fontsize": 9}
    line: dict[str, Any] = {"color": style.QUIET, "linewidth": 1.2, "linestyle": style.DASHES[1], "zorder": 1}
    if math.isfinite(plan.deadline):
        axes.axvline(plan.deadline, **line)
        axes.text(
            plan.deadline, 0.98, " deadline", transform=axes.get_xaxis_transform(), va="top", **text
        )  # fmt: skip
    if math.isfinite(plan.budget):
        axes.axhline(plan.budget, **line)
        axes.text(
            0.99, plan.budget, "budget", transform=axes.get_yaxis_transform(), va="bottom", ha="right", **text
        )  # fmt: skip


def _kind(axes: Axes, name: str, rows: Any, plan: Plan, index: int) -> None:
    """One kind of machine: a line through its numbers of machines, fewest machines last, where its name stands."""
    colour = style.WORKERS[index % len(style.WORKERS)]
    marker = style.MARKERS[index % len(style.MARKERS)]
    rows = rows[::-1]
    axes.plot(rows["hours"], rows["dollars"], color=style.tint(colour, 0.5), linewidth=1.4, zorder=2)
    allowed = (rows["hours"] <= plan.deadline) & (rows["dollars"] <= plan.budget)
    for chosen, face in ((rows[allowed], colour), (rows[~allowed], "white")):
        axes.plot(
            chosen["hours"], chosen["dollars"], marker=marker, linestyle="none", markerfacecolor=face,
            markeredgecolor=colour, zorder=3,
        )  # fmt: skip
    every = math.ceil(len(rows) / LABELS)
    for _, row in rows.iloc[::every].iterrows():
        axes.annotate(
            f"{row['machines']}", (row["hours"], row["dollars"]), (0, 6), textcoords="offset points",
            color=style.QUIET, fontsize=8, ha="center", path_effects=[withStroke(linewidth=2.5, foreground="white")],
        )  # fmt: skip
    axes.plot(rows["hours"].iloc[-1:], rows["dollars"].iloc[-1:], color=colour, linestyle="none", label=name)


def _days(hours: Any) -> list[float]:
    """Ticks at days that people name, given in hours."""
    named = (1 / 24, 0.25, 1, 3, 10, 30, 100, 365, 1_000, 3_650, 10_000, 36_500, 100_000)
    return [24 * days for days in named if 0.5 * hours.min() <= 24 * days <= 2 * hours.max()]


class Planner:
    """A plan that can be changed by hand: `plan` is that of the widgets' present values.

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
        self.plan = plan_run(model, tokens, deadline, budget, instances)
        self.problem = ""
        # A file may have described these; the catalogue alone would not know them again.
        self._given, self._kinds = self.plan.model, self.plan.instances
        self._widgets: Any = None

    def picture(self) -> tuple[str, dict[str, Any]]:
        """The plan as base64 PNG, and its metadata: width, height and, as `alt`, what it shows in words."""
        figure = hours_and_price(self.plan)
        data, metadata = alternative.bundle(figure)
        plt.close(figure)
        return data["image/png"], metadata["image/png"]

    def __repr__(self) -> str:
        return str(self.plan)

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        # A front end shows the richest form that it can: sliders while a kernel answers, the picture anywhere else.
        view = self.widgets()._repr_mimebundle_()[WIDGET_VIEW]
        data = {"text/plain": repr(self), "image/png": self._png, WIDGET_VIEW: view}
        return data, {"image/png": self._metadata}

    def widgets(self) -> Any:
        """The sliders above the picture and the plan's text; made once."""
        if self._widgets is not None:
            return self._widgets
        import ipywidgets

        plan, later = self.plan, {"continuous_update": False}
        wide = {"layout": {"width": "32em"}, "style": {"description_width": "7em"}}
        deadline = plan.deadline if math.isfinite(plan.deadline) else 24 * 365
        budget = plan.budget if math.isfinite(plan.budget) else 1e9
        known = dict.fromkeys([plan.model.name, *catalogue.models()])
        self._model = ipywidgets.Dropdown(
            options=list(known), value=plan.model.name, description="model", **wide
        )
        self._tokens = _log_slider(ipywidgets, "tokens", plan.tokens, 8, 14, **later, **wide)
        self._days = _log_slider(ipywidgets, "days", deadline / 24, -1, 3, **later, **wide)
        self._budget = _log_slider(ipywidgets, "dollars", budget, 1, 9, **later, **wide)
        names = list(plan.instances)
        self._instances = ipywidgets.SelectMultiple(
            options=names, value=names, description="instances", rows=min(6, len(names)), **wide
        )
        self._image = ipywidgets.HTML()  # an Image would have no alternative text
        self._draw()
        self._text = ipywidgets.Textarea(
            value=str(plan), disabled=True, rows=16, layout={"width": "100%"}, description="plan"
        )
        inputs = (self._model, self._tokens, self._days, self._budget, self._instances)
        for each in inputs:
            each.observe(self._changed, names="value")
        self._widgets = ipywidgets.VBox([*inputs, self._image, self._text])
        return self._widgets

    def _draw(self) -> None:
        """The present plan's picture, for the sliders and for where there are none."""
        self._png, self._metadata = self.picture()
        self._image.value = alternative.html_image(self._png, self._metadata, self._metadata["alt"])

    def _changed(self, _: Any) -> None:
        """Plan anew; what cannot be planned is said in the text, and the picture stays."""
        kinds = [self._kinds[name] for name in self._instances.value]
        model = self._given if self._model.value == self._given.name else self._model.value
        try:
            plan = plan_run(
                model, self._tokens.value, self._days.value * 24 * HOUR, self._budget.value, kinds
            )
        except ValueError as error:
            self.problem = str(error)
            self._text.value = self.problem
            return
        self.problem, self.plan = "", plan
        self._draw()
        self._text.value = str(plan)


def _log_slider(widgets: Any, description: str, value: float, low: float, high: float, **options: Any) -> Any:
    """A slider over powers of ten, wide enough for `value`."""
    power = math.log10(value)
    return widgets.FloatLogSlider(
        value=value, base=10, min=min(low, power), max=max(high, power), step=0.01, readout_format=",.4g",
        description=description, **options,
    )  # fmt: skip


def planner(
    model: str,
    tokens: float,
    deadline: str | float | None = None,
    budget: float | None = None,
    instances: Sequence[str] | None = None,
) -> Planner:
    """A planner to end a cell with; arguments as those of `plan_run`."""
    return Planner(model, tokens, deadline, budget, instances)
