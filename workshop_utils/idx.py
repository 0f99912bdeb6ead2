"""The format of MNIST's files: labelled images as arrays of bytes. `place.load` reads them for a training script."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Examples:
    """Labelled images: `images` holds count × height × width bytes in row order, `labels` one byte each."""

    count: int
    height: int
    width: int
    images: bytes
    labels: bytes

    def arrays(self) -> tuple[Any, Any]:
        """NumPy arrays: images in [0, 1], float32 of shape (count, pixels), and labels, int64 of shape (count,)."""
        import numpy as np

        images = np.frombuffer(self.images, np.uint8).reshape(self.count, -1)
        return images.astype(np.float32) / np.float32(255), np.frombuffer(self.labels, np.uint8).astype(
            np.int64
        )

    def tensors(self) -> tuple[Any, Any]:
        """The same as PyTorch's tensors."""
        import torch

        images = torch.frombuffer(bytearray(self.images), dtype=torch.uint8).view(self.count, -1) / 255
        return images, torch.frombuffer(bytearray(self.labels), dtype=torch.uint8).long()


def load(folder: Path, split: str) -> Examples:
    """The images and labels of `split` ("train" or "test") in `folder`. Raises as `place.load` does."""
    prefix = {"train": "train", "test": "t10k"}.get(split)
    if prefix is None:
        raise ValueError(f"split is {split!r}; it must be 'train' or 'test'")
    (count, height, width), images = read(_find(folder, f"{prefix}-images-idx3-ubyte"), 3)
    (labelled,), labels = read(_find(folder, f"{prefix}-labels-idx1-ubyte"), 1)
    if count != labelled:
        raise ValueError(f"{folder} holds {count} {split} images but {labelled} labels")
    return Examples(count, height, width, images, labels)


def _find(folder: Path, name: str) -> Path:
    for candidate in (folder / name, folder / f"{name}.gz"):
        if candidate.is_file():
            return candidate
    raise FileNotFoundError(f"{name} is not in {folder.absolute()}")


def read(path: Path, expected: int | None = None) -> tuple[tuple[int, ...], bytes]:
    """Shape and contents of an idx file of unsigned bytes, the format of MNIST, plain or gzipped.

    `expected` is the number of dimensions it must have.

    Raises:
        ValueError: if the file is not idx, holds values other than bytes, has another shape, or is not as long as it
            claims.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rb") as file:
            content: bytes = file.read()
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path} is not a whole gzip file: {error}") from error
    if len(content) < 4 or content[:3] != b"\x00\x00\x08":
        raise ValueError(f"{path} is not an idx file of unsigned bytes")
    dimensions = content[3]
    start = 4 + 4 * dimensions
    if len(content) < start:
        raise ValueError(f"{path} ends inside its header")
    shape = struct.unpack(f">{dimensions}I", content[4:start])
    if len(content) - start != math.prod(shape):
        raise ValueError(
            f"{path} claims {math.prod(shape)} bytes of shape {shape} but holds {len(content) - start}"
        )
    if expected not in (None, dimensions):
        raise ValueError(f"{path} has shape {shape}; it must have {expected} dimensions")
    return shape, content[start:]
