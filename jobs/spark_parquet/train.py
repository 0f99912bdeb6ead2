"""Train with DistributedDataParallel from Parquet files that Spark has written: each rank reads its own row groups.

A row group is what Parquet reads as a whole. So the ranks share row groups, not rows: `RowGroups` gives each its part,
in an order that changes with the epoch, and passes rows through a buffer from which they are drawn at random. All
ranks take as many steps as the one with the fewest rows can, since every step needs every rank.
"""

import argparse
import random
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pyarrow.parquet
import torch
import torch.distributed as dist

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from workshop_utils import place

Row = tuple[bytes, int]  # an image's pixels, and its label


class RowGroups:
    """The row groups of a folder of Parquet files that belong to one of `count` readers. `rows` is how many they hold.

    Raises:
        SystemExit: if there are fewer row groups than readers; the message says what to do.
    """

    def __init__(self, folder: Path, index: int, count: int) -> None:
        files = sorted(folder.glob("*.parquet"))
        found = [
            (file, group, metadata.row_group(group).num_rows)
            for file in files
            for metadata in [pyarrow.parquet.read_metadata(file)]
            for group in range(metadata.num_row_groups)
        ]
        if len(found) < count:
            sys.exit(
                f"parquet is {str(folder)!r}, with {len(found)} row groups; each of {count} workers needs one: "
                "write more files, or use fewer workers"
            )
        self._own: Sequence[tuple[Path, int, int]] = found[index::count]
        self.rows = sum(rows for *_, rows in self._own)

    def read(self, epoch: int, buffered: int) -> Iterator[Row]:
        """Every row once, shuffled: row groups as a whole, then rows among `buffered` of them."""
        generator = random.Random(epoch)
        buffer: list[Row] = []
        for file, group, _ in generator.sample(self._own, len(self._own)):
            table = pyarrow.parquet.ParquetFile(file).read_row_group(group, columns=["pixels", "label"])
            for row in zip(table["pixels"].to_pylist(), table["label"].to_pylist(), strict=True):
                buffer.append(row)
                if len(buffer) > buffered:
                    yield buffer.pop(generator.randrange(len(buffer)))
        generator.shuffle(buffer)
        yield from buffer


def batch_of(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Images in [0, 1], shape (count, pixels), and labels, shape (count,)."""
    joined = bytearray(b"".join(pixels for pixels, _ in rows))
    images = torch.frombuffer(joined, dtype=torch.uint8).view(len(rows), -1) / 255
    return images, torch.tensor([label for _, label in rows])


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "--parquet", type=Path, required=True, help="the folder that spark_prepare has written"
    )
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=32, help="rows a worker takes in one step")
    parser.add_argument("--buffered", type=int, default=256, help="rows among which the next one is drawn")
    parser.add_argument("--learning-rate", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def main() -> None:
    given = options()
    place.here()
    torch.set_num_threads(1)
    torch.manual_seed(given.seed)
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    groups = RowGroups(given.parquet, rank, size)
    fewest = torch.tensor([groups.rows // given.batch_size])
    dist.all_reduce(fewest, dist.ReduceOp.MIN)
    steps = int(fewest)
    if steps == 0:
        sys.exit(f"batch-size is {given.batch_size}; a worker has only {groups.rows} rows")
    examples = place.load("test")
    test_images, test_labels = batch_of(
        [
            (
                examples.images[i * (size_ := examples.height * examples.width) : (i + 1) * size_],
                examples.labels[i],
            )
            for i in range(examples.count)
        ]
    )
    module = nn.Sequential(nn.Linear(test_images.shape[1], 64), nn.ReLU(), nn.Linear(64, 10))
    model = DistributedDataParallel(module)
    optimizer = torch.optim.SGD(model.parameters(), given.learning_rate, momentum=0.9)
    for epoch in range(1, given.epochs + 1):
        rows = groups.read(epoch, given.buffered)
        for _ in range(steps):
            images, labels = batch_of([next(rows) for _ in range(given.batch_size)])
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        with torch.no_grad():
            accuracy = (module(test_images).argmax(dim=1) == test_labels).float().mean().item()
        values = {"loss": loss.item(), "accuracy": accuracy, "rows": float(groups.rows)}
        place.report(step=epoch * steps, epoch=epoch, **values)
    # Who holds the group must let go of it first, and all must have met: see mnist_torch_ddp.
    dist.barrier()
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
