"""Everything that Horovod adds to a PyTorch script, each behind an option: broadcast, warm-up, compression, Adasum.

The same network, the same batches and the same schedule as in digits_horovod_tensorflow and digits_horovod_keras:
the three take the same steps, and so does one process with the batches of all workers.
"""

import argparse
import itertools
import math
import os
import random
import sys
import time

import horovod.torch as hvd
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from workshop_utils import place


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.2, help="of one worker; N take N times it")
    parser.add_argument(
        "--warmup-epochs", type=float, default=1, help="until the learning rate is N times as high"
    )
    parser.add_argument("--hidden", type=int, default=64, help="units in a hidden layer")
    parser.add_argument("--layers", type=int, default=1, help="hidden layers")
    parser.add_argument(
        "--broadcast", type=int, choices=[0, 1], default=1, help="whether all start as rank 0 does"
    )
    parser.add_argument("--compression", choices=["none", "fp16"], default="none")
    parser.add_argument("--reduction", choices=["average", "adasum"], default="average")
    parser.add_argument(
        "--timeline-steps", type=int, default=0, help="how many steps timeline.json shows, 0: none"
    )
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def dense(inputs: int, outputs: int, generator: random.Random) -> nn.Linear:
    """A layer with weights in ±√(6 / (inputs + outputs)), drawn by Python, so that any framework can start alike."""
    limit = math.sqrt(6 / (inputs + outputs))
    drawn = [generator.uniform(-limit, limit) for _ in range(inputs * outputs)]
    layer = nn.Linear(inputs, outputs)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(drawn).view(inputs, outputs).T)
        layer.bias.zero_()
    return layer


def network(sizes: list[int], seed: int) -> nn.Sequential:
    """A perceptron with layers of these sizes, the pixels first and the classes last."""
    generator = random.Random(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in itertools.pairwise(sizes):
        layers += [dense(inputs, outputs, generator), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def spread(model: nn.Module) -> float:
    """The largest difference between any rank's parameters and those of rank 0."""
    own = nn.utils.parameters_to_vector(model.parameters()).detach()
    farthest = (own - hvd.broadcast(own, root_rank=0)).abs().max()
    return hvd.allreduce(farthest, op=hvd.Max).item()


def main() -> None:
    here = place.here()
    options = read_options()
    if options.timeline_steps:  # asked for before init, since its writer keeps a core busy all the time
        os.environ["HOROVOD_TIMELINE"] = "DYNAMIC"
    hvd.init()
    rank, world_size = hvd.rank(), hvd.size()
    if options.reduction == "adasum" and not hvd.mpi_enabled():
        sys.exit("reduction is 'adasum', which Horovod computes over MPI alone: launch with strategy 'mpi'")
    if options.reduction == "adasum" and world_size & (world_size - 1):
        sys.exit(f"reduction is 'adasum', which takes 2, 4, 8 … workers; there are {world_size}")

    images, labels = place.load("train").tensors()
    test_images, test_labels = place.load("test").tensors()
    share = len(images) // world_size
    steps = share // options.batch_size  # an epoch; the rest waits for the next shuffle
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {world_size} workers has only {share} images")

    # As in a script without a seed, each rank draws its own weights …
    sizes = [images.shape[1], *[options.hidden] * options.layers, 10]
    model = network(sizes, options.seed + rank)
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate)
    optimizer = hvd.DistributedOptimizer(
        optimizer,
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.compression == "fp16" else hvd.Compression.none,
        op=hvd.Adasum if options.reduction == "adasum" else hvd.Average,
    )
    if options.broadcast:  # … and all go on with those of rank 0
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    # N workers make the batch N times as large, so a step may be N times as long (Goyal et al. 2017, section 2.1);
    # it grows to that from the learning rate of one (2.2). Adasum finds the length by itself.
    scale = 1 if options.reduction == "adasum" else world_size
    warmup = max(1, round(options.warmup_epochs * steps))

    step, samples, since = 0, 0, time.perf_counter()
    for epoch in range(1, options.epochs + 1):
        order = list(range(len(images)))
        random.Random(options.seed + epoch).shuffle(order)
        mine = order[rank::world_size]
        for batch in torch.tensor(mine[: steps * options.batch_size]).split(options.batch_size):
            for group in optimizer.param_groups:
                group["lr"] = options.learning_rate * (1 + (scale - 1) * min(1.0, step / warmup))
            if options.timeline_steps and step == steps:  # the second epoch is in its stride
                hvd.start_timeline(str(here.model_folder / "timeline.json"))
            loss = cross_entropy(model(images[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()  # each gradient sets off on its ring as soon as it is there
            optimizer.step()  # waits until all are back
            step, samples = step + 1, samples + len(batch)
            if options.timeline_steps and step == steps + options.timeline_steps:
                hvd.stop_timeline()
            if step == 1 or step % steps % max(1, steps // 4) == 0:
                speed = {"samples_per_second": samples / (time.perf_counter() - since)} if step > 1 else {}
                place.report(step, loss=loss.item(), learning_rate=group["lr"], epoch=epoch, **speed)
                samples, since = 0, time.perf_counter()

        paused = time.perf_counter()
        with torch.no_grad():
            correct = (
                model(test_images[rank::world_size]).argmax(dim=1) == test_labels[rank::world_size]
            ).sum()
        mean_loss = hvd.allreduce(loss.detach(), op=hvd.Average).item()
        accuracy = hvd.allreduce(correct, op=hvd.Sum).item() / len(test_labels)
        differ = spread(model)
        if rank == 0:
            place.report(step, accuracy=accuracy, mean_loss=mean_loss, spread=differ, epoch=epoch)
        since += time.perf_counter() - paused  # testing is not training

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), here.model_folder / "model.pt")
    hvd.shutdown()


if __name__ == "__main__":
    main()
