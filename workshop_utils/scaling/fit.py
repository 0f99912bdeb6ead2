"""Costs fitted to measurements by robust regression, with intervals: what they say, and what they predict.

    terms = path_terms(lambda size, nbytes, path: all_reduce_seconds("ring", size, nbytes, path))
    found = fit(terms, (workers, nbytes), seconds)
    print(found)                                        # latency and bandwidth, each with its interval
    found.predict(1000, 100e6)                          # seconds

A cost is a sum of terms, each a known function of what was varied, times a coefficient of at least 0. All closed forms
of `cost` are of that kind: linear in α and 1/B. What is minimised are relative errors, as logarithms, for a time
of 1 ms deserves as much as one of 1 s; and by the soft L1 loss, so that a disturbed measurement does not pull by its
square.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from workshop_utils.comm.topology import Link, Numbers
from workshop_utils.scaling.cost import plain

Array = npt.NDArray[np.float64]

TOLERATED = 0.05  # of a time: beyond it, errors count by their size and no longer by its square
STEPS = 50  # at most; a handful is enough
DRAWS = 200  # of the bootstrap
QUANTILES = (0.025, 0.975)  # between them lie 95 %

# Bytes with which NCCL's pipeline is full: 32 channels (MAXCHANNELS) of one slot each, an eighth (NCCL_STEPS) of a
# buffer of 4 MiB (NCCL_BUFFSIZE). Source: NCCL 2, src/include/device.h, and src/init.cc for the buffer.
PIPELINE_NBYTES = 32 * (4 << 20) / 8


class Term(NamedTuple):
    """A function of what was varied, with the name and unit of its coefficient; or of 1 / coefficient, if `inverse`."""

    name: str
    unit: str
    of: Callable[..., Numbers]
    inverse: bool = False


class Estimate(NamedTuple):
    """A fitted number and its 95 % interval, in the unit of its term; without draws, the interval is NaN."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Fit:
    """Fitted terms. `coefficients` has shape (terms,), `draws` (draws, terms): what repeated measurements would give.

    Where nothing is left to judge by, `draws` is one row of NaN.

    `errors` are the relative errors, predicted over measured less 1, of the points that it was fitted to.
    """

    terms: tuple[Term, ...]
    coefficients: Array
    errors: Array
    draws: Array = field(repr=False)

    def predict(self, *varied: Numbers) -> Numbers:
        """Seconds for these values of what was varied, broadcast together."""
        columns = np.broadcast_arrays(*(np.asarray(term.of(*varied), dtype=float) for term in self.terms))
        return plain(np.tensordot(self.coefficients, np.stack(columns), axes=1))

    @property
    def estimates(self) -> dict[str, Estimate]:
        """Value and 95 % interval of each term, by name."""
        lows, highs = np.quantile(self.draws, QUANTILES, axis=0, method="nearest")
        estimates = {}
        for term, value, low, high in zip(self.terms, self.coefficients, lows, highs, strict=True):
            with np.errstate(divide="ignore"):
                numbers = (1 / value, 1 / high, 1 / low) if term.inverse else (value, low, high)
            estimates[term.name] = Estimate(*map(float, numbers))
        return estimates

    def __str__(self) -> str:
        lines = [f"{'':28} {'fitted':>12} {'95 % interval':>27}"]
        for term, (value, low, high) in zip(self.terms, self.estimates.values(), strict=True):
            between = "–" if math.isnan(low) else f"{low:12.4g} … {high:.4g}"
            lines.append(f"{term.name:28} {value:12.4g} {between:>27} {term.unit}")
        typical = 100 * float(np.median(np.abs(self.errors)))
        return "\n".join([*lines, f"{len(self.errors)} measurements, median error {typical:.1f} %"])


def fit(
    terms: Sequence[Term], varied: Sequence[npt.ArrayLike], seconds: npt.ArrayLike, draws: int = DRAWS
) -> Fit:
    """The coefficients, none below 0, with which the sum of `terms` comes closest to measured `seconds`.

    Intervals are by bootstrap: relative errors are drawn again, with random signs, scaled for the coefficients that
    were fitted, and the fit is repeated. With as many coefficients as points there are no intervals. Source: Efron and
    Tibshirani (1993), "An introduction to the bootstrap", section 9.4.

    Args:
        terms: of the cost.
        varied: what each term is a function of, one value a measurement, such as (workers, nbytes).
        seconds: measured.
        draws: how often to repeat the fit for intervals; 0 for none. They are the same at every call.

    Raises:
        ValueError: if there are fewer measurements than terms, lengths differ, a time is not above 0, or a measurement
            costs nothing by any term.
    """
    measured = np.asarray(seconds, dtype=float)
    values = [np.asarray(each, dtype=float) for each in varied]
    if any(each.shape != measured.shape for each in values):
        shapes = ", ".join(str(each.size) for each in values)
        raise ValueError(f"{measured.size} seconds go with {shapes} values; each needs one")
    if measured.size < len(terms):
        counts = f"{measured.size} measurements cannot tell {len(terms)} numbers apart"
        raise ValueError(f"{counts}; there must be at least as many")
    if not (np.isfinite(measured) & (measured > 0)).all():
        raise ValueError(f"seconds are {measured.tolist()}; each has to be above 0")
    columns = np.stack([term.of(*values) * np.ones(measured.size) for term in terms], axis=1)
    if not columns.any(axis=1).all():
        idle = int(np.flatnonzero(~columns.any(axis=1))[0])
        which = f"measurement {idle} ({', '.join(f'{each[idle]:g}' for each in values)})"
        raise ValueError(f"{which} costs nothing by any term; it must be left out of the fit")
    coefficients = _robust(columns, measured)
    fitted = columns @ coefficients
    logs, freedom = np.log(fitted / measured), measured.size - len(terms)
    random, drawn = np.random.default_rng(0), []
    for _ in range(draws if freedom else 0):
        # Errors of either sign are as likely: one disturbed measurement must not shift all draws.
        noise = random.choice(logs, measured.size) * random.choice([-1, 1], measured.size)
        drawn.append(_robust(columns, fitted * np.exp(noise * math.sqrt(measured.size / freedom))))
    drawn = drawn or [np.full(len(terms), math.nan)]
    return Fit(tuple(terms), coefficients, np.expm1(logs), np.array(drawn))


def _robust(columns: Array, measured: Array) -> Array:
    """Coefficients of at least 0 that minimise Σ 2 (√(1 + (e/t)²) − 1), with e the logarithms' errors, t TOLERATED.

    By Gauss and Newton's steps, each a weighted non-negative least squares (iteratively reweighted; Huber and Ronchetti
    2009, "Robust statistics", section 7.8).
    """
    scale = columns.max(axis=0)
    scale[scale == 0] = 1.0  # a term that is nothing at these points stays at 0
    scaled = columns / scale
    coefficients, _ = nnls(scaled / measured[:, None], np.ones(measured.size))
    for _ in range(STEPS):
        fitted = np.maximum(scaled @ coefficients, 1e-12 * measured)
        error = np.log(fitted / measured)
        weight = (1 + (error / TOLERATED) ** 2) ** -0.25  # of an equation: the root of the loss's weight
        step, _ = nnls(weight[:, None] * scaled / fitted[:, None], weight * (1 - error))
        if np.allclose(step, coefficients, rtol=1e-8, atol=0):
            break
        coefficients = step
    return np.asarray(coefficients / scale)


def path_terms(cost: Callable[..., Numbers]) -> tuple[Term, Term]:
    """α and B of any function of `cost` that takes a Link last and is linear in α and 1/B."""
    # One of the two at a time: without bytes, and without latency.
    return (
        Term("latency", "s", lambda *varied: cost(*varied, Link(1.0))),
        Term("bandwidth", "bytes/s", lambda *varied: cost(*varied, Link(0.0, 1.0)), inverse=True),
    )


def size_terms(pipeline_nbytes: float = PIPELINE_NBYTES) -> tuple[Term, ...]:
    """α + n/B + fill · n/(n + n_p): one collective among the same ranks, by size, as pipelining libraries run it.

    An array goes through several links (inside a machine, between machines) in pieces, one piece a channel. Up to n_p
    bytes there is one piece, which passes the links one after the other, so each byte costs more than 1/B. Above,
    pieces follow each other, and only the first one's way is added to the slowest link's time: the pipeline's filling,
    which no longer grows. `pipeline_nbytes` is n_p, by default NCCL's. Bandwidth, n/t, so grows with size long after α
    has faded.
    """
    return (
        Term("latency", "s", lambda nbytes: np.ones_like(nbytes, dtype=float)),
        Term("bandwidth", "bytes/s", lambda nbytes: nbytes, inverse=True),
        Term("filling", "s", lambda nbytes: nbytes / (nbytes + pipeline_nbytes)),
    )
