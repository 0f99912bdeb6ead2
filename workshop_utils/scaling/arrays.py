"""Numbers and arrays by one formula: what the models of this package take, and give back."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

# A number, or an array of them; what comes back has the shape of all arguments broadcast together.
Numbers = float | npt.NDArray[Any]


def plain(values: Any) -> Numbers:
    """A float for numbers, an array of floats for arrays."""
    return float(values) if np.ndim(values) == 0 else np.asarray(values, dtype=float)
