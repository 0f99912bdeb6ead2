"""The arithmetic of a training run, the two laws of parallel speed-up, and the fit of a serial fraction.

Both laws describe work of which a fraction cannot be shared. Amdahl keeps the work fixed and asks how much sooner it
is done; Gustafson keeps the time fixed and asks how much more is done in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def training_flops(parameters: float, samples: float) -> float:
    """Floating-point operations to train on `samples`: 6 · N · D.

    N is the number of parameters, D that of samples: images for a network of dense layers, tokens for a language
    model. A parameter takes part in one multiplication and one addition in the forward pass, and in twice as many
    in the backward pass (one gradient for the parameter, one for its input). Attention's own products, a few per
    cent in a large model, are left out.

    Source: Kaplan et al. (2020), "Scaling laws for neural language models", section 2.1; used in the same form by
    Hoffmann et al. (2022), "Training compute-optimal large language models".
    """
    return 6 * parameters * samples


def amdahl_speedup(serial_fraction: float, workers: npt.ArrayLike) -> Any:
    """How many times sooner the same work is done: 1 / (s + (1 − s) / N).

    `serial_fraction` is s, the part of one worker's time that cannot be shared; `workers` is N, a number or an
    array. However large N is, the speed-up stays below 1 / s.

    Source: Amdahl (1967), "Validity of the single processor approach to achieving large scale computing
    capabilities", AFIPS. He gave the argument in words; this is the formula that bears his name.

    Raises:
        ValueError: if the serial fraction is outside 0 … 1, or there is less than one worker.
    """
    sizes = _workers(workers)
    serial = _fraction(serial_fraction)
    return 1 / (serial + (1 - serial) / sizes)


def gustafson_speedup(serial_fraction: float, workers: npt.ArrayLike) -> Any:
    """How many times more work is done in the same time: s + (1 − s) · N.

    `serial_fraction` is s, here the part of the *parallel* run's time that one worker spends on what cannot be
    shared; `workers` is N, a number or an array. The work that can be shared grows with N, the rest does not.

    Source: Gustafson (1988), "Reevaluating Amdahl's law", Communications of the ACM 31(5).

    Raises:
        ValueError: if the serial fraction is outside 0 … 1, or there is less than one worker.
    """
    sizes = _workers(workers)
    serial = _fraction(serial_fraction)
    return serial + (1 - serial) * sizes


def fit_serial_fraction(workers: Sequence[float], speedups: Sequence[float]) -> float:
    """The serial fraction with which Amdahl's law comes closest to measured speed-ups.

    1 / speed-up is linear in the fraction, 1/N + s · (1 − 1/N), so this is a least-squares line through (1 worker,
    1), held between 0 and 1. With one measurement it is the metric of Karp and Flatt (1990), "Measuring parallel
    processor performance", Communications of the ACM 33(5), section "A new metric".

    Raises:
        ValueError: if the numbers of workers and speed-ups differ, no measurement has more than one worker, or a
            speed-up is not above zero.
    """
    sizes, measured = _workers(workers), np.asarray(speedups, dtype=float)
    if sizes.shape != measured.shape:
        raise ValueError(f"{sizes.size} numbers of workers have {measured.size} speed-ups; each needs one")
    if not (measured > 0).all():
        raise ValueError(f"the speed-ups are {list(speedups)}; each has to be above zero")
    slope = 1 - 1 / sizes
    if not slope.any():
        raise ValueError("every measurement has one worker; a second size is needed to see what is shared")
    fraction = slope @ (1 / measured - 1 / sizes) / (slope @ slope)
    return float(np.clip(fraction, 0, 1))


def _workers(workers: npt.ArrayLike) -> npt.NDArray[np.float64]:
    sizes = np.asarray(workers, dtype=float)
    if not (sizes >= 1).all():
        raise ValueError(f"workers is {workers!r}; there must be at least 1")
    return sizes


def _fraction(serial_fraction: float) -> float:
    if not 0 <= serial_fraction <= 1:
        raise ValueError(f"serial_fraction is {serial_fraction}; it must lie between 0 and 1")
    return serial_fraction
