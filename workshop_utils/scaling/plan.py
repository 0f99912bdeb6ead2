"""A training run, planned: which layout on how many of which machines, how long it takes and what it costs.

    plan = plan_run("llama-3.1-8b", tokens=100e9, deadline="14d", budget=200_000, instances=["p5.48xlarge"])
    print(plan)                        # the plan, its runners-up, and why all other layouts are out
    plan.best.layout                   # data × tensor × pipeline, ZeRO's stage, micro-batches, recomputation
    plan.table                         # every layout that was looked at, with its reason

Memory is that of `memory`, time that of `step_time`, prices are those of `catalogue`: estimates all. A test compares
them with published runs. Try a plan for an hour before you pay for a week.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property

import pandas as pd

from workshop_utils.jobs.quantities import seconds_of
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.catalogue import AS_OF, Instance, Transformer
from workshop_utils.scaling.memory import Layout
from workshop_utils.scaling.recovery import best_interval, lost_share
from workshop_utils.scaling.search import LAYOUT_COLUMNS, MACHINES, REASONS, USABLE_MEMORY, search

DAY, HOUR = 86_400.0, 3_600.0  # in seconds

# By how much `step_time` may be too fast, and so what a range here spans. It is off by up to a tenth on three published
# runs on A100 that nothing was fitted to. On H100 it is fitted to Llama 3 405B, and with a p5's memory so many times
# too fast for another model: torchtitan, compiled, trained Llama 3.1 8B at 6,514 tokens a second on each of 128
# (benchmarks/llama3_h100_202412_torchtitan.md, table 3; their card's memory is slower, with which it is 1.41).
SLOWDOWN = 1.47

# One accelerator is the cause of an unexpected interruption so often: 419 in 54 days among 16,384 (Grattafiori et al.
# 2024, section 3.3.4).
FAILURES_A_SECOND = 419 / (54 * DAY * 16_384)
# To write a checkpoint, and to start again. They are assumptions; with them 16,384 accelerators lose 8 % of the time,
# and Llama 3 405B lost less than 10 %.
SAVE_SECONDS, RESTART_SECONDS = 15.0, 300.0

# Linux instances are billed by the second, but for at least a minute. Source: AWS, "Amazon EC2 billing and purchasing
# options".
LEAST_HOURS = 1 / 60


class PlanError(ValueError):
    """A run that cannot be planned as it is described; the message names what is wrong, and what would be right."""


@dataclass(frozen=True)
class Candidate:
    """A layout on some machines, and what the run takes with it; times in seconds or hours, prices in dollars."""

    instance: str
    machines: int
    workers: int
    layout: Layout
    memory_nbytes: float
    step_seconds: float
    mfu: float
    hours: float
    dollars: float

    @classmethod
    def of(cls, rows: pd.DataFrame) -> Candidate:
        """That in the first of these rows of a plan's table."""
        row = rows.iloc[:1].to_dict("records")[0]
        layout = Layout(**{name: row[name] for name in LAYOUT_COLUMNS})
        numbers = (row[name] for name in ("memory_nbytes", "step_seconds", "mfu", "hours", "dollars"))
        return cls(row["instance"], row["machines"], int(layout.workers), layout, *numbers)

    def __str__(self) -> str:
        return (
            f"{self.machines} × {self.instance} ({self.workers} workers): {self.layout}; "
            f"{self.memory_nbytes / 1e9:.0f} GB a worker, MFU {self.mfu:.0%} to {SLOWDOWN * self.mfu:.0%}, "
            f"{hours_text(self.hours / SLOWDOWN)} to {hours_text(self.hours)}, "
            f"{dollars_text(self.dollars / SLOWDOWN)} to {dollars_text(self.dollars)}"
        )


@dataclass(frozen=True)
class TrainingPlan:
    """What `plan_run` has found. `table` is described there; deadline in hours, budget in dollars."""

    model: Transformer
    tokens: float
    batch_tokens: int
    instances: Mapping[str, Instance]
    deadline: float
    budget: float
    fastest: bool
    table: pd.DataFrame = field(repr=False)
    notes: tuple[str, ...] = ()

    @cached_property
    def usable(self) -> pd.DataFrame:
        """The rows that meet deadline and budget, the best first."""
        limits = ["hours", "dollars"] if self.fastest else ["dollars", "hours"]
        # Among equals the simplest: less sharding, less recomputing, fewer ways of being parallel.
        simplest = ["zero", "tensor", "pipeline", "chunks", "memory_nbytes"]
        rows = self.table[self.table["reason"] == "fits"]
        return rows.sort_values([*limits, *simplest], kind="stable")

    @cached_property
    def timed(self) -> pd.DataFrame:
        """The rows that fit into memory, whatever they take and cost."""
        return self.table[self.table["hours"].notna()]

    @property
    def best(self) -> Candidate | None:
        """The cheapest, or where asked for the fastest, that can be used; None where nothing can."""
        return Candidate.of(self.usable) if len(self.usable) else None

    @property
    def runner_ups(self) -> list[Candidate]:
        """The best layouts on other kinds or numbers of machines than the best plan's, five at most."""
        others = self.usable.drop_duplicates(["instance", "machines"]).iloc[1:6]
        return [Candidate.of(others.iloc[row:]) for row in range(len(others))]

    def ties(self, other: Candidate) -> bool:
        """Whether the ranges of `other` and the best overlap, so that no estimate here can tell them apart."""
        name = "hours" if self.fastest else "dollars"
        return self.best is not None and getattr(other, name) <= SLOWDOWN * getattr(self.best, name)

    @cached_property
    def rejected(self) -> pd.Series:
        """How many layouts are out, by reason, the most frequent reason first."""
        counts = self.table["reason"].value_counts()
        return counts[counts.index != "fits"]

    @property
    def steps(self) -> int:
        """Of the whole run."""
        return math.ceil(self.tokens / self.batch_tokens)

    @property
    def verdict(self) -> str:
        """The best plan; where there is none, what stands in its way, and what would be enough."""
        if self.best is not None:
            return str(self.best)
        if self.timed.empty:
            return self._nothing_fits()
        sentences = ["No layout meets " + " and ".join(self._limits()) + "."]
        deadline = ("deadline", self.deadline, "hours", "dollars")
        for limit, bound, column, other in (deadline, ("budget", self.budget, "dollars", "hours")):
            within = self.timed[self.timed[column] <= bound].sort_values([other, column])
            nearest = Candidate.of(self.timed.sort_values([column, other]) if within.empty else within)
            price, machines = dollars_text(nearest.dollars), f"{nearest.machines} × {nearest.instance}"
            takes = f"{hours_text(nearest.hours)} and {price} on {machines}"
            if within.empty:
                sentences.append(f"The {limit} alone is too tight: at the least it takes {takes}.")
            elif math.isfinite(bound):
                sentences.append(f"Within the {limit}, enough would be {takes}.")
        return " ".join(sentences)

    def _nothing_fits(self) -> str:
        small = self.table[self.table["reason"] == "memory"]
        if small.empty:
            return (
                f"No layout divides {self.model.name} and its batch of {self.batch_tokens // self.model.sequence} "
                "sequences evenly; another batch, such as a power of two, may."
            )
        memory = small["instance"].map({name: each.memory_nbytes for name, each in self.instances.items()})
        least = Candidate.of(small.iloc[int((small["memory_nbytes"] / memory).argmin()) :])
        usable = USABLE_MEMORY * self.instances[least.instance].memory_nbytes
        return (
            f"{self.model.name} fits into no worker's memory. Closest is {least.machines} × {least.instance}, "
            f"{least.layout}: {least.memory_nbytes / 1e9:,.0f} GB, of {usable / 1e9:,.0f} GB that a "
            "plan may use. More machines, or accelerators with more memory, would do."
        )

    def _limits(self) -> list[str]:
        deadline, budget = hours_text(self.deadline), dollars_text(self.budget)
        limits = {f"the deadline of {deadline}": self.deadline, f"the budget of {budget}": self.budget}
        return [words for words, limit in limits.items() if math.isfinite(limit)]

    def __str__(self) -> str:
        lines = [
            f"{self.model.name}: {count_text(self.model.parameters)} parameters, {count_text(self.tokens)} tokens in "
            f"{self.steps:,} steps of {count_text(self.batch_tokens)}; "
            + (", ".join(self._limits()) or "no deadline, no budget"),
            "",
            self.verdict if self.best is None else f"Best: {self.best}",
        ]
        if self.runner_ups:
            lines += [
                "",
                "On other machines, or another number of them (a tie: its range and the best's overlap):",
            ]
            lines += [f"  {each}{', a tie' if self.ties(each) else ''}" for each in self.runner_ups]
        lines += ["", f"{self.rejected.sum():,} of {len(self.table):,} layouts are out:"]
        lines += [f"  {count:>9,}  {REASONS[str(reason)]}" for reason, count in self.rejected.items()]
        lines += ["", *self.notes]
        return "\n".join(lines)


def plan_run(
    model: str | Transformer,
    tokens: float,
    deadline: str | float | None = None,
    budget: float | None = None,
    instances: Iterable[str | Instance] | None = None,
    *,
    batch_tokens: float | None = None,
    machines: Sequence[int] = MACHINES,
    fastest: bool = False,
) -> TrainingPlan:
    """The best way to train `model` on `tokens` before `deadline` for `budget` dollars, in bfloat16.

    A price is EC2's on demand, by the dated catalogue. Storage, traffic, what manages a cluster, and time in which
    machines wait are not in it. AWS's invoice is what counts.

    Args:
        model: a name of the catalogue, or a Transformer.
        deadline: how long it may take, such as "14d" or seconds; any time by default.
        budget: what it may cost, in dollars; anything by default.
        instances: which kinds to look at, one kind at a time: names or Instances; by default all whose price is known.
        batch_tokens: tokens in a step, rounded to whole sequences; by default the model's published ones.
        machines: how many of a kind to try.
        fastest: whether the best plan takes the fewest hours within the limits, and not the fewest dollars.

    Returns:
        A plan; its table is that of `search`, with hours and dollars where the layout fits into memory.

    Raises:
        PlanError: for a number that cannot be, no instance to look at, or one without a price.
        CatalogueError: for an unknown model or instance.
    """
    transformer = catalogue.model(model)
    limit = math.inf if deadline is None else _checked_deadline(deadline) / HOUR
    for name, value in (("tokens", tokens), ("budget", budget), ("batch_tokens", batch_tokens)):
        if value is not None and not 0 < value < math.inf:
            raise PlanError(f"{name} is {value}; it must be more than 0, and finite")
    if not machines or min(machines) < 1:
        raise PlanError(f"machines is {list(machines)}; it must have numbers of at least 1")
    kinds, notes = _kinds(instances)
    sequences = max(1, round((batch_tokens or transformer.batch_tokens) / transformer.sequence))
    batch = sequences * transformer.sequence
    steps = math.ceil(tokens / batch)
    dollars = math.inf if budget is None else float(budget)

    tables = []
    for kind in kinds.values():
        layouts = search(transformer, kind, sequences, machines)
        workers = layouts["machines"] * kind.accelerators
        hours = SLOWDOWN * layouts["step_seconds"] * steps / workers.map(effective_time) / HOUR
        assert kind.dollars_an_hour is not None  # _kinds has refused those without a price
        cost = kind.dollars_an_hour * layouts["machines"] * hours.clip(lower=LEAST_HOURS)
        layouts["mfu"] /= SLOWDOWN
        layouts["step_seconds"] *= SLOWDOWN
        tables.append(layouts.assign(hours=hours, dollars=cost))
    table = pd.concat(tables, ignore_index=True)
    fits = table["reason"] == "fits"
    table.loc[fits & (table["dollars"] > dollars), "reason"] = "budget"
    table.loc[fits & (table["hours"] > limit), "reason"] = "deadline"
    notes = (*notes, *_cautions(kinds))
    return TrainingPlan(transformer, tokens, batch, kinds, limit, dollars, fastest, table, notes)


@cache
def effective_time(workers: int) -> float:
    """The part of the time in which a run makes progress that lasts: what failures and checkpoints leave."""
    failure = 1 / (FAILURES_A_SECOND * workers)
    return float(1 - lost_share(best_interval(SAVE_SECONDS, failure), SAVE_SECONDS, failure, RESTART_SECONDS))


def _kinds(given: Iterable[str | Instance] | None) -> tuple[dict[str, Instance], tuple[str, ...]]:
    """The instances to look at, by name, and what a reader should know of those that were left out."""
    if given is None:
        known = catalogue.instances()
        priced = {name: each for name, each in known.items() if each.dollars_an_hour}
        missing = ", ".join(name for name in known if name not in priced)
        return priced, (f"Left out, as no price to rely on is known: {missing}.",) if missing else ()
    kinds = [catalogue.instance(each) for each in ([given] if isinstance(given, str) else given)]
    for kind in kinds:
        if "bfloat16" not in kind.flops_per_second:
            raise PlanError(f"{kind.name}: its peak for bfloat16 is not known; flops_per_second must have it")
        if kind.dollars_an_hour is None:
            raise PlanError(f"{kind.name}: no price to rely on is known; dollars_an_hour must have one")
    if not kinds:
        raise PlanError("instances is empty; name at least one, such as p5.48xlarge")
    return {kind.name: kind for kind in kinds}, ()


def _cautions(kinds: Mapping[str, Instance]) -> Iterable[str]:
    """What a reader should know before they believe the numbers."""
    yield (
        f"A range ends with what our model of a step says, slowed down {SLOWDOWN:g} times: it was so much too fast for "
        "torchtitan's 8B run on H100. Limits hold for that end. Failures, at the rate of Llama 3's, are in both."
    )
    yield (
        "Memory is counted, not measured; where a framework recomputes more than attention's scores, layouts that are "
        "out for memory may fit."
    )
    guesses = [name for name, kind in kinds.items() if kind.efficiency_from == catalogue.GUESS]
    if guesses:
        yield f"How fast {', '.join(guesses)} computes is a guess, so take an hour to measure it."
    yield (
        f"Prices: on demand in us-east-1, as public copies of AWS's price list had it in {AS_OF}; it was not checked "
        "against AWS's own page, so do that before you spend."
    )


def _checked_deadline(deadline: str | float) -> float:
    try:
        seconds = seconds_of(deadline)
    except ValueError as error:
        raise PlanError(f"deadline is {deadline!r}; {error}, or '14d'") from None
    if seconds <= 0:
        raise PlanError(f"deadline is {deadline!r}; it must be more than 0, such as '14d'")
    return seconds


def count_text(number: float) -> str:
    """Such as "4.19 million"."""
    for size, name in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number:,.0f}"


def hours_text(hours: float) -> str:
    """Minutes, hours or days, by what people would say."""
    if hours < 1:
        return f"{hours * 60:.0f} min"
    return f"{hours:,.1f} h" if hours < 48 else f"{hours * HOUR / DAY:,.1f} days"


def dollars_text(dollars: float) -> str:
    """With cents where they count."""
    return f"${dollars:,.2f}" if dollars < 100 else f"${dollars:,.0f}"
