"""The checks of lesson 14 accept what is right and say what is wrong."""

import pytest

from workshop_utils.exercises import spark as checks
from workshop_utils.exercises.spark import partial_sums


def add(left, right):
    return left[0] + right[0], left[1] + right[1]


@pytest.mark.parametrize(
    ("answer", "state", "said"),
    [
        (((0.0, 0), add, lambda held: held[0] / held[1]), "right", "only at the end is there a division"),
        (((0.0, 0), ..., lambda held: 0), "not yet", "write zero, add and finish"),
        (((0.0, 0), lambda left, right: None, lambda held: 0), "not yet", "`add` gave nothing"),
        (((0.0, 0), add, lambda held: held[0]), "wrong", "with partitions of (7, 4) numbers it gave"),
        ((0, 1), "wrong", "give three things"),
        (None, "not yet", "put your answer"),
    ],
)
def test_a_mean_needs_sums_and_counts(answer, state, said):
    verdict = checks.mean_of_partitions(answer)
    assert verdict.state == state
    assert said in verdict.text


def test_the_mean_of_means_is_recognised():
    """A sum that keeps a mean for each partition: right only where all are of one size."""

    def keep(left, right):
        if right[1] == 1:  # a number
            total, count, means = left
            return total + right[0], count + 1, means
        return (
            0.0,
            0,
            left[2]
            + ((left[0] / left[1],) if left[1] else ())
            + ((right[0] / right[1],) if right[1] else ())
            + right[2],
        )

    def finish(held):
        means = held[2] + ((held[0] / held[1],) if held[1] else ())
        return sum(means) / len(means)

    verdict = checks.mean_of_partitions(((0.0, 0, ()), keep, finish))
    assert verdict.state == "wrong"
    assert "counts a small partition as much as a large one" in verdict.text


def test_the_rank_with_the_fewest_rows_decides():
    assert (
        checks.steps_of_all(lambda rows, n, b: min(sum(rows[r::n]) for r in range(n)) // b).state == "right"
    )
    verdict = checks.steps_of_all(lambda rows, n, b: sum(rows) // n // b)
    assert verdict.state == "wrong"
    assert "would wait for it for ever" in verdict.text
    assert checks.steps_of_all(lambda rows, n, b: None).state == "not yet"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (512_000_000, "a sum from each of the 64 partitions"),
        (8_000_000, "that is one sum"),
        (32_000_000, "a float64 has 8"),
        (48_000_000, "the tree is not binary"),
        (64, "1,000,000 times too small: a wrong unit?"),
        (1, "√64 = 8 sums reach the driver"),
    ],
)
def test_other_bytes_of_a_tree_are_told_what_they_are(answer, said):
    verdict = checks.bytes_of_a_tree(answer)
    assert verdict.state == "wrong"
    assert said in verdict.text


@pytest.mark.parametrize(
    ("partitions", "depth", "sums"),
    [(9, 2, 3), (16, 2, 4), (16, 1, 16), (1, 2, 1), (2, 2, 2), (64, 2, 8), (64, 3, 4)],
)
def test_the_tree_has_the_width_that_spark_gives_it(partitions, depth, sums):
    assert partial_sums(partitions, depth) == sums
