"""What others measured and published: training runs and curves against which the workshop's arithmetic is held.

    for curve in all_reduce_curves() + training_curves():
        curve.name, curve.varied, curve.values, curve.seconds, curve.source

The figures stand in data/*.csv, each with its source; here they come in SI units. Nothing is fitted in this module: see
`validation`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

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


@dataclass(frozen=True)
class Curve:
    """How long one system took, over `varied`.

    Attributes:
        name: the system, and what it ran.
        varied: "nbytes" of an all-reduce, or "workers" of a training run.
        values: of what was varied, ascending.
        seconds: of one all-reduce; or those in which every worker trains one image, so that they are the same for all
            numbers of workers where scaling is perfect.
        source: where it was published.
        machines: that all-reduced, 0 for training.
    """

    name: str
    varied: Literal["nbytes", "workers"]
    values: tuple[float, ...]
    seconds: tuple[float, ...]
    source: str
    machines: int = 0


@cache
def table(name: str) -> pd.DataFrame:
    """data/NAME.csv as it stands: nccl_all_reduce, training_throughput or pipeline_speedups."""
    return pd.read_csv(DATA / f"{name}.csv")


@cache
def reasons() -> dict[str, str]:
    """A sentence on the errors of each system's predictions, by part of its name."""
    return dict(yaml.safe_load((DATA / "reasons.yaml").read_text(encoding="utf-8")))


def all_reduce_curves() -> tuple[Curve, ...]:
    """Times of NCCL's all-reduce by size, one curve a system."""
    return tuple(
        Curve(
            str(system),
            "nbytes",
            tuple(rows["nbytes"].astype(float)),
            tuple(rows["seconds"]),
            _first(rows, "source"),
            int(_first(rows, "machines")),
        )
        for system, rows in table("nccl_all_reduce").groupby("system", sort=False)
    )


def training_curves() -> tuple[Curve, ...]:
    """Times of data parallel training by workers, of the runs whose images per second were published."""
    measured = table("training_throughput").dropna(subset=["images_per_second"])
    return tuple(
        Curve(
            f"{_first(rows, 'strategy').split(' (')[0]}, {model}, {system}",
            "workers",
            tuple(rows["workers"].astype(float)),
            tuple(rows["workers"] / rows["images_per_second"]),
            _first(rows, "source"),
        )
        for (system, model), rows in measured.groupby(["system", "model"], sort=False)
    )


def _first(rows: pd.DataFrame, column: str) -> Any:
    return rows[column].iloc[0]
