"""Floating-point operations of a GPT's step, here and as they were measured before."""

from pathlib import Path

import pytest

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.parallel.gpt import GPT, GPTSizes
from workshop_utils.runs import RunFailed
from workshop_utils.scaling import compute_rate

JOB = TrainingJob.load(Path(__file__).parents[2] / "jobs" / "measure_gpt_step")
TINY = {"layers": 1, "width": 16, "heads": 2, "sequence": 8, "batch-size": 2, "steps": 4, "product-size": 64}


def test_flops_are_six_a_parameter_and_token_and_attention_s():
    assert compute_rate.step_flops(1e6, layers=0, width=1, sequence=8, batch_size=2) == 6 * 1e6 * 16
    more = compute_rate.step_flops(0, layers=2, width=32, sequence=8, batch_size=2)
    assert more == 12 * 2 * 32 * 8 * 16


@pytest.mark.slow
def test_a_step_is_measured_here_beside_a_matrix_product():
    rate = compute_rate.measure(JOB.replace(arguments={**TINY, "device": "cpu"}))
    model = GPT(GPTSizes(layers=1, width=16, heads=2, sequence=8))
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert rate.parameters == parameters
    assert rate.flops == compute_rate.step_flops(parameters - (256 + 8) * 16, 1, 16, 8, 2)
    assert (rate.device, rate.threads) == ("cpu", 1)
    assert rate.seconds > 0
    assert rate.utilisation == pytest.approx(rate.flops_per_second / rate.product_flops_per_second)


@pytest.mark.slow
def test_where_there_is_no_gpu_asking_for_one_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    job = JOB.replace(arguments={**TINY, "device": "cuda"})
    with Local(warm=True).launch(job) as run, pytest.raises(RunFailed):
        run.wait()
    assert "device is cuda, and PyTorch finds no GPU here" in "\n".join(line.text for line in run.logs())


def test_a_run_without_steps_is_refused():
    class Empty:
        name, records = "made up", ()

    with pytest.raises(ValueError, match="made up has reported no step_seconds"):
        compute_rate.rate_of(JOB, Empty())


def test_measured_rates_come_with_hardware_versions_and_date():
    table = compute_rate.measured()
    assert len(table) == 6
    assert table[["hardware", "pytorch", "date"]].notna().all(axis=None)
    assert set(table["device"]) == {"cpu"}  # no GPU was at hand
    assert table["utilisation"].between(0, 1).all()
    for row in table.to_dict("records"):
        looked_up = (256 + row["sequence"]) * row["width"]
        sizes = (row[name] for name in ("layers", "width", "sequence", "batch_size"))
        assert row["flops"] == compute_rate.step_flops(row["parameters"] - looked_up, *sizes)
    # Larger matrices use the processor better.
    assert (table.groupby("dtype")["utilisation"].diff().dropna() > 0).all()
