"""Checkpoints: all of a step's state in one file, written so that a crash at any moment costs one checkpoint at most.

    newest = checkpoints.newest(folder)            # the last that is whole, or None
    checkpoints.save(folder, step, {"weights": weights, "velocity": velocity})   # arrays of NumPy
    checkpoints.write(folder, step, content)       # any bytes, such as what torch.save has written

Three things can go wrong with a file, and each has its remedy:

| what goes wrong | remedy |
| --- | --- |
| the writer dies half-way, or the disk is full | write under another name, then rename (rename(2)) |
| bytes change or get lost on the disk | a SHA-256 of all that follows in its first line, compared when it is read |
| it is of another run, with another model or batch | the run's settings in its second line, compared likewise |

Needs NumPy, and travels with every job's script. Arrays are never unpickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import re
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

KEPT = 2  # checkpoints in a folder
NAME = re.compile(r"step-(\d{8})\.checkpoint")


Settings = Mapping[str, str | int | float]


class CheckpointDamaged(ValueError):
    """A checkpoint that is not what was written; the message names the file and what is wrong with it."""


class OtherRun(ValueError):
    """A checkpoint of a run with other settings; the message names those that differ."""


@dataclass(frozen=True)
class Checkpoint:
    """What was saved: the number of steps that had been made, and the content, by a run with these settings."""

    step: int
    content: bytes
    settings: Settings
    path: Path

    @property
    def arrays(self) -> dict[str, np.ndarray]:
        """What `save` was given: arrays by name.

        Raises:
            CheckpointDamaged: if the content is something else.
        """
        try:
            with np.load(io.BytesIO(self.content), allow_pickle=False) as arrays:
                return {name: arrays[name] for name in arrays.files}
        except (ValueError, OSError, zipfile.BadZipFile, AttributeError) as error:
            raise CheckpointDamaged(f"{self.path.name} holds no arrays: {error}") from None


def save(folder: Path, step: int, arrays: Mapping[str, np.ndarray], settings: Settings | None = None) -> Path:
    """Write arrays by name as a checkpoint, as `write` does.

    Raises:
        ValueError: if an array holds Python objects.
        OSError: as `write` does.
    """
    for name, array in arrays.items():
        if array.dtype.hasobject:
            raise ValueError(f"array {name!r} holds Python objects; it must hold numbers")
    packed = io.BytesIO()
    np.savez(packed, **arrays)  # type: ignore[arg-type]  # it takes any names but allow_pickle
    return write(folder, step, packed.getvalue(), settings)


def write(folder: Path, step: int, content: bytes, settings: Settings | None = None) -> Path:
    """Write a checkpoint into `folder`, remove all but the newest KEPT, and return its path.

    When this returns, the checkpoint survives the loss of this process, and of the machine's power. One process
    alone may write into a folder. `settings` are those without which the next step would be another one.

    Raises:
        OSError: if it cannot be written; the checkpoints from before are then as they were.
    """
    header = json.dumps({"step": step, "nbytes": len(content), "settings": dict(settings or {})}).encode()
    body = header + b"\n" + content
    make_folder(folder)
    path = path_of(folder, step)
    write_atomically(path, hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    for old in paths(folder)[:-KEPT]:
        old.unlink()
    return path


def make_folder(folder: Path) -> None:
    """Make `folder`, if it is not there, so that it survives the loss of the machine's power.

    Raises:
        OSError: if it cannot be made.
    """
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        with contextlib.suppress(PermissionError):  # a folder that may be written and not read
            _sync(folder.parent)


def _sync(folder: Path) -> None:
    """Wait until the names in `folder` are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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
    _sync(path.parent)  # the name, too, is to be on the disk


def path_of(folder: Path, step: int) -> Path:
    """Where the checkpoint of `step` is, or would be."""
    return folder / f"step-{step:08d}.checkpoint"


def paths(folder: Path) -> list[Path]:
    """The checkpoints in `folder`, damaged or not, the oldest first. Half-written ones have no such name.

    Raises:
        OSError: if the folder cannot be read; one that does not exist holds none.
    """
    if not folder.exists():
        return []
    return sorted(path for path in folder.iterdir() if NAME.fullmatch(path.name))


def read(path: Path) -> Checkpoint:
    """The checkpoint in `path`.

    Raises:
        CheckpointDamaged: if it is not, byte by byte, what was written.
        OSError: if there is none, or it cannot be read.
    """
    digest, _, body = path.read_bytes().partition(b"\n")
    line, _, content = body.partition(b"\n")
    try:
        header = json.loads(line)
        step, nbytes, settings = int(header["step"]), int(header["nbytes"]), dict(header["settings"])
    except (ValueError, KeyError, TypeError):
        raise CheckpointDamaged(f"{path.name} does not begin as a checkpoint does") from None
    if len(content) != nbytes:
        raise CheckpointDamaged(f"{path.name} holds {len(content)} bytes; {nbytes} were written")
    if hashlib.sha256(body).hexdigest().encode() != digest:
        raise CheckpointDamaged(f"{path.name} does not hold what was written (SHA-256 differs)")
    if path.name != path_of(path.parent, step).name:
        raise CheckpointDamaged(f"{path.name} is the checkpoint of step {step}, under another name")
    return Checkpoint(step, content, settings, path)


def newest(folder: Path, settings: Settings | None = None) -> Checkpoint | None:
    """The newest checkpoint in `folder` that is whole; None if there is none.

    It prints a line about each damaged one. They are kept, as `*.damaged`, out of the way of those that follow.

    Raises:
        OtherRun: if `settings` are given, and the checkpoint was written with other ones.
        OSError: if a file cannot be read, which says nothing about its content.
    """
    for path in reversed(paths(folder)):
        try:
            checkpoint = read(path)
        except CheckpointDamaged as damage:
            print(f"{damage}; going back to the one before")
            path.rename(path.with_name(path.name + ".damaged"))
            continue
        if settings is not None:
            refuse_other_run(folder, checkpoint.settings, settings)
        return checkpoint
    return None


def refuse_other_run(folder: Path, written: Settings, settings: Settings) -> None:
    """Raise OtherRun if a checkpoint in `folder` was written with other settings than these."""
    names = [name for name in {**settings, **written} if written.get(name) != settings.get(name)]
    if names:
        pairs = [f"{name} is {settings.get(name)} and was {written.get(name)}" for name in names]
        differences = ", ".join(pairs)
        raise OtherRun(f"the checkpoints in {folder} are of another run: {differences}; give another folder")
