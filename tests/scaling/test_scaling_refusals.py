"""Numbers that cannot be are refused by name."""

import pytest

from workshop_utils.comm.topology import Link, Topology
from workshop_utils.scaling import convergence, cost, laws, memory

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
        (lambda: laws.amdahl_speedup(1.5, 4), r"serial_fraction is 1\.5; it must lie between 0 and 1"),
        (lambda: laws.gustafson_speedup(0.1, 0), "workers is 0; there must be at least 1"),
        (lambda: laws.fit_serial_fraction([2, 4], [1.5]), "2 numbers of workers have 1 speed-ups"),
        (lambda: laws.fit_serial_fraction([1], [1.0]), "a second size is needed"),
        (lambda: laws.fit_serial_fraction([2], [0.0]), "each has to be above zero"),
        (lambda: memory.training_memory(1, "adamw"), "is 'adamw'; it must be one of sgd, momentum, adam"),
        (lambda: memory.zero_memory(1, 2, 4), "stage is 4; it must be 0, 1, 2 or 3"),
        (lambda: memory.zero_memory(1, 0, 3), "workers is 0; there must be at least 1"),
    ],
)
def test_numbers_that_cannot_be_are_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
