"""Steps of large models: like those that others have timed, and without what a machine does not have."""

import itertools
import math
from pathlib import Path

import numpy as np
import pandas as pd

from workshop_utils.scaling.catalogue import Transformer, instance, model
from workshop_utils.scaling.memory import Layout, blocks_of_stages, worker_memory
from workshop_utils.scaling.step_time import step_time

MACHINES = {
    name: instance(name) for name in ("p4de.24xlarge", "p5.48xlarge")
} | {
    # NVIDIA's own: 8 A100 of 80 GB and 8 × 200 Gbit/s InfiniBand a machine.
    "Selene": instance("p4de.24xlarge").model_copy(
        update={"network_bytes_per_second": 200e9, "network_latency_seconds": 10e-6}
    ),
    # H100 with slower memory, and a power limit of 500 W that lowers the clock by an amount the source does not know.
    "Grand Teton": instance("p5.48xlarge").model_copy(
        update={"memory_nbytes": 96_000_000_000, "memory_bytes_per_second": 2.4e12}
    ),
}  # fmt: skip


def layouts(row, transformer):
    """Those that a source leaves open: the size of micro-batches, and the stages a worker has."""
    data = row.devices // row.tensor // row.pipeline
    sizes = (1, 2, 4, 8, 16) if math.isnan(row.micro_batch) else (int(row.micro_batch),)
    for micro_batch, chunks in itertools.product(sizes, (1, 2, 3, 4, 8)):
        microbatches, rest = divmod(row.batch, data * micro_batch)
        uneven = chunks > 1 and (row.pipeline == 1 or microbatches % row.pipeline)
        if not rest and not uneven and blocks_of_stages(transformer, row.pipeline, chunks)[1] >= 1:
            yield Layout(
                data, row.tensor, row.pipeline, row.zero, micro_batch, microbatches, row.recompute,
                sequence_parallel=isinstance(row.model, str), chunks=chunks,
            )  # fmt: skip


def ratio(row):
    """Predicted over published tokens per second, of the fastest layout that is left open and fits into memory."""
    machine, old = MACHINES[row.machine], not isinstance(row.model, str)
    if old:  # Narayanan et al. (2021b): before sequence parallelism and fused attention; equation 3 counts operations
        l, h = int(row.layers), int(row.width)  # noqa: E741 - as there
        transformer = Transformer(
            name="GPT", layers=l, width=h, heads=int(row.heads), sequence=2048, vocabulary=51_200,
            positions=2048, tied=True,
        )  # fmt: skip
        flops = 96 * l * h**2 * (1 + 2048 / (6 * h) + 51_200 / (16 * l * h))
    else:
        transformer = model(row.model)
        flops = transformer.flops_per_token
    published = row.tokens_per_second if math.isnan(row.teraflops) else row.teraflops * 1e12 / flops
    seconds = [
        (
            worker_memory(transformer, layout).total > machine.memory_nbytes,
            float(step_time(transformer, machine, layout, fused_attention=not old).seconds),
        )
        for layout in layouts(row, transformer)
    ]
    return row.batch * transformer.sequence / row.devices / min(seconds)[1] / published


def test_steps_of_published_runs_are_predicted():
    table = pd.read_csv(Path(__file__).with_name("published_steps.csv"))
    ratios = pd.Series([ratio(row) for row in table.itertuples()])
    # In the last of torchtitan's, a general framework on a slower kind of H100, half of all products are recomputed.
    slower = table["machine"] == "Grand Teton"
    assert 1 < float(ratios[slower].iloc[0]) < 1.5
    assert ratios[~slower].between(0.85, 1.15).all()
    assert np.exp(np.abs(np.log(ratios[~slower])).mean()) < 1.05
    unfitted = table["source"].str.contains("torchtitan") & ~slower
    assert unfitted.sum() == 3
    assert ratios[unfitted].between(0.9, 1.1).all()
