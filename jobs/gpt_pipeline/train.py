"""Train a small GPT on Python's manual in a pipeline: every rank has some of the layers, and passes activations on.

Only the last rank knows the loss. With `--check 1` every rank also trains the whole model by itself, and reports how
far its gradients, and the last rank's loss, are apart.
"""

import argparse
import sys
import time

import torch
from torch import Tensor, nn

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.parallel.gpt import (
    GPT,
    GPTSizes,
    OneProcess,
    batch_of,
    cross_entropy,
    gradient_error,
    manual,
)
from workshop_utils.parallel.pipeline import ModuleStage, run
from workshop_utils.parallel.schedule import SCHEDULES, Schedule, Timed, schedule_of


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="one_f_one_b")
    parser.add_argument("--microbatches", type=int, default=4)
    parser.add_argument(
        "--chunks", type=int, default=1, help="stages a rank has; more than 1 when interleaved"
    )
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--batch-size", type=int, default=8, help="sequences in a step, all microbatches together"
    )
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument(
        "--timeline", type=int, choices=(0, 1), default=0, help="report the last step's passes"
    )
    parser.add_argument("--check", type=int, choices=(0, 1), default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def plan(options: argparse.Namespace, workers: int) -> tuple[GPTSizes, Schedule]:
    """The model's sizes and the schedule; ends the script where they cannot be."""
    try:
        sizes = GPTSizes(layers=options.layers)
        schedule = schedule_of(options.schedule, workers, options.microbatches, options.chunks)
        sizes.check_cut(stages=schedule.stages)
    except ValueError as error:
        sys.exit(str(error))
    if options.batch_size % options.microbatches:
        sys.exit(
            f"batch-size is {options.batch_size}; the {options.microbatches} microbatches must divide it"
        )
    return sizes, schedule


def main() -> None:
    here, options = place.here(), arguments()
    torch.set_num_threads(1)
    sizes, schedule = plan(options, here.world_size)
    microbatches = options.microbatches
    text, tokens, targets = manual(), torch.empty(0), torch.empty(0)

    def inputs(microbatch: int) -> Tensor:
        return tokens.chunk(microbatches)[microbatch]

    def loss_of(logits: Tensor, microbatch: int) -> Tensor:
        return cross_entropy(logits, targets.chunk(microbatches)[microbatch]) / microbatches

    with tcp.connect(*place.rendezvous()) as communicator:
        # Every rank makes the whole model from the same seed, and keeps its stages.
        parts, last = GPT(sizes, options.seed).stages(schedule.stages), schedule.stages - 1
        stages = {
            stage: ModuleStage(parts[stage], None if stage else inputs, loss_of if stage == last else None)
            for stage in schedule.stages_of(communicator.rank)
        }
        model = nn.ModuleList(stage.module for stage in stages.values())
        optimizer = torch.optim.Adam(model.parameters(), options.learning_rate)
        message = (options.batch_size // microbatches, sizes.sequence, sizes.width)
        reference = OneProcess(sizes, options.seed, options.learning_rate) if options.check else None

        timeline: list[Timed] = []
        for step in range(1, options.steps + 1):
            tokens, targets = batch_of(text, step, options.batch_size, sizes.sequence)
            communicator.barrier()  # so that all begin together
            communicator.traffic.reset()
            start = time.perf_counter()
            optimizer.zero_grad()
            timeline = run(schedule, stages, communicator, message)
            optimizer.step()
            values = {
                "step_seconds": time.perf_counter() - start,
                "bytes_sent": float(communicator.traffic.bytes_sent.sum()),
            }
            if last in stages:
                values["loss"] = sum(stages[last].losses.values())
            if reference is not None:
                whole_loss, gradients = reference.step(tokens, targets)
                expected = gradients.stages(schedule.stages)
                own = nn.ModuleList(expected[stage] for stage in stages)
                values["gradient_error"] = gradient_error(model, own)
                if last in stages:
                    values["loss_error"] = abs(values["loss"] - whole_loss)
            place.report(step=step, **values)
        for timed in timeline if options.timeline else ():
            place.report(step=options.steps, **timed.record())
        communicator.barrier()


if __name__ == "__main__":
    main()
