"""Train a small GPT on Python's manual in three directions at once: data × tensor × pipeline.

The batch is cut between data-parallel replicas, each replica's layers between the stages of a pipeline, and each layer
between the ranks of a tensor-parallel group. With `--check 1` every rank also trains the whole model by itself, and
reports how far its gradients, and the last stage's loss, are apart.
"""

import argparse
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel import mesh
from workshop_utils.parallel.data import BucketedDataParallel
from workshop_utils.parallel.gpt import GPT, GPTSizes, OneProcess, batch_of, gradient_error, manual
from workshop_utils.parallel.pipeline import ModuleStage, run
from workshop_utils.parallel.schedule import SCHEDULES, Schedule, schedule_of
from workshop_utils.parallel.tensor import (
    Region,
    finish_gradients,
    parallelize,
    vocabulary_parallel_cross_entropy,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    for direction in ("data", "tensor", "pipeline"):
        parser.add_argument(f"--{direction}", type=int, default=1, help="ranks in this direction")
    parser.add_argument("--sequence-parallel", type=int, choices=(0, 1), default=0)
    parser.add_argument("--schedule", choices=list(SCHEDULES), default="one_f_one_b")
    parser.add_argument("--microbatches", type=int, default=2, help="of each replica")
    parser.add_argument("--chunks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument(
        "--batch-size", type=int, default=8, help="sequences in a step, all replicas together"
    )
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--check", type=int, choices=(0, 1), default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def plan(options: argparse.Namespace, workers: int) -> tuple[GPTSizes, Schedule, tuple[int, int, int]]:
    """The model's sizes, each pipeline's schedule and the mesh's sizes; ends the script where they cannot be."""
    mesh_sizes = options.data, options.tensor, options.pipeline
    try:
        mesh.check(workers, *mesh_sizes)
        sizes = GPTSizes(layers=options.layers)
        schedule = schedule_of(options.schedule, options.pipeline, options.microbatches, options.chunks)
        sizes.check_cut(options.tensor, schedule.stages, bool(options.sequence_parallel))
    except ValueError as error:
        sys.exit(str(error))
    if options.batch_size % (options.data * options.microbatches):
        sys.exit(
            f"batch-size is {options.batch_size}; {options.data} replicas of {options.microbatches} microbatches "
            "must divide it"
        )
    return sizes, schedule, mesh_sizes


def main() -> None:
    here, options = place.here(), arguments()
    torch.set_num_threads(1)
    sizes, schedule, mesh_sizes = plan(options, here.world_size)
    microbatches = options.microbatches
    text, tokens, targets = manual(), torch.empty(0), torch.empty(0)  # tokens and targets are this replica's

    with tcp.connect(*place.rendezvous()) as communicator:
        groups = mesh.mesh_of(communicator, *mesh_sizes)
        region = Region(groups.tensor, bool(options.sequence_parallel))

        def inputs(microbatch: int) -> Tensor:
            return tokens.chunk(microbatches)[microbatch]

        def loss_of(logits: Tensor, microbatch: int) -> Tensor:
            own = targets.chunk(microbatches)[microbatch]
            return vocabulary_parallel_cross_entropy(logits, own, region, sizes.vocabulary) / microbatches

        def part_of(whole: GPT) -> dict[int, nn.Module]:
            parts = whole.stages(schedule.stages)
            return {
                stage: parallelize(parts[stage], region) for stage in schedule.stages_of(groups.pipeline.rank)
            }

        last = schedule.stages - 1
        stages = {
            stage: ModuleStage(
                part, None if stage else inputs, loss_of if stage == last else None, schedule.is_split
            )
            for stage, part in part_of(GPT(sizes, options.seed)).items()
        }
        model = nn.ModuleList(stage.module for stage in stages.values())
        replicas = BucketedDataParallel(model, groups.data)
        optimizer = torch.optim.Adam(model.parameters(), options.learning_rate)
        share = sizes.sequence // (options.tensor if options.sequence_parallel else 1)
        message = (options.batch_size // options.data // microbatches, share, sizes.width)
        reference = OneProcess(sizes, options.seed, options.learning_rate) if options.check else None

        for step in range(1, options.steps + 1):
            batch = batch_of(text, step, options.batch_size, sizes.sequence)
            tokens, targets = (each.chunk(options.data)[groups.data.rank] for each in batch)
            for each in (communicator, *groups):
                each.traffic.reset()
            start = time.perf_counter()
            optimizer.zero_grad()
            run(schedule, stages, groups.pipeline, message)  # forward and backward: pipeline and tensor
            finish_gradients(model, region)  # tensor, where the sequence is cut
            replicas.synchronise()  # data
            optimizer.step()
            values = {
                "step_seconds": time.perf_counter() - start,
                "bytes_sent": float(communicator.traffic.bytes_sent.sum()),
                **{
                    f"{direction}_bytes": float(group.traffic.bytes_sent.sum())
                    for direction, group in groups._asdict().items()
                },
            }
            if last in stages:
                mean = np.array([sum(stages[last].losses.values())])
                ring_all_reduce(groups.data, mean, "mean")
                values["loss"] = float(mean[0])
            if reference is not None:
                whole_loss, gradients = reference.step(batch[0], batch[1])
                expected = nn.ModuleList(part_of(gradients).values())
                values["gradient_error"] = gradient_error(model, expected)
                if last in stages:
                    values["loss_error"] = abs(values["loss"] - whole_loss)
            place.report(step=step, **values)
        communicator.barrier()


if __name__ == "__main__":
    main()
