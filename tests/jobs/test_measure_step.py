"""The job that measures training steps: four strategies, the very same steps, and counted bytes."""

import functools

import pytest
from launching import launched

from workshop_utils.comm.ring import ring_bytes_sent

WORKERS, STEPS = 3, 12

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def steps():
    arguments = {"width": 16, "layers": 2, "batch_size": 32, "steps": STEPS, "learning_rate": 0.5}
    return {
        strategy: launched("measure_step", workers=WORKERS, strategy=strategy, arguments=arguments).metrics
        for strategy in ("ring", "workshop_parameter_server", "torch_ddp")
    }


def test_all_strategies_take_the_very_same_steps(steps):
    losses = {
        name: table.dropna(subset=["loss"]).groupby("step")["loss"].mean().to_numpy()
        for name, table in steps.items()
    }
    assert len(losses["ring"]) == STEPS
    assert losses["ring"][-3:].mean() < losses["ring"][:3].mean()  # it learns
    for other in ("workshop_parameter_server", "torch_ddp"):
        assert losses[other] == pytest.approx(losses["ring"], rel=1e-5)


def test_the_bytes_of_a_step_are_counted_on_each_worker(steps):
    ring = steps["ring"]
    nbytes = int(ring["gradient_nbytes"].iloc[0])
    assert nbytes == 4 * ((64 + 1) * 16 + (16 + 1) * 16 + (16 + 1) * 10)
    by_step = ring.groupby("step")["bytes_sent"].sum()
    assert by_step.tolist() == pytest.approx([WORKERS * ring_bytes_sent(WORKERS, nbytes)] * STEPS)
    workers = steps["workshop_parameter_server"].dropna(subset=["step_seconds"])
    assert set(workers["bytes_sent"]) == {nbytes}
    assert set(workers["bytes_received"]) == {nbytes + 8}  # and the version of the parameters
    server = steps["workshop_parameter_server"].query("worker == 'server-0'")
    assert server["bytes_received"].tolist() == [STEPS * WORKERS * nbytes]


@pytest.fixture(scope="module")
def losses():
    """Of a model with layers of given sizes: by strategy, the mean of the workers in each step, and the bytes."""

    @functools.cache
    def by(strategy):
        arguments = {"elements": "640,64,1280", "costs": "1,0,3", "batch_size": 32, "learning_rate": 0.5}
        arguments["horovod"] = int(strategy == "horovod")
        steps = launched("measure_step", workers=2, strategy=strategy, arguments=arguments).metrics
        assert set(steps["gradient_nbytes"].dropna()) == {4 * (640 + 64 + 1280 + 650)}
        return steps.dropna(subset=["loss"]).groupby("step")["loss"].mean().to_numpy()

    return by


@pytest.mark.parametrize("strategy", ["workshop_parameter_server", "torch_ddp", "horovod"])
def test_a_model_of_given_layers_takes_the_very_same_steps_by_all_strategies(losses, strategy):
    if strategy == "horovod":
        pytest.importorskip("horovod")
    assert len(losses("ring")) == 6
    assert losses("ring")[-1] < losses("ring")[0]  # it learns
    assert losses(strategy) == pytest.approx(losses("ring"), rel=1e-5)
