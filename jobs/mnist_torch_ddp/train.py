"""Train a small network on handwritten digits with DistributedDataParallel: gradients are averaged as they appear."""

import argparse
import sys
import time

import torch
import torch.distributed as dist

# PyTorch imports this when the optimizer is made, and its functions keep the group that they find then as a default
# for their arguments: the group's threads would outlive it, and abort a process that ends before they do.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place
from workshop_utils.training.tcp_bytes import count_bytes


def load(split: str) -> tuple[Tensor, Tensor]:
    """Images in [0, 1], shape (count, pixels), and labels, shape (count,)."""
    examples = place.load(split)
    images = torch.frombuffer(bytearray(examples.images), dtype=torch.uint8).view(examples.count, -1) / 255
    return images, torch.frombuffer(bytearray(examples.labels), dtype=torch.uint8).long()


def main() -> None:
    here = place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of one worker; N take N times it")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    images, labels = load("train")
    test_images, test_labels = load("test")
    mine = slice(rank, None, world_size)  # every world_size-th example, to train as to test
    share = len(images) // world_size  # equal shares, since every step needs every rank
    steps = share // options.batch_size  # an epoch; the shuffled remainder waits for the next one
    if steps == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {world_size} workers has only {share} images")

    torch.manual_seed(options.seed)
    model = nn.Sequential(
        nn.Linear(images.shape[1], options.hidden), nn.ReLU(), nn.Linear(options.hidden, 10)
    )
    parallel = DistributedDataParallel(model)
    # N workers make the batch N times as large and the steps N times fewer, so each step may be N times as
    # long: the linear scaling rule (Goyal et al. 2017, section 2.1).
    optimizer = torch.optim.SGD(model.parameters(), options.learning_rate * world_size, options.momentum)

    step, samples, since, sent = 0, 0, time.perf_counter(), 0.0
    for epoch in range(1, options.epochs + 1):
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(options.seed + epoch))
        with count_bytes() as counted:  # by the kernel: gradients, and what gloo adds to them
            for batch in order[mine][: steps * options.batch_size].split(options.batch_size):
                loss = cross_entropy(parallel(images[batch]), labels[batch])
                optimizer.zero_grad()
                loss.backward()  # returns with the average of all ranks' gradients
                optimizer.step()
                step, samples = step + 1, samples + len(batch)
                if step == 1:  # its time is that of starting up, so the clock starts after it
                    place.report(step=step, loss=loss.item(), epoch=epoch)
                    samples, since = 0, time.perf_counter()
                elif step % max(1, steps * options.epochs // 20) == 0:
                    values = {"samples_per_second": samples / (time.perf_counter() - since), "epoch": epoch}
                    place.report(step=step, loss=loss.item(), bytes_sent=sent + counted.sent, **values)
                    samples, since = 0, time.perf_counter()

        paused = time.perf_counter()
        sent += counted.sent
        with torch.no_grad():
            correct = (model(test_images[mine]).argmax(dim=1) == test_labels[mine]).sum()
        dist.all_reduce(correct)
        if rank == 0:
            place.report(step=step, accuracy=correct.item() / len(test_labels), epoch=epoch)
        since += time.perf_counter() - paused  # testing is not training

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), here.model_folder / "model.pt")
    # Gloo's threads may still hold `correct`, and need Python's lock to let go of it. Once all have met again they
    # are done; otherwise a rank now and then aborts as it leaves, or hangs where DDP is the group's last holder.
    dist.barrier()
    del parallel
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
