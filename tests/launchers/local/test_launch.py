"""What a launch does once, from its call to the start of its processes."""

from collections import Counter

import pytest

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network.ports import PortReservation
from workshop_utils.ranks import on_ranks
from workshop_utils.strategies import Strategy
from workshop_utils.training import data

pytestmark = pytest.mark.processes

# Its first rank reports a metric.
SCRIPT = """
from workshop_utils import place
from workshop_utils.comm import tcp
with tcp.connect(*place.rendezvous()) as communicator:
    communicator.barrier()
    place.report(step=1, loss=0.5)
"""


@pytest.fixture
def planned(monkeypatch):
    """How often processes were listed and connected, ports reserved and data prepared."""
    counted = Counter()

    def count(owner, name):
        real = getattr(owner, name)

        def counting(*arguments):
            counted[name] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, counting)

    count(Strategy, "connect")
    count(PortReservation, "__init__")
    count(data, "prepare")
    return counted


def test_a_launch_and_a_call_on_ranks_plan_and_reserve_once_and_prepare_what_data_they_name(
    tmp_path, planned
):
    assert on_ranks(2, lambda communicator: communicator.rank).values == [0, 1]
    assert planned == {"connect": 1, "__init__": 1}
    (tmp_path / "train.py").write_text(SCRIPT)
    job = TrainingJob(name="traced", folder=tmp_path, strategy="ring", workers=2, data="digits")
    with Local().launch(job) as run:
        run.wait(60)
    assert planned == {"connect": 2, "__init__": 2, "prepare": 1}
