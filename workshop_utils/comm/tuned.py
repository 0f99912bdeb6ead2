"""All-reduce as a library does it: the algorithm chosen by the size of the array and by what the transport can do.

| array | where ranks read each other's memory | elsewhere |
| --- | --- | --- |
| small | `direct_all_reduce` | `direct_all_reduce` |
| larger | `one_sided_all_reduce` | `ring_all_reduce` |

The idea is that of Open MPI's `coll/tuned`, which has more algorithms and more sizes.
"""

from __future__ import annotations

from workshop_utils.comm.communicator import Array, Communicator, Operation, collective
from workshop_utils.comm.direct import direct_all_reduce
from workshop_utils.comm.one_sided import one_sided_all_reduce
from workshop_utils.comm.ring import ring_all_reduce

# The largest arrays, in bytes, for which one step with all of the array beats several with parts of it: measured with
# 2 and 4 ranks, as `workshop bench all_reduce` does.
DIRECT_UP_TO = 32 * 1024
DIRECT_UP_TO_IN_WINDOWS = 128 * 1024


@collective
def tuned_all_reduce(communicator: Communicator, array: Array, operation: Operation = "sum") -> None:
    """Replace `array`, in place on every rank, by the reduction over all ranks, the fastest way known here."""
    windows = communicator.has_windows
    if array.nbytes <= (DIRECT_UP_TO_IN_WINDOWS if windows else DIRECT_UP_TO):
        direct_all_reduce(communicator, array, operation)
    elif windows:
        one_sided_all_reduce(communicator, array, operation)
    else:
        ring_all_reduce(communicator, array, operation)
