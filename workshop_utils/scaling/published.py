"""What others measured and published: training runs and curves to compare the workshop's arithmetic with.

The figures are in data/*.csv, each with its source; here they come in SI units. Nothing is fitted in this module: see
`validation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pandas as pd
import yaml

DATA = Path(__file__).parent / "data"

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


@cache
def published_table(name: str) -> pd.DataFrame:
    """data/NAME.csv as it stands: nccl_all_reduce, training_throughput or pipeline_speedups."""
    return pd.read_csv(DATA / f"{name}.csv")


@cache
def reasons() -> dict[str, str]:
    """A sentence on the errors of each system's predictions, by part of its name."""
    return dict(yaml.safe_load((DATA / "reasons.yaml").read_text(encoding="utf-8")))


def published_curves() -> pd.DataFrame:
    """How long NCCL's all-reduce takes by size, and a step of data parallel training by workers: a row a point.

    Returns:
        Columns `system`, with what it ran; `varied`, "nbytes" or "workers", and its `value`, ascending; `measured`, the
        seconds of one all-reduce, or those in which every worker trains one image; `machines` that all-reduced.
    """
    reduces = published_table("nccl_all_reduce").rename(columns={"nbytes": "value", "seconds": "measured"})
    steps = published_table("training_throughput").dropna(subset=["images_per_second"])
    library = steps["strategy"].str.split(" (", regex=False).str[0]
    steps = steps.assign(
        system=library + ", " + steps["model"] + ", " + steps["system"],
        value=steps["workers"],
        measured=steps["workers"] / steps["images_per_second"],
    )
    both = pd.concat([reduces.assign(varied="nbytes"), steps.assign(varied="workers")], ignore_index=True)
    return both[["system", "varied", "value", "measured", "machines"]].astype({"value": float})
