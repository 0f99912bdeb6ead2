"""Checkpoints: all of a step's state in one file, written so that a crash at any moment costs one checkpoint at most.

    newest = checkpoints.newest(folder)            # the last that is whole, or None
    checkpoints.save(folder, step, {"weights": weights, "velocity": velocity})

Two things can go wrong with a file, and each has its remedy:

| what goes wrong | remedy |
| --- | --- |
| the writer dies half-way, or the disk is full | write under another name, then rename (rename(2)) |
| bytes change or get lost on the disk | a SHA-256 of the content in its first line, compared when it is read |

Needs NumPy, and travels with every job's script. Nothing in a checkpoint is ever unpickled.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KEPT = 2  # checkpoints in a folder
NAME = re.compile(r"step-(\d{8})\.checkpoint")


class CheckpointDamaged(ValueError):
    """A checkpoint that is not what was written; the message names the file and what is wrong with it."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: the number of steps that had been made, and arrays by name."""

    step: int
    arrays: dict[str, np.ndarray]


def save(folder: Path, step: int, arrays: Mapping[str, np.ndarray]) -> Path:
    """Write a checkpoint into `folder`, remove all but the newest KEPT, and return its path.

    When this returns, the checkpoint survives the loss of this process, and of the machine's power. One process
    alone may save into a folder.

    Raises:
        ValueError: if an array holds Python objects.
        OSError: if it cannot be written; the checkpoints from before are then as they were.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ValueError(f"array {name!r} holds Python objects; it must hold numbers")
    packed = io.BytesIO()
    np.savez(packed, **arrays)  # type: ignore[arg-type]  # it takes any names but allow_pickle
    content = packed.getvalue()
    header = {"step": step, "nbytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.checkpoint"
    write_atomically(path, json.dumps(header).encode() + b"\n" + content)
    for old in paths(folder)[:-KEPT]:
        old.unlink()
    return path


def write_atomically(path: Path, content: bytes) -> None:
    """Give `path` this content such that, whenever this process dies, the file is the old one or the new one, whole.

    Raises:
        OSError: if it cannot be written; the file is then as it was.
    """
    part = path.with_name(path.name + ".part")  # beside it, since a rename cannot cross file systems
    try:
        with part.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the new name on an empty file
        part.replace(path)
    except OSError:
        part.unlink(missing_ok=True)
        raise
    descriptor = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)  # the name, too, is to be on the disk
    finally:
        os.close(descriptor)


def paths(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, damaged or not, the oldest first. Half-written ones have no such name."""
    return sorted(path for path in folder.glob("step-*") if NAME.fullmatch(path.name))


def read(path: Path) -> Checkpoint:
    """The checkpoint in `path`.

    Raises:
        CheckpointDamaged: if it is not, byte by byte, what `save` wrote.
        FileNotFoundError: if there is none.
    """
    line, _, content = path.read_bytes().partition(b"\n")
    try:
        header = json.loads(line)
        step, nbytes, sha256 = int(header["step"]), int(header["nbytes"]), str(header["sha256"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointDamaged(f"{path.name} does not begin as a checkpoint does") from None
    if len(content) != nbytes:
        raise CheckpointDamaged(f"{path.name} holds {len(content)} bytes; {nbytes} were written")
    if hashlib.sha256(content).hexdigest() != sha256:
        raise CheckpointDamaged(f"{path.name} has another content than was written (SHA-256 differs)")
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
            return Checkpoint(step, {name: arrays[name] for name in arrays.files})
    except (ValueError, OSError, zipfile.BadZipFile) as error:  # a right sum of something that is no archive
        raise CheckpointDamaged(f"{path.name} holds no arrays: {error}") from None


def newest(folder: Path, say: Callable[[str], None] = print) -> Checkpoint | None:
    """The newest checkpoint in `folder` that is whole; None if there is none. `say` is told of damaged ones."""
    for path in reversed(paths(folder)):
        try:
            return read(path)
        except CheckpointDamaged as damage:
            say(f"{damage}; going back to the one before")
    return None
