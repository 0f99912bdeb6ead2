"""Train a small network on handwritten digits in one process: what every other job is compared with.

It trains on a GPU where there is one. The images are scikit-learn's digits, which need no download; `data: mnist` is
the real thing. With a folder for checkpoints, a run that was killed goes on where its last checkpoint was, and ends
with the weights of a run that was not: on the CPU bit by bit.
"""

import argparse
import io
import itertools
import math
import sys
import time
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Sampler, TensorDataset

from workshop_utils import place
from workshop_utils.training import checkpoints
from workshop_utils.training.profiler import profile


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=32, help="images in one step")
    parser.add_argument("--accumulate", type=int, default=1, help="forward passes that share a batch")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="at first; it falls to 0")
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--clip-norm", type=float, default=0.0, help="limit of the gradient's norm; 0: none")
    parser.add_argument("--hidden", type=int, default=128, help="units in the hidden layer")
    parser.add_argument("--dropout", type=float, default=0.0, help="fraction of these that each step drops")
    parser.add_argument("--dtype", choices=["auto", "float32", "bfloat16"], default="auto",
                        help="of matrix products; auto: bfloat16 on a GPU that has it")  # fmt: skip
    parser.add_argument("--checkpoint-steps", type=int, default=100, help="between two checkpoints")
    parser.add_argument("--profile-steps", type=int, default=0, help="steps in a trace; 0: no trace")
    parser.add_argument("--loader-workers", type=int, default=0, help="processes that load images")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in ("epochs", "batch_size", "accumulate", "hidden", "checkpoint_steps"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    for name in ("momentum", "dropout"):
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


class Shuffled(Sampler[int]):
    """Another order of the examples in every epoch, which may begin at `start`: the first ones are not loaded again."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed, self.epoch, self.start = count, seed, 0, 0

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return iter(torch.randperm(self.count, generator=generator)[self.start :].tolist())


class Training:
    """All that a step changes, and so all that a checkpoint holds. Where an epoch stands follows from `step`."""

    def __init__(
        self, data: TensorDataset, total: int, device: torch.device, given: argparse.Namespace
    ) -> None:
        pixels = data.tensors[0].shape[1]
        torch.manual_seed(given.seed)
        hidden, dropout = given.hidden, nn.Dropout(given.dropout)
        layers = (nn.Linear(pixels, hidden), nn.ReLU(), dropout, nn.Linear(hidden, 10))
        self.model = nn.Sequential(*layers).to(device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), given.learning_rate, given.momentum)
        # From the whole rate down to 0, as half a cosine (Loshchilov and Hutter 2017, equation 5).
        rate = lambda step: 0.5 * (1 + math.cos(math.pi * step / total))  # noqa: E731
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, rate)
        self.device, self.given, self.step = device, given, 0
        has_bfloat16 = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        self.is_low = given.dtype == "bfloat16" or (given.dtype == "auto" and has_bfloat16)
        # A checkpoint belongs to another run if its next step would differ.
        technical = ("checkpoint_steps", "profile_steps", "loader_workers")
        own = {name.replace("_", "-"): value for name, value in vars(given).items() if name not in technical}
        checksum = 0
        for tensor in data.tensors:
            checksum = zlib.crc32(tensor.numpy().tobytes(), checksum)
        self.settings = {**own, "dtype": "bfloat16" if self.is_low else "float32", "images": len(data)}
        self.settings |= {"pixels": pixels, "data": checksum}

    def take_step(self, parts: Iterable[tuple[Tensor, Tensor]]) -> Tensor:
        """Update the model with the mean gradient of a batch in equal parts; returns the loss, not waiting for it."""
        total = torch.zeros((), device=self.device)
        for images, labels in parts:
            images = images.to(self.device, non_blocking=True)
            labels = labels.to(self.device, non_blocking=True)
            with torch.autocast(self.device.type, torch.bfloat16, enabled=self.is_low):
                loss = cross_entropy(self.model(images), labels) / self.given.accumulate
            loss.backward()  # adds to the gradients
            total += loss.detach()
        if self.given.clip_norm:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.given.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        return total

    def save(self, folder: Path) -> None:
        """Write a checkpoint."""
        state = {name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")}
        state["random"] = torch.get_rng_state()
        if self.device.type == "cuda":
            state["random-cuda"] = torch.cuda.get_rng_state(self.device)
        buffer = io.BytesIO()
        torch.save(state, buffer)
        checkpoints.write(folder, self.step, buffer.getvalue(), self.settings)

    def resume(self, folder: Path) -> None:
        """Go on from the newest whole checkpoint, if there is one."""
        try:
            checkpoints.make_folder(folder)  # fails now, not at the first checkpoint
            found = checkpoints.newest(folder, self.settings)
        except (OSError, checkpoints.OtherRun) as error:
            sys.exit(f"cannot resume: {error}")
        if found is None:
            return
        state = torch.load(io.BytesIO(found.content), map_location="cpu", weights_only=True)
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(state[name])
        torch.set_rng_state(state["random"])
        if self.device.type == "cuda" and "random-cuda" in state:
            torch.cuda.set_rng_state(state["random-cuda"], self.device)
        self.step = found.step
        print(f"resumed after step {self.step}")


def main() -> None:
    given = options()
    here = place.here()
    device = torch.device(here.device)
    train, test = (TensorDataset(*place.load(split).tensors()) for split in ("train", "test"))
    # Of an epoch. The remainder is dropped; the next epoch shuffles again.
    steps = len(train) // given.batch_size
    if steps == 0:
        sys.exit(f"batch-size is {given.batch_size}; there are only {len(train)} images to train on")
    total = steps * given.epochs
    training = Training(train, total, device, given)
    folder = place.checkpoint_folder()
    if folder:
        training.resume(folder)

    sampler = Shuffled(len(train), given.seed)
    draws = torch.Generator()  # what loading draws, such as augmentation
    loader = DataLoader(
        train,
        given.batch_size // given.accumulate,
        sampler=sampler,
        num_workers=given.loader_workers,
        pin_memory=device.type == "cuda",  # so that copies to the GPU need not wait
        generator=draws,  # otherwise each epoch would draw from the one that is saved
    )
    test_images, test_labels = (tensor.to(device) for tensor in test.tensors)
    begun, samples, since = training.step, 0, time.perf_counter()
    with profile(given.profile_steps) as profiler:
        for epoch in range(training.step // steps, given.epochs):
            sampler.epoch, sampler.start = epoch, training.step % steps * given.batch_size
            draws.manual_seed(given.seed + epoch)
            batches = iter(loader)
            training.model.train()
            while training.step < (epoch + 1) * steps:
                loss = training.take_step(itertools.islice(batches, given.accumulate))
                profiler.step()
                samples += given.batch_size
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
                    paused = time.perf_counter()
                    training.save(folder)
                    since += time.perf_counter() - paused  # saving is not training, nor is testing

            loss.item()
            paused = time.perf_counter()
            training.model.eval()
            with torch.no_grad():
                correct = (training.model(test_images).argmax(dim=1) == test_labels).sum().item()
            place.report(training.step, accuracy=correct / len(test), epoch=epoch + 1)
            since += time.perf_counter() - paused

    here.model_folder.mkdir(parents=True, exist_ok=True)
    torch.save(training.model.state_dict(), here.model_folder / "model.pt")


if __name__ == "__main__":
    main()
