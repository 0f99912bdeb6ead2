"""Measure a pipeline's timeline among real processes whose passes sleep instead of computing. Trains nothing.

A laptop has fewer cores than the pipeline has ranks, so that real passes would wait for a core, and not for each other.
Sleeping takes no core; the messages are real. Reports each pass: `backward` (0 or 1), `microbatch`, `stage`, and
`start` and `end` in seconds of the clock that all processes of a machine share.
"""

import argparse
import sys

import numpy as np
import torch  # noqa: F401 - the pipeline needs it; named here, it is imported before the ranks are made

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.parallel.pipeline import EmulatedStage, run
from workshop_utils.parallel.schedule import SCHEDULES, schedule_of


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="one_f_one_b")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--forward-seconds", type=float, default=0.01, help="of one microbatch on one rank")
    parser.add_argument("--backward-seconds", type=float, default=0.02)
    parser.add_argument("--message-nbytes", type=int, default=65536, help="activations between two stages")
    parser.add_argument("--repeats", type=int, default=1)
    options = parser.parse_args()

    try:
        schedule = schedule_of(options.schedule, here.world_size, options.microbatches, options.chunks)
    except ValueError as error:
        sys.exit(str(error))

    with tcp.connect(*place.rendezvous()) as communicator:
        message = np.zeros(options.message_nbytes, np.uint8)
        seconds = options.forward_seconds / options.chunks, options.backward_seconds / options.chunks
        stages = {
            stage: EmulatedStage(communicator, *seconds, message)
            for stage in schedule.stages_of(communicator.rank)
        }
        for repeat in range(options.repeats):
            communicator.barrier()  # so that all begin together
            for timed in run(schedule, stages, communicator, message.shape, message.dtype):
                place.report(step=repeat, **timed.record())
        communicator.barrier()


if __name__ == "__main__":
    main()
