"""A training run, planned: which layout on how many of which machines, how long it takes and what it costs.

    plan = plan_run("llama-3.1-8b", tokens=100e9, deadline="14d", budget=200_000, instances=["p5.48xlarge"])
    print(plan)                        # the plan, its runners-up, and why all other layouts are out
    plan.best.layout                   # data × tensor × pipeline, ZeRO's stage, micro-batches, recomputation
    plan.table                         # every layout that was looked at, with its reason

Memory is that of `worker_memory`, time that of `step_time`, prices are those of `catalogue`: estimates all, of which
`published_layouts` shows the error where others have measured. Try a plan for an hour before you pay for a week.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import pandas as pd

from workshop_utils.quantities import seconds_of
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.catalogue import Dtype, Instance, Transformer
from workshop_utils.scaling.choice import HOUR, Choice, count_text, dollars_text, hours_text
from workshop_utils.scaling.layouts import REASONS, USABLE_MEMORY, describe, layout_of, search
from workshop_utils.scaling.price import DATED, price

# The part of the time in which a long run makes progress; the rest goes into failures, restarts and checkpoints.
# Source: Grattafiori et al. (2024), section 3.3.4: more than 90 % for Llama 3 405B, on 16,384 GPUs.
EFFECTIVE_TIME = 0.9

MACHINES = tuple(2**power for power in range(12))  # how many of an instance a plan tries: 1 to 2,048

Objective = Literal["dollars", "hours"]
OUT = {
    **REASONS,
    "deadline": "it would take longer than the deadline allows",
    "budget": "it would cost more than the budget",
}


class PlanError(ValueError):
    """A run that cannot be planned as it is described; the message names what is wrong, and what would be right."""


@dataclass(frozen=True)
class Plan:
    """What `plan_run` has found. `table` is described there; deadline in hours, budget in dollars."""

    model: Transformer
    tokens: float
    batch_tokens: int
    instances: Mapping[str, Instance]
    deadline: float
    budget: float
    objective: Objective
    table: pd.DataFrame = field(repr=False)
    notes: tuple[str, ...] = ()

    @cached_property
    def usable(self) -> pd.DataFrame:
        """The rows that meet deadline and budget, the best first."""
        return self._sorted(self.table[self.table["reason"] == "fits"])

    @cached_property
    def timed(self) -> pd.DataFrame:
        """The rows that fit into memory, whatever they take and cost."""
        return self.table[self.table["hours"].notna()]

    @property
    def best(self) -> Choice | None:
        """The cheapest, or with the objective "hours" the fastest, that can be used; None where nothing can."""
        return self._choice(self.usable.iloc[0]) if len(self.usable) else None

    def runner_ups(self, count: int = 5) -> list[Choice]:
        """The best layouts on other kinds or numbers of machines than the best plan's."""
        each = self.usable.drop_duplicates(["instance", "machines"]).iloc[1 : 1 + count]
        return [self._choice(row) for _, row in each.iterrows()]

    @cached_property
    def rejected(self) -> pd.Series:
        """How many layouts are out, by reason."""
        counts = self.table["reason"].value_counts()
        return counts[(counts > 0) & (counts.index != "fits")]

    @cached_property
    def pareto(self) -> pd.DataFrame:
        """Of all that fits into memory, what nothing else beats in both hours and dollars; the fastest first."""
        return front_of(self.timed)

    def why(self, row: pd.Series) -> str:
        """A sentence on why the layout in a row of `table` is out, with the numbers that say so."""
        reason = str(row["reason"])
        known = self.instances[str(row["instance"])]
        usable = USABLE_MEMORY * known.memory_nbytes
        numbers = {
            "workers": f"{row['machines'] * known.accelerators} accelerators, tensor {row['tensor']} × pipeline "
            f"{row['pipeline']}",
            "heads": f"{self.model.heads} heads, {self.model.kv_heads} of keys, tensor {row['tensor']}",
            "layers": f"{self.model.layers} layers, {row['pipeline'] * row['chunks']} stages",
            "batch": f"{self.sequences} sequences, data {row['data']} × micro-batch {row['micro_batch']}",
            "rounds": f"{row['microbatches']} micro-batches, pipeline {row['pipeline']}",
            "alone": f"ZeRO-{row['zero']}, data {row['data']}",
            "regather": f"ZeRO-{row['zero']}, pipeline {row['pipeline']}",
            "memory": f"{row['memory_nbytes'] / 1e9:,.1f} GB, of {usable / 1e9:,.1f} GB that a plan may use",
            "deadline": f"{hours_text(row['hours'])}, of {hours_text(self.deadline)}",
            "budget": f"{dollars_text(row['dollars'])}, of {dollars_text(self.budget)}",
            "fits": f"{hours_text(row['hours'])}, {dollars_text(row['dollars'])}",
        }
        return f"{OUT[reason]} ({numbers[reason]})"

    @property
    def sequences(self) -> int:
        """In a step."""
        return self.batch_tokens // self.model.sequence

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return math.ceil(self.tokens / self.batch_tokens)

    @property
    def verdict(self) -> str:
        """Where there is no plan: what stands in its way, and what would be enough. Otherwise the best plan."""
        if self.best is not None:
            return str(self.best)
        if self.timed.empty:
            return self._nothing_fits()
        fastest = self._choice(self.timed.sort_values(["hours", "dollars"]).iloc[0])
        cheapest = self._choice(self.timed.sort_values(["dollars", "hours"]).iloc[0])
        sentences = ["No layout meets " + " and ".join(self._limits()) + "."]
        for limit, bound, column, other, extreme in (
            ("deadline", self.deadline, "hours", "dollars", fastest),
            ("budget", self.budget, "dollars", "hours", cheapest),
        ):
            within = self.timed[self.timed[column] <= bound]
            if within.empty:
                sentences.append(
                    f"The {limit} alone is too tight: at the least it takes {extreme.cost_text}."
                )
            elif math.isfinite(bound):
                enough = self._choice(within.sort_values([other, column]).iloc[0])
                sentences.append(f"Within the {limit}, enough would be {enough.cost_text}.")
        return " ".join(sentences)

    def _nothing_fits(self) -> str:
        small = self.table[self.table["reason"] == "memory"]
        if small.empty:
            return (
                f"No layout divides {self.model.name} and its batch of {self.sequences} sequences evenly; another "
                "batch, such as a power of two, may."
            )
        ratio = small["memory_nbytes"] / small["instance"].map(
            {name: each.memory_nbytes for name, each in self.instances.items()}
        ).astype(float)
        least = small.iloc[int(ratio.to_numpy().argmin())]
        usable = USABLE_MEMORY * self.instances[str(least["instance"])].memory_nbytes
        return (
            f"{self.model.name} fits into no worker's memory. Closest is {least['machines']} × {least['instance']}, "
            f"{describe(layout_of(least))}: {least['memory_nbytes'] / 1e9:,.0f} GB, of {usable / 1e9:,.0f} GB that a "
            "plan may use. More machines, or accelerators with more memory, would do."
        )

    def _limits(self) -> list[str]:
        limits = []
        if math.isfinite(self.deadline):
            limits.append(f"the deadline of {hours_text(self.deadline)}")
        if math.isfinite(self.budget):
            limits.append(f"the budget of {dollars_text(self.budget)}")
        return limits

    def _sorted(self, rows: pd.DataFrame) -> pd.DataFrame:
        other = "hours" if self.objective == "dollars" else "dollars"
        # Among equals the simplest: less sharding, less recomputing, fewer ways of being parallel.
        simplest = ["zero", "tensor", "pipeline", "chunks", "memory_nbytes"]
        return rows.sort_values([self.objective, other, *simplest], kind="stable")

    def _choice(self, row: pd.Series) -> Choice:
        layout = layout_of(row)
        return Choice(
            str(row["instance"]), int(row["machines"]), int(layout.workers), layout, float(row["memory_nbytes"]),
            float(row["step_seconds"]), float(row["mfu"]), float(row["hours"]), float(row["dollars"]),
        )  # fmt: skip

    def __str__(self) -> str:
        limits = self._limits()
        lines = [
            f"{self.model.name}: {count_text(self.model.parameters)} parameters, {count_text(self.tokens)} tokens in "
            f"{self.steps:,} steps of {count_text(self.batch_tokens)}; "
            + (", ".join(limits) or "no deadline, no budget"),
            "",
            self.verdict if self.best is None else f"Best: {self.best}",
        ]
        others = self.runner_ups()
        if others:
            lines += ["", "Runners-up on other machines:", *(f"  {each}" for each in others)]
        lines += ["", f"{self.rejected.sum():,} of {len(self.table):,} layouts are out:"]
        lines += [f"  {count:>9,}  {OUT[str(reason)]}" for reason, count in self.rejected.items()]
        lines += ["", *self.notes]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: model, tokens, steps, best, runner_ups, rejected (by reason), verdict and notes."""
        return {
            "model": self.model.name,
            "parameters": self.model.parameters,
            "tokens": self.tokens,
            "steps": self.steps,
            "batch_tokens": self.batch_tokens,
            "best": asdict(self.best) if self.best else None,
            "runner_ups": [asdict(each) for each in self.runner_ups()],
            "layouts": len(self.table),
            "rejected": {str(reason): int(count) for reason, count in self.rejected.items()},
            "verdict": self.verdict,
            "notes": list(self.notes),
        }


def front_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that no other beats, or equals, in both hours and dollars; the fastest first."""
    by_hours = rows.sort_values(["hours", "dollars"])
    return by_hours[by_hours["dollars"] < by_hours["dollars"].cummin().shift(fill_value=math.inf)]


def plan_run(
    model: str | Path | Transformer,
    tokens: float,
    deadline: str | float | None = None,
    budget: float | None = None,
    instances: Iterable[str | Path | Instance] | None = None,
    *,
    batch_tokens: float | None = None,
    machines: Sequence[int] = MACHINES,
    dtype: Dtype = "bfloat16",
    objective: Objective = "dollars",
    discount: float = 0.0,
) -> Plan:
    """The best way to train `model` on `tokens` before `deadline` for `budget` dollars.

    Args:
        model: a name of the catalogue, a file as `catalogue.model` reads it, or a Transformer.
        deadline: how long it may take, such as "14d" or seconds; any time by default.
        budget: what it may cost, in dollars; anything by default.
        instances: which kinds to look at, one kind at a time: names, Instances, or a YAML file of them, which comes on
            top of the catalogue; by default all of which the price is known.
        batch_tokens: tokens in a step, rounded to whole sequences; by default the model's published ones.
        machines: how many of a kind to try.
        objective: what to have as little of as possible, "dollars" or "hours".
        discount: the part that a contract, or spot, takes off the price.

    Returns:
        A Plan; its table has the columns of `layouts.search`, and hours, dollars and reasons "deadline" and "budget".

    Raises:
        PlanError: for a number that cannot be, or no instance to look at.
        CatalogueError: for an unknown model or instance, or a file that is wrong.
        PriceError: for an instance without a price, or a discount that cannot be.
    """
    transformer = catalogue.model(model)
    seconds = _checked_deadline(deadline)
    for name, value in (("tokens", tokens), ("budget", budget), ("batch_tokens", batch_tokens)):
        if value is not None and not value > 0:
            raise PlanError(f"{name} is {value}; it must be more than 0")
        if value == math.inf:
            raise PlanError(f"{name} is {value}; it must be finite")
    if objective not in ("dollars", "hours"):
        raise PlanError(f"objective is {objective!r}; it must be 'dollars' or 'hours'")
    if not machines or min(machines) < 1:
        raise PlanError(f"machines is {list(machines)}; it must have numbers of at least 1")
    kinds, notes = _kinds(instances, dtype)
    sequences = max(1, round((batch_tokens or transformer.batch_tokens) / transformer.sequence))
    batch = sequences * transformer.sequence
    steps = math.ceil(tokens / batch)

    tables = []
    for kind in kinds.values():
        found = search(transformer, kind, sequences, machines, dtype)
        found["hours"] = found["step_seconds"] * steps / EFFECTIVE_TIME / HOUR
        found["dollars"] = price(kind, found["machines"].to_numpy(), found["hours"].to_numpy(), discount)
        tables.append(found)
    table = _joined(tables)
    limit, dollars = seconds / HOUR, math.inf if budget is None else float(budget)
    fits = table["reason"] == "fits"
    late, dear = fits & (table["hours"] > limit), fits & (table["dollars"] > dollars)
    table["reason"] = table["reason"].cat.add_categories(["deadline", "budget"])
    table.loc[dear, "reason"] = "budget"
    table.loc[late, "reason"] = "deadline"
    notes = (*notes, *_cautions(kinds))
    return Plan(transformer, tokens, batch, kinds, limit, dollars, objective, table, notes)


def _cautions(kinds: Mapping[str, Instance]) -> tuple[str, ...]:
    """What a reader should know before they believe the numbers."""
    guesses = [name for name, kind in kinds.items() if kind.efficiency_from == catalogue.GUESS]
    likely = (
        f"How fast {', '.join(guesses)} computes is a guess, so take an hour to measure it."
        if guesses
        else ""
    )
    times = (
        f"Times are those of well-tuned code, with {1 - EFFECTIVE_TIME:.0%} for failures, restarts and "
        "checkpoints; others have taken up to 1.4 times as long."
    )
    return tuple(filter(None, (times, likely, f"Prices: {DATED}.")))


def _kinds(
    given: Iterable[str | Path | Instance] | None, dtype: Dtype
) -> tuple[dict[str, Instance], tuple[str, ...]]:
    """The instances to look at, by name, and what a reader should know of those that were left out."""
    if given is None:
        priced = {name: each for name, each in catalogue.instances().items() if each.dollars_an_hour}
        missing = [name for name in catalogue.instances() if name not in priced]
        notes = (f"Left out, as no price to rely on is known: {', '.join(missing)}.",) if missing else ()
        return priced, notes
    wanted = [given] if isinstance(given, str) else list(given)
    known = dict(catalogue.instances())
    names: list[str] = []
    files = [each for each in wanted if Path(str(each)).suffix in (".yaml", ".yml")]
    for file in files:
        added = catalogue.instances(str(file))
        names += [name for name, each in added.items() if known.get(name) != each]
        known |= added
    chosen = [each for each in wanted if each not in files]
    kinds = [catalogue.instance(each, known) for each in chosen if isinstance(each, str | Instance)]
    if not chosen:  # a file alone: what it describes
        kinds = [known[name] for name in names]
    for each in kinds:
        if dtype not in each.flops_per_second:
            raise PlanError(f"{each.name}: its peak for {dtype} is not known; flops_per_second must have it")
    if not kinds:
        raise PlanError("instances is empty; name at least one, such as p5.48xlarge")
    return {each.name: each for each in kinds}, ()


def _checked_deadline(deadline: str | float | None) -> float:
    if deadline is None:
        return math.inf
    try:
        seconds = seconds_of(deadline)
    except ValueError as error:
        raise PlanError(f"deadline is {deadline!r}; {error}, or '14d'") from None
    if seconds <= 0:
        raise PlanError(f"deadline is {deadline!r}; it must be more than 0, such as '14d'")
    return seconds


def _joined(tables: list[pd.DataFrame]) -> pd.DataFrame:
    """Below each other, with instances as one category."""
    names = pd.Index([str(table["instance"].cat.categories[0]) for table in tables])
    for table in tables:
        table["instance"] = table["instance"].cat.set_categories(names)
    return pd.concat(tables, ignore_index=True)
