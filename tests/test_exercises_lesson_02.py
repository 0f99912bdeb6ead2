import numpy as np
import pytest

from workshop_utils.exercises import parallelism


def right_mean(gradients, sizes):
    return sum(size * gradient for gradient, size in zip(gradients, sizes, strict=True)) / sum(sizes)


def right_logits(activations, rows, bias):
    return sum(own @ part for own, part in zip(activations, rows, strict=True)) + bias


@pytest.mark.parametrize(
    ("check", "answer"),
    [
        (parallelism.weighted_mean, right_mean),
        (parallelism.combined_logits, right_logits),
        (parallelism.data_parallel_megabytes, 2.44),
        (parallelism.model_parallel_megabytes, 0.79),
        (parallelism.weight_of_an_image, 3),
    ],
)
def test_a_right_answer_is_right(check, answer):
    assert check(answer).state == "right"


@pytest.mark.parametrize(
    "check",
    [
        parallelism.weighted_mean,
        parallelism.combined_logits,
        parallelism.data_parallel_megabytes,
        parallelism.model_parallel_megabytes,
        parallelism.weight_of_an_image,
    ],
)
def test_no_answer_is_not_yet_one(check):
    assert check(None).state == "not yet"
    assert check(...).state == "not yet"


def test_a_function_that_is_not_written_is_not_yet_an_answer():
    assert parallelism.weighted_mean(lambda *_: ...).state == "not yet"
    assert parallelism.combined_logits(lambda *_: ...).state == "not yet"


@pytest.mark.parametrize(
    ("check", "answer", "said"),
    [
        (
            parallelism.weighted_mean,
            lambda gradients, sizes: sum(gradients) / len(gradients),
            "30 and 10 images",
        ),
        (parallelism.weighted_mean, lambda gradients, sizes: sum(gradients), "that is the sum"),
        (
            parallelism.weighted_mean,
            lambda gradients, sizes: right_mean(gradients, sizes) * sum(sizes),
            "weighted, but never divided",
        ),
        (
            parallelism.weighted_mean,
            lambda gradients, sizes: right_mean(gradients, sizes) * sum(sizes) / len(sizes),
            "divided by the number of shards",
        ),
        (
            parallelism.weighted_mean,
            lambda gradients, sizes: right_mean(gradients, [1 / max(size, 1) for size in sizes]),
            "the wrong way round",
        ),
        (
            parallelism.weighted_mean,
            lambda gradients, sizes: gradients[0] * 2,
            "30 and 10 images gave [2. 4.]",
        ),
        (parallelism.weighted_mean, lambda gradients, sizes: gradients[9], "IndexError"),
        (
            parallelism.combined_logits,
            lambda own, rows, bias: right_logits(own, rows, 0),
            "the bias is missing",
        ),
        (
            parallelism.combined_logits,
            lambda own, rows, bias: right_logits(own, rows, bias) / len(own),
            "with 2 workers this is the mean of their parts",
        ),
        (
            parallelism.combined_logits,
            lambda own, rows, bias: right_logits(own[:2], rows[:2], bias),
            "with 3 workers the part of worker 2 is missing",
        ),
        (parallelism.combined_logits, lambda own, rows, bias: own @ rows, "TypeError"),
        (
            parallelism.combined_logits,
            lambda own, rows, bias: sum(a @ b + bias for a, b in zip(own, rows, strict=True)),
            "bias was added 2 times",
        ),
        (
            parallelism.combined_logits,
            lambda own, rows, bias: np.hstack([a @ b for a, b in zip(own, rows, strict=True)]) + bias[0],
            "1 worker",
        ),
        (parallelism.combined_logits, lambda own, rows, bias: own[0] @ rows[0] + bias, "2 workers"),
        (parallelism.data_parallel_megabytes, 1.63, "2(N − 1)/N"),
        (parallelism.data_parallel_megabytes, 4.88, "this counts 8"),
        (parallelism.data_parallel_megabytes, 1.22, "one of the ring's two phases"),
        (parallelism.data_parallel_megabytes, 17, "2(N − 1)/N times 407,050 parameters"),
        (parallelism.data_parallel_megabytes, 2_442_300, "1,000,000 times too large"),
        (parallelism.model_parallel_megabytes, 2.44, "that is the data parallel worker's number"),
        (parallelism.model_parallel_megabytes, 1.06, "keeps a quarter at home"),
        (parallelism.model_parallel_megabytes, 0.4, "that is the forward pass"),
        (parallelism.weight_of_an_image, 1, "divides by 10"),
        (parallelism.weight_of_an_image, 0.333, "the other way round"),
        (parallelism.weight_of_an_image, "three", "no number"),
    ],
)
def test_a_wrong_answer_is_told_what_is_wrong(check, answer, said):
    verdict = check(answer)
    assert verdict.state == "wrong"
    assert said in verdict.text
