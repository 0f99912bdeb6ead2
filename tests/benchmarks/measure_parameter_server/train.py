"""Measure steps of the workshop's parameter servers that only push and pull, between real processes. Trains nothing.

Each worker reports for every step `step_seconds`, from one gradient to the next; each server reports once, at the
end, `bytes_received` and `bytes_sent`.
"""

import argparse
import time

import numpy as np

from workshop_utils import place
from workshop_utils.comm import parameter_server, tcp
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.comm.subset import Subset


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nbytes", type=int, default=1_000_000, help="size of the parameters")
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()

    workers = here.world_size - here.servers
    arrangement = Arrangement(here.servers, workers, options.steps)
    with tcp.connect(*place.rendezvous()) as communicator:
        parameters = np.zeros(options.nbytes // 4, np.float32)
        gradient = np.ones_like(parameters)
        starts: list[float] = []
        # All begin a step together; otherwise the first ones' pushes would already travel while the server still
        # answers the last ones.
        works = here.rank in arrangement.worker_ranks
        others = Subset(communicator, arrangement.worker_ranks) if works else None

        def gradient_of(*_: object) -> np.ndarray:
            assert others is not None  # a server computes no gradient
            others.barrier()
            starts.append(time.perf_counter())
            return gradient

        def update(part: np.ndarray, gradient: np.ndarray) -> None:
            part -= gradient

        log = parameter_server.train(communicator, arrangement, parameters, gradient_of, update)
        starts.append(time.perf_counter())
        if log is None:
            for step, seconds in enumerate(np.diff(starts)):
                place.report(step=step, step_seconds=float(seconds))
        else:
            traffic = communicator.traffic
            received, sent = int(traffic.bytes_received.sum()), int(traffic.bytes_sent.sum())
            place.report(step=log.version, bytes_received=received, bytes_sent=sent)
        communicator.barrier()


if __name__ == "__main__":
    main()
