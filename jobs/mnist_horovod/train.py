"""Train a small network on handwritten digits with Horovod: its optimizer averages gradients by ring all-reduce.

The job trains on scikit-learn's digits unless its `data` is `mnist`. It trains on CPUs, where the workshop tests it,
and is written for one GPU per worker as well; that needs a Horovod built with NCCL.

Where the launch names a place for checkpoints, which every worker can reach, a job that was killed resumes at its last
one, with the same number of workers. On CPUs, two workers then reach the weights of an uninterrupted run, bit by bit.
More than two reach them up to rounding: Horovod sends small gradients together as they appear, and the grouping, which
depends on timing, decides in which order the ring adds the workers' numbers. HOROVOD_FUSION_THRESHOLD=0 turns the
grouping off; these runs, too, are then equal bit by bit.
"""

import argparse
import io
import itertools
import math
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from workshop_utils import place
from workshop_utils.training import checkpoints

DTYPES = ("auto", "float32", "bfloat16")  # of matrix products; auto: float32 on CPUs and older GPUs
Parts = dict[str, Any]  # what has a state_dict: the model, the optimizer and the scheduler


def read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--accumulate", type=int, default=1, help="backward passes that share a batch")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="of one worker; N take N times it")
    parser.add_argument("--warmup", type=float, default=0.05, help="fraction of all steps in which it rises")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--clip-norm", type=float, default=0.0, help="limit on the gradient's norm; 0: none")
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument(
        "--dropout", type=float, default=0.0, help="fraction of hidden units dropped in each step"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="auto: bfloat16 on GPUs that have it")
    parser.add_argument("--fp16-allreduce", type=int, choices=[0, 1], default=0, help="1: send fp16")
    parser.add_argument("--checkpoint-steps", type=int, default=100, help="between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    if not 0 < options.learning_rate < math.inf:
        sys.exit(f"learning-rate is {options.learning_rate}; it must be a finite number above 0")
    for name in ("epochs", "batch_size", "accumulate", "hidden", "checkpoint_steps"):
        if getattr(options, name) < 1:
            sys.exit(f"{name.replace('_', '-')} is {getattr(options, name)}; it must be at least 1")
    for name in ("warmup", "momentum", "dropout"):
        if not 0 <= getattr(options, name) < 1:
            sys.exit(f"{name} is {getattr(options, name)}; it must be at least 0 and less than 1")
    if not 0 <= options.clip_norm < math.inf:
        sys.exit(f"clip-norm is {options.clip_norm}; it must be a finite number, at least 0")
    if options.batch_size % options.accumulate:
        sys.exit(
            f"batch-size is {options.batch_size}; it must be a multiple of accumulate, {options.accumulate}"
        )
    return options


class ResumableSampler(DistributedSampler):
    """A rank's share of each epoch, which may begin at `start`: what came before a restart is not loaded again."""

    start = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.start, None)


def learning_rate_factor(step: int, total: int, warmup: float, world_size: int) -> float:
    """The factor on one worker's learning rate in a step.

    N workers make the batch N times as large and the steps N times fewer, so each step may be N times as long, once the
    rate has risen to that step by step (Goyal et al. 2017, sections 2.1 and 2.2). It then falls to 0 along half a
    cosine (Loshchilov and Hutter 2017, equation 5).
    """
    rise = min(1.0, step / (warmup * total)) if warmup else 1.0
    return (1 + (world_size - 1) * rise) * 0.5 * (1 + math.cos(math.pi * step / total))


def random_state(device: torch.device) -> Tensor:
    """The state of this rank's random generators, uint8: of the CPU's and, where it trains on one, its GPU's."""
    on_gpu = [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    return torch.cat([torch.get_rng_state(), *on_gpu])


def save(folder: Path, step: int, parts: Parts, device: torch.device, settings: checkpoints.Settings) -> None:
    """Write a checkpoint. All ranks call this, since each has a random state; rank 0 writes, and the others wait."""
    random_states = hvd.allgather(random_state(device).unsqueeze(0), name="random_states")
    if hvd.rank() == 0:
        state = {name: part.state_dict() for name, part in parts.items()}
        content = io.BytesIO()
        torch.save({**state, "random": random_states}, content)
        checkpoints.write(folder, step, content.getvalue(), settings)
    hvd.barrier()  # or the others would count the wait as part of their next step


def newest_step(folder: Path, settings: checkpoints.Settings) -> int:
    """The step of the newest whole checkpoint in `folder`; 0 if there is none."""
    try:
        folder.mkdir(parents=True, exist_ok=True)  # fails now, not at the first checkpoint
        checkpoint = checkpoints.newest(folder, settings)
    except (OSError, checkpoints.OtherRun) as error:
        sys.exit(f"cannot resume: {error}")
    return checkpoint.step if checkpoint else 0


def restore(folder: Path, step: int, parts: Parts, device: torch.device) -> None:
    """Give each of `parts` its state from the checkpoint of `step`, and this rank its random state."""
    try:
        content = checkpoints.read(checkpoints.path_of(folder, step)).content
    except (OSError, checkpoints.CheckpointDamaged) as error:
        sys.exit(f"cannot resume: {error}; every worker needs the folder that worker 0 writes to")
    state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    own, cpu_nbytes = state["random"][hvd.rank()], len(torch.get_rng_state())
    torch.set_rng_state(own[:cpu_nbytes].clone())  # PyTorch 2.13 crashes when it is given a part of a tensor
    if device.type == "cuda":
        torch.cuda.set_rng_state(own[cpu_nbytes:].clone(), device)


def seconds(device: torch.device) -> float:
    """The time once the device has finished its queued work: a GPU runs behind Python."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def train_step(
    model: nn.Module, optimizer: Any, images: Tensor, labels: Tensor, options: argparse.Namespace
) -> Tensor:
    """Update the model with the mean gradient of all ranks' batches; returns the mean loss of this rank's."""
    optimizer.zero_grad()
    mean = torch.zeros((), device=images.device)
    for some, classes in zip(images.chunk(options.accumulate), labels.chunk(options.accumulate), strict=True):
        with torch.autocast(images.device.type, torch.bfloat16, enabled=options.dtype == "bfloat16"):
            # Horovod adds the gradients of several passes, so each contributes its share of the mean.
            loss = cross_entropy(model(some), classes) / options.accumulate
        loss.backward()  # in the last pass, Horovod starts averaging each gradient as soon as it is there
        mean += loss.detach()
    optimizer.synchronize()  # waits for the mean of the ranks' gradients, which is what has to be clipped
    if options.clip_norm:
        nn.utils.clip_grad_norm_(model.parameters(), options.clip_norm)
    with optimizer.skip_synchronize():
        optimizer.step()
    return mean


def main() -> None:
    here = place.here()
    options = read_options()
    device = torch.device(here.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)  # that of hvd.local_rank(), or the only one that this rank sees
    train, test = (TensorDataset(*place.load(split).tensors()) for split in ("train", "test"))
    pixels, workers = train.tensors[0].shape[1], here.world_size
    share = len(train) // workers  # equal shares, since every step needs every rank
    steps_per_epoch = share // options.batch_size  # the remainder is dropped; the next epoch shuffles again
    if steps_per_epoch == 0:
        sys.exit(f"batch-size is {options.batch_size}; each of {workers} workers has only {share} images")
    total = steps_per_epoch * options.epochs
    if options.dtype == "auto":
        has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        options.dtype = "bfloat16" if has_bfloat16 else "float32"

    # Resuming with other settings than these would lead to other weights, so it is refused.
    settings = {name.replace("_", "-"): value for name, value in vars(options).items()}
    settings |= {"workers": workers, "images": len(train), "pixels": pixels, "device": device.type}
    settings["labels"] = zlib.crc32(train.tensors[1].numpy().tobytes())
    del settings["checkpoint-steps"]
    folder = place.checkpoint_folder()
    # Rank 0 alone looks, since two might find different ones; before the ranks are connected, so that it alone fails.
    step = newest_step(folder, settings) if folder and here.rank == 0 else 0

    hvd.init()
    rank = hvd.rank()
    if hvd.size() != workers:  # Horovod does not know torchrun, and would train a model in each process
        sys.exit(
            f"the launcher started {workers} workers, but Horovod connects {hvd.size()}; start the job with horovodrun "
            "or mpirun (strategy: horovod or mpi)"
        )
    step = int(hvd.broadcast(torch.tensor([step]), root_rank=0, name="step"))

    # Ranks draw different units to drop. They draw different weights as well, and go on with those of rank 0.
    torch.manual_seed(options.seed + rank)
    hidden, dropout = options.hidden, nn.Dropout(options.dropout)
    model = nn.Sequential(nn.Linear(pixels, hidden), nn.ReLU(), dropout, nn.Linear(hidden, 10)).to(device)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), options.learning_rate, options.momentum),
        named_parameters=model.named_parameters(),
        compression=hvd.Compression.fp16 if options.fp16_allreduce else hvd.Compression.none,
        backward_passes_per_step=options.accumulate,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, total, options.warmup, workers)
    )
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    if folder and step:
        restore(folder, step, parts, device)
        if rank == 0:
            print(f"resumed after step {step}")
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    # Of the state, Horovod sends tensors as they are, and numbers such as the momentum as a pickle.
    hvd.broadcast_optimizer_state(optimizer, root_rank=0)

    sampler = ResumableSampler(train, hvd.size(), rank, seed=options.seed, drop_last=True)
    loader = DataLoader(
        train,
        options.batch_size,
        sampler=sampler,
        drop_last=True,
        pin_memory=device.type == "cuda",  # or copies to the GPU would make Python wait
        generator=torch.Generator(),  # or the loader would draw from the generator whose state is saved
    )
    test_images, test_labels = (tensor[rank::workers].to(device) for tensor in test.tensors)

    first, samples, since = step + 1, 0, 0.0
    for epoch in range(step // steps_per_epoch, options.epochs):
        sampler.set_epoch(epoch)  # or every epoch would have the order of the first
        sampler.start = step % steps_per_epoch * options.batch_size
        model.train()
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = train_step(model, optimizer, images, labels, options)
            scheduler.step()
            step += 1

            samples += options.batch_size
            if step == first:  # its time is that of starting up, so the clock starts after it
                on = str(next(model.parameters()).device)
                place.report(step, loss=loss.item(), epoch=epoch + 1, device=on)
                samples, since = 0, seconds(device)
            elif step % max(1, total // 20) == 0:
                speed = samples / (seconds(device) - since)
                place.report(step, loss=loss.item(), epoch=epoch + 1, samples_per_second=speed)
            if folder and (step % options.checkpoint_steps == 0 or step == total):
                paused = seconds(device)
                save(folder, step, parts, device, settings)
                since += time.perf_counter() - paused  # saving is not training, nor is testing

        paused = seconds(device)
        model.eval()
        with torch.no_grad():
            correct = (model(test_images).argmax(dim=1) == test_labels).sum()
        correct = hvd.allreduce(correct, op=hvd.Sum, name="correct")
        if rank == 0:
            place.report(step, accuracy=correct.item() / len(test), epoch=epoch + 1)
        since += time.perf_counter() - paused

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), here.model_folder / "model.pt")
    hvd.shutdown()


if __name__ == "__main__":
    main()
