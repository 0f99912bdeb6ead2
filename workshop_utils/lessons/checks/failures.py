"""Checks of lesson 10, when things break; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import builtins
import io
import os
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

from workshop_utils.comm.communicator import Communicator
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, is_missing
from workshop_utils.lessons.checks.open_question import OpenQuestion
from workshop_utils.lessons.checks.processes import values_on_ranks
from workshop_utils.ranks import RanksFailed, on_ranks

# Unlabelled in the lesson: what was broken, and on which rank.
CASES = {
    "A": ("skipped all-reduce", 1),
    "B": ("slow loader", 2),
    "C": ("one batch more", 0),
    "D": ("bad value", 1),
    "E": ("slow computing", 0),
}
CAUSES = (
    *("slow loader", "slow computing", "slow link", "bad value", "killed"),
    *("skipped all-reduce", "skipped barrier", "one batch more", "one batch fewer"),
)
_RANK = {
    "A": "two ranks wait in the same all-reduce for one that has left the loop: who stands elsewhere?",
    "B": "the rank that waits least in the all-reduce is the one for whom all others wait",
    "C": "two ranks wait at the end, in the barrier, for one that is still in the loop",
    "D": "a sum spreads it to all ranks: look at the first step, at each rank's own norm, before the sum",
    "E": "the rank that waits least in the all-reduce is the one for whom all others wait",
}
_CAUSE = {
    "A": "all ranks have 10 batches, and the one in the barrier has done all its steps, so it made a call less: "
    "look at its norms, where the sum should be three times its own",
    "B": "a slow link would make the all-reduce long on every rank; which part is long on this rank alone?",
    "C": "count the batches that each rank announces, and take the odd one out: two against one",
    "D": "nothing was slow, and nobody hangs: which number is none?",
    "E": "a slow link would make the all-reduce long on every rank; which part is long on this rank alone?",
}


@exercise
def diagnosis(answer: Mapping[str, Any]) -> str:
    """`answer` has for each of CASES the rank at fault and the cause, one of CAUSES."""
    if not isinstance(answer, Mapping):
        raise Wrong('answer with a dictionary, such as {"A": (2, "killed")}.')
    for letter, (cause, rank) in CASES.items():
        given = answer.get(letter, ...)
        parts = list(given) if isinstance(given, tuple | list) else [given]
        if any(map(is_missing, parts)):
            raise NotYet(f"case {letter} has no answer: a rank and a cause.")
        ranks = [part for part in parts if isinstance(part, Integral) and not isinstance(part, bool)]
        causes = [part.strip().lower() for part in parts if isinstance(part, str)]
        if len(parts) != 2 or len(ranks) != 1 or len(causes) != 1:
            raise Wrong(f"case {letter}: {given!r} is no rank and cause; it looks like (2, 'killed').")
        if causes[0] not in CAUSES:
            raise Wrong(f"case {letter}: {causes[0]!r} is none of the causes: {', '.join(CAUSES)}.")
        if ranks[0] != rank:
            raise Wrong(f"case {letter}, not rank {ranks[0]}: {_RANK[letter]}.")
        if causes[0] != cause:
            raise Wrong(f"case {letter}, not {causes[0]!r}: {_CAUSE[letter]}.")
    return "every rank and every cause. In A and C, who stands alone made one all-reduce less, or one more."


@contextmanager
def full_disk(after_nbytes: int) -> Iterator[None]:
    """In this block, no file of this process can grow beyond `after_nbytes`: writing more raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class _Watched:
    """What a function does to files: `path` and others by inode, in the order of its calls.

    Each event is ("write", name, 0, True), ("rename", inode, name, whether `path` existed before) or ("sync", inode,
    nbytes, True).
    This includes what `Path` and `shutil` do, since they call these functions of `os`, `io` and `builtins`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.events = path, list[tuple[Any, ...]]()

    def rename(self, source: Any, target: Any, *_arguments: object, **_options: object) -> object:
        inode, name = Path(source).stat().st_ino, os.path.realpath(target)
        self.events.append(("rename", inode, name, self.path.exists()))
        return mock.DEFAULT  # go on with the wrapped function

    def open(self, file: Any, mode: str | int = "r", *_arguments: object, **_options: object) -> object:
        flags = mode & (os.O_WRONLY | os.O_RDWR) if isinstance(mode, int) else set(mode) & set("wax+")
        if flags and not isinstance(file, int):
            self.events.append(("write", os.path.realpath(file), 0, True))
        return mock.DEFAULT

    def sync(self, file: Any) -> object:
        state = os.fstat(file if isinstance(file, int) else file.fileno())
        self.events.append(("sync", state.st_ino, state.st_size, True))
        return mock.DEFAULT

    @contextmanager
    def calls_of(self, function: Callable[..., object]) -> Iterator[None]:
        """In this block, collect them; also those that `function` has imported by name."""
        watches: list[tuple[Any, str, Any]] = [
            (os, each, self.rename) for each in ("rename", "replace", "link")
        ]
        watches += [(module, "open", self.open) for module in (os, io, builtins)]
        watches += [(os, each, self.sync) for each in ("fsync", "fdatasync") if hasattr(os, each)]
        names: dict[str, Any] = getattr(function, "__globals__", {})
        self.events.clear()
        with ExitStack() as patches:
            for module, name, watch in watches:
                original = getattr(module, name)
                watched = patches.enter_context(
                    mock.patch.object(module, name, side_effect=watch, wraps=original)
                )
                for own in [each for each, value in names.items() if value is original]:
                    patches.callback(names.__setitem__, own, original)
                    names[own] = watched
            yield


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
        watched = _Watched(path)
        for content in (new, old):
            with watched.calls_of(answer):
                answer(path, content)
            _saved(path, content)
            if not all(existed for *_, existed in watched.events):
                lost = "a save that breaks off there has lost the old one"
                advice = "do not remove it or move it aside, since a rename replaces it"
                raise Wrong(f"just before a rename there was no file at all: {lost}; {advice}.")
        events = list(watched.events)
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
        if any(event[:2] == ("write", os.path.realpath(path)) for event in events):
            half = "a save that breaks off while it writes leaves half a file"
            raise Wrong(f"you open {path.name} itself for writing: {half}; rename what you wrote beside it.")
        _durable(path, len(old), events)
    return (
        "after a crash the file is the old one or the new one, and once you return, no power cut undoes it."
    )


def _durable(path: Path, nbytes: int, events: list[tuple[Any, ...]]) -> None:
    """Raise Wrong unless the file was on the disk before it was renamed, and its name after that."""
    renames = [at for at, event in enumerate(events) if event[::2] == ("rename", os.path.realpath(path))]
    if not renames:
        raise Wrong(f"{path.name} came without a rename that the check could see: use `part.replace(path)`.")
    last = renames[-1]
    file, folder = events[last][1], path.parent.stat().st_ino
    synced = [event[2] for event in events[:last] if event[:2] == ("sync", file)]
    if not synced:
        empty = "a power cut soon after the rename can leave the new name on an empty file"
        late = any(event[:2] == ("sync", file) for event in events[last:])
        what = "you sync the file only after the rename" if late else "nothing forces the content to the disk"
        raise Wrong(f"{what}: {empty}; call `os.fsync(file.fileno())` before it.")
    if max(synced) < nbytes:
        held = f"only {max(synced):,} of {nbytes:,} bytes had left Python's buffer"
        raise Wrong(f"at `fsync`, {held}: call `file.flush()` first.")
    if not any(event[:2] == ("sync", folder) for event in events[last:]):
        early = any(event[:2] == ("sync", folder) for event in events[:last])
        what = "you sync the folder only before the rename" if early else "nothing syncs the folder"
        lost = "a power cut after you return can bring the old file back, since a rename changes the folder"
        how = "open it afterwards with `os.open(path.parent, os.O_RDONLY)`, and `os.fsync` that"
        raise Wrong(f"{what}: {lost}; {how}.")


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


RANKS = 3
SaveSharded = Callable[[Communicator, Path, bytes, Callable[[Path, bytes], None]], object]


@exercise
def save_sharded(answer: SaveSharded) -> str:
    """`answer(communicator, folder, shard, write)` saves every rank's shard, and then `complete`, with their number."""
    with TemporaryDirectory() as name:
        folder = Path(name) / "slow"
        folder.mkdir()
        arguments = {"answer": answer, "folder": folder}
        told = values_on_ranks(f"on {RANKS} ranks", RANKS, _slowly, arguments, timeout="3s")
        if not any(told) and not any(folder.iterdir()):
            raise NotYet("your function wrote nothing: write it, then run this again.")
        _refuse_calls(told)
        for rank in range(RANKS):
            file = folder / f"shard-{rank}"
            if file.read_bytes() != _shard(rank):
                raise Wrong(f"{file.name} does not hold what rank {rank} was given.")
        if (folder / "complete").read_bytes().strip() != str(RANKS).encode():
            raise Wrong(f'`complete` holds something else than the number of shards: b"{RANKS}".')
        folder = Path(name) / "broken"
        folder.mkdir()
        with suppress(RanksFailed):
            on_ranks(RANKS, _breaking, {"answer": answer, "folder": folder}, timeout="3s")
        if (folder / "complete").exists():
            raise Wrong("rank 1's disk was full, and yet the checkpoint is `complete`, without its shard.")
        if (folder / "returned").exists():
            raise Wrong("rank 1 could not write its shard, and nobody was told: let the OSError pass.")
    return "each rank wrote its own shard, and `complete` came when all of them were there, and only then."


def _shard(rank: int) -> bytes:
    return f"parameters of rank {rank}".encode() * 100


def _slowly(
    communicator: Communicator, answer: SaveSharded, folder: Path
) -> list[tuple[str, bytes, list[str]]]:
    """What this rank writes: names, contents, and what was in `folder` before; rank 1's disk is slow."""
    calls = []

    def write(path: Path, content: bytes) -> None:
        calls.append((Path(path).name, bytes(content), sorted(each.name for each in folder.iterdir())))
        time.sleep(0.3 * (communicator.rank == 1))
        _write(Path(path), content, communicator.rank)

    answer(communicator, folder, _shard(communicator.rank), write)
    return calls


def _breaking(communicator: Communicator, answer: SaveSharded, folder: Path) -> None:
    def write(path: Path, content: bytes) -> None:
        if communicator.rank == 1:
            raise OSError("No space left on device")
        _write(Path(path), content, communicator.rank)

    answer(communicator, folder, _shard(communicator.rank), write)
    if communicator.rank == 1:
        (folder / "returned").touch()


def _write(path: Path, content: bytes, rank: int) -> None:
    """Atomically, also where several ranks write the same file, which is a mistake that has a sentence of its own."""
    part = path.with_name(f"{path.name}.part-{rank}")
    part.write_bytes(content)
    part.replace(path)


def _refuse_calls(told: list[list[tuple[str, bytes, list[str]]]]) -> None:
    """Raise Wrong unless each rank wrote its own shard through `write`, and one rank `complete`, after all shards."""
    shards = [f"shard-{rank}" for rank in range(RANKS)]
    for rank, calls in enumerate(told):
        names = [name for name, _, _ in calls if name != "complete"]
        foreign = [name for name in names if name != shards[rank]]
        if foreign:
            own = f"each rank writes its own, {shards[rank]}, and all at once"
            raise Wrong(f"rank {rank} writes {foreign[0]}: {own}.")
        if not names:
            how = "`write(path, content)` it, which is durable"
            raise Wrong(f"rank {rank} has not written {shards[rank]} through `write`: {how}.")
    markers = [
        (rank, there) for rank, calls in enumerate(told) for name, _, there in calls if name == "complete"
    ]
    if not markers:
        raise Wrong("all shards are written, but nobody writes `complete`: no reader will trust them.")
    for rank, there in markers:
        missing = [name for name in shards if name not in there]
        if missing:
            late = "rank 1's disk is slow: wait for all ranks before you declare it complete"
            raise Wrong(f"when rank {rank} wrote `complete`, {missing[0]} was not there: {late}.")
    if len(markers) > 1:
        raise Wrong(f"{len(markers)} ranks write `complete`, into the same file at once: one rank is enough.")


best_interval = OpenQuestion(
    "seconds",
    (60, 2000),
    "A failure can hit the save as well: what is at risk is τ + δ, not τ, and Young leaves out terms that are small "
    "only where δ is small beside M. Here δ is 60 s and M 864 s. Daly's correction gives 283 s. The valley is flat: "
    "chance moves the measured minimum by tens of seconds, which costs next to nothing.",
    predictable=(30, 4000),
)
