"""The checks of lesson 10."""

import os
import resource
import shutil
from pathlib import Path

import pytest

from workshop_utils import checkpoints
from workshop_utils.exercises import failures as exercises


def through_a_part(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    part.replace(path)


def removing_first(path: Path, content: bytes) -> None:
    path.unlink(missing_ok=True)
    through_a_part(path, content)


def cleaning_up(path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError:
        path.unlink()
        raise


def removing_before_the_rename(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    path.unlink(missing_ok=True)
    part.rename(path)


def removing_before_moving(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    if path.exists():
        path.unlink()
    shutil.move(part, path)


def putting_aside(path: Path, content: bytes) -> None:
    part, aside = path.with_suffix(".part"), path.with_suffix(".old")
    part.write_bytes(content)
    if path.exists():
        path.rename(aside)
    part.rename(path)
    aside.unlink(missing_ok=True)


def moving(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    shutil.move(part, path)


def copying(path: Path, content: bytes) -> None:
    part = path.with_suffix(".part")
    part.write_bytes(content)
    shutil.copy(part, path)


def never_renaming(path: Path, content: bytes) -> None:
    path.with_suffix(".part").write_bytes(content)


def saying_nothing(path: Path, content: bytes) -> None:
    try:
        through_a_part(path, content)
    except OSError:
        return


@pytest.mark.parametrize("save", [through_a_part, checkpoints.write_atomically, moving])
def test_a_save_that_renames_is_right(save) -> None:
    assert exercises.atomic_save(save).state == "right"


@pytest.mark.parametrize(
    ("save", "told"),
    [
        (Path.write_bytes, "neither the old content nor the new"),
        (removing_first, "just before a rename there was no file at all"),
        (cleaning_up, "the old one is lost too"),
        (removing_before_the_rename, "just before a rename there was no file at all"),
        (removing_before_moving, "just before a rename there was no file at all"),
        (putting_aside, "nor put it aside"),
        (saying_nothing, "nobody was told"),
        (copying, "model.part lies beside model: *rename*"),
        (never_renaming, "written model.part, but model is not there"),
        (lambda path, content: path.write_bytes(b"?"), "the file holds other bytes"),
        (lambda path, content: path.write_bytes(content[:9]), "the file holds only the first 9 of them"),
        (lambda path, content: path.write_bytes(content / 2), "line 1 of your function"),
    ],
    ids=[
        "in place",
        "removing first",
        "cleaning up",
        "removing before the rename",
        "removing before moving",
        "putting aside",
        "saying nothing",
        "copying",
        "never renaming",
        "something else",
        "a part",
        "an exception",
    ],
)
def test_a_save_that_loses_something_is_told_what(save, told: str) -> None:
    verdict = exercises.atomic_save(save)
    assert verdict.state == "wrong"
    assert told in verdict.text


def test_a_save_that_is_not_written_yet_is_no_mistake() -> None:
    assert exercises.atomic_save(lambda path, content: None).state == "not yet"
    assert exercises.atomic_save(...).state == "not yet"


def test_the_disk_is_as_large_as_before_afterwards(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    exercises.atomic_save(Path.write_bytes)
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before


def test_a_rename_is_the_same_as_before_afterwards() -> None:
    before = os.rename, os.replace
    exercises.atomic_save(removing_before_the_rename)
    assert (os.rename, os.replace) == before


@pytest.mark.parametrize(
    ("check", "right"),
    [
        (exercises.steps_made_twice, 475 - 400),
        (exercises.failures_a_day, 1000 / 100),
        (exercises.minutes_between_checkpoints, (2 * 60 * 8640) ** 0.5 / 60),
    ],
)
def test_numbers_are_checked_and_explained(check, right: float) -> None:
    assert check(right).state == "right"
    assert check(1.2 * right).state == "wrong"
    assert check(...).state == "not yet"


@pytest.mark.parametrize(
    ("check", "wrong", "said"),
    [
        (exercises.steps_made_twice, 475, "without any checkpoint"),
        (exercises.steps_made_twice, 100, "a whole interval"),
        (exercises.failures_a_day, 0.1, "in days"),
        (exercises.failures_a_day, 2.4, "in hours"),
        (exercises.minutes_between_checkpoints, 1018, "those are seconds"),
        (exercises.minutes_between_checkpoints, (60 * 8640) ** 0.5 / 60, "lacks the factor 2"),
        (exercises.minutes_between_checkpoints, (2 * 60 * 8_640_000) ** 0.5 / 60, "one worker's M"),
        (exercises.minutes_between_checkpoints, (2 * 60 * 144) ** 0.5, "mixed"),
    ],
)
def test_a_typical_wrong_number_is_told_where_it_comes_from(check, wrong: float, said: str) -> None:
    verdict = check(wrong)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict
