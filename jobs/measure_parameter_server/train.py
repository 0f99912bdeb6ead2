"""Measure steps of the workshop's parameter servers that only push and pull, between real processes. Trains nothing.

Each worker reports for every step `step_seconds`, from one gradient to the next; each server reports once, at the
end, `bytes_received` and `bytes_sent`. With `--compute-seconds` workers pretend to compute between a pull and a push,
as long as `asynchronous.compute_times` says; with `--log-pushes` the servers report who pushed when.
"""

import argparse
import time

import numpy as np

from workshop_utils import place
from workshop_utils.comm import parameter_server, tcp
from workshop_utils.comm.asynchronous import compute_times
from workshop_utils.comm.parameter_server import Arrangement
from workshop_utils.comm.subset import Subset


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--nbytes", type=int, default=1_000_000, help="size of the parameters")
    parser.add_argument("--steps", type=int, default=4)
    consistencies = ["synchronous", "stale_synchronous", "asynchronous"]
    parser.add_argument("--consistency", choices=consistencies, default="synchronous")
    parser.add_argument("--bound", type=int, default=0, help="steps that a worker may be ahead")
    parser.add_argument("--compute-seconds", type=float, default=0.0, help="median of a gradient's computing")
    parser.add_argument("--jitter", type=float, default=0.0, help="its spread: times exp(jitter z), z normal")
    parser.add_argument("--seed", type=int, default=0, help="of the jitter")
    parser.add_argument("--log-pushes", type=int, default=0, help="1: servers report each push")
    options = parser.parse_args()

    workers = here.world_size - here.servers
    arrangement = Arrangement(here.servers, workers, options.steps, options.consistency, options.bound)
    with tcp.connect(*place.rendezvous()) as communicator:
        parameters = np.zeros(options.nbytes // 4, np.float32)
        gradient = np.ones_like(parameters)
        starts: list[float] = []
        computing = compute_times(
            workers, options.steps, options.compute_seconds, options.jitter, seed=options.seed
        )
        # In synchronous training all begin a step together; otherwise the first ones' pushes would already travel
        # while the server still answers the last ones.
        together = options.consistency == "synchronous" and here.rank in arrangement.worker_ranks
        others = Subset(communicator, arrangement.worker_ranks) if together else None

        def gradient_of(_: np.ndarray, step: int) -> np.ndarray:
            if others is not None:
                others.barrier()
            starts.append(time.perf_counter())
            time.sleep(computing[here.index, step])
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
            entries = zip(log.worker, log.seconds, log.staleness, strict=True) if options.log_pushes else ()
            for push, (rank, moment, staleness) in enumerate(entries):
                since_first = moment - log.seconds[0]
                place.report(push, pusher=rank - here.servers, push_seconds=since_first, staleness=staleness)
        communicator.barrier()


if __name__ == "__main__":
    main()
