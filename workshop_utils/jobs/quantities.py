"""Sizes, rates and durations as people write them, read in one place.

bytes_of("2Gi")                  2147483648
seconds_of("50us")               5e-05
bytes_per_second_of("100Mbit")   12500000.0
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_NUMBER = re.compile(r"\s*(\d+(?:\.\d+)?(?:[eE][+-]?\d+)?)\s*([A-Za-zµ/]*)\s*")

# Kubernetes and Linux write Ki and Mi for powers of 1024, K and M for powers of 1000.
_BYTES = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    for _spelling in (_letter, _letter + "B"):
        _BYTES[_spelling] = 1000**_power
        _BYTES[_spelling[0] + "i" + _spelling[1:]] = 1024**_power
_BYTES |= {"k": 1000, "kB": 1000}

_SECONDS = {"": 1.0, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}

_BITS_PER_SECOND = {
    prefix + unit: factor
    for prefix, factor in {"": 1.0, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9}.items()
    for unit in ("bit", "bit/s", "bps")
}


def bytes_of(text: str | float) -> int:
    """Bytes in a size such as `"512Mi"`, `"1.5GB"` or `1024`. Raises ValueError with the forms allowed."""
    return round(_quantity(text, _BYTES, "a size such as '512Mi', '2Gi' or '1GB'"))


def seconds_of(text: str | float) -> float:
    """Seconds in a duration such as `"10min"`, `"50us"` or `1.5`. Raises ValueError with the forms allowed."""
    return _quantity(text, _SECONDS, "a duration such as '50us', '1ms', '30s', '10min' or '2h'")


def bytes_per_second_of(text: str) -> float:
    """Bytes per second in a rate such as `"100Mbit"`; rates count bits, as network hardware does.

    Raises ValueError with the forms allowed. `"1GBit/s"` is refused: it may mean bits or bytes.
    """
    rate = _quantity(text, _BITS_PER_SECOND, "a rate in bits, such as '100Mbit' or '1Gbit' (small b)") / 8
    if rate <= 0:
        raise ValueError("it must be more than zero, such as '100Mbit'")
    return rate


def _quantity(text: str | float, units: Mapping[str, float], form: str) -> float:
    match = _NUMBER.fullmatch(str(text)) if not isinstance(text, bool) else None
    value = float(match[1]) * units.get(match[2], math.nan) if match else math.nan
    if not math.isfinite(value):  # no number, no such unit, or more than a float can hold
        raise ValueError(f"it must be {form}")
    return value
