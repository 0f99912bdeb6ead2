"""Checks of lesson 10, when things break; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import builtins
import errno
import io
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
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
    "A": "two ranks wait in the same all-reduce for one that has left the loop: look who stands elsewhere",
    "B": "the rank that waits least in the all-reduce is the one for whom all others wait",
    "C": "two ranks wait at the end, in the barrier, for one that is still in the loop",
    "D": "a sum spreads it to all ranks: look at the first step, at each rank's own norm, before the sum",
    "E": "the rank that waits least in the all-reduce is the one for whom all others wait",
}
_CAUSE = {
    "A": "all ranks have 10 batches, and the one in the barrier has done all its steps, so it made one call fewer: "
    "look at its norms, where the sum should be three times its own",
    "B": "a slow link would make the all-reduce long on every rank: look which part is long on this rank alone",
    "C": "count the batches that each rank announces, and take the odd one out: two against one",
    "D": "nothing was slow, and nobody hangs: look which value is not a number",
    "E": "a slow link would make the all-reduce long on every rank: look which part is long on this rank alone",
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
    return "every rank and every cause. In A and C, the rank that stands alone made one all-reduce fewer, or one more."


@contextmanager
def full_disk(after_nbytes: int) -> Iterator[None]:
    """In this block, no file of this process can grow beyond `after_nbytes`: writing more raises OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (after_nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class _Event(NamedTuple):
    kind: str  # "write", "rename" or "sync"
    name: str = ""  # of the file that is written, or of what a rename gives
    source: str = ""  # what is renamed
    inode: int = 0  # of what is renamed or synced
    content: bytes = b""  # of what is synced
    changed: int = 0  # when the content of what is renamed or synced last changed
    existed: bool = True  # whether `path` was there, just before a rename


def _place(file: Any, folder: int | None = None) -> str:
    """The path of `file`, which may be relative to the open `folder`."""
    return os.path.realpath(file if folder is None else Path(f"/proc/self/fd/{folder}", file))


class _Watched:
    """What a function does to files: `path` and others, in the order of its calls; what is `broken` can't be synced.

    This includes what `Path` and `shutil` do, since they call these functions of `os`, `io` and `builtins`.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.events = path, list[_Event]()
        self.broken: Callable[[int], bool] = lambda _mode: False
        self.refused = False
        self.synchronous = set[str]()  # files of which a write returns when it is on the disk

    def rename(
        self,
        source: Any,
        target: Any,
        *_arguments: object,
        src_dir_fd: int | None = None,
        dst_dir_fd: int | None = None,
        **_options: object,
    ) -> object:
        source, name = _place(source, src_dir_fd), _place(target, dst_dir_fd)
        state = Path(source).stat()
        about: dict[str, Any] = {"inode": state.st_ino, "changed": state.st_mtime_ns}
        if source in self.synchronous:
            self.events.append(_Event("sync", content=Path(source).read_bytes(), **about))
        self.events.append(_Event("rename", name, source, existed=self.path.exists(), **about))
        return mock.DEFAULT  # go on with the wrapped function

    def open(self, file: Any, mode: str | int = "r", *_arguments: object, **options: Any) -> object:
        flags = mode & (os.O_WRONLY | os.O_RDWR) if isinstance(mode, int) else set(mode) & set("wax+")
        if flags and not isinstance(file, int):
            name = _place(file, options.get("dir_fd"))
            self.events.append(_Event("write", name))
            if isinstance(mode, int) and mode & (os.O_SYNC | os.O_DSYNC):
                self.synchronous.add(name)
        return mock.DEFAULT

    def sync(self, file: Any) -> object:
        state = os.fstat(file if isinstance(file, int) else file.fileno())
        if self.broken(state.st_mode):
            self.refused = True
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        files = [each for each in self.path.parent.rglob("*") if each.is_file()]
        content = next((each.read_bytes() for each in files if each.stat().st_ino == state.st_ino), b"")
        self.events.append(_Event("sync", inode=state.st_ino, content=content, changed=state.st_mtime_ns))
        _sleep(0.02)  # so that a later change has a later time
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
        old, new = b"old" * 300, b"new" * 100_000
        watched, saves = _Watched(path), list[list[_Event]]()
        for content in (old, new, old):
            first = not path.exists()
            with watched.calls_of(answer):
                answer(path, content)
            if not any(Path(folder).iterdir()):
                raise NotYet("your function wrote nothing: write it, then run this again.")
            _saved(path, content)
            if not first and not all(event.existed for event in watched.events):
                lost = "a save that breaks off there has lost the old one"
                advice = "do not remove it or move it aside, since a rename replaces it"
                raise Wrong(f"just before a rename there was no file at all: {lost}; {advice}.")
            saves.append(list(watched.events))
        with full_disk(100_000):
            told = _tells(answer, path, new)
        if not path.exists():
            raise Wrong("the disk was full halfway, and now there is no file: the old one is lost too.")
        if path.read_bytes() != old:
            state = f"the file has {path.stat().st_size:,} bytes that are neither the old content nor the new"
            raise Wrong(f"the disk was full halfway, and now {state}: write beside it first, then rename.")
        if not told:
            raise Wrong("the disk was full halfway, and nobody was told: let the OSError pass.")
        for content, events in zip((old, new, old), saves, strict=True):
            when = "at the first save, of a new name, " if events is saves[0] else ""
            if any((event.kind, event.name) == ("write", _place(path)) for event in events):
                half = "a save that breaks off while it writes leaves half a file"
                raise Wrong(f"{when}you open {path.name} itself for writing: {half}; rename what is whole.")
            _durable(path, content, events, when)
        for broken, content, what in ((stat.S_ISDIR, new, " of the folder"), (stat.S_ISREG, old, "")):
            before, watched.broken, watched.refused = path.read_bytes(), broken, False
            with watched.calls_of(answer):
                told = _tells(answer, path, content)
            if watched.refused and not told:
                raise Wrong(f"the disk failed at `fsync`{what}, and nobody was told: let the OSError pass.")
            if watched.refused and broken is stat.S_ISREG and path.read_bytes() != before:
                undone = "and yet the file is not the old one: rename only what it has synced"
                raise Wrong(f"`fsync` failed, {undone}.")
        try:
            answer(path, new)
        except OSError as raised:
            way = "is what it left behind in the way?"
            raise Wrong(f"one save broke off, and the next raises {type(raised).__name__}: {way}") from None
        if path.read_bytes() != new:
            sizes = f"the file has {path.stat().st_size:,} bytes instead of {len(new):,}"
            raise Wrong(f"one save broke off, and after the next {sizes}: begin with an empty file.")
        _apart(answer, Path(folder))
    return (
        "after a crash the file is the old one or the new one, and once you return, no power cut undoes it."
    )


def _tells(answer: Callable[[Path, bytes], object], path: Path, content: bytes) -> bool:
    """Whether it raises an exception, of any kind."""
    try:
        answer(path, content)
    except Exception:
        return True
    return False


def _apart(answer: Callable[[Path, bytes], object], folder: Path) -> None:
    """Raise Wrong if two files, saved by two threads, are written under one name."""
    used = []
    with ThreadPoolExecutor(1) as thread:
        for ending, waits in (("weights", False), ("optimizer", True)):
            watched = _Watched(folder / f"step-30.{ending}")
            with watched.calls_of(answer):
                thread.submit(answer, watched.path, b"new").result() if waits else answer(
                    watched.path, b"new"
                )
            used.append({event.source for event in watched.events if event.kind == "rename"})
    both = used[0] & used[1]
    if both:
        mixed = f"step-30.weights and step-30.optimizer are both written as {Path(both.pop()).name}"
        raise Wrong(f"{mixed}: saved at once, they would mix; take all of the name, and add to it.")


def _durable(path: Path, content: bytes, events: list[_Event], when: str) -> None:
    """Raise Wrong unless the file was on the disk before it was renamed, and its name after that."""
    renames = [at for at, event in enumerate(events) if (event.kind, event.name) == ("rename", _place(path))]
    if not renames:
        unseen = f"{when}{path.name} came without a rename that the check could see"
        raise Wrong(f"{unseen}: use `part.replace(path)`.")
    last = renames[-1]
    if not Path(events[last].source).is_relative_to(_place(path.parent)):
        far = (
            "which may be on another file system; there `rename` fails, and `shutil.move` copies byte by byte"
        )
        raise Wrong(f"{when}what you rename lies in another folder, {far}: write it beside {path.name}.")
    syncs = [(at, event) for at, event in enumerate(events) if event.kind == "sync"]
    file = [(at, event.content) for at, event in syncs if event.inode == events[last].inode]
    folder = [at for at, event in syncs if event.inode == path.parent.stat().st_ino]
    synced = [each for at, each in file if at < last]
    if not synced:
        empty = "a power cut soon after the rename can leave the new name on an empty file"
        what = "you sync the file only after the rename" if file else "nothing forces the content to the disk"
        raise Wrong(f"{when}{what}: {empty}; call `os.fsync(file.fileno())` before it.")
    if content not in synced:
        if max(map(len, synced)) == len(content):
            raise Wrong("what you rename is not what you synced: write all of it first, then sync it.")
        held = f"only {max(map(len, synced)):,} of {len(content):,} bytes had left Python's buffer"
        raise Wrong(f"at `fsync`, {held}: call `file.flush()` first.")
    if all(events[at].changed != events[last].changed for at, each in file if at < last and each == content):
        raise Wrong("you write to the file again after its `fsync`: write all of it first, then sync it.")
    if max(folder, default=0) < last:
        what = "you sync the folder only before the rename" if folder else "nothing syncs the folder"
        lost = "a power cut after you return can undo the rename, which changes the folder"
        how = "open it afterwards with `os.open(path.parent, os.O_RDONLY)`, and `os.fsync` that"
        raise Wrong(f"{when}{what}: {lost}; {how}.")


def _saved(path: Path, content: bytes) -> None:
    """Raise Wrong unless `path` holds `content`, and lies alone in its folder."""
    beside = sorted(each.name for each in path.parent.iterdir() if each != path)
    if not path.exists():
        raise Wrong(f"you have written {', '.join(beside)}, but {path.name} is not there: rename it last.")
    if beside:
        copied = "a copy is written byte by byte too, and can break off halfway"
        raise Wrong(f"after saving, {', '.join(beside)} lies beside {path.name}: *rename* it; {copied}.")
    saved = path.read_bytes()
    if saved != content:
        how = f"only the first {len(saved):,} of them" if content.startswith(saved) else "other bytes"
        raise Wrong(f"after saving {len(content):,} bytes, the file holds {how}.")


_sleep = time.sleep  # a slow disk's, when a learner's takes no time
SaveSharded = Callable[[Communicator, Path, bytes, Callable[[Path, bytes], None]], object]


@exercise
def save_sharded(answer: SaveSharded) -> str:
    """`answer(communicator, folder, shard, write)` saves every rank's shard, and then `complete`, with their number."""
    with TemporaryDirectory() as name:
        for size, slow in ((3, (1, 2, 0)), (2, (1,))):
            folders = {rank: Path(name) / f"{size}-ranks-{rank}-slow" for rank in slow}
            for folder in folders.values():
                folder.mkdir()
            arguments = {"answer": answer, "folders": folders}
            told = values_on_ranks(f"on {size} ranks", size, _slowly, arguments, timeout="5s")
            for rank, folder in folders.items():
                calls = [each[rank] for each in told]
                if not any(calls) and not any(folder.iterdir()):
                    raise NotYet("your function wrote nothing: write it, then run this again.")
                _refuse_calls(calls, rank)
                _refuse_files(folder, size)
        for size, full in ((3, ("shard-1",)), (1, ("shard-0", "complete"))):
            broken = {each: Path(name) / f"{each}-full" for each in full}
            for folder in broken.values():
                folder.mkdir()
            with suppress(RanksFailed):
                on_ranks(size, _breaking, {"answer": answer, "folders": broken}, timeout="3s")
            for each, folder in broken.items():
                if each != "complete" and (folder / "complete").exists():
                    raise Wrong(
                        f"the disk was full at {each}, and yet there is a `complete`, without its shard."
                    )
                if (folder / "returned").exists():
                    raise Wrong(f"{each} could not be written, and nobody was told: let the OSError pass.")
    return "each rank wrote its own shard, and `complete` came when all of them were there, and only then."


def _shard(rank: int) -> bytes:
    return f"parameters of rank {rank}".encode() * 100


def _refuse_files(folder: Path, size: int) -> None:
    for rank in range(size):
        if (folder / f"shard-{rank}").read_bytes() != _shard(rank):
            raise Wrong(f"shard-{rank} does not hold what rank {rank} was given.")
    if (folder / "complete").read_bytes().strip() != str(size).encode():
        raise Wrong(f'`complete` holds something else than the number of shards: b"{size}".')


_Calls = list[tuple[str, bytes, dict[str, bytes]]]  # names, contents, and the shards that were there before


def _slowly(
    communicator: Communicator, answer: SaveSharded, folders: Mapping[int, Path]
) -> dict[int, _Calls]:
    """What this rank writes into each folder, while the disk of the rank with its number is slow."""
    told = {}
    for slow, folder in folders.items():
        told[slow] = _calls(communicator, answer, folder, slow)
        ended = folder.with_suffix(".ended")
        ended.mkdir(exist_ok=True)
        (ended / str(communicator.rank)).touch()
        while (
            len(list(ended.iterdir())) < communicator.size
        ):  # not by messages, which could meet the learner's
            _sleep(0.01)
    return told


def _calls(communicator: Communicator, answer: SaveSharded, folder: Path, slow: int) -> _Calls:
    """What this rank writes; a learner's `time.sleep` is over at once, so that it never outlasts the slow disk."""
    calls: _Calls = []

    def write(path: Path, content: bytes) -> None:
        there = {each.name: each.read_bytes() for each in folder.glob("shard-?")}
        calls.append((Path(path).name, bytes(content), there))
        _sleep(0.3 * (communicator.rank == slow))
        _write(Path(path), content, communicator.rank)

    with mock.patch("time.sleep"):
        answer(communicator, folder, _shard(communicator.rank), write)
    return calls


def _breaking(communicator: Communicator, answer: SaveSharded, folders: Mapping[str, Path]) -> None:
    """Save where one file can't be written, while a learner's clock runs so fast that no deadline lasts."""
    hours = count(0, 3600)
    for full, folder in folders.items():
        failed = list[str]()

        def write(path: Path, content: bytes, full: str = full, failed: list[str] = failed) -> None:
            if Path(path).name == full:
                failed.append(full)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            _write(Path(path), content, communicator.rank)

        with ExitStack() as patches:
            patches.enter_context(mock.patch("time.sleep"))
            for clock in ("time", "monotonic", "perf_counter"):
                patches.enter_context(mock.patch(f"time.{clock}", side_effect=lambda: float(next(hours))))
            try:
                answer(communicator, folder, _shard(communicator.rank), write)
                if failed:
                    (folder / "returned").touch()
            except Exception:
                if communicator.size > 1:
                    _sleep(1.2 * bool(failed))  # silent for the others, not dead
                    raise


def _write(path: Path, content: bytes, rank: int) -> None:
    """Atomically, also where several ranks write the same file, which is a mistake that has a sentence of its own."""
    part = path.with_name(f"{path.name}.part-{rank}")
    part.write_bytes(content)
    part.replace(path)


def _refuse_calls(told: list[_Calls], slow: int) -> None:
    """Raise Wrong unless each rank wrote its own shard through `write`, and one rank `complete`, after all shards."""
    shards = [f"shard-{rank}" for rank in range(len(told))]
    for rank, calls in enumerate(told):
        names = [name for name, _, _ in calls if name != "complete"]
        foreign = [name for name in names if name != shards[rank]]
        if foreign:
            own = f"each rank writes its own, {shards[rank]}, and all at once"
            raise Wrong(f"rank {rank} writes {foreign[0]}: {own}.")
        if not names:
            how = "`write(path, content)` it, which is durable"
            raise Wrong(f"rank {rank} has not written {shards[rank]} through `write`: {how}.")
        if any(content != _shard(rank) for name, content, _ in calls if name != "complete"):
            raise Wrong(f"{shards[rank]} does not hold what rank {rank} was given, or not at once.")
    markers = [
        (rank, there) for rank, calls in enumerate(told) for name, _, there in calls if name == "complete"
    ]
    if not markers:
        raise Wrong("all shards are written, but nobody writes `complete`: no reader will trust them.")
    for rank, there in markers:
        missing = [name for name in shards if name not in there]
        if missing:
            late = f"rank {slow}'s disk is slow, and may take longer than any time you wait: wait for all ranks' shards"
            raise Wrong(f"when rank {rank} wrote `complete`, {missing[0]} was not there: {late}.")
    if len(markers) > 1:
        raise Wrong(f"{len(markers)} ranks write `complete`, into the same file at once: one rank is enough.")


best_interval = OpenQuestion(
    "seconds",
    (400, 680),
    "A long interval may fail again and again before one attempt succeeds, so it costs more than the τ/2 per failure "
    "of Young's rule: the time per interval grows like e^((τ+δ)/M), of which the rule keeps the first terms. That is "
    "exact only for δ much shorter than M, and here δ is a third of M. Daly's formula has its minimum at 536 s. R "
    "multiplies all by the same factor, so it doesn't move the minimum.",
    predictable=(684, 756),  # Young's rule gives 720
)
