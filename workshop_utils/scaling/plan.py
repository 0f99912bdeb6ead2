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
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from workshop_utils.quantities import seconds_of
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.catalogue import AS_OF, Instance, Transformer
from workshop_utils.scaling.memory import RECOMPUTE, Layout, blocks_of_stages, worker_memory
from workshop_utils.scaling.step_time import step_time

DAY, HOUR = 86_400.0, 3_600.0  # in seconds

# The part of an accelerator's memory that a plan may fill. The rest is for the framework, the communication library and
# the allocator's gaps: an allowance, not a measurement.
USABLE_MEMORY = 0.9

# The part of the time in which a long run makes progress; the rest goes into failures, restarts and checkpoints.
# Source: Grattafiori et al. (2024), section 3.3.4: more than 90 % for Llama 3 405B, on 16,384 GPUs.
EFFECTIVE_TIME = 0.9

# Linux instances are billed by the second, but for at least a minute. Source: AWS, "Amazon EC2 billing and purchasing
# options".
LEAST_HOURS = 1 / 60

# What a plan tries. A tensor-parallel group never leaves its machine, so it has at most all accelerators of one.
MACHINES = tuple(2**power for power in range(12))  # of a kind: 1 to 2,048
PIPELINES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
CHUNKS = (1, 2, 4, 8)
ZERO_STAGES = (0, 1, 2, 3)
MICRO_BATCHES = (1, 2, 4, 8, 16)

# Why a layout is out, in the order in which it is asked; a layout has the first reason that applies.
REASONS = {
    "workers": "tensor × pipeline does not divide the accelerators",
    "heads": "tensor parallelism gives every worker whole heads, and does not divide them, or those of the keys",
    "layers": "there are too few layers for so many stages",
    "batch": "data × micro-batch does not divide the batch",
    "rounds": "an interleaved pipeline takes micro-batches in rounds of its length, which does not divide them",
    "alone": "ZeRO shards between data-parallel workers, and there is one only",
    "regather": "with ZeRO-2 and -3 a pipeline would reduce gradients, or gather parameters, for every micro-batch",
    "memory": "a worker's memory is too small",
    "deadline": "it would take longer than the deadline allows",
    "budget": "it would cost more than the budget",
}

Objective = Literal["dollars", "hours"]


class PlanError(ValueError):
    """A run that cannot be planned as it is described; the message names what is wrong, and what would be right."""


@dataclass(frozen=True)
class Choice:
    """A layout that can be used, and what becomes of the run with it; times in seconds or hours, prices in dollars."""

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
    def of(cls, row: pd.Series) -> Choice:
        """That in a row of a plan's table."""
        layout = layout_of(row)
        numbers = (float(row[name]) for name in ("memory_nbytes", "step_seconds", "mfu", "hours", "dollars"))
        return cls(str(row["instance"]), int(row["machines"]), int(layout.workers), layout, *numbers)

    def __str__(self) -> str:
        return (
            f"{self.machines} × {self.instance} ({self.workers} workers): {describe(self.layout)}; "
            f"step {self.step_seconds:.3g} s, MFU {self.mfu:.0%}, {hours_text(self.hours)}, "
            f"{dollars_text(self.dollars)}, {self.memory_nbytes / 1e9:.0f} GB a worker"
        )

    @property
    def cost_text(self) -> str:
        """How long, for how much, and on what."""
        return (
            f"{hours_text(self.hours)} and {dollars_text(self.dollars)} on {self.machines} × {self.instance}"
        )


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
        other = "hours" if self.objective == "dollars" else "dollars"
        # Among equals the simplest: less sharding, less recomputing, fewer ways of being parallel.
        simplest = ["zero", "tensor", "pipeline", "chunks", "memory_nbytes"]
        rows = self.table[self.table["reason"] == "fits"]
        return rows.sort_values([self.objective, other, *simplest], kind="stable")

    @cached_property
    def timed(self) -> pd.DataFrame:
        """The rows that fit into memory, whatever they take and cost."""
        return self.table[self.table["hours"].notna()]

    @property
    def best(self) -> Choice | None:
        """The cheapest, or with the objective "hours" the fastest, that can be used; None where nothing can."""
        return Choice.of(self.usable.iloc[0]) if len(self.usable) else None

    @property
    def runner_ups(self) -> list[Choice]:
        """The best layouts on other kinds or numbers of machines than the best plan's, five at most."""
        each = self.usable.drop_duplicates(["instance", "machines"]).iloc[1:6]
        return [Choice.of(row) for _, row in each.iterrows()]

    @cached_property
    def rejected(self) -> pd.Series:
        """How many layouts are out, by reason, the most frequent reason first."""
        counts = self.table["reason"].value_counts()
        return counts[counts.index != "fits"]

    @cached_property
    def pareto(self) -> pd.DataFrame:
        """Of all that fits into memory, what nothing else beats in both hours and dollars; the fastest first."""
        return front_of(self.timed)

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
        sentences = ["No layout meets " + " and ".join(self._limits()) + "."]
        for limit, bound, column, other in (
            ("deadline", self.deadline, "hours", "dollars"),
            ("budget", self.budget, "dollars", "hours"),
        ):
            within = self.timed[self.timed[column] <= bound]
            if within.empty:
                least = Choice.of(self.timed.sort_values([column, other]).iloc[0])
                sentences.append(f"The {limit} alone is too tight: at the least it takes {least.cost_text}.")
            elif math.isfinite(bound):
                enough = Choice.of(within.sort_values([other, column]).iloc[0])
                sentences.append(f"Within the {limit}, enough would be {enough.cost_text}.")
        return " ".join(sentences)

    def _nothing_fits(self) -> str:
        small = self.table[self.table["reason"] == "memory"]
        if small.empty:
            return (
                f"No layout divides {self.model.name} and its batch of {self.sequences} sequences evenly; another "
                "batch, such as a power of two, may."
            )
        memory = small["instance"].map({name: each.memory_nbytes for name, each in self.instances.items()})
        least = small.iloc[int((small["memory_nbytes"] / memory).argmin())]
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

    def __str__(self) -> str:
        lines = [
            f"{self.model.name}: {count_text(self.model.parameters)} parameters, {count_text(self.tokens)} tokens in "
            f"{self.steps:,} steps of {count_text(self.batch_tokens)}; "
            + (", ".join(self._limits()) or "no deadline, no budget"),
            "",
            self.verdict if self.best is None else f"Best: {self.best}",
        ]
        if self.runner_ups:
            lines += ["", "Runners-up on other machines:", *(f"  {each}" for each in self.runner_ups)]
        lines += ["", f"{self.rejected.sum():,} of {len(self.table):,} layouts are out:"]
        lines += [f"  {count:>9,}  {REASONS[str(reason)]}" for reason, count in self.rejected.items()]
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
            "runner_ups": [asdict(each) for each in self.runner_ups],
            "layouts": len(self.table),
            "rejected": {str(reason): int(count) for reason, count in self.rejected.items()},
            "verdict": self.verdict,
            "notes": list(self.notes),
        }


def plan_run(
    model: str | Path | Transformer,
    tokens: float,
    deadline: str | float | None = None,
    budget: float | None = None,
    instances: Iterable[str | Path | Instance] | None = None,
    *,
    batch_tokens: float | None = None,
    machines: Sequence[int] = MACHINES,
    objective: Objective = "dollars",
) -> Plan:
    """The best way to train `model` on `tokens` before `deadline` for `budget` dollars, in bfloat16.

    Args:
        model: a name of the catalogue, a file as `catalogue.model` reads it, or a Transformer.
        deadline: how long it may take, such as "14d" or seconds; any time by default.
        budget: what it may cost, in dollars; anything by default.
        instances: which kinds to look at, one kind at a time: names, Instances, or a YAML file of them, which comes on
            top of the catalogue; by default all of which the price is known.
        batch_tokens: tokens in a step, rounded to whole sequences; by default the model's published ones.
        machines: how many of a kind to try.
        objective: what to have as little of as possible, "dollars" or "hours".

    Returns:
        A Plan; its table has a row for each layout: instance, machines; data, tensor, pipeline, chunks, zero,
        micro_batch, microbatches and recompute as in Layout; memory_nbytes; and where memory is enough step_seconds,
        mfu, hours and dollars. `reason` is "fits" or one of REASONS. What was not asked for is NaN.

    Raises:
        PlanError: for a number that cannot be, no instance to look at, or one without a price.
        CatalogueError: for an unknown model or instance, or a file that is wrong.
    """
    transformer = catalogue.model(model)
    limit = _checked_deadline(deadline) / HOUR
    for name, value in (("tokens", tokens), ("budget", budget), ("batch_tokens", batch_tokens)):
        if value is not None and not value > 0:
            raise PlanError(f"{name} is {value}; it must be more than 0")
        if value == math.inf:
            raise PlanError(f"{name} is {value}; it must be finite")
    if objective not in ("dollars", "hours"):
        raise PlanError(f"objective is {objective!r}; it must be 'dollars' or 'hours'")
    if not machines or min(machines) < 1:
        raise PlanError(f"machines is {list(machines)}; it must have numbers of at least 1")
    kinds, notes = _kinds(instances)
    sequences = max(1, round((batch_tokens or transformer.batch_tokens) / transformer.sequence))
    batch = sequences * transformer.sequence
    steps = math.ceil(tokens / batch)
    dollars = math.inf if budget is None else float(budget)

    tables = []
    for kind in kinds.values():
        found = search(transformer, kind, sequences, machines)
        found["hours"] = found["step_seconds"] * steps / EFFECTIVE_TIME / HOUR
        found["dollars"] = price(kind, found["machines"], found["hours"])
        tables.append(found)
    table = pd.concat(tables, ignore_index=True)
    fits = table["reason"] == "fits"
    table.loc[fits & (table["dollars"] > dollars), "reason"] = "budget"
    table.loc[fits & (table["hours"] > limit), "reason"] = "deadline"
    notes = (*notes, *_cautions(kinds))
    return Plan(transformer, tokens, batch, kinds, limit, dollars, objective, table, notes)


def search(
    model: Transformer, instance: Instance, sequences: int, machines: Sequence[int] = MACHINES
) -> pd.DataFrame:
    """All layouts on so many `machines`, for a step of `sequences`; a row each, without price and hours.

    What cannot be is sorted out first, by rules of divisibility, and only the rest is asked for its memory and time.
    """
    table = _grid(instance, machines)
    grid: dict[str, Any] = {str(name): column.to_numpy() for name, column in table.items()}
    workers = grid["machines"] * instance.accelerators
    model_workers = grid["tensor"] * grid["pipeline"]
    data = np.maximum(1, workers // model_workers)
    share = data * grid["micro_batch"]
    microbatches = np.maximum(1, sequences // share)
    _, blocks_at_end = blocks_of_stages(model, grid["pipeline"], grid["chunks"])
    broken = {
        "workers": workers % model_workers != 0,
        "heads": (model.heads % grid["tensor"] != 0) | (model.kv_heads % grid["tensor"] != 0),
        "layers": blocks_at_end < 1,
        "batch": sequences % share != 0,
        "rounds": (grid["chunks"] > 1) & (microbatches % grid["pipeline"] != 0),
        "alone": (data == 1) & (grid["zero"] > 0),
        "regather": (grid["pipeline"] > 1) & (grid["zero"] > 1),
    }
    table = table.assign(data=data, microbatches=microbatches, instance=instance.name, reason="fits")
    for reason in reversed(broken):
        table.loc[broken[reason], "reason"] = reason

    possible = np.flatnonzero(table["reason"] == "fits")
    needed = np.broadcast_to(worker_memory(model, _layouts(table.iloc[possible])).total, possible.shape)
    small = needed > USABLE_MEMORY * instance.memory_nbytes
    table.loc[possible[small], "reason"] = "memory"
    usable = possible[~small]
    time = step_time(model, instance, _layouts(table.iloc[usable]))
    for name, rows, values in (
        ("memory_nbytes", possible, needed),
        ("step_seconds", usable, time.seconds),
        ("mfu", usable, time.mfu),
    ):
        table[name] = math.nan
        table.loc[rows, name] = values
    return table


def _grid(instance: Instance, machines: Sequence[int]) -> pd.DataFrame:
    """All combinations, a row each. A pipeline of one stage has one chunk only."""
    axes: dict[str, Sequence[Any]] = {
        "machines": machines,
        "tensor": [2**power for power in range(instance.accelerators.bit_length())],
        "pipeline": PIPELINES,
        "chunks": CHUNKS,
        "zero": ZERO_STAGES,
        "micro_batch": MICRO_BATCHES,
        "recompute": RECOMPUTE,
    }
    grid = pd.MultiIndex.from_product(list(axes.values()), names=list(axes)).to_frame(index=False)
    return grid[(grid["pipeline"] > 1) | (grid["chunks"] == 1)].reset_index(drop=True)


LAYOUT_COLUMNS = ("data", "tensor", "pipeline", "zero", "micro_batch", "microbatches", "recompute", "chunks")


def _layouts(rows: pd.DataFrame) -> Layout:
    """Those in rows of a table, as one layout of arrays."""
    return Layout(**{name: rows[name].to_numpy() for name in LAYOUT_COLUMNS})


def layout_of(row: pd.Series) -> Layout:
    """The layout in one row of a table."""
    numbers = {name: int(row[name]) for name in LAYOUT_COLUMNS if name != "recompute"}
    return Layout(**numbers, recompute=str(row["recompute"]))


def describe(layout: Layout) -> str:
    """A layout in words."""
    words = [f"data {layout.data} × tensor {layout.tensor} × pipeline {layout.pipeline}"]
    if layout.chunks != 1:
        words.append(f"{layout.chunks} stages a worker")
    words.append(f"ZeRO-{layout.zero}" if layout.zero else "not sharded")
    sequences = "sequence" if layout.micro_batch == 1 else "sequences"
    words.append(f"{layout.microbatches} × {layout.micro_batch} {sequences} a step")
    words.append("nothing recomputed" if layout.recompute == "none" else f"{layout.recompute} recomputation")
    return ", ".join(words)


def price(machine: Instance, machines: Any, hours: Any) -> Any:
    """Dollars for `machines` of a kind during `hours`, numbers or columns: EC2, on demand, by the dated catalogue.

    Storage, traffic, what manages a cluster, and time in which machines wait are not in it. AWS's invoice is what
    counts.

    Raises:
        PlanError: if the catalogue has no price for the instance.
    """
    if machine.dollars_an_hour is None:
        raise PlanError(
            f"{machine.name}: no price to rely on is known; give one as dollars_an_hour in a file of instances"
        )
    return machine.dollars_an_hour * machines * np.maximum(hours, LEAST_HOURS)


def front_of(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows that no other beats, or equals, in both hours and dollars; the fastest first."""
    by_hours = rows.sort_values(["hours", "dollars"])
    return by_hours[by_hours["dollars"] < by_hours["dollars"].cummin().shift(fill_value=math.inf)]


def _kinds(given: Iterable[str | Path | Instance] | None) -> tuple[dict[str, Instance], tuple[str, ...]]:
    """The instances to look at, by name, and what a reader should know of those that were left out."""
    known = dict(catalogue.instances())
    if given is None:
        priced = {name: each for name, each in known.items() if each.dollars_an_hour}
        missing = ", ".join(name for name in known if name not in priced)
        return priced, (f"Left out, as no price to rely on is known: {missing}.",) if missing else ()
    chosen: list[str | Instance] = []
    described: list[str] = []
    for each in [given] if isinstance(given, str) else given:
        if isinstance(each, Instance) or Path(each).suffix not in (".yaml", ".yml"):
            chosen.append(each if isinstance(each, Instance) else str(each))
            continue
        added = catalogue.instances(each)
        described += [name for name, kind in added.items() if known.get(name) != kind]
        known |= added
    # A file alone: what it describes.
    kinds = [catalogue.instance(each, known) for each in chosen or described]
    for kind in kinds:
        if "bfloat16" not in kind.flops_per_second:
            raise PlanError(f"{kind.name}: its peak for bfloat16 is not known; flops_per_second must have it")
    if not kinds:
        raise PlanError("instances is empty; name at least one, such as p5.48xlarge")
    return {kind.name: kind for kind in kinds}, ()


def _cautions(kinds: Mapping[str, Instance]) -> Iterable[str]:
    """What a reader should know before they believe the numbers."""
    yield (
        f"Times are those of well-tuned code, with {1 - EFFECTIVE_TIME:.0%} for failures, restarts and "
        "checkpoints; others have taken up to 1.4 times as long."
    )
    guesses = [name for name, kind in kinds.items() if kind.efficiency_from == catalogue.GUESS]
    if guesses:
        yield f"How fast {', '.join(guesses)} computes is a guess, so take an hour to measure it."
    yield (
        f"Prices: on demand in us-east-1, as public copies of AWS's price list had it in {AS_OF}; it was not checked "
        "against AWS's own page, so do that before you spend."
    )


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
