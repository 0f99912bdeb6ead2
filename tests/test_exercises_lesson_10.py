"""The checks of lesson 10."""

import resource
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


def saying_nothing(path: Path, content: bytes) -> None:
    try:
        through_a_part(path, content)
    except OSError:
        return


@pytest.mark.parametrize("save", [through_a_part, checkpoints.write_atomically])
def test_a_save_that_renames_is_right(save) -> None:
    assert exercises.atomic_save(save).state == "right"


@pytest.mark.parametrize(
    ("save", "told"),
    [
        (Path.write_bytes, "neither the old content nor the new"),
        (removing_first, "the old one is lost too"),
        (saying_nothing, "nobody was told"),
        (lambda path, content: path.write_bytes(b"?"), "holds something else"),
    ],
    ids=["in place", "removing first", "saying nothing", "something else"],
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
