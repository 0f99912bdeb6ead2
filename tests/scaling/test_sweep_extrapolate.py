"""From few workers to many: a sweep whose latency and bandwidth are known is fitted and predicted back."""

import numpy as np
import pandas as pd
import pytest

from workshop_utils.jobs import JobError
from workshop_utils.scaling import extrapolate
from workshop_utils.scaling.cost import Path, all_reduce_seconds, synchronous_server_seconds

PATH = Path(1e-3, 2e7)
COMPUTE = 0.05


def sweep(strategy="ring", workers=(1, 2, 4, 8), sizes=(400_000, 4_000_000), noise=0.0, network="160Mbit"):
    random, rows = np.random.default_rng(0), []
    for nbytes in sizes:
        for count in workers:
            for repeat in range(3):
                if strategy == "workshop_parameter_server":
                    seconds = synchronous_server_seconds(count, nbytes, PATH)
                else:
                    seconds = all_reduce_seconds("ring", count, nbytes, PATH)
                step = COMPUTE + seconds * np.exp(noise * random.standard_normal())
                rows.append(
                    (
                        strategy,
                        count,
                        network,
                        "succeeded",
                        step,
                        COMPUTE,
                        nbytes,
                        64,
                        repeat,
                        1.0,
                        "weak",
                        "",
                    )
                )
    columns = [*extrapolate.NEEDED, "repeat", "run_seconds", "scaling", "reason"]
    return pd.DataFrame(rows, columns=columns)


@pytest.mark.parametrize("strategy", list(extrapolate.COSTS))
def test_latency_and_bandwidth_come_back(strategy):
    found = extrapolate.fit_strategy(sweep(strategy), strategy)
    assert found["latency"] == pytest.approx(1e-3, rel=1e-3)
    assert found["bandwidth"] == pytest.approx(2e7, rel=1e-3)


def test_workers_that_were_held_out_are_predicted():
    table = extrapolate.held_out(sweep(noise=0.02), "ring", [8])
    assert table["workers"].tolist() == [8, 8]
    assert table["error"].abs().max() < 0.1


@pytest.mark.parametrize("strategy", ["ring", "workshop_parameter_server"])
def test_closed_form_and_simulated_clock_say_the_same_of_many(strategy):
    table = extrapolate.predict(sweep(strategy), strategy, [8, 100])
    assert table["workers"].tolist() == [8, 100, 8, 100]
    assert table["simulated_seconds"].to_numpy() == pytest.approx(table["step_seconds"].to_numpy(), rel=0.02)
    assert (table["low"] <= table["step_seconds"] * 1.001).all()
    assert table["efficiency"].to_numpy() + table["communication_share"].to_numpy() == pytest.approx(1)


def test_what_cannot_be_fitted_is_said():
    with pytest.raises(JobError, match="lacks compute_seconds"):
        extrapolate.strategies(sweep().drop(columns="compute_seconds"))
    with pytest.raises(JobError, match="strategies are horovod; known are"):
        extrapolate.strategies(sweep("horovod"))
    with pytest.raises(JobError, match="each has a bandwidth of its own"):
        extrapolate.fit_strategy(pd.concat([sweep(), sweep(network="1Gbit")]), "ring")
    with pytest.raises(JobError, match=r"ring was measured with \[2\] workers; it takes two"):
        extrapolate.fit_strategy(sweep(workers=(1, 2), sizes=(4_000,)), "ring")
    with pytest.raises(JobError, match="no run of ring has 16 workers"):
        extrapolate.held_out(sweep(), "ring", [16])
    with pytest.raises(JobError, match="nothing was measured with 1 worker"):
        extrapolate.predict(sweep(workers=(2, 4)), "ring", [8])
