"""The job that a scale model launches: four strategies take the very same steps."""

import pytest
from conftest import with_horovod

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.scaling.scale_model import JOB

ARGUMENTS = {"elements": "640,64,1280", "costs": "1,0,3", "batch-size": 32, "learning-rate": 0.5}

pytestmark = pytest.mark.processes


def losses(strategy):
    """By step, the mean over three workers."""
    job = TrainingJob.load(JOB).replace(strategy=strategy, workers=3, arguments=ARGUMENTS)
    with Local(warm=True).launch(job) as run:
        steps = run.wait(200).metrics
    assert set(steps["gradient_nbytes"].dropna()) == {4 * (640 + 64 + 1280 + 650)}
    return steps.groupby("step")["loss"].mean().to_numpy()


@pytest.fixture(scope="module")
def by_ring():
    return losses("ring")


@pytest.mark.parametrize(
    "strategy", [*map(with_horovod, ["workshop_parameter_server", "torch_ddp", "horovod"])]
)
def test_a_model_of_given_layers_takes_the_very_same_steps_by_all_strategies(by_ring, strategy):
    assert len(by_ring) == 6
    assert by_ring[-1] < by_ring[0]  # it learns
    assert losses(strategy) == pytest.approx(by_ring, rel=1e-5)
