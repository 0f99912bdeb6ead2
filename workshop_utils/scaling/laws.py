"""The arithmetic of a training run, the two laws of parallel speed-up, and the first one turned around.

Both laws describe work of which a fraction cannot be shared. Amdahl keeps the work fixed and asks how much sooner it
is done; Gustafson keeps the time fixed and asks how much more is done in it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt


def training_flops(parameters: float, samples: float) -> float:
    """Floating-point operations to train on `samples`: 6 · P · D.

    P is the number of parameters, D that of samples: images for a network of dense layers, tokens for a language
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
    """
    return 1 / (serial_fraction + (1 - serial_fraction) / np.asarray(workers))


def gustafson_speedup(unshared_fraction: float, workers: npt.ArrayLike) -> Any:
    """How many times more work is done in the same time: g + (1 − g) · N.

    `unshared_fraction` is g, the part of the *parallel* run's time that one worker spends on what cannot be
    shared; `workers` is N, a number or an array. The work that can be shared grows with N, the rest does not.

    Source: Gustafson (1988), "Reevaluating Amdahl's law", Communications of the ACM 31(5).
    """
    return unshared_fraction + (1 - unshared_fraction) * np.asarray(workers)


def karp_flatt(seconds_alone: float, seconds: npt.ArrayLike, workers: npt.ArrayLike) -> Any:
    """The serial fraction with which Amdahl's law gives the time `seconds` of more than one of `workers`.

    Below 0 where N workers are more than N times as fast, above 1 where they are slower than one.

    Source: Karp and Flatt (1990), "Measuring parallel processor performance", Communications of the ACM 33(5).
    """
    share = 1 / np.asarray(workers)
    return (np.asarray(seconds) / seconds_alone - share) / (1 - share)
