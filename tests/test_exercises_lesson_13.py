"""The checks of lesson 13."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from workshop_utils.exercises import torchx_and_trainium as exercises

NEURON, EFA = "aws.amazon.com/neuron", "vpc.amazonaws.com/efa"


def test_a_step_of_two_nodes_has_32768_sequences() -> None:
    assert exercises.sequences_of_a_step(32768).state == "right"
    assert exercises.sequences_of_a_step(...).state == "not yet"


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (512, "one rank's part"),
        (1024, "one forward pass of all ranks"),
        (16384, "a chip has two ranks"),
        (64, "2 nodes × 32 ranks × 16"),
    ],
)
def test_a_step_of_another_size_is_told_what_it_counts(answer: int, said: str) -> None:
    verdict = exercises.sequences_of_a_step(answer)
    assert (verdict.state, said in verdict.text) == ("wrong", True)


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({"aws.amazon.com/neurondevice": 16}, "dropped in 2.20"),
        ({"aws.amazon.com/neuroncore": 32, EFA: 16}, "for several pods that share it"),
        ({NEURON: 16}, f"{EFA} is missing"),
        ({EFA: 16}, f"{NEURON} is missing"),
        ({NEURON: 32, EFA: 16}, "it counts chips"),
        ({NEURON: 16, EFA: 8}, "twice the eight"),
        ({NEURON: 16, EFA: 16, "nvidia.com/gpu": 1}, "nvidia.com/gpu: no node"),
        (16, "an amount for each resource"),
    ],
)
def test_wrong_limits_are_told_what_they_would_do(limits: Any, said: str) -> None:
    verdict = exercises.limits_of_a_pod(limits)
    assert (verdict.state, said in verdict.text) == ("wrong", True)


@pytest.mark.parametrize(
    "limits", [{NEURON: 16, EFA: 16}, {NEURON: "16", EFA: "16", "cpu": 120, "memory": "480Gi"}]
)
def test_the_limits_of_a_whole_machine_are_right(limits: dict[str, Any]) -> None:
    assert exercises.limits_of_a_pod(limits).state == "right"


def in_place(tokens: np.ndarray, chosen: np.ndarray, luck: np.ndarray, others: np.ndarray) -> np.ndarray:
    tokens[chosen] = 4
    return tokens


def always(tokens: np.ndarray, chosen: np.ndarray, luck: np.ndarray, others: np.ndarray) -> np.ndarray:
    seen = tokens.copy()
    seen[chosen] = 4
    return seen


def everywhere(tokens: np.ndarray, chosen: np.ndarray, luck: np.ndarray, others: np.ndarray) -> np.ndarray:
    return np.full_like(tokens, 4)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (in_place, "change a copy"),
        (always, "position 3 has luck 0.85, so it must be the other token, 91; it gave 4"),
        (everywhere, "position 0 was not chosen"),
        (lambda tokens, *_: tokens[:2], "shape (2,)"),
    ],
)
def test_wrong_masks_are_told_where(function: Callable[..., Any], said: str) -> None:
    verdict = exercises.hide(function)
    assert (verdict.state, said in verdict.text) == ("wrong", True)
