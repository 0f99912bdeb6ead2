"""Where the memory of a training step goes: parameters, gradients, the optimizer's state, activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Optimizer = Literal["sgd", "momentum", "adam"]

# How many numbers an optimizer keeps for each parameter between two steps.
OPTIMIZER_NUMBERS: dict[Optimizer, int] = {
    "sgd": 0,
    "momentum": 1,  # a running sum of gradients
    "adam": 2,  # running means of the gradient and of its square (Kingma and Ba 2015, algorithm 1)
}


@dataclass(frozen=True)
class TrainingMemory:
    """What one worker holds during a step, in bytes."""

    parameters: float
    gradients: float
    optimizer: float
    activations: float = 0

    @property
    def total(self) -> float:
        """All four together. The peak is a little lower: gradients come as activations go."""
        return self.parameters + self.gradients + self.optimizer + self.activations


def training_memory(
    parameters: float, optimizer: Optimizer = "adam", activations: float = 0, bytes_per_number: int = 4
) -> TrainingMemory:
    """What it takes to train `parameters` numbers of `bytes_per_number` each; `activations` in bytes.

    Raises:
        ValueError: if the optimizer is unknown.
    """
    if optimizer not in OPTIMIZER_NUMBERS:
        raise ValueError(f"optimizer is {optimizer!r}; it must be one of {', '.join(OPTIMIZER_NUMBERS)}")
    own = parameters * bytes_per_number
    return TrainingMemory(own, own, OPTIMIZER_NUMBERS[optimizer] * own, activations)


def zero_memory(
    parameters: float,
    workers: int,
    stage: int,
    optimizer: Optimizer = "adam",
    bytes_per_number: int = 4,
) -> TrainingMemory:
    """What each of `workers` holds between two steps where data parallelism is sharded, as `training_memory`.

    Stage 0 shards nothing; 1 the optimizer's state; 2 the gradients too; 3 the parameters too. Source: Rajbhandari et
    al. (2020), section 5.

    Raises:
        ValueError: if the stage or the optimizer is unknown, or there is not at least one worker.
    """
    if stage not in (0, 1, 2, 3):
        raise ValueError(f"stage is {stage}; it must be 0, 1, 2 or 3")
    if workers < 1:
        raise ValueError(f"workers is {workers}; there must be at least 1")
    whole = training_memory(parameters, optimizer, 0, bytes_per_number)
    return TrainingMemory(
        whole.parameters / (workers if stage >= 3 else 1),
        whole.gradients / (workers if stage >= 2 else 1),
        whole.optimizer / (workers if stage >= 1 else 1),
    )


def mlp_activation_nbytes(batch: int, widths: Sequence[int], bytes_per_number: int = 4) -> int:
    """What the forward pass of a multilayer perceptron keeps for the backward pass, in bytes.

    `widths` are the sizes of its hidden layers and of its output. Each hidden layer's rectified values are the next
    layer's input, and kept once; the loss keeps its log-probabilities. The input itself was there before.
    """
    return batch * sum(widths) * bytes_per_number


def mixed_precision_adam(parameters: float) -> TrainingMemory:
    """Adam in mixed precision: 16 bytes a parameter, without activations.

    2 for the parameter and 2 for its gradient in 16 bits, 12 for the optimizer: its two means and the parameter itself
    in 32 bits.

    Source: Rajbhandari et al. (2020), "ZeRO: memory optimizations toward training trillion parameter models",
    section 3.1.
    """
    return TrainingMemory(2 * parameters, 2 * parameters, 12 * parameters)
