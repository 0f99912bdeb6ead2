"""A checkpoint is whole or it is not there, and what is damaged is told and passed over."""

import multiprocessing
import os
import re
import resource
import signal
import stat

import numpy as np
import pytest

from workshop_utils.training import checkpoints
from workshop_utils.training.checkpoints import CheckpointDamaged

ARRAYS = {
    "weights": np.arange(7, dtype=np.float32),
    "velocity": np.full((3, 1), np.nan),
    "empty": np.empty((0, 4), np.int64),
}


def test_what_is_read_is_what_was_saved_bit_by_bit(tmp_path):
    found = checkpoints.read(checkpoints.save(tmp_path / "new" / "folder", 40, ARRAYS))
    content, expected = (
        {name: (array.dtype, array.shape, array.tobytes()) for name, array in arrays.items()}
        for arrays in (found.arrays, ARRAYS)
    )
    assert (found.step, content) == (40, expected)


def test_every_new_folder_s_name_is_on_the_disk_too(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: synced.append(os.fstat(descriptor).st_ino))
    written = checkpoints.save(tmp_path / "new" / "folder", 40, ARRAYS)
    assert {path.stat().st_ino for path in (written, *written.parents[:3])} <= {*synced}


def test_a_folder_that_cannot_be_synced_is_told_and_left_closed(tmp_path, monkeypatch):
    opened = []

    def fsync(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            opened.append(descriptor)
            raise OSError("the disk fails")

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(OSError, match="the disk fails"):
        checkpoints.save(tmp_path, 40, ARRAYS)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened[0])


def test_the_newest_are_kept_and_nothing_else_is_left(tmp_path):
    saved = [checkpoints.save(tmp_path, step, ARRAYS) for step in (5, 10, 100, 1000)]
    assert sorted(tmp_path.iterdir()) == saved[2:]
    newest = checkpoints.newest(tmp_path)
    assert newest.step == 1000
    assert checkpoints.newest(tmp_path / "not there") is None


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda content: content[: len(content) // 2], "bytes; "),
        (lambda content: content + b"x", "bytes; "),
        (lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:], "SHA-256 differs"),
        (lambda content: content.replace(b'"step": 20', b'"step": 30'), "SHA-256 differs"),
        (lambda content: b"", "does not begin as a checkpoint does"),
        (lambda content: b"null\n" + content, "does not begin as a checkpoint does"),
        (lambda content: bytes(len(content)), "does not begin as a checkpoint does"),
    ],
    ids=["cut", "longer", "one bit", "the step", "empty", "other header", "zeros"],
)
def test_a_damaged_one_is_named_and_the_one_before_is_taken(damage, told, tmp_path, capsys):
    checkpoints.save(tmp_path, 10, ARRAYS)
    newest = checkpoints.save(tmp_path, 20, ARRAYS)
    newest.write_bytes(damage(newest.read_bytes()))
    with pytest.raises(CheckpointDamaged, match=told):
        checkpoints.read(newest)
    assert checkpoints.newest(tmp_path).step == 10
    assert re.search(r"step-00000020\.checkpoint.*going back to the one before", capsys.readouterr().out)
    checkpoints.save(tmp_path, 15, ARRAYS)  # the damaged one must not pass for newer than those that follow
    assert checkpoints.newest(tmp_path).step == 15
    assert newest.with_name(f"{newest.name}.damaged").exists()


def test_a_checkpoint_of_another_run_is_refused_with_the_settings_that_differ(tmp_path):
    checkpoints.save(tmp_path, 10, ARRAYS, {"seed": 0, "hidden": 64, "workers": 2})
    checkpoints.write(tmp_path, 20, b"anything", {"seed": 0, "hidden": 64, "workers": 2})
    found = checkpoints.newest(tmp_path, {"seed": 0, "hidden": 64, "workers": 2})
    assert (found.step, found.content) == (20, b"anything")
    with pytest.raises(CheckpointDamaged, match=r"step-00000020\.checkpoint holds no arrays"):
        _ = found.arrays
    with pytest.raises(
        checkpoints.OtherRun, match=r"another run: hidden is 32 and was 64, workers is 4 and was 2; "
    ):
        checkpoints.newest(tmp_path, {"seed": 0, "hidden": 32, "workers": 4})


def test_objects_are_refused_since_reading_them_back_would_run_code(tmp_path):
    with pytest.raises(ValueError, match="array 'bad' holds Python objects"):
        checkpoints.save(tmp_path, 1, {"bad": np.array([{}], dtype=object)})
    assert not list(tmp_path.iterdir())


def save_until_the_limit(folder, die):
    """Save while no file may become longer than 200 bytes: the kernel kills the process in the middle of writing."""
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL if die else signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200, 200))
    try:
        checkpoints.save(folder, 20, ARRAYS)
    except OSError as error:
        os._exit(error.errno or 1)


@pytest.mark.parametrize("die", [True, False], ids=["killed half-way", "disk full half-way"])
def test_what_breaks_off_the_writing_leaves_the_checkpoints_from_before(die, tmp_path):
    before = checkpoints.save(tmp_path, 10, ARRAYS)
    content = before.read_bytes()
    process = multiprocessing.get_context("spawn").Process(target=save_until_the_limit, args=(tmp_path, die))
    process.start()
    process.join(60)
    assert process.exitcode == (-signal.SIGXFSZ if die else 27)  # 27 is EFBIG
    assert checkpoints.paths(tmp_path) == [before]
    assert before.read_bytes() == content
    leftover = [path for path in tmp_path.iterdir() if path != before]
    assert [path.stat().st_size for path in leftover] == ([200] if die else [])
    after = checkpoints.save(tmp_path, 20, ARRAYS)  # in the place of the half that was left
    assert sorted(tmp_path.iterdir()) == [before, after]
