"""Checks of lesson 10, when things break; see `workshop_utils.exercises` for how a check speaks."""

from __future__ import annotations

import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from workshop_utils.exercises import NotYet, Wrong, exercise, number
from workshop_utils.scaling import recovery

DAY = 24 * 3600.0

steps_made_twice = number(75, "steps", "it goes back from 475 to 400, the last multiple of 100")
failures_a_day = number(
    10, "failures", "1,000 workers that each fail once in 100 days fail 1,000 / 100 times a day together"
)
minutes_between_checkpoints = number(
    recovery.best_interval(60, recovery.failure_interval(100 * DAY, 1000)) / 60,
    "minutes",
    "√(2 · 60 s · 8,640 s) is 1,018 s",
)


@contextmanager
def full_disk(after_nbytes: int) -> Iterator[None]:
    """In this block, no file of this process can become longer than `after_nbytes`: writing on raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@exercise
def atomic_save(answer: Callable[[Path, bytes], object]) -> str:
    """`answer(path, content)` writes a file that is the old one or the new one whenever the writing breaks off."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        old, new = bytes(1000), b"new" * 100_000
        answer(path, old)
        if not path.exists():
            raise NotYet("your function wrote nothing: write it, then run this again.")
        for content in (new, old):
            answer(path, content)
            if path.read_bytes() != content:
                raise Wrong(f"after saving {len(content):,} bytes, the file holds something else.")
        said_nothing = True
        with full_disk(100_000):
            try:
                answer(path, new)
            except OSError:
                said_nothing = False
        if not path.exists():
            raise Wrong(
                "the disk was full half-way, and now there is no file at all: the old one is lost too."
            )
        if path.read_bytes() != old:
            raise Wrong(
                f"the disk was full half-way, and now the file has {path.stat().st_size:,} bytes that are neither the "
                "old content nor the new: write beside it first, then rename."
            )
        if said_nothing:
            raise Wrong("the disk was full half-way, and nobody was told: let the OSError pass.")
    return "whatever happens half-way, the file is the old one or the new one."
