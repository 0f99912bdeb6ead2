"""What others measured and published: training runs and curves to compare the workshop's arithmetic with.

The figures are in data/*.csv, each with its source; here they come in SI units. Nothing is fitted in this module: see
`validation`.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

DATA = Path(__file__).parent / "data"

# Peak of dense bfloat16 products with float32 sums, in floating-point operations a second, by NVIDIA's data sheets for
# the SXM modules: the H100's gives twice as much, with sparsity.
PEAK_FLOPS_PER_SECOND = {"A100": 312e12, "H100": 989e12}

# The part of the peak that a large run reaches: 38 to 43 % for Llama 3 405B (Grattafiori et al. 2024, table 4).
UTILISATION = 0.4


# A series without a first point of its own: that of the same device, batch and page.
SAME_DEVICE = {
    f"pascal-25g-{model}-512": f"pascal-25g-{model}-tcp" for model in ("vgg16", "resnet101", "inception_v3")
}


@cache
def published_table(name: str) -> pd.DataFrame:
    """data/NAME.csv as it stands: nccl_all_reduce, scaling_series, throughputs, training_runs or weak_scaling."""
    return pd.read_csv(DATA / f"{name}.csv")


# Of language models; `device_hours` is the sum over all devices.
TRAINING_RUNS: tuple[Any, ...] = tuple(
    published_table("training_runs").itertuples(index=False, name="TrainingRun")
)


def published_curves() -> pd.DataFrame:
    """How long NCCL's all-reduce takes, a row a point: system, machines, bytes as `value`, `measured` seconds."""
    reduces = published_table("nccl_all_reduce").rename(columns={"nbytes": "value", "seconds": "measured"})
    return reduces[["system", "value", "measured", "machines"]].astype({"value": float})


def scaling_series() -> pd.DataFrame:
    """Published throughput over machines, a row a point; where `emulated_as` is empty, too little is known to predict.

    Columns: series, model, devices, machines, devices_a_machine, batch of a device, throughput, efficiency over one
    device, strategy and source as published; then what a prediction takes, none of it from the series beyond its first
    row: device, link_gbit, inner_gbit; `reached`, the part of a link that the same library got in a microbenchmark
    (sources: data/clusters.yaml); and one_device, examples a second.
    """
    rows = published_table("scaling_series")
    single = rows[rows["devices"] == 1].set_index("series")["throughput"]
    return rows.assign(one_device=rows["series"].replace(SAME_DEVICE).map(single))
