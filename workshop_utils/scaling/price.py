"""What machines cost for as long as a run takes: EC2, on demand, from the dated table of `catalogue`.

    price(instance("p5.48xlarge"), machines=16, hours=61.5)

Storage, traffic, what manages a cluster, and time in which machines wait are not in it. AWS's invoice is what counts.
"""

from __future__ import annotations

import numpy as np

from workshop_utils.scaling.arrays import Numbers, plain
from workshop_utils.scaling.catalogue import AS_OF, Instance

# Linux instances are billed by the second, but for at least a minute. Source: AWS, "Amazon EC2 billing and purchasing
# options".
LEAST_HOURS = 1 / 60

DATED = (
    f"on demand in us-east-1, as public copies of AWS's price list had it in {AS_OF}; it was not checked against AWS's "
    "own page, so do that before you spend"
)


class PriceError(ValueError):
    """A price that cannot be given; the message says why, and what would help."""


def price(machine: Instance, machines: Numbers, hours: Numbers, discount: float = 0.0) -> Numbers:
    """Dollars for `machines` of a kind during `hours`; `discount` is the part that a contract, or spot, takes off.

    Raises:
        PriceError: if the table has no price for the instance, or the discount is not between 0 and 1.
    """
    if machine.dollars_an_hour is None:
        raise PriceError(
            f"{machine.name}: no price to rely on is known; give one as dollars_an_hour in a file of instances"
        )
    if not 0 <= discount < 1:
        raise PriceError(
            f"discount is {discount}; it must be at least 0 and less than 1, such as 0.3 for 30 %"
        )
    billed = np.maximum(hours, LEAST_HOURS)
    return plain(machine.dollars_an_hour * (1 - discount) * np.asarray(machines) * billed)
