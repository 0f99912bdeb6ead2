"""From few workers to many: a sweep whose latency and bandwidth are known is fitted and predicted back."""

import pandas as pd
import pytest

from workshop_utils.comm.topology import Link
from workshop_utils.jobs import JobError
from workshop_utils.scaling.extrapolate import COSTS, fit_steps, held_out, predict_steps, swept

PATH = Link(1e-3, 2e7)


def sweep(strategy="ring", workers=(1, 2, 4, 8), sizes=(400000, 4000000), network="160Mbit"):
    grid = pd.DataFrame({"workers": workers}).merge(pd.DataFrame({"gradient_nbytes": sizes}), how="cross")
    return grid.assign(
        strategy=strategy, network=network, state="succeeded", reason="", scaling="weak", batch_size=64, repeat=0,
        run_seconds=1.0, compute_seconds=0.05,
        step_seconds=0.05 + COSTS[strategy](grid["workers"], grid["gradient_nbytes"], PATH),
    )  # fmt: skip


@pytest.mark.parametrize("strategy", list(COSTS))
def test_latency_and_bandwidth_come_back_and_both_ways_to_predict_say_the_same_of_many(strategy):
    runs = sweep(strategy)
    found = fit_steps(runs)
    assert found["latency"] == pytest.approx(1e-3, rel=1e-3)
    assert found["bandwidth"] == pytest.approx(2e7, rel=1e-3)
    table = predict_steps(runs, [8, 100])
    assert table["workers"].tolist() == [8, 100, 8, 100]
    assert table["simulated_seconds"].to_numpy() == pytest.approx(table["step_seconds"].to_numpy(), rel=0.02)
    assert (table["low"] <= table["step_seconds"] * 1.001).all()
    assert table["efficiency"].to_numpy() + table["communication_share"].to_numpy() == pytest.approx(1)


def test_workers_that_were_held_out_are_predicted_by_a_fit_that_has_not_seen_them():
    runs = sweep()
    runs.loc[runs["workers"] == 8, "step_seconds"] += 0.1
    table = held_out(runs, [8])
    assert table["workers"].tolist() == [8, 8]
    assert (table["measured"] - table["predicted"]).to_numpy() == pytest.approx(0.1, rel=1e-3)
    assert (table["error"] < 0).all()


def test_each_network_has_a_fit_of_its_own():
    found = swept(pd.concat([sweep(), sweep(network="1Gbit"), sweep("torch_ddp")]))
    assert [names for names, _ in found] == [("ring", "160Mbit"), ("ring", "1Gbit"), ("torch_ddp", "160Mbit")]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: swept(sweep().drop(columns="compute_seconds")), "lacks compute_seconds"),
        (lambda: swept(sweep().assign(strategy="horovod")), "strategies are horovod; known are"),
        (lambda: fit_steps(sweep(workers=(1, 2), sizes=(4_000,))), r"ring was measured with \[2\] workers"),
        (lambda: held_out(sweep(), [16]), "no run has 16 workers"),
        (lambda: predict_steps(sweep(workers=(2, 4)), [8]), "nothing was measured with 1 worker"),
    ],
)
def test_what_cannot_be_predicted_is_said(call, message):
    with pytest.raises(JobError, match=message):
        call()
