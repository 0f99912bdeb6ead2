"""Numbers that cannot be are refused by name."""

import pytest

from workshop_utils.comm.topology import Link, Topology
from workshop_utils.scaling import cost, memory

LINK = Link(1e-4, 1e8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: cost.all_reduce_seconds("rings", 2, 1, LINK), "is 'rings'; it must be one of ring"),
        (lambda: cost.hierarchical_seconds(12, 1, Topology(LINK, 8, LINK)), "is 12; it must be a multiple"),
        (lambda: memory.training_memory(1, "adamw"), "is 'adamw'; it must be one of sgd, momentum, adam"),
    ],
)
def test_numbers_that_cannot_be_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
