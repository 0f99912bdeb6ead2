"""Checks of lesson 10, when things break; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

from workshop_utils.lessons.checks import NotYet, Wrong, exercise, questions

__getattr__ = questions(__name__)


@contextmanager
def full_disk(after_nbytes: int) -> Iterator[None]:
    """In this block, no file of this process can grow beyond `after_nbytes`: writing more raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@contextmanager
def renames_watched(path: Path) -> Iterator[list[bool]]:
    """In this block, collect for each rename whether the file `path` existed just before it.

    This includes renames by `Path` and `shutil`, which call `os.rename` and `os.replace`.
    """
    existed: list[bool] = []

    def look(*_arguments: object, **_options: object) -> object:
        existed.append(path.exists())
        return mock.DEFAULT  # go on with the wrapped function

    watched = partial(mock.patch.object, os, side_effect=look)
    with watched("rename", wraps=os.rename), watched("replace", wraps=os.replace):
        yield existed


@exercise
def atomic_save(answer: Callable[[Path, bytes], object]) -> str:
    """`answer(path, content)` writes a file that is the old one or the new one whenever the writing breaks off."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        old, new = bytes(1000), b"new" * 100_000
        answer(path, old)
        if not any(Path(folder).iterdir()):
            raise NotYet("your function wrote nothing: write it, then run this again.")
        _saved(path, old)
        for content in (new, old):
            with renames_watched(path) as existed:
                answer(path, content)
            _saved(path, content)
            if not all(existed):
                raise Wrong("just before a rename there was no file at all; the rename alone replaces it.")
        error = None
        with full_disk(100_000):
            try:
                answer(path, new)
            except OSError as raised:
                error = raised
        if not path.exists():
            raise Wrong("the disk was full half-way, and now there is no file: the old one is lost too.")
        if path.read_bytes() != old:
            raise Wrong("with a full disk the file is neither old nor new: write beside it, then rename.")
        if error is None:
            raise Wrong("the disk was full half-way, and nobody was told: let the OSError pass.")
    return "whatever happens half-way, the file is the old one or the new one."


def _saved(path: Path, content: bytes) -> None:
    """Raise Wrong unless `path` holds `content`, and lies alone in its folder."""
    beside = ", ".join(sorted(each.name for each in path.parent.iterdir() if each != path))
    if not path.exists():
        raise Wrong(f"you have written {beside}, but {path.name} is not there: rename it last.")
    if beside:
        raise Wrong(f"after saving, {beside} lies beside {path.name}: *rename* it; a copy can break off too.")
    saved = path.read_bytes()
    if saved != content:
        how = f"only the first {len(saved):,} of them" if content.startswith(saved) else "other bytes"
        raise Wrong(f"after saving {len(content):,} bytes, the file holds {how}.")
