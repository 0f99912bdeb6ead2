"""Count what gets lost when workers change shared parameters without a lock. Trains nothing.

Every update adds one to each element, or with `--stride` to every so-manieth, beginning anywhere; so the sum at the
end says how many of the additions have counted. The server reports `additions`, `lost`, `overlapped` (the share of
pulls that an update overlapped), `updates_per_second` and `staleness_mean`.
"""

import argparse
import sys
import time

import numpy as np

from workshop_utils import place
from workshop_utils.comm import hogwild, tcp
from workshop_utils.comm.parameter_server import Arrangement

MOST_EXACT = 1 << 24  # up to here float32 counts in ones


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--elements", type=int, default=10_000, help="parameters, float32")
    parser.add_argument("--stride", type=int, default=1, help="an update changes every so-manieth of them")
    parser.add_argument("--steps", type=int, default=2_000, help="updates of each worker")
    parser.add_argument("--locking", choices=["lock", "none"], default="none")
    parser.add_argument("--compute-seconds", type=float, default=0.0, help="between a pull and a push")
    options = parser.parse_args()
    workers = here.world_size - here.servers
    if here.servers != 1:
        sys.exit(f"parameter_servers is {here.servers}; this job counts in the memory of 1")
    if options.stride < 1 or options.elements < 1 or options.elements % options.stride:
        sys.exit(f"stride is {options.stride}; it must divide the number of elements, {options.elements}")
    if not 1 <= options.steps < MOST_EXACT // workers:
        sys.exit(f"steps is {options.steps}; it must be at least 1, and less than {MOST_EXACT // workers}")

    arrangement = Arrangement(1, workers, options.steps, "asynchronous")
    random = np.random.default_rng(here.rank)
    ones = np.ones(options.elements // options.stride, np.float32)

    def gradient_of(*_: object) -> np.ndarray:
        if options.compute_seconds:
            time.sleep(options.compute_seconds)
        return ones

    def update(part: np.ndarray, gradient: np.ndarray) -> None:
        mine = part[random.integers(options.stride) :: options.stride]
        mine += gradient  # not `part[...] +=`, which would write the result back once more

    with tcp.connect(*place.rendezvous()) as communicator:
        parameters = np.zeros(options.elements, np.float32)
        log = hogwild.train(communicator, arrangement, parameters, gradient_of, update, options.locking)
        if log is not None:
            additions = workers * options.steps * ones.size
            seconds = log.seconds[-1] - log.seconds[0]
            place.report(
                step=log.version,
                additions=additions,
                lost=additions - int(parameters.sum(dtype=np.float64)),
                overlapped=float(np.mean(log.overlapped)),
                updates_per_second=(len(log.seconds) - 1) / seconds if seconds else 0.0,
                staleness_mean=float(np.mean(log.staleness)),
            )
        communicator.barrier()


if __name__ == "__main__":
    main()
