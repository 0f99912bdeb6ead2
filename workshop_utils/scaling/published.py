"""What others measured and published: training runs against which the workshop's arithmetic is held."""

from __future__ import annotations

from dataclasses import dataclass

# Peak of dense bfloat16 products with float32 sums, in floating-point operations a second, as NVIDIA's data sheets
# give them for the SXM modules.
PEAK_FLOPS_PER_SECOND = {"A100": 312e12, "H100": 989e12}

# The part of the peak that a large run reaches: 38 to 43 % for Llama 3 405B (Grattafiori et al. 2024, table 4).
UTILISATION = 0.4


@dataclass(frozen=True)
class TrainingRun:
    """One published training run of a language model. `device_hours` is the sum over all devices."""

    name: str
    parameters: float
    tokens: float
    device: str
    device_hours: float
    source: str


TRAINING_RUNS = (
    TrainingRun("LLaMA 7B", 6.7e9, 1.0e12, "A100", 82_432, "Touvron et al. (2023), tables 2 and 15"),
    TrainingRun("LLaMA 13B", 13.0e9, 1.0e12, "A100", 135_168, "Touvron et al. (2023), tables 2 and 15"),
    TrainingRun("LLaMA 65B", 65.2e9, 1.4e12, "A100", 1_022_362, "Touvron et al. (2023), tables 2 and 15"),
    TrainingRun("BLOOM 176B", 176.2e9, 366e9, "A100", 1_082_990, "Le Scao et al. (2022), section 3"),
    TrainingRun(
        "Llama 3.1 405B", 405e9, 15.6e12, "H100", 30.84e6, "Grattafiori et al. (2024); Meta's model card"
    ),
)
