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


def cut(is_full, zero_is_all=True):
    """Packs of which a new one begins where `is_full(held, next, hint)`."""

    def answer(sizes, hint):
        packs = [[]]
        for size in sizes:
            if packs[-1] and is_full(sum(packs[-1]), size, hint) and (hint or not zero_is_all):
                packs.append([])
            packs[-1].append(size)
        return packs

    return answer


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (lambda sizes, hint: [[size] for size in sizes], "every tensor a pack of its own"),
        (lambda sizes, hint: [sizes], "only 0 means that"),
        (cut(lambda held, size, hint: held > hint, zero_is_all=False), "0 means one pack for all"),
        (cut(lambda held, size, hint: held + size > hint), "that tensor still goes in"),
        (cut(lambda held, size, hint: held >= hint), "is not full yet"),
        (
            lambda sizes, hint: [pack for pack in exercises.packed(sizes, hint) if sum(pack) > hint],
            "the last one is lost",
        ),
        (
            lambda sizes, hint: [sizes[i : i + 2] for i in range(0, len(sizes), 2)] if hint else [sizes],
            "pack 1 is [4, 4], and must be [4]: each tensor alone is more than 1 byte",
        ),
        (lambda sizes, hint: exercises.packed(sizes[::-1], hint), "must stay in order"),
        (lambda sizes, hint: [sizes, sizes[:1]], "in one pack, once"),
        (lambda sizes, hint: sizes, "it gave [4, 4, 4]; it must be a list of lists"),
        (lambda sizes, hint: 3, "it must be a list of lists"),
        (lambda sizes, hint: [sizes[hint]] / 2, "line 1 of your function"),
    ],
)
def test_a_wrong_rule_is_told_what_it_does_wrong(answer, told):
    verdict = exercises.packs(answer)
    assert verdict.state == "wrong"
    assert told in verdict.text, verdict


@pytest.mark.parametrize("answer", [..., lambda sizes, hint: ..., lambda sizes, hint: None])
def test_a_rule_that_is_not_written_is_not_wrong(answer):
    assert exercises.packs(answer).state == "not yet"


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


@pytest.mark.parametrize(
    ("check", "wrong", "said"),
    [
        (exercises.synchronous_updates, 2000, "as in an asynchronous form"),
        (exercises.asynchronous_updates, 500, "nobody waits"),
        (exercises.collectives_a_step, 6, "a 13th goes in"),
        (exercises.collectives_a_step, 256_000 / 50_000, "tensors are not cut"),
        (exercises.collectives_a_step, 64, "as if the hint were 1"),
    ],
)
def test_a_typical_wrong_number_is_told_where_it_comes_from(check, wrong, said):
    verdict = check(wrong)
    assert (verdict.state, said in verdict.text) == ("wrong", True), verdict
