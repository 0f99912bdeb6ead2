"""Checks of lesson 10, when things break; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import errno
import functools
import os
import resource
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from numbers import Integral
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest import mock

from workshop_utils.comm.communicator import Communicator
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, is_missing, refuse
from workshop_utils.lessons.checks.open_question import question
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
_WAITS = "the rank that waits least in the all-reduce is the one for whom all others wait"
_LONG = "a slow link would make the all-reduce long on every rank: look which part is long on this rank alone"
_HINTS = {  # where to look for the rank, and for the cause
    "A": (
        "two ranks wait in the same all-reduce for one that has left the loop: look who stands elsewhere",
        "all ranks have 10 batches, and the one in the barrier has done all its steps, so it made one call fewer: "
        "look at its norms, where the sum should be three times its own",
    ),
    "B": (_WAITS, _LONG),
    "C": (
        "two ranks wait at the end, in the barrier, for one that is still in the loop",
        "count the batches that each rank announces, and take the odd one out: two against one",
    ),
    "D": (
        "a sum spreads it to all ranks: look at the first step, at each rank's own norm, before the sum",
        "nothing was slow, and nobody hangs: look which value is not a number",
    ),
    "E": (_WAITS, _LONG),
}


@exercise
def diagnosis(answer: Mapping[str, Any]) -> str:
    """`answer` has for each of CASES the rank at fault and the cause, one of CAUSES."""
    refuse(not isinstance(answer, Mapping), 'answer with a dictionary, such as {"A": (2, "killed")}.')
    for letter, (cause, rank) in CASES.items():
        given = answer.get(letter, ...)
        parts = given if isinstance(given, tuple | list) else [given]
        if any(map(is_missing, parts)):
            raise NotYet(f"case {letter} has no answer: a rank and a cause.")
        ranks = [part for part in parts if isinstance(part, Integral) and not isinstance(part, bool)]
        causes = [part.strip().lower() for part in parts if isinstance(part, str)]
        form = f"case {letter}: {given!r} is no rank and cause; it looks like (2, 'killed')."
        refuse((len(ranks), len(causes), len(parts)) != (1, 1, 2), form)
        known = f"case {letter}: {causes[0]!r} is none of the causes: {', '.join(CAUSES)}."
        refuse(causes[0] not in CAUSES, known)
        refuse(ranks[0] != rank, f"case {letter}, not rank {ranks[0]}: {_HINTS[letter][0]}.")
        refuse(causes[0] != cause, f"case {letter}, not {causes[0]!r}: {_HINTS[letter][1]}.")
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
    kind: str  # "rename" of a file to the saved one's name, "sync", or "failed" where a sync was refused
    inode: int = 0  # of what is renamed or synced
    file: Path | None = None  # that which is renamed or synced, if it is in the saved one's folder
    content: bytes = b""  # of what is synced
    changed: int = 0  # when the content of what is renamed or synced last changed
    existed: bool = True  # whether the saved file was there, just before a rename


class _Watched:
    """What a function does for the file `path`, in the order of its calls; what is `broken` can't be synced."""

    def __init__(self, path: Path) -> None:
        self.path, self.events = path, list[_Event]()
        self.broken: Callable[[int], bool] = lambda _mode: False

    def _rename(self, original: Callable[..., None], source: Any, target: Any, **folders: Any) -> None:
        state, existed = os.stat(source, dir_fd=folders.get("src_dir_fd")), self.path.exists()
        file = self._file(state)
        original(source, target, **folders)
        if self.path.exists() and self.path.stat().st_ino == state.st_ino:
            self.events.append(_Event("rename", state.st_ino, file, b"", state.st_mtime_ns, existed))

    def _sync(self, original: Callable[..., None], synced: Any) -> None:
        state = os.fstat(synced if isinstance(synced, int) else synced.fileno())
        if self.broken(state.st_mode):
            self.events.append(_Event("failed"))
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        file = self._file(state)
        content = file.read_bytes() if file else b""
        self.events.append(_Event("sync", state.st_ino, file, content, state.st_mtime_ns))
        _sleep(0.02)  # so that a later change has a later time
        original(synced)

    def _file(self, state: os.stat_result) -> Path | None:
        files = [each for each in self.path.parent.rglob("*") if each.is_file()]
        return next((each for each in files if each.stat().st_ino == state.st_ino), None)

    @contextmanager
    def calls_of(self, function: Callable[..., object]) -> Iterator[list[_Event]]:
        """In this block, collect them; also those of functions that `function` has imported by name."""
        self.events = []
        heard: dict[str, Callable[..., None]] = dict.fromkeys(("fsync", "fdatasync"), self._sync)
        heard |= dict.fromkeys(("rename", "replace", "link"), self._rename)
        names: dict[str, Any] = getattr(function, "__globals__", {})
        with ExitStack() as patches:
            for name in heard.keys() & set(dir(os)):
                original = getattr(os, name)
                replaced = functools.partial(heard[name], original)
                patches.enter_context(mock.patch.object(os, name, replaced))
                imported = {own: replaced for own, value in names.items() if value is original}
                patches.enter_context(mock.patch.dict(names, imported))
            yield self.events


Save = Callable[[Path, bytes], object]


@exercise
def atomic_save(answer: Save) -> str:
    """`answer(path, content)` writes a file that is the old one or the new one whenever the writing breaks off."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        old, new = b"old" * 300, b"new" * 100_000
        watched, saves = _Watched(path), list[list[_Event]]()
        for content in (old, new, old):
            with watched.calls_of(answer) as events:
                answer(path, content)
            if not any(Path(folder).iterdir()):
                raise NotYet("your function wrote nothing: write it, then run this again.")
            _saved(path, content)
            lost = "just before a rename there was no file at all: a save that breaks off there has lost the old one"
            instead = "do not remove it or move it aside, since a rename replaces it"
            refuse(saves and not all(event.existed for event in events), f"{lost}; {instead}.")
            saves.append(events)
        full = "the disk was full halfway, and"
        with full_disk(100_000):
            told = _tells(answer, path, new)
        refuse(not path.exists(), f"{full} now there is no file: the old one is lost too.")
        state = f"the file has {path.stat().st_size:,} bytes that are neither the old content nor the new"
        refuse(path.read_bytes() != old, f"{full} now {state}: write beside it first, then rename.")
        refuse(not told, f"{full} nobody was told: let the OSError pass.")
        whens = "at the first save, of a new name, ", "", ""
        for content, events, when in zip((old, new, old), saves, whens, strict=True):
            _durable(path, content, events, when)
        third = b"third" * 200
        for watched.broken, content, what in (
            (stat.S_ISDIR, new, " of the folder"),
            (stat.S_ISREG, third, ""),
        ):
            before = path.read_bytes()
            with watched.calls_of(answer) as events:
                told = _tells(answer, path, content)
            if any(event.kind == "failed" for event in events):
                unheard = f"the disk failed at `fsync`{what}, and nobody was told: let the OSError pass."
                refuse(not told, unheard)
                lost = "`fsync` failed, and now there is no file: the old one is lost too."
                refuse(not path.exists(), lost)
                renamed = "`fsync` failed, and the file is not the old one: rename only what it has synced."
                refuse(not what and path.read_bytes() != before, renamed)
        try:
            answer(path, new)
        except OSError as raised:
            way = "is what it left behind in the way?"
            raise Wrong(f"one save broke off, and the next raises {type(raised).__name__}: {way}") from None
        sizes = (
            f"the file has {path.stat().st_size:,} bytes instead of {len(new):,}: begin with an empty file."
        )
        refuse(path.read_bytes() != new, f"one save broke off, and after the next {sizes}")
        used = []
        with ThreadPoolExecutor(1) as thread:
            for run, ending in ((map, "weights"), (thread.map, "optimizer")):
                with (watched := _Watched(Path(folder, f"step-30.{ending}"))).calls_of(answer) as events:
                    list(run(answer, [watched.path], [b"new"]))
                used.append({event.file for event in events if event.kind == "rename" and event.file})
        for both in used[0] & used[1]:
            mixed = f"step-30.weights and step-30.optimizer are both written as {both.name}"
            raise Wrong(f"{mixed}: saved at once, they would mix; take all of the name, and add to it.")
    return (
        "after a crash the file is the old one or the new one, and once you return, no power cut undoes it."
    )


def _tells(answer: Save, path: Path, content: bytes) -> bool:
    """Whether it raises an exception, of any kind."""
    try:
        answer(path, content)
    except Exception:
        return True
    return False


def _saved(path: Path, content: bytes) -> None:
    """Raise Wrong unless `path` holds `content`, and lies alone in its folder."""
    beside = ", ".join(sorted(each.name for each in path.parent.iterdir() if each != path))
    refuse(not path.exists(), f"you have written {beside}, but {path.name} is not there: rename it last.")
    copied = "a copy is written byte by byte too, and can break off halfway"
    refuse(beside, f"after saving, {beside} lies beside {path.name}: *rename* it; {copied}.")
    saved = path.read_bytes()
    how = f"only the first {len(saved):,} of them" if content.startswith(saved) else "other bytes"
    refuse(saved != content, f"after saving {len(content):,} bytes, the file holds {how}.")


def _durable(path: Path, content: bytes, events: list[_Event], when: str) -> None:
    """Raise Wrong unless the file was on the disk before it was renamed, and its name after that."""
    half = "a save that breaks off while it writes leaves half a file; rename what is whole"
    last = max((at for at, each in enumerate(events) if each.kind == "rename"), default=-1)
    refuse(last < 0, f"{when}you open {path.name} itself for writing: {half}.")
    rename = events[last]
    far = "which may be on another file system; there `rename` fails, and `shutil.move` copies byte by byte"
    elsewhere = f"{when}what you rename lies in another folder, {far}: write it beside {path.name}"
    refuse(not rename.file, f"{elsewhere}.")
    file, folder = (
        [at for at, each in enumerate(events) if (each.kind, each.inode) == ("sync", inode)]
        for inode in (rename.inode, path.parent.stat().st_ino)
    )
    synced = [events[at] for at in file if at < last]
    empty = "a power cut soon after the rename can leave the new name on an empty file"
    what = "you sync the file only after the rename" if file else "nothing forces the content to the disk"
    refuse(not synced, f"{when}{what}: {empty}; call `os.fsync(file.fileno())` before it.")
    whole, longest = (
        [each for each in synced if each.content == content],
        max(len(each.content) for each in synced),
    )
    other = "what you rename is not what you synced: write all of it first, then sync it."
    refuse(not whole and longest == len(content), other)
    held = f"at `fsync`, only {longest:,} of {len(content):,} bytes had left Python's buffer"
    refuse(not whole, f"{held}: call `file.flush()` first.")
    again = "you write to the file again after its `fsync`: write all of it first, then sync it."
    refuse(all(each.changed != rename.changed for each in whole), again)
    what = "you sync the folder only before the rename" if folder else "nothing syncs the folder"
    lost = "a power cut after you return can undo the rename, which changes the folder"
    how = "open it afterwards with `os.open(path.parent, os.O_RDONLY)`, and `os.fsync` that"
    refuse(max(folder, default=-1) < last, f"{when}{what}: {lost}; {how}.")


_sleep = time.sleep  # a slow disk's, when a learner's takes no time
SaveSharded = Callable[[Communicator, Path, bytes, Save], object]
_Calls = list[tuple[str, bytes, dict[str, bytes]]]  # names, contents, and the shards that were there before


@exercise
def save_sharded(answer: SaveSharded) -> str:
    """`answer(communicator, folder, shard, write)` saves every rank's shard, and then `complete`, with their number."""
    with TemporaryDirectory() as name:
        for size, slow in ((3, 1), (3, 2), (3, 0), (2, 1)):
            folder = Path(name, f"{size}-ranks-{slow}-slow")
            folder.mkdir()
            arguments = {"answer": answer, "folder": folder, "bad": slow}
            calls = values_on_ranks(f"on {size} ranks", size, _save, arguments, timeout="20s")
            if not any(calls) and not any(folder.iterdir()):
                raise NotYet("your function wrote nothing: write it, then run this again.")
            _refuse_calls(calls, slow)
        for size, full in ((3, "shard-1"), (1, "shard-0"), (1, "complete")):
            folder = Path(name, f"{full}-full")
            folder.mkdir()
            with suppress(RanksFailed):
                on_ranks(size, _save, {"answer": answer, "folder": folder, "bad": full}, timeout="10s")
            without = f"the disk was full at {full}, and yet there is a `complete`, without its shard."
            refuse(full != "complete" and (folder / "complete").exists(), without)
            unheard = f"{full} could not be written, and nobody was told: let the OSError pass."
            refuse((folder / "returned").exists(), unheard)
    return "each rank wrote its own shard, and `complete` came when all of them were there, and only then."


def _shard(rank: int) -> bytes:
    return f"parameters of rank {rank}".encode() * 100


def _write(rank: int, others: int, bad: int | str, calls: _Calls, path: Path, content: bytes) -> None:
    """Write atomically, also where ranks write one file; with a slow disk if `bad` is this rank, a full one if a name.

    A slow disk waits for the `others`' shards, 2 s at most, and then for a hasty `complete`: 1 s at most, rank 2's 6 s,
    which outlasts a deadline of five seconds.
    """
    path = Path(path)
    there = {each.name: each.read_bytes() for each in path.parent.glob("shard-?")}
    calls.append((path.name, bytes(content), there))
    if rank == bad and path.name != "complete":
        _wait(2, lambda: len([*path.parent.glob("shard-?")]) >= others)
        _wait(6 if rank == 2 else 1, path.with_name("complete").exists)
    if path.name == bad:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    part = path.with_name(f"{path.name}.part-{rank}")
    part.write_bytes(content)
    part.replace(path)


def _wait(seconds: float, until: Callable[[], bool]) -> None:
    latest = time.monotonic() + seconds
    while not until() and time.monotonic() < latest:
        _sleep(0.01)


def _save(communicator: Communicator, answer: SaveSharded, folder: Path, bad: int | str) -> _Calls:
    """What a rank writes; a learner's `time.sleep` is over at once, so it outlasts no slow disk."""
    rank, calls = communicator.rank, _Calls()
    write = functools.partial(_write, rank, communicator.size - 1, bad, calls)
    communicator.barrier()  # else a rank that starts late is as slow as a disk
    with mock.patch("time.sleep"):
        answer(communicator, folder, _shard(rank), write)
    if any(name == bad for name, *_ in calls):
        (folder / "returned").touch()
    return calls


def _refuse_calls(told: list[_Calls], slow: int) -> None:
    """Raise Wrong unless each rank wrote its own shard through `write`, and one rank `complete`, after all shards."""
    shards = [f"shard-{rank}" for rank in range(len(told))]
    for rank, (calls, shard) in enumerate(zip(told, shards, strict=True)):
        written = [(name, content) for name, content, _ in calls if name != "complete"]
        for name, _ in written:
            own = f"each rank writes its own, {shard}, and all at once"
            refuse(name != shard, f"rank {rank} writes {name}: {own}.")
        how = "`write(path, content)` it, which is durable"
        refuse(not written, f"rank {rank} has not written {shard} through `write`: {how}.")
        other = f"{shard} does not hold what rank {rank} was given, or not at once."
        refuse(any(content != _shard(rank) for _, content in written), other)
    markers = [(rank, call) for rank, calls in enumerate(told) for call in calls if call[0] == "complete"]
    nobody = "all shards are written, but nobody writes `complete`: no reader will trust them."
    refuse(not markers, nobody)
    for rank, (_, _, there) in markers:
        late = f"rank {slow}'s disk is slow, and may take longer than any time you wait: wait for all ranks' shards"
        for shard in shards:
            refuse(shard not in there, f"when rank {rank} wrote `complete`, {shard} was not there: {late}.")
    many = f"{len(markers)} ranks write `complete`, into the same file at once: one rank is enough."
    refuse(len(markers) > 1, many)
    number = f'`complete` holds something else than the number of shards: b"{len(told)}".'
    refuse(markers[0][1][1].strip() != str(len(told)).encode(), number)


best_interval = question(__name__, "best_interval")
