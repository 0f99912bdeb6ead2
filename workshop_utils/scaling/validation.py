"""Predictions compared with what was measured, misses included.

    print(scores(published_predictions()))             # a row a system; published curves, fitted from three points each
    print(scores(hardware_predictions()))              # NCCL's curves, from hardware facts alone
    print(other_predictions())                         # published figures with fewer points: shown, not scored
    own_predictions(table, terms, fitted)              # the learner's own measurements, some of them left out

The rule for the three points is fixed, and looks at no time: of the sizes from 64 KB up, or the numbers of workers, the
smallest, the largest, and the one whose logarithm is nearest to the middle between theirs (the smaller one of two). The
error of a point is |ln(predicted / measured)|; its mean over the points that were not fitted, as a factor less 1, is
the geometric-mean error. The form of the model and its one constant, NCCL's pipeline, are the same for all systems: see
`fit.size_terms`. The form was chosen among about ten with these curves in sight, so only other curves judge it fully.
Half and twice the constant, and the other ways to say which point is in the middle, change the error over all points
from 8.5 % to 9.2 % at most.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from workshop_utils.comm.topology import Link, Numbers, Topology
from workshop_utils.parallel.schedule import bubble_fraction
from workshop_utils.scaling import nccl, published
from workshop_utils.scaling.cost import data_parallel_step_seconds, hierarchical_seconds
from workshop_utils.scaling.fit import Term, fit, size_terms, worker_terms

LEAST_NBYTES = 64 * 1024
LEAST_POINTS = 5  # with fewer, a system is shown and not scored


def fitted_points(values: npt.ArrayLike) -> tuple[int, int, int]:
    """Which three of at least three ascending `values` a curve is fitted from, by their indices.

    Raises:
        ValueError: if there are fewer, or they do not ascend.
    """
    logs = np.log(np.asarray(values, dtype=float))
    if len(logs) < 3 or not (np.diff(logs) > 0).all():
        raise ValueError(f"values are {values!r}; there must be at least three, ascending")
    away = np.abs(logs[1:-1] - (logs[0] + logs[-1]) / 2)
    return 0, 1 + int(np.flatnonzero(away < away.min() + 1e-9)[0]), len(logs) - 1


def predict_curve(curve: pd.DataFrame, by_size: Sequence[Term] | None = None) -> pd.DataFrame:
    """One published curve with `predicted` seconds, from three of its points; `fitted` says which.

    `by_size` are the terms for sizes, by default `size_terms()`.
    """
    values, seconds = curve["value"].to_numpy(), curve["measured"].to_numpy()
    seen = np.isin(np.arange(len(values)), fitted_points(values))
    terms = (by_size or size_terms()) if curve["varied"].iloc[0] == "nbytes" else worker_terms()
    return curve.assign(predicted=fit(terms, [values[seen]], seconds[seen]).predict(values), fitted=seen)


def published_predictions(by_size: Sequence[Term] | None = None) -> pd.DataFrame:
    """All curves that have enough points: columns system, varied, value, measured and predicted seconds, fitted.

    With `by_size=size_terms()[:2]`, sizes are predicted by a plain line of latency and bandwidth, for comparison.
    """
    enough = [curve for curve in _curves() if len(curve) >= LEAST_POINTS]
    return pd.concat([predict_curve(curve, by_size) for curve in enough], ignore_index=True)


def hardware_predictions() -> pd.DataFrame:
    """NCCL's curves from hardware facts alone; no point is fitted. Columns as `published_predictions`."""
    tables = []
    for curve in _curves():
        if curve["varied"].iloc[0] == "nbytes":
            system, machines = curve[["system", "machines"]].iloc[0]
            seconds = nccl.MACHINES[system].seconds(int(machines), curve["value"].to_numpy())
            tables.append(curve.assign(predicted=seconds, fitted=False))
    return pd.concat(tables, ignore_index=True)


def _curves() -> list[pd.DataFrame]:
    """Each published curve, without arrays that are too small."""
    points = published.published_curves()
    usable = points[(points["varied"] == "workers") | (points["value"] >= LEAST_NBYTES)]
    return [curve for _, curve in usable.groupby("system", sort=False)]


def scores(predictions: pd.DataFrame) -> pd.DataFrame:
    """By system, and for `all`: how many points were not fitted, the geometric-mean error, and the largest error."""
    held = predictions[~predictions["fitted"]]
    logs = (held["predicted"] / held["measured"]).map(math.log)
    rows = []
    for system, own in [*logs.groupby(held["system"], sort=False), ("all", logs)]:
        largest = own[own.abs().idxmax()]
        rows.append((system, len(own), np.expm1(own.abs().mean()), np.expm1(largest)))
    return pd.DataFrame(rows, columns=["system", "points", "error", "largest"]).set_index("system")


def reason(system: str) -> str:
    """A sentence on where the errors of a published system come from; empty where there is none."""
    return next((sentence for name, sentence in published.reasons().items() if name in system), "")


def own_predictions(
    table: pd.DataFrame,
    terms: Sequence[Term],
    varied: Sequence[str],
    fitted: Callable[[pd.DataFrame], pd.Series],
) -> pd.DataFrame:
    """Measurements predicted by a fit to some of them.

    Args:
        table: a row a measurement, with `seconds` and the columns named in `varied`.
        terms: of the cost.
        varied: the columns that the terms are functions of, in their order.
        fitted: which rows the fit may see, such as `lambda rows: rows["workers"] <= 4`.

    Returns:
        `table` with `measured`, `predicted`, `fitted`.

    Raises:
        ValueError: if too few rows are fitted, or all are.
    """
    seen = fitted(table).to_numpy(bool)
    if seen.all():
        raise ValueError(f"all {len(table)} rows are fitted; some must be left out to be predicted")
    found = fit(terms, [table.loc[seen, name] for name in varied], table.loc[seen, "seconds"], draws=0)
    predicted = found.predict(*(table[name].to_numpy(float) for name in varied))
    return table.assign(measured=table["seconds"], predicted=predicted, fitted=seen)


def median_error(predictions: pd.DataFrame) -> float:
    """Median of |predicted / measured − 1| over the rows that were not fitted."""
    held = predictions[~predictions["fitted"]]
    return float((held["predicted"] / held["measured"] - 1).abs().median())


def other_predictions() -> pd.DataFrame:
    """Published figures of which there are too few to fit, beside what formulas say: shown, not scored.

    Columns: what, measured, predicted_low, predicted_high, unit, why. Low is with no communication hidden behind the
    backward pass, high with as much as can be.
    """
    columns = ["what", "measured", "predicted_low", "predicted_high", "unit", "why"]
    return pd.DataFrame([*_pipelines(), *_all_reduce_trainings()], columns=columns)


Row = tuple[str, float, float, float, str, str]


def _pipelines() -> Iterator[Row]:
    rows = published.published_table("pipeline_speedups")[["model", "stages", "microbatches", "speedup"]]
    for model, stages, microbatches, measured in rows.to_numpy().tolist():
        speedup = stages * (1 - bubble_fraction(stages, microbatches))
        what = f"GPipe, {model}, {stages} stages"
        yield what, measured, speedup, speedup, "times", reason(what)


def _all_reduce_trainings() -> Iterator[Row]:
    """Of a DGX-1 (8 P100, 4 NVLinks of 20 GB/s one way each) and of 128 servers with 4 GPUs and 25 Gbit/s each."""
    batch = {"ResNet-50": 64, "VGG16": 64, "AlexNet": 512}  # a GPU; as the TensorFlow page says
    nbytes = {"ResNet-50": 102_400_000, "VGG16": 552_000_000, "AlexNet": 244_000_000}
    throughput = published.published_table("training_throughput")
    rates = throughput.query("system == 'DGX-1 P100'").pivot(
        index="model", columns="workers", values="images_per_second"
    )
    steps = {model: images / rates[1][model] for model, images in batch.items()}
    dgx = Topology(ranks_per_machine=8, inside=Link(0.0, 80e9))
    for model, step in steps.items():
        seconds = hierarchical_seconds(8, nbytes[model], dgx)
        measured = rates[8][model] / (8 * rates[1][model])
        what = f"DGX-1, {model}, 8 GPUs: efficiency"
        yield what, measured, *_efficiencies(step, seconds), "", reason(what)
    servers = Topology(Link(0.0, 25e9 / 8), ranks_per_machine=4, inside=Link(0.0, 12e9))
    seconds = hierarchical_seconds(512, nbytes["VGG16"], servers)
    measured = throughput.query("model == 'VGG-16'")["efficiency"].iloc[0]
    what = "Horovod, VGG-16, 512 GPUs: efficiency"
    yield what, measured, *_efficiencies(steps["VGG16"], seconds), "", reason(what)


def _efficiencies(step_seconds: float, all_reduce_seconds: Numbers, buckets: int = 8) -> tuple[float, float]:
    """With nothing overlapped, and with gradients in so many buckets; two thirds of a step are its backward pass."""
    forward, backward = step_seconds / 3, 2 * step_seconds / 3
    low = step_seconds / data_parallel_step_seconds(forward, backward, all_reduce_seconds)
    high = step_seconds / data_parallel_step_seconds(forward, backward, all_reduce_seconds / buckets, buckets)
    return float(low), float(high)
