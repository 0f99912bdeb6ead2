"""Numbers that cannot be are refused by name."""

import pytest

from workshop_utils.comm.topology import Link, Topology
from workshop_utils.scaling import convergence, cost, memory

LINK = Link(1e-4, 1e8)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: convergence.steps_to({}, target=0), "target is 0; a loss must be more than 0"),
        (lambda: convergence.CriticalBatch.fit([1, 2, 4], [10, 20, 40]), "do not fall towards a minimum"),
        (lambda: convergence.staleness_at_most(0, 1), "workers is 0"),
        (lambda: convergence.stable_learning_rate(-1), "delay is -1"),
        (lambda: cost.all_reduce_seconds("rings", 2, 1, LINK), "is 'rings'; it must be one of ring"),
        (lambda: cost.hierarchical_seconds(12, 1, Topology(LINK, 8, LINK)), "is 12; it must be a multiple"),
        (lambda: memory.training_memory(1, "adamw"), "is 'adamw'; it must be one of sgd, momentum, adam"),
    ],
)
def test_numbers_that_cannot_be_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
