"""How fast a device trains: floating-point operations a second of a small GPT's steps, and how near its best that is.

    measure(TrainingJob.load("jobs/measure_gpt_step"))      # here, now
    measured()                                              # what was measured before, with hardware and date

Best is a large matrix product on the same device, timed in turn with the steps. On a CPU rates are by processor
seconds of all threads, so that a busy machine is not taken for a slow one.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import pandas as pd

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.runs import Run
from workshop_utils.scaling import published
from workshop_utils.scaling.compute import training_flops


@dataclass(frozen=True)
class ComputeRate:
    """What steps of a GPT take on one device.

    Attributes:
        parameters: of the model, embeddings included.
        flops: floating-point operations of a step, by `step_flops`.
        seconds: the median step, by the clock.
        flops_per_second: that steps reach; of one thread, on a CPU, while it runs.
        product_flops_per_second: the same of a large matrix product.
        threads: of the CPU.
        device: "cpu" or "cuda".
    """

    parameters: int
    flops: float
    seconds: float
    flops_per_second: float
    product_flops_per_second: float
    threads: int
    device: str

    @property
    def utilisation(self) -> float:
        """Of the large product's rate, the share that steps reach."""
        return self.flops_per_second / self.product_flops_per_second


def step_flops(matrix_parameters: float, layers: int, width: int, sequence: int, batch_size: int) -> float:
    """Floating-point operations of forward and backward pass: (6 N + 12 l s w) for each of b · s tokens.

    N counts what is multiplied by, without embeddings; the second term is attention's scores and sums, masked ones
    included. Source: Chowdhery et al. (2022), "PaLM", appendix B.
    """
    tokens = batch_size * sequence
    return training_flops(matrix_parameters, tokens) + 12 * layers * width * sequence * tokens


def measure(job: TrainingJob) -> ComputeRate:
    """Run `job`, jobs/measure_gpt_step, on this machine.

    Raises:
        RunFailed: if it fails, such as for `--device cuda` without a GPU.
        ValueError: if it has reported no step.
    """
    with Local(warm=True).launch(job) as run:
        return rate_of(job, run.wait())


def rate_of(job: TrainingJob, run: Run) -> ComputeRate:
    """The rate from what such a run has reported. Raises ValueError if it has reported no step."""
    records = [record for record in run.records if "step_seconds" in record]
    if not records:
        raise ValueError(f"{run.name} has reported no step_seconds; steps must be at least 3")
    arguments = job.arguments
    first = records[0]
    names = ("layers", "width", "sequence", "batch-size")
    flops = step_flops(first["matrix_parameters"], *(int(arguments[name]) for name in names))
    clock = "step_seconds" if first["on_gpu"] else "step_processor_seconds"
    middle = {
        name: statistics.median(record[name] for record in records)
        for name in {"step_seconds", clock, "product_flops_per_second"}
    }
    return ComputeRate(
        parameters=int(first["parameters"]),
        flops=flops,
        seconds=middle["step_seconds"],
        flops_per_second=flops / middle[clock],
        product_flops_per_second=middle["product_flops_per_second"],
        threads=int(first["threads"]),
        device="cuda" if first["on_gpu"] else "cpu",
    )


def measured() -> pd.DataFrame:
    """Rates that were measured before: hardware, versions, date, and the columns of `ComputeRate`.

    On CPUs only: no GPU was at hand. For GPUs, `published.UTILISATION` is what large runs have published.
    """
    return published.table("gpt_steps").assign(
        utilisation=lambda rows: rows["flops_per_second"] / rows["product_flops_per_second"]
    )
