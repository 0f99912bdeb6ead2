"""Checks of lesson 10, when things break; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import builtins
import io
import os
import resource
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
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
def file_watched(path: Path) -> Iterator[tuple[list[bool], list[str]]]:
    """In this block, collect whether `path` existed before each rename or link, and the files opened for writing.

    This includes what `Path` and `shutil` do, since they call these functions of `os`, `io` and `builtins`.
    """
    existed: list[bool] = []
    written: list[str] = []

    def rename(*_arguments: object, **_options: object) -> object:
        existed.append(path.exists())
        return mock.DEFAULT  # go on with the wrapped function

    def open_(file: Any, mode: str | int = "r", *_arguments: object, **_options: object) -> object:
        flags = mode & (os.O_WRONLY | os.O_RDWR) if isinstance(mode, int) else set(mode) & set("wax+")
        if flags and not isinstance(file, int):
            written.append(os.path.realpath(file))
        return mock.DEFAULT

    watches: list[tuple[Any, str, Any]] = [(os, name, rename) for name in ("rename", "replace", "link")]
    watches += [(module, "open", open_) for module in (os, io, builtins)]
    with ExitStack() as patches:
        for module, name, watch in watches:
            function = getattr(module, name)
            patches.enter_context(mock.patch.object(module, name, side_effect=watch, wraps=function))
        yield existed, written


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
            with file_watched(path) as (existed, written):
                answer(path, content)
            _saved(path, content)
            if not all(existed):
                lost = "a save that breaks off there has lost the old one"
                advice = "do not remove it or move it aside, since a rename replaces it"
                raise Wrong(f"just before a rename there was no file at all: {lost}; {advice}.")
        error = None
        with full_disk(100_000):
            try:
                answer(path, new)
            except OSError as raised:
                error = raised
        if not path.exists():
            raise Wrong("the disk was full half-way, and now there is no file: the old one is lost too.")
        if path.read_bytes() != old:
            state = f"the file has {path.stat().st_size:,} bytes that are neither the old content nor the new"
            raise Wrong(f"the disk was full half-way, and now {state}: write beside it first, then rename.")
        if error is None:
            raise Wrong("the disk was full half-way, and nobody was told: let the OSError pass.")
        if os.path.realpath(path) in written:
            half = "a save that breaks off while it writes leaves half a file"
            raise Wrong(f"you open {path.name} itself for writing: {half}; rename what you wrote beside it.")
    return "whatever happens half-way, the file is the old one or the new one."


def _saved(path: Path, content: bytes) -> None:
    """Raise Wrong unless `path` holds `content`, and lies alone in its folder."""
    beside = sorted(each.name for each in path.parent.iterdir() if each != path)
    if not path.exists():
        raise Wrong(f"you have written {', '.join(beside)}, but {path.name} is not there: rename it last.")
    if beside:
        copied = "a copy is written byte by byte too, and can break off half-way"
        raise Wrong(f"after saving, {', '.join(beside)} lies beside {path.name}: *rename* it; {copied}.")
    saved = path.read_bytes()
    if saved != content:
        how = f"only the first {len(saved):,} of them" if content.startswith(saved) else "other bytes"
        raise Wrong(f"after saving {len(content):,} bytes, the file holds {how}.")
