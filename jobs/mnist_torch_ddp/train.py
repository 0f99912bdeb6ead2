"""Train a small network on handwritten digits with PyTorch, by one worker or many.

`--parallel` says how the workers' gradients meet; both ways take the very same steps:

- `naive`: one by one, after the backward pass;
- `ddp`: DistributedDataParallel puts them into buckets and averages each as soon as it is full (`job.yaml`).

For a model that is to be split among the workers, copy `gpt_fsdp`.

One worker needs no launcher (`single.yaml`). Each worker has a GPU, and NCCL joins them; where there are none, they are
on CPUs, and gloo joins them. The images are scikit-learn's digits, which need no download; `data: mnist` is the real
thing.

With a folder for checkpoints, which the first worker alone has to reach, a run that was killed goes on where its last
checkpoint was. It ends with the weights of a run that was not killed: on CPUs bit by bit.
"""

import argparse
import io
import itertools
import math
import os
import sys
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# PyTorch imports this when the optimizer is made, and its functions keep the group that they find then as a default
# for their arguments: the group's threads would outlive it, and abort a process that ends before they do.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from workshop_utils import place
from workshop_utils.training import checkpoints
from workshop_utils.training.profiler import profile
from workshop_utils.training.tcp_bytes import count_bytes

# Options that change no step.
TECHNICAL = {"parallel", "bucket_bytes", "checkpoint_steps", "profile_steps", "loader_workers"}
STATEFUL = ("model", "optimizer", "scheduler")  # of Training, in a checkpoint


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--parallel", choices=["naive", "ddp"], default="ddp")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images a worker takes in one step")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes that share a batch")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="N workers take N times it")
    parser.add_argument("--warmup", type=float, default=0.05, help="part of all steps in which it rises")
    parser.add_argument("--momentum", type=float, default=0.9, help="of SGD")
    parser.add_argument("--clip-norm", type=float, default=0.0, help="limit of the gradient's norm; 0: none")
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--dropout", type=float, default=0.0, help="fraction of these that each step drops")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
                        help="of matrix products; auto: bfloat16 on a GPU that has it")  # fmt: skip
    parser.add_argument("--bucket-bytes", type=int, default=0, help="of DDP's buckets; 0: PyTorch's own size")
    parser.add_argument("--checkpoint-steps", type=int, default=100, help="between two checkpoints")
    parser.add_argument("--profile-steps", type=int, default=0, help="steps in a trace; 0: no trace")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in ("epochs", "batch_size", "accumulate", "hidden", "checkpoint_steps"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    for name in ("warmup", "momentum", "dropout"):
        if not 0 <= getattr(given, name) < 1:
            parser.error(f"{name} is {getattr(given, name)}; it must be at least 0 and less than 1")
    if not 0 < given.learning_rate < math.inf or not 0 <= given.clip_norm < math.inf:
        rates = f"learning-rate is {given.learning_rate} and clip-norm {given.clip_norm}"
        parser.error(f"{rates}; the first must be more than 0, the second at least 0")
    if given.batch_size % given.accumulate:
        parser.error(
            f"batch-size is {given.batch_size}; it must be a multiple of accumulate, {given.accumulate}"
        )
    return given


class Share(DistributedSampler):
    """A worker's share of each epoch, which can start at index `start`: a resumed epoch skips what was used.

    Worker r of N takes every N-th image from the r-th on. So a step's batch is the same images for any N.
    """

    start = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.start, None)


def average_gradients(model: nn.Module) -> None:
    """Naive data parallelism: one all-reduce for each parameter, and nothing else happens meanwhile."""
    for parameter in model.parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()


class Training:
    """All that a step changes, and so all that a checkpoint holds. Where an epoch stands follows from `step`."""

    def __init__(
        self, data: TensorDataset, total: int, device: torch.device, given: argparse.Namespace
    ) -> None:
        rank, size, pixels = dist.get_rank(), dist.get_world_size(), data.tensors[0].shape[1]
        self.device, self.given, self.step = device, given, 0
        has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.is_low = given.dtype == "bfloat16" or (given.dtype == "auto" and has_bfloat16)
        torch.manual_seed(given.seed)  # the same weights on every worker
        hidden, dropout = given.hidden, nn.Dropout(given.dropout)
        layers = (nn.Linear(pixels, hidden), nn.ReLU(), dropout, nn.Linear(hidden, 10))
        self.model: Any = nn.Sequential(*layers).to(device)
        torch.manual_seed(given.seed + rank)  # from here on each worker drops other units

        self.parallel: Any = self.model
        if given.parallel == "ddp":
            self.parallel = DistributedDataParallel(
                self.model, bucket_cap_mb=given.bucket_bytes / 2**20 or None
            )
        self.optimizer: Any = torch.optim.SGD(self.model.parameters(), given.learning_rate, given.momentum)

        # N workers make the batch N times as large and the steps N times fewer, so each may be N times as long, once
        # it has risen to that step by step (Goyal et al. 2017, sections 2.1 and 2.2). From there it falls to 0, as
        # half a cosine (Loshchilov and Hutter 2017, equation 5).
        def rate(step: int) -> float:
            rises = min(1.0, step / (given.warmup * total)) if given.warmup else 1.0
            return (1 + (size - 1) * rises) * 0.5 * (1 + math.cos(math.pi * step / total))

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        # A checkpoint belongs to another run if its next step would differ.
        own = {name.replace("_", "-"): value for name, value in vars(given).items() if name not in TECHNICAL}
        checksum = 0
        for tensor in data.tensors:
            checksum = zlib.crc32(tensor.numpy().tobytes(), checksum)
        self.settings = {**own, "dtype": "bfloat16" if self.is_low else "float32", "images": len(data)}
        self.settings |= {"pixels": pixels, "data": checksum, "workers": size}

    def take_step(self, parts: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """Update the model with the mean gradient of a batch in equal parts; returns the loss, not waiting for it."""
        given, total = self.given, torch.zeros((), device=self.device)
        for part in range(1, given.accumulate + 1):
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in next(parts))
            # Gradients add up on their worker; those of the last part set off, and come back as the workers' mean.
            if given.parallel == "ddp":
                self.parallel.require_backward_grad_sync = part == given.accumulate  # as `no_sync()` does
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_low):
                loss = cross_entropy(self.parallel(images).float(), labels) / given.accumulate
            loss.backward()
            total += loss.detach()
        if given.parallel == "naive":
            average_gradients(self.model)
        if given.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), given.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return total

    def save(self, folder: Path) -> None:
        """Write a checkpoint; all workers call this, and the first one writes."""
        random = [torch.get_rng_state()]
        if self.device.type == "cuda":
            random.append(torch.cuda.get_rng_state(self.device))
        everyones: Any = [None] * dist.get_world_size() if dist.get_rank() == 0 else None
        dist.gather_object(random, everyones)
        if dist.get_rank() == 0:
            state = {name: getattr(self, name).state_dict() for name in STATEFUL}
            buffer = io.BytesIO()
            torch.save({**state, "step": self.step, "random": everyones}, buffer)
            checkpoints.write(folder, self.step, buffer.getvalue(), self.settings)
        dist.barrier()  # all wait here for the first, not in the next step, whose time is measured

    def resume(self, folder: Path) -> None:
        """Go on from the newest whole checkpoint, if there is one: the first worker reads it, and sends it to all."""
        content: list[Any] = [None]
        if dist.get_rank() == 0:
            try:
                folder.mkdir(parents=True, exist_ok=True)  # fails now, not at the first checkpoint
                found = checkpoints.newest(folder, self.settings)
            except (OSError, checkpoints.OtherRun) as error:
                sys.exit(f"cannot resume: {error}")
            content = [found.content if found else None]
        dist.broadcast_object_list(content)
        if content[0] is None:
            return
        if self.given.parallel == "ddp":
            # After its first backward pass DDP lays out its buckets in the order in which gradients came, and so adds
            # them up in another order. An uninterrupted run has already done that.
            pixels = self.settings["pixels"]
            self.parallel(torch.zeros(1, pixels, device=self.device)).sum().backward()
            self.optimizer.zero_grad()
        state = torch.load(io.BytesIO(content[0]), map_location="cpu", weights_only=True)
        for name in STATEFUL:
            getattr(self, name).load_state_dict(state[name])
        self.step = state["step"]
        cpu, *gpu = state["random"][dist.get_rank()]
        torch.set_rng_state(cpu)
        if gpu and self.device.type == "cuda":
            torch.cuda.set_rng_state(gpu[0], self.device)
        if dist.get_rank() == 0:
            print(f"resumed after step {self.step}")


def join(here: place.Place) -> torch.device:
    """Meet the other workers; returns the device of this one."""
    device, store = torch.device(here.device), None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        if here.world_size > 1:
            sys.exit(
                "MASTER_ADDR or MASTER_PORT is not set; start this with torchrun, or with `workshop launch`"
            )
        store = dist.HashStore()  # in this process: one worker meets nobody
    own = device if device.type == "cuda" else None
    dist.init_process_group(
        here.backend, store=store, rank=here.rank or 0, world_size=here.world_size, device_id=own
    )
    return device


def main() -> None:
    given, here = options(), place.here()
    device = join(here)
    rank, size = dist.get_rank(), dist.get_world_size()
    train, test = (TensorDataset(*place.load(split).tensors()) for split in ("train", "test"))
    share = len(train) // size  # equal shares, since every step needs every worker
    steps = share // given.batch_size  # an epoch; the remainder is dropped; the next epoch shuffles again
    if steps == 0:
        sys.exit(f"batch-size is {given.batch_size}; each of {size} workers has only {share} images")
    total = steps * given.epochs
    training = Training(train, total, device, given)
    folder = place.checkpoint_folder()
    if folder:
        training.resume(folder)

    sampler = Share(train, size, rank, seed=given.seed, drop_last=True)
    draws = torch.Generator()  # what loading draws, such as augmentation
    loader = DataLoader(
        train,
        given.batch_size // given.accumulate,
        sampler=sampler,
        num_workers=given.loader_workers,
        pin_memory=device.type == "cuda",  # so that copies to the GPU need not wait
        generator=draws,  # otherwise each epoch would draw from the one that is saved
    )
    test_images, test_labels = (tensor[rank::size].to(device) for tensor in test.tensors)
    begun, samples, since, sent = training.step, 0, time.perf_counter(), 0.0
    with profile(given.profile_steps) as profiler:
        for epoch in range(training.step // steps, given.epochs):
            sampler.set_epoch(epoch)  # or every epoch would have the order of the first
            sampler.start = training.step % steps * given.batch_size
            draws.manual_seed((given.seed + epoch) * size + rank)
            batches = iter(loader)
            training.model.train()
            # By the kernel: gradients, what gloo adds to them, and checkpoints.
            with count_bytes() as counted:
                while training.step < (epoch + 1) * steps:
                    loss = training.take_step(batches)
                    profiler.step()
                    samples += given.batch_size
                    if (
                        training.step == begun + 1
                    ):  # its time is that of starting up: the clock starts after it
                        is_on = str(next(training.model.parameters()).device)
                        place.report(training.step, loss=loss.item(), epoch=epoch + 1, device=is_on)
                        samples, since = 0, time.perf_counter()
                    elif training.step % max(1, total // 20) == 0:
                        value = loss.item()  # waits for the device, so it comes before the clock is read
                        measured = {"samples_per_second": samples / (time.perf_counter() - since)}
                        if device.type == "cpu":  # what NCCL sends inside a machine passes through no socket
                            measured["bytes_sent"] = sent + counted.sent
                        place.report(training.step, loss=value, epoch=epoch + 1, **measured)
                    if folder and (training.step % given.checkpoint_steps == 0 or training.step == total):
                        if not math.isfinite(loss.item()):
                            sys.exit(
                                "the loss is not a number any more; the checkpoints from before are kept"
                            )
                        paused = time.perf_counter()
                        training.save(folder)
                        since += time.perf_counter() - paused  # saving is not training, nor is testing
                loss.item()

            paused = time.perf_counter()
            sent += counted.sent
            training.model.eval()
            with torch.no_grad():
                correct = (training.model(test_images).argmax(dim=1) == test_labels).sum()
            dist.all_reduce(correct)
            if rank == 0:
                place.report(training.step, accuracy=correct.item() / len(test), epoch=epoch + 1)
            since += time.perf_counter() - paused

    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(training.model.cpu().state_dict(), here.model_folder / "model.pt")
    # Gloo's threads may still hold `correct`, and need Python's lock to let go of it. Once all have met again they
    # are done; otherwise a rank now and then aborts as it leaves, or hangs where DDP is the group's last holder.
    dist.barrier()
    del training
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
