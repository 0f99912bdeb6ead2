"""Train a small network on handwritten digits with FSDP2: parameters, gradients and moments are split among workers.

`fully_shard` gathers a layer's parameters just before they are needed, and lets them go afterwards. The master weights
are float32; in bfloat16 they travel and layers compute, while gradients are summed in float32. Each worker has a GPU,
and NCCL joins them; where there are none, they are on CPUs, and gloo joins them. The images are scikit-learn's digits,
which need no download; `data: mnist` is the real thing.

Checkpoints are those of `torch.distributed.checkpoint`: each worker writes its own part, while training goes on. With a
folder that all machines share, a run that was killed goes on where its last checkpoint was. Any number of workers may
go on, since the batch is that of all together: as many as before end with the weights of a run that was not killed (on
CPUs bit by bit), others with the same weights up to rounding, unless units are dropped, which each worker draws.
PyTorch reads these checkpoints by pickle: use a folder that only you can write to.
"""

import argparse
import itertools
import json
import math
import os
import re
import shutil
import sys
import time
import zlib
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from workshop_utils import place
from workshop_utils.training import checkpoints

KEPT = 2  # checkpoints in the folder, beside the one that is being written


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes that share a batch")
    parser.add_argument("--learning-rate", type=float, default=0.005, help="of AdamW")
    parser.add_argument("--warmup", type=float, default=0.05, help="part of all steps in which it rises")
    parser.add_argument("--clip-norm", type=float, default=0.0, help="limit of the gradient's norm; 0: none")
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--dropout", type=float, default=0.0, help="fraction of these that each step drops")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
                        help="of messages and computation; auto: bfloat16 on a GPU that has it")  # fmt: skip
    parser.add_argument("--checkpoint-steps", type=int, default=100, help="between two checkpoints")
    parser.add_argument("--profile-steps", type=int, default=0, help="steps in a trace; 0: no trace")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in ("epochs", "batch_size", "accumulate", "hidden", "checkpoint_steps"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    for name in ("warmup", "dropout"):
        if not 0 <= getattr(given, name) < 1:
            parser.error(f"{name} is {getattr(given, name)}; it must be at least 0 and less than 1")
    if not 0 < given.learning_rate < math.inf or not 0 <= given.clip_norm < math.inf:
        rates = f"learning-rate is {given.learning_rate} and clip-norm {given.clip_norm}"
        parser.error(f"{rates}; the first must be more than 0, the second at least 0")
    return given


class Share(DistributedSampler):
    """A worker's share of each epoch, which may begin at `start`: what came before a restart is not loaded again.

    Worker r of N takes every N-th image from the r-th on. So a step's batch is the same images for any N.
    """

    start = 0

    def __iter__(self) -> Iterator[int]:
        return itertools.islice(super().__iter__(), self.start, None)


class Training:
    """All that a step changes, and so all that a checkpoint holds. Where an epoch stands follows from `step`."""

    def __init__(
        self, data: TensorDataset, total: int, device: torch.device, given: argparse.Namespace
    ) -> None:
        pixels = data.tensors[0].shape[1]
        torch.manual_seed(given.seed)
        has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.is_low = given.dtype == "bfloat16" or (given.dtype == "auto" and has_bfloat16)
        policy = MixedPrecisionPolicy(torch.bfloat16 if self.is_low else None, reduce_dtype=torch.float32)
        sharding: dict[str, Any] = {
            "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
            "mp_policy": policy,
        }
        hidden, dropout = given.hidden, nn.Dropout(given.dropout)
        layers = (nn.Linear(pixels, hidden), nn.ReLU(), dropout, nn.Linear(hidden, 10))
        self.model: Any = nn.Sequential(*layers).to(device)
        for layer in (layers[0], layers[3]):  # gathered, and let go of, one by one
            fully_shard(layer, **sharding)
        fully_shard(self.model, **sharding)
        torch.manual_seed(given.seed + dist.get_rank())  # from here on each worker drops other units
        self.optimizer = torch.optim.AdamW(self.model.parameters(), given.learning_rate)

        def rate(step: int) -> float:
            # Up in a straight line, then down to 0 as half a cosine (Loshchilov and Hutter 2017, equation 5).
            rises = min(1.0, (step + 1) / max(1.0, given.warmup * total))
            return rises * 0.5 * (1 + math.cos(math.pi * step / total))

        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.device, self.given, self.step = device, given, 0
        # A checkpoint belongs to another run if its next step would differ.
        technical = ("checkpoint_steps", "profile_steps", "loader_workers")
        own = {name.replace("_", "-"): value for name, value in vars(given).items() if name not in technical}
        images, labels = data.tensors
        self.settings = {**own, "dtype": "bfloat16" if self.is_low else "float32", "images": len(images)}
        self.settings |= {"pixels": pixels, "labels": zlib.crc32(labels.numpy().tobytes())}
        # Checkpoints are agreed upon in a thread of their own, so in a group of their own.
        self.group = dist.new_group(backend="gloo")
        self.saving: Any = None  # what writes a checkpoint meanwhile, to `path`
        self.path = Path()

    def take_step(self, parts: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
        """Update the model with the mean gradient of a batch in equal parts; returns the loss, not waiting for it."""
        total = torch.zeros((), device=self.device)
        for part in range(1, self.given.accumulate + 1):
            images, labels = (tensor.to(self.device, non_blocking=True) for tensor in next(parts))
            # Gradients add up on their worker; with the last part each worker gets the mean of those that it owns.
            self.model.set_requires_gradient_sync(part == self.given.accumulate)
            loss = cross_entropy(self.model(images).float(), labels) / self.given.accumulate
            loss.backward()
            total += loss.detach()
        if self.given.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.given.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return total

    def state(self) -> dict[str, Any]:
        """What all workers write, each its own part. The random state is each worker's own, under a name of its own."""
        model, optimizer = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optimizer": optimizer, "scheduler": self.scheduler.state_dict()}
        state[f"random-{dist.get_rank()}"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state[f"random-cuda-{dist.get_rank()}"] = torch.cuda.get_rng_state(self.device)
        return state

    def save(self, folder: Path) -> None:
        """Begin to write a checkpoint, once the one before is written. All workers call this."""
        self.finish(folder)
        self.path = folder / f"step-{self.step:08d}"
        if dist.get_rank() == 0:
            shutil.rmtree(self.path, ignore_errors=True)  # of a run that did not come to its end
            self.path.mkdir()
            header = {"settings": self.settings, "workers": dist.get_world_size()}
            checkpoints.write_atomically(self.path / "run.json", json.dumps(header).encode())
        dist.barrier()
        # It copies what is to be written, then returns, and fsyncs its files. It has no sums of them: see `seal`.
        self.saving = dcp.async_save(self.state(), checkpoint_id=self.path, process_group=self.group)

    def seal(self, folder: Path) -> None:
        """If a checkpoint is written by now, keep the sums of this worker's files beside them, and remove old ones."""
        if self.saving is None or not self.saving.done():
            return
        self.saving.result()
        self.saving, rank = None, dist.get_rank()
        files = [*self.path.glob(f"__{rank}_*"), *([self.path / ".metadata"] if rank == 0 else [])]
        sums = {file.name: sha256(file.read_bytes()).hexdigest() for file in files}
        checkpoints.write_atomically(self.path / f"sums-{rank}.json", json.dumps(sums).encode())
        if rank == 0:
            whole = [path for path in saved(folder) if not damage(path)]
            for old in whole[:-KEPT]:
                shutil.rmtree(old)

    def finish(self, folder: Path) -> None:
        """Wait until the checkpoint is written."""
        if self.saving is not None:
            self.saving.result()
            self.seal(folder)

    def resume(self, folder: Path) -> None:
        """Go on from the newest whole checkpoint, if there is one: the first worker finds it, and all read it."""
        try:
            found = self.newest(folder) if dist.get_rank() == 0 else 0
        except (OSError, checkpoints.OtherRun) as error:
            sys.exit(f"cannot resume: {error}")
        step = torch.tensor(found, device=self.device)
        dist.broadcast(step, src=0)
        if not step:
            return
        self.step, path = int(step), folder / f"step-{int(step):08d}"
        state = self.state()
        names = (
            dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        )  # a pickle, as its other values
        own = [name for name in state if name.startswith("random")]
        for name in own:
            if name not in names:  # more workers than wrote it: the new ones keep the state of their seed
                del state[name]
        dcp.load(state, checkpoint_id=path, process_group=self.group)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.scheduler.load_state_dict(state["scheduler"])
        for name in own:
            if name in state:
                cuda = name.startswith("random-cuda")
                torch.cuda.set_rng_state(state[name], self.device) if cuda else torch.set_rng_state(
                    state[name]
                )
        if dist.get_rank() == 0:
            print(f"resumed after step {self.step}")

    def newest(self, folder: Path) -> int:
        """The step of the newest whole checkpoint in `folder`; 0 if there is none."""
        checkpoints.make_folder(folder)  # fails now, not at the first checkpoint
        for path in reversed(saved(folder)):
            if reason := damage(path):
                print(f"{path.name} {reason}; going back to the one before")
                continue
            header = json.loads((path / "run.json").read_text(encoding="utf-8"))
            checkpoints.refuse_other_run(folder, header["settings"], self.settings)
            return int(path.name[-8:])
        return 0


def saved(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, whole or not, the oldest first."""
    return sorted(path for path in folder.iterdir() if re.fullmatch(r"step-\d{8}", path.name))


def damage(path: Path) -> str:
    """Why the checkpoint in `path` is not what was written; "" if it is."""
    try:
        workers = json.loads((path / "run.json").read_text(encoding="utf-8"))["workers"]
        parts = [
            json.loads((path / f"sums-{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)
        ]
    except FileNotFoundError:
        return "was not written to its end"
    for name, written in itertools.chain.from_iterable(sums.items() for sums in parts):
        if not (path / name).is_file() or sha256((path / name).read_bytes()).hexdigest() != written:
            return f"is damaged: {name} is not as it was written"
    return ""


def main() -> None:
    given = options()
    here = place.here()
    if "MASTER_ADDR" not in os.environ:
        sys.exit("MASTER_ADDR is not set; start this script with torchrun, or with `workshop launch`")
    device = torch.device(here.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    own = device if device.type == "cuda" else None
    dist.init_process_group(here.backend, rank=here.rank or 0, world_size=here.world_size, device_id=own)
    rank, size = dist.get_rank(), dist.get_world_size()
    train, test = (TensorDataset(*place.load(split).tensors()) for split in ("train", "test"))
    steps = (
        len(train) // given.batch_size
    )  # an epoch; the remainder is dropped; the next epoch shuffles again
    if steps == 0:
        sys.exit(f"batch-size is {given.batch_size}; there are only {len(train)} images to train on")
    part = given.batch_size // size // given.accumulate  # images of one worker in one forward pass
    if part * size * given.accumulate != given.batch_size:
        sys.exit(
            f"batch-size is {given.batch_size}; it must be a multiple of the number of workers, {size}, times "
            f"accumulate, {given.accumulate}"
        )
    training = Training(train, steps * given.epochs, device, given)
    folder = place.checkpoint_folder()
    if folder:
        training.resume(folder)

    sampler = Share(train, size, rank, seed=given.seed, drop_last=True)
    loader = DataLoader(
        train,
        part,
        sampler=sampler,
        num_workers=given.loader_workers,
        pin_memory=device.type == "cuda",  # so that copies to the GPU need not wait
        generator=torch.Generator(),  # of its own: otherwise each epoch would draw from the one that is saved
    )
    test_images, test_labels = (tensor[rank::size].to(device) for tensor in test.tensors)
    begun, samples, since = training.step, 0, time.perf_counter()
    with place.profile(given.profile_steps) as profiler:
        for epoch in range(training.step // steps, given.epochs):
            sampler.set_epoch(epoch)  # or every epoch would have the order of the first
            sampler.start = training.step % steps * (given.batch_size // size)
            batches = iter(loader)
            training.model.train()
            while training.step < (epoch + 1) * steps:
                loss = training.take_step(batches)
                if folder:
                    training.seal(folder)
                profiler.step()
                samples += given.batch_size // size
                if (
                    training.step == begun + 1
                ):  # its time is that of starting up, so the clock starts after it
                    is_on = str(next(training.model.parameters()).device)
                    place.report(training.step, loss=loss.item(), epoch=epoch + 1, device=is_on)
                    samples, since = 0, time.perf_counter()
                elif training.step % max(1, steps * given.epochs // 20) == 0:
                    value = loss.item()  # waits for the device, so it comes before the clock is read
                    speed = samples / (time.perf_counter() - since)
                    place.report(training.step, loss=value, samples_per_second=speed, epoch=epoch + 1)
                if folder and (
                    training.step % given.checkpoint_steps == 0 or training.step == steps * given.epochs
                ):
                    training.save(folder)  # counts as training, since that goes on meanwhile

            loss.item()
            paused = time.perf_counter()
            training.model.eval()
            with torch.no_grad():
                correct = (training.model(test_images).argmax(dim=1) == test_labels).sum()
            dist.all_reduce(correct)
            if rank == 0:
                place.report(training.step, accuracy=correct.item() / len(test), epoch=epoch + 1)
            since += time.perf_counter() - paused  # testing is not training
    if folder:
        training.finish(folder)

    whole_model = get_model_state_dict(
        training.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True)
    )
    if rank == 0:
        here.model_folder.mkdir(parents=True, exist_ok=True)
        torch.save(whole_model, here.model_folder / "model.pt")
    dist.barrier()  # all have met again, so gloo's threads hold no tensor any more: see mnist_torch_ddp
    del training
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
