"""Train a small GPT on Python's manual with tensor parallelism: every rank has a part of every layer.

With `--check 1` every rank also trains the whole model by itself, and reports how far loss and gradients are apart.
"""

import argparse
import sys
import time

import torch

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.parallel.gpt import GPT, GPTSizes, OneProcess, batch_of, gradient_error, manual
from workshop_utils.parallel.tensor import (
    Region,
    finish_gradients,
    parallelize,
    vocabulary_parallel_cross_entropy,
)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences in a step")
    parser.add_argument("--learning-rate", type=float, default=0.003)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--sequence-parallel", type=int, choices=(0, 1), default=0)
    parser.add_argument("--check", type=int, choices=(0, 1), default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    here, options = place.here(), arguments()
    torch.set_num_threads(1)
    try:
        sizes = GPTSizes(layers=options.layers)
        sizes.check_cut(tensor=here.world_size, sequence_parallel=bool(options.sequence_parallel))
    except ValueError as error:
        sys.exit(str(error))
    text = manual()

    with tcp.connect(*place.rendezvous()) as communicator:
        region = Region(communicator, bool(options.sequence_parallel))
        # Every rank makes the whole model from the same seed, and keeps its part.
        model = parallelize(GPT(sizes, options.seed), region)
        optimizer = torch.optim.Adam(model.parameters(), options.learning_rate)
        reference = OneProcess(sizes, options.seed, options.learning_rate) if options.check else None

        for step in range(1, options.steps + 1):
            tokens, targets = batch_of(text, step, options.batch_size, sizes.sequence)
            communicator.traffic.reset()
            start = time.perf_counter()
            optimizer.zero_grad()
            loss = vocabulary_parallel_cross_entropy(model(tokens), targets, region, sizes.vocabulary)
            loss.backward()
            finish_gradients(model, region)
            optimizer.step()
            values = {
                "loss": loss.item(),
                "step_seconds": time.perf_counter() - start,
                "bytes_sent": float(communicator.traffic.bytes_sent.sum()),
            }
            if reference is not None:
                whole_loss, gradients = reference.step(tokens, targets)
                values["loss_error"] = abs(loss.item() - whole_loss)
                values["gradient_error"] = gradient_error(model, parallelize(gradients, region))
            place.report(step=step, **values)
        communicator.barrier()


if __name__ == "__main__":
    main()
