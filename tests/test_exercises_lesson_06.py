"""The checks of lesson 06, and that they are about what TensorFlow does."""

import ast
import importlib.util
from pathlib import Path

import pytest

from workshop_utils.exercises import tensorflow as exercises


def tensorflow_rule():
    """TensorFlow's own `group_by_size`, taken from its source, since importing TensorFlow takes seconds."""
    package = importlib.util.find_spec("tensorflow")
    assert package is not None
    assert package.submodule_search_locations
    folder = Path(package.submodule_search_locations[0])
    source = (folder / "python" / "distribute" / "cross_device_utils.py").read_text(encoding="utf-8")
    (function,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.FunctionDef) and node.name == "group_by_size"
    ]
    scope: dict = {}
    exec(compile(ast.Module([function], []), "group_by_size", "exec"), scope)
    return scope["group_by_size"]


class Tensor:
    """What the rule looks at: a number of one-byte elements."""

    def __init__(self, size: int) -> None:
        self.shape = self
        self.dtype = self
        self.size = 1
        self.count = size

    def num_elements(self) -> int:
        return self.count


@pytest.mark.parametrize("hint", [0, 1, 4, 7, 8, 9, 1000])
@pytest.mark.parametrize("sizes", [[4], [4, 4, 4, 4], [100, 1, 1, 1, 100], [3, 9, 2, 7, 7, 1, 1]])
def test_packs_are_cut_as_tensorflow_cuts_them(sizes, hint):
    theirs = tensorflow_rule()([Tensor(size) for size in sizes], hint)
    assert exercises.packed(sizes, hint) == [[tensor.count for tensor in pack] for pack in theirs]


def test_the_rule_itself_is_right():
    assert exercises.packs(exercises.packed).state == "right"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda sizes, hint: [[size] for size in sizes], "0 means all in one"),
        (lambda sizes, hint: [sizes], "fills a pack"),
        (
            lambda sizes, hint: [sizes[i : i + 2] for i in range(0, len(sizes), 2)] if hint else [sizes],
            "fills a pack",
        ),
    ],
)
def test_a_wrong_rule_is_told_which_case_it_gets_wrong(answer, told):
    verdict = exercises.packs(answer)
    assert verdict.state == "wrong"
    assert told in verdict.text


def test_a_pack_that_is_just_full_takes_one_more():
    def at_least(sizes, hint):
        packs = [[]]
        for size in sizes:
            if hint and packs[-1] and sum(packs[-1]) >= hint:
                packs.append([])
            packs[-1].append(size)
        return packs

    verdict = exercises.packs(at_least)
    assert verdict.state == "wrong"
    assert "not more than 8" in verdict.text


@pytest.mark.parametrize(
    ("check", "right"),
    [
        (exercises.synchronous_updates, 500),
        (exercises.asynchronous_updates, 2000),
        (exercises.collectives_a_step, len(exercises.packed([4000] * 64, 50_000))),
    ],
)
def test_numbers_are_checked_and_explained(check, right):
    assert check(right).state == "right"
    assert check(right + 1).state == "wrong"
    assert check(...).state == "not yet"
