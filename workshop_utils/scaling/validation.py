"""Predictions held against what was measured, misses included.

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

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from workshop_utils.comm.hierarchical import hierarchical_seconds
from workshop_utils.parallel.schedule import bubble_fraction
from workshop_utils.scaling import nccl, published
from workshop_utils.scaling.cost import data_parallel_step_seconds
from workshop_utils.scaling.fit import Array, Term, fit, size_terms, worker_terms
from workshop_utils.scaling.published import Curve

LEAST_NBYTES = 64 * 1024
LEAST_POINTS = 5  # with fewer, a system is shown and not scored

COLUMNS = ["system", "varied", "value", "measured", "predicted", "fitted"]


def chosen(values: npt.ArrayLike) -> tuple[int, int, int]:
    """Which three of at least three ascending `values` a curve is fitted from, by their indices.

    Raises:
        ValueError: if there are fewer, or they do not ascend.
    """
    logs = np.log(np.asarray(values, dtype=float))
    if len(logs) < 3 or not (np.diff(logs) > 0).all():
        raise ValueError(f"values are {values!r}; there must be at least three, ascending")
    away = np.abs(logs[1:-1] - (logs[0] + logs[-1]) / 2)
    return 0, 1 + int(np.flatnonzero(away < away.min() + 1e-9)[0]), len(logs) - 1


def predict_curve(curve: Curve, by_size: Sequence[Term] | None = None) -> pd.DataFrame:
    """One published curve from three of its points: a row a point; `fitted` says which.

    `by_size` are the terms for sizes, by default `size_terms()`.
    """
    values, seconds = _points(curve)
    three = list(chosen(values))
    terms = (by_size or size_terms()) if curve.varied == "nbytes" else worker_terms()
    found = fit(terms, (values[three],), seconds[three])
    return _rows(curve, values, seconds, found.predict(values), np.isin(np.arange(len(values)), three))


def published_predictions(by_size: Sequence[Term] | None = None) -> pd.DataFrame:
    """All curves that have enough points: columns system, varied, value, measured and predicted seconds, fitted.

    With `by_size=size_terms()[:2]`, sizes are predicted by a plain line of latency and bandwidth, for comparison.
    """
    curves = published.all_reduce_curves() + published.training_curves()
    enough = [each for each in curves if len(_points(each)[0]) >= LEAST_POINTS]
    return pd.concat([predict_curve(each, by_size) for each in enough], ignore_index=True)


def hardware_predictions() -> pd.DataFrame:
    """NCCL's curves from hardware facts alone; no point is fitted. Columns as `published_predictions`."""
    tables = []
    for curve in published.all_reduce_curves():
        values, seconds = _points(curve)
        predicted = nccl.MACHINES[curve.name].seconds(curve.machines, values)
        tables.append(_rows(curve, values, seconds, predicted, np.zeros(len(values), bool)))
    return pd.concat(tables, ignore_index=True)


def scores(predictions: pd.DataFrame) -> pd.DataFrame:
    """A row a system, and `all` for all their points: points not fitted, geometric-mean error, largest, and where."""
    held = predictions[~predictions["fitted"]]
    rows = [_score(str(system), own) for system, own in held.groupby("system", sort=False)]
    return pd.DataFrame([*rows, _score("all", held)]).set_index("system")


def geometric_mean_error(predicted: npt.ArrayLike, measured: npt.ArrayLike) -> float:
    """exp(mean |ln(predicted / measured)|) − 1: twice as long and half as long are equally wrong."""
    logs = np.log(np.asarray(predicted, dtype=float) / np.asarray(measured, dtype=float))
    return float(np.expm1(np.abs(logs).mean()))


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
    return pd.DataFrame([*_pipelines(), *_all_reduce_trainings()])


def _pipelines() -> list[dict[str, object]]:
    why = {
        "Transformer-48": "equal layers, so that the bubble is most of the loss",
        "AmoebaNet-D": "missed: its layers are unequal, and the slowest stage decides, which the bubble does not know",
    }
    found = []
    for row in published.table("pipeline_speedups").to_dict("records"):
        stages, model = int(row["stages"]), str(row["model"])
        speedup = stages * (1 - bubble_fraction(stages, int(row["microbatches"])))
        found.append(
            _other(f"GPipe, {model}, {stages} stages", row["speedup"], speedup, speedup, "times", why[model])
        )
    return found


def _all_reduce_trainings() -> list[dict[str, object]]:
    """Of a DGX-1 (8 P100, 4 NVLinks of 20 GB/s one way each) and of 128 servers with 4 GPUs and 25 Gbit/s each."""
    batch = {"ResNet-50": 64, "VGG16": 64, "AlexNet": 512}  # a GPU; as the TensorFlow page says
    nbytes = {"ResNet-50": 102_400_000, "VGG16": 552_000_000, "AlexNet": 244_000_000}
    throughput = published.table("training_throughput")
    rates = throughput.query("system == 'DGX-1 P100'").pivot(
        index="model", columns="workers", values="images_per_second"
    )
    steps = {model: images / rates[1][model] for model, images in batch.items()}
    missed = "missed: what else a step does, such as reading images, is in no formula here"
    found = []
    for model, step in steps.items():
        seconds = hierarchical_seconds(8, nbytes[model], 0.0, 80e9, group_size=8)
        low, high = _efficiencies(step, seconds)
        measured = rates[8][model] / (8 * rates[1][model])
        why = "met" if model == "ResNet-50" else missed
        found.append(_other(f"DGX-1, {model}, 8 GPUs: efficiency", measured, low, high, "", why))
    seconds = hierarchical_seconds(512, nbytes["VGG16"], 0.0, 25e9 / 8 / 4, 4, 0.0, 12e9)
    low, high = _efficiencies(steps["VGG16"], seconds)
    measured = throughput.query("model == 'VGG-16'")["efficiency"].iloc[0]
    why = "between: P100's speed is the DGX-1's, and PCIe 12 GB/s inside, which the source does not say"
    return [*found, _other("Horovod, VGG-16, 512 GPUs: efficiency", measured, low, high, "", why)]


def _efficiencies(step_seconds: float, all_reduce_seconds: float, buckets: int = 8) -> tuple[float, float]:
    """With nothing overlapped, and with gradients in so many buckets; two thirds of a step are its backward pass."""
    forward, backward = step_seconds / 3, 2 * step_seconds / 3
    low = step_seconds / data_parallel_step_seconds(forward, backward, all_reduce_seconds)
    high = step_seconds / data_parallel_step_seconds(forward, backward, all_reduce_seconds / buckets, buckets)
    return float(low), float(high)


def _other(what: str, measured: float, low: float, high: float, unit: str, why: str) -> dict[str, object]:
    figures = {"measured": measured, "predicted_low": low, "predicted_high": high}
    return {"what": what, **figures, "unit": unit, "why": why}


def _points(curve: Curve) -> tuple[Array, Array]:
    """Values and seconds, of arrays those that are not too small."""
    values, seconds = np.array(curve.values), np.array(curve.seconds)
    usable = values >= (LEAST_NBYTES if curve.varied == "nbytes" else 1)
    return values[usable], seconds[usable]


def _rows(curve: Curve, *columns: npt.ArrayLike) -> pd.DataFrame:
    return pd.DataFrame(
        dict(zip(COLUMNS, (curve.name, curve.varied, *columns), strict=True)), columns=COLUMNS
    )


def _score(name: str, held: pd.DataFrame) -> dict[str, object]:
    ratios = (held["predicted"] / held["measured"]).to_numpy(float)
    worst = int(np.abs(np.log(ratios)).argmax())
    return {
        "system": name,
        "points": len(held),
        "error": geometric_mean_error(held["predicted"], held["measured"]),
        "largest": float(ratios[worst] - 1),
        "at": float(held["value"].to_numpy(float)[worst]),
    }
