"""Predictions compared with what was measured, misses included.

    print(scores(published_predictions()))             # a row a system; published curves, fitted from three points each
    print(scores(hardware_predictions()))              # the same curves, from hardware facts alone

The rule for the three points is fixed, and looks at no time: of the sizes from 64 KB up, the smallest, the largest, and
the one whose logarithm is nearest to the middle between theirs (the smaller one of two). So all others lie between
points that were fitted. The error of a point is |ln(predicted / measured)|; its mean over the points that were not
fitted, as a factor less 1, is the geometric-mean error. The model's form and its one constant, NCCL's pipeline, are the
same for all systems: see `fit.size_terms`. The form was chosen among about ten with these curves in sight, so only
other curves judge it fully. Half and twice the constant make the error over all points 10.1 and 9.6 %, and not 9.2.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd

from workshop_utils.scaling import nccl
from workshop_utils.scaling.fit import Term, fit, size_terms
from workshop_utils.scaling.published import published_curves

LEAST_NBYTES = 64 * 1024


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
    return curve.assign(
        predicted=fit(by_size or size_terms(), [values[seen]], seconds[seen]).predict(values), fitted=seen
    )


def published_predictions(by_size: Sequence[Term] | None = None) -> pd.DataFrame:
    """All curves of NCCL's: columns system, value, measured and predicted seconds, machines, fitted.

    With `by_size=size_terms()[:2]`, sizes are predicted by a plain line of latency and bandwidth, for comparison.
    """
    return pd.concat([predict_curve(curve, by_size) for curve in _curves()], ignore_index=True)


def hardware_predictions() -> pd.DataFrame:
    """The same from hardware facts alone; `fitted` are the other table's, so that the same points judge both."""
    table = published_predictions()
    for system, curve in table.groupby("system"):
        seconds = nccl.MACHINES[str(system)].seconds(
            int(curve["machines"].iloc[0]), curve["value"].to_numpy()
        )
        table.loc[curve.index, "predicted"] = seconds
    return table


def _curves() -> list[pd.DataFrame]:
    """Each published curve, without arrays that are too small."""
    points = published_curves()
    return [curve for _, curve in points[points["value"] >= LEAST_NBYTES].groupby("system", sort=False)]


def scores(predictions: pd.DataFrame) -> pd.DataFrame:
    """By system, and for `all`: how many points were not fitted, the geometric-mean error, and the largest error."""
    held = predictions[~predictions["fitted"]]
    logs = (held["predicted"] / held["measured"]).map(math.log)
    rows = []
    for system, own in [*logs.groupby(held["system"], sort=False), ("all", logs)]:
        largest = own[own.abs().idxmax()]
        rows.append((system, len(own), np.expm1(own.abs().mean()), np.expm1(largest)))
    return pd.DataFrame(rows, columns=["system", "points", "error", "largest"]).set_index("system")
