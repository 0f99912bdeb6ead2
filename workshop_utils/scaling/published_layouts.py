"""Steps of large models that others have timed in a layout they name, and what `step_time` says of them.

    against_published()            # a row a run: published and predicted FLOP/s a device, and their ratio

Each accelerator's kernel efficiency in data/instances.yaml was fitted to these, one number for an accelerator: for A100
so that the geometric mean of the ratios of Narayanan et al. is about 1, for H100 to the first row of Grattafiori et al.
What the table shows beyond those two numbers is prediction; the rows of torchtitan were fitted to nothing. In the
last of them, a general framework on a slower kind of H100, a device does 1 / 1.4 of what is predicted: read a plan's
times as those of well-tuned code.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pandas as pd

from workshop_utils.scaling.catalogue import Instance, Transformer, instance, model
from workshop_utils.scaling.step_time import step_time
from workshop_utils.scaling.worker_memory import Layout, blocks_of_stages, worker_memory

MEGATRON = "Narayanan et al. (2021b), table 1"
LLAMA = "Grattafiori et al. (2024), table 4"
TORCHTITAN = "torchtitan, docs/performance.md (2024)"
TORCHTITAN_H100 = "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md, table 3"


@dataclass(frozen=True)
class PublishedStep:
    """One run: `batch` sequences in a step; `flops_per_second` a device, of the model's own arithmetic.

    `micro_batch` is None where the source does not say; a run that is not `scored` differs in something that is not
    modelled, which its source names.
    """

    transformer: Transformer
    machine: Instance
    devices: int
    tensor: int
    pipeline: int
    batch: int
    flops_per_second: float
    recompute: str
    source: str
    zero: int = 0
    fused_attention: bool = True
    micro_batch: int | None = None
    scored: bool = True

    @property
    def name(self) -> str:
        """Of the model."""
        return self.transformer.name

    def layouts(self) -> Iterator[Layout]:
        """Those that the source leaves open: the size of micro-batches, and the stages a worker has."""
        data = self.devices // self.tensor // self.pipeline
        sizes = (1, 2, 4, 8, 16) if self.micro_batch is None else (self.micro_batch,)
        for micro_batch, chunks in itertools.product(sizes, (1, 2, 3, 4, 8)):
            microbatches, rest = divmod(self.batch, data * micro_batch)
            uneven = chunks > 1 and (self.pipeline == 1 or microbatches % self.pipeline)
            _, last = blocks_of_stages(self.transformer, self.pipeline, chunks)
            if not rest and not uneven and last >= 1:
                yield Layout(
                    data, self.tensor, self.pipeline, self.zero, micro_batch, microbatches, self.recompute,
                    sequence_parallel=self.fused_attention,  # both came into use between the sources
                    chunks=chunks,
                )  # fmt: skip


# NVIDIA's Selene: 8 A100 of 80 GB and 8 × 200 Gbit/s InfiniBand a machine.
SELENE = instance("p4de.24xlarge").model_copy(
    update={"name": "Selene", "network_bytes_per_second": 200e9, "network_latency_seconds": 10e-6}
)


def _megatron(
    billions: float, width: int, layers: int, heads: int, tensor: int, pipeline: int, devices: int, batch: int,
    teraflops: float,
) -> PublishedStep:  # fmt: skip
    transformer = Transformer(
        name=f"GPT {billions:g} B", layers=layers, width=width, heads=heads, sequence=2048, vocabulary=51_200,
        positions=2048, tied=True, source=MEGATRON,
    )  # fmt: skip
    return PublishedStep(
        transformer, SELENE, devices, tensor, pipeline, batch, teraflops * 1e12, "full", MEGATRON, fused_attention=False
    )  # fmt: skip


def _sharded(
    name: str, machine: Instance, devices: int, micro_batch: int, tokens_per_second: float, recompute: str,
    source: str, scored: bool = True,
) -> PublishedStep:  # fmt: skip
    """Data parallel with everything sharded, one micro-batch a step, of which the source has tokens per second."""
    transformer = model(name)
    return PublishedStep(
        transformer, machine, devices, 1, 1, devices * micro_batch, tokens_per_second * transformer.flops_per_token,
        recompute, source, zero=3, micro_batch=micro_batch, scored=scored,
    )  # fmt: skip


# Slower memory, and a power limit of 500 W that lowers the clock by an amount the source does not know.
SLOW_H100 = instance("p5.48xlarge").model_copy(
    update={
        "name": "Grand Teton",
        "memory_nbytes": 96_000_000_000,
        "memory_bytes_per_second": 2_400_000_000_000,
    }
)
P4DE = instance("p4de.24xlarge")

RUNS = (
    _megatron(1.7, 2304, 24, 24, 1, 1, 32, 512, 137),
    _megatron(3.6, 3072, 30, 32, 2, 1, 64, 512, 138),
    _megatron(7.5, 4096, 36, 32, 4, 1, 128, 512, 142),
    _megatron(18.4, 6144, 40, 48, 8, 1, 256, 1024, 135),
    _megatron(39.1, 8192, 48, 64, 8, 2, 512, 1536, 138),
    _megatron(76.1, 10240, 60, 80, 8, 4, 1024, 1792, 140),
    _megatron(145.6, 12288, 80, 96, 8, 8, 1536, 2304, 148),
    _megatron(310.1, 16384, 96, 128, 8, 16, 1920, 2160, 155),
    _megatron(529.6, 20480, 105, 128, 8, 35, 2520, 2520, 163),
    _megatron(1008.0, 25600, 128, 160, 8, 64, 3072, 3072, 163),
    *(
        PublishedStep(
            model("llama-3.1-405b"), instance("p5.48xlarge"), devices, 8, 16, 2048, teraflops * 1e12, "selective",
            LLAMA, zero=1,
        )
        for devices, teraflops in ((8_192, 430.0), (16_384, 400.0))
    ),
    # Without recomputation, but with a kernel that keeps attention's scores: "selective" here.
    _sharded("llama-2-13b", P4DE, 64, 2, 2_162, "selective", TORCHTITAN),
    _sharded("llama-2-70b", P4DE, 64, 2, 353, "full", TORCHTITAN),
    _sharded("llama-3.1-70b", P4DE, 64, 1, 331, "full", TORCHTITAN),
    # Recomputes about half of all products as well, and runs at a lower clock: shown, not scored.
    _sharded("llama-3.1-8b", SLOW_H100, 128, 2, 6_514, "selective", TORCHTITAN_H100, scored=False),
)  # fmt: skip


def predicted_flops_per_second(run: PublishedStep) -> float:
    """A device's, in the fastest of the layouts that are left open and fit into memory (where any does).

    Counted as the source counts: Narayanan et al. (2021b), equation 3, has arithmetic that full recomputation repeats
    in it, and all of attention.
    """
    times = []
    for layout in run.layouts():
        seconds = step_time(run.transformer, run.machine, layout, fused_attention=run.fused_attention).seconds
        fits = worker_memory(run.transformer, layout).total <= run.machine.memory_nbytes
        times.append((not fits, float(seconds)))
    return _counted_flops(run) / run.devices / min(times)[1]


def _counted_flops(run: PublishedStep) -> float:
    """Of one step."""
    each = run.transformer
    tokens = run.batch * each.sequence
    if run.source != MEGATRON:
        return each.flops_per_token * tokens
    return (
        96 * tokens * each.layers * each.width**2
        * (1 + each.sequence / (6 * each.width) + each.vocabulary / (16 * each.layers * each.width))
    )  # fmt: skip


def against_published() -> pd.DataFrame:
    """All runs: model, devices, tensor, pipeline, published and predicted (FLOP/s a device), ratio, scored, source."""
    rows = []
    for run in RUNS:
        predicted = predicted_flops_per_second(run)
        rows.append(
            (run.name, run.devices, run.tensor, run.pipeline, run.flops_per_second, predicted,
             predicted / run.flops_per_second, run.scored, run.source)
        )  # fmt: skip
    columns = [
        "model",
        "devices",
        "tensor",
        "pipeline",
        "published",
        "predicted",
        "ratio",
        "scored",
        "source",
    ]
    return pd.DataFrame(rows, columns=columns)


def geometric_mean_error(ratios: pd.Series) -> float:
    """exp(mean |log ratio|) − 1: 0.1 is 10 % too high or too low, at the geometric mean."""
    return float(np.exp(np.abs(np.log(ratios)).mean()) - 1)
