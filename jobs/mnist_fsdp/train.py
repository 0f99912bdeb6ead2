"""Train a small network on handwritten digits with FSDP2: parameters, gradients and moments are split among workers.

`fully_shard` gathers a layer's parameters just before they are needed, and frees them afterwards. The master weights
are float32; in bfloat16 they travel and layers compute, while gradients are summed in float32. Each worker has a GPU,
and NCCL joins them; where there are none, they are on CPUs, and gloo joins them. The images are scikit-learn's digits,
which need no download; `data: mnist` is the real thing. With `--accumulate`, each worker holds whole gradients until
the last part of a batch.

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
from concurrent.futures import Future, ThreadPoolExecutor
from hashlib import file_digest
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
from workshop_utils.training.profiler import profile

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
    """A worker's share of each epoch, which can start at index `start`: a resumed epoch skips what was used.

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
        checksum = 0
        for tensor in data.tensors:
            checksum = zlib.crc32(tensor.numpy().tobytes(), checksum)
        self.settings = {**own, "dtype": "bfloat16" if self.is_low else "float32", "images": len(data)}
        self.settings |= {"pixels": pixels, "data": checksum}
        # The workers agree on a checkpoint in a thread of their own, and so in a group of their own.
        self.group = dist.new_group(backend="gloo")
        self.saving: Future[None] | None = None  # the checkpoint that is being written
        self.thread = ThreadPoolExecutor(1)

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
        self.finish()
        path, rank = folder / f"step-{self.step:08d}", dist.get_rank()
        if rank == 0:
            for old in [old for old in saved(folder) if is_written(old)][:-KEPT]:
                shutil.rmtree(old)
            shutil.rmtree(path, ignore_errors=True)  # of a run that did not come to its end
            path.mkdir()
            header = {"settings": self.settings, "workers": dist.get_world_size()}
            checkpoints.write_atomically(path / "run.json", json.dumps(header).encode())
        dist.barrier()
        if not (path / "run.json").is_file():
            sys.exit(f"{path} is not there; every machine needs the folder that the first worker writes to")
        # It copies what is to be written, and returns. Files are fsynced, without checksums: so `keep_sums` follows.
        writing: Any = dcp.async_save(self.state(), checkpoint_id=path, process_group=self.group)
        self.saving = self.thread.submit(keep_sums, writing, path, rank)

    def finish(self) -> None:
        """Wait until the checkpoint is written."""
        if self.saving is not None:
            self.saving.result()
            self.saving = None

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
        if not path.is_dir():
            sys.exit(
                f"cannot resume: {path} is not there; every machine needs the folder of the first worker"
            )
        state = self.state()
        names = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        own = [name for name in state if name.startswith("random")]
        for name in own:
            if name not in names:  # more workers than wrote it: the new ones keep the state of their seed
                del state[name]
        dcp.load(state, checkpoint_id=path, process_group=self.group)
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.scheduler.load_state_dict(state["scheduler"])
        for name in state.keys() & set(own):
            if name.startswith("random-cuda"):
                torch.cuda.set_rng_state(state[name], self.device)
            else:
                torch.set_rng_state(state[name])
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


def is_written(path: Path) -> bool:
    """Whether all workers have come to the end of the checkpoint in `path`."""
    try:
        workers = json.loads((path / "run.json").read_text(encoding="utf-8"))["workers"]
    except (OSError, ValueError, KeyError):  # the first worker has not come far, or the file is damaged
        return False
    return len(list(path.glob("sums-*.json"))) == workers


def keep_sums(writing: Any, path: Path, rank: int) -> None:
    """Once the checkpoint is written, keep the SHA-256 of this worker's files beside them: in a thread of its own."""
    writing.result()
    shared = [path / ".metadata", path / "run.json"] if rank == 0 else []
    sums = {file.name: sum_of(file) for file in [*path.glob(f"__{rank}_*"), *shared]}
    checkpoints.write_atomically(path / f"sums-{rank}.json", json.dumps(sums).encode())


def sum_of(file: Path) -> str:
    with file.open("rb") as content:
        return file_digest(content, "sha256").hexdigest()


def damage(path: Path) -> str:
    """Why the checkpoint in `path` is not what was written; "" if it is."""
    try:
        if not is_written(path):
            return "was not written to its end"
        for sums in path.glob("sums-*.json"):
            for name, written in json.loads(sums.read_text(encoding="utf-8")).items():
                if sum_of(path / name) != written:
                    return f"is damaged: {name} is not as it was written"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"is damaged ({error!r})"
    return ""


def main() -> None:
    given = options()
    here = place.here()
    if not {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        sys.exit("MASTER_ADDR or MASTER_PORT is not set; start this with torchrun, or with `workshop launch`")
    device = torch.device(here.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    own = device if device.type == "cuda" else None
    dist.init_process_group(here.backend, rank=here.rank or 0, world_size=here.world_size, device_id=own)
    rank, size = dist.get_rank(), dist.get_world_size()
    train, test = (TensorDataset(*place.load(split).tensors()) for split in ("train", "test"))
    # Of an epoch. The remainder is dropped; the next epoch shuffles again.
    steps = len(train) // given.batch_size
    if steps == 0:
        sys.exit(f"batch-size is {given.batch_size}; there are only {len(train)} images to train on")
    part = given.batch_size // size // given.accumulate  # images of one worker in one forward pass
    if part * size * given.accumulate != given.batch_size:
        sys.exit(
            f"batch-size is {given.batch_size}; it must be a multiple of the number of workers, {size}, times "
            f"accumulate, {given.accumulate}"
        )
    total = steps * given.epochs
    training = Training(train, total, device, given)
    folder = place.checkpoint_folder()
    if folder:
        training.resume(folder)

    sampler = Share(train, size, rank, seed=given.seed, drop_last=True)
    draws = torch.Generator()  # what loading draws, such as augmentation
    loader = DataLoader(
        train,
        part,
        sampler=sampler,
        num_workers=given.loader_workers,
        pin_memory=device.type == "cuda",  # so that copies to the GPU need not wait
        generator=draws,  # otherwise each epoch would draw from the one that is saved
    )
    test_images, test_labels = (tensor[rank::size].to(device) for tensor in test.tensors)
    begun, samples, since = training.step, 0, time.perf_counter()
    with profile(given.profile_steps) as profiler:
        for epoch in range(training.step // steps, given.epochs):
            sampler.set_epoch(epoch)  # or every epoch would have the order of the first
            sampler.start = training.step % steps * (given.batch_size // size)
            draws.manual_seed((given.seed + epoch) * size + rank)
            batches = iter(loader)
            training.model.train()
            while training.step < (epoch + 1) * steps:
                loss = training.take_step(batches)
                profiler.step()
                samples += given.batch_size // size
                if training.step == begun + 1:  # which is the time of starting up: the clock starts after it
                    is_on = str(next(training.model.parameters()).device)
                    place.report(training.step, loss=loss.item(), epoch=epoch + 1, device=is_on)
                    samples, since = 0, time.perf_counter()
                elif training.step % max(1, total // 20) == 0:
                    value = loss.item()  # waits for the device, so it comes before the clock is read
                    speed = samples / (time.perf_counter() - since)
                    place.report(training.step, loss=value, samples_per_second=speed, epoch=epoch + 1)
                if folder and (training.step % given.checkpoint_steps == 0 or training.step == total):
                    if not math.isfinite(loss.item()):
                        sys.exit("the loss is not a number any more; the checkpoints from before are kept")
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
    training.finish()

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
