"""Real parameter servers receive and send the bytes of the formulas."""

from pathlib import Path

import pytest

from workshop_utils.comm.parameter_server import REQUEST_NBYTES, VERSION_NBYTES, server_bytes_received
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local

JOBS = Path(__file__).parents[2] / "jobs"


@pytest.mark.slow
def test_real_servers_receive_and_send_the_bytes_of_the_formulas():
    job = TrainingJob.load(JOBS / "measure_parameter_server").replace(
        workers=4, parameter_servers=2, arguments={"nbytes": 200_000, "steps": 10}
    )
    ends = Local(warm=True).launch(job).wait(60).metrics.dropna(subset=["bytes_received"])
    pushed = server_bytes_received(
        4, 200_000, 2
    )  # by all workers in a step; they pull as much, and once at the start
    assert set(ends["bytes_received"]) == {10 * pushed + 11 * 4 * REQUEST_NBYTES}
    assert set(ends["bytes_sent"]) == {11 * (pushed + 4 * VERSION_NBYTES)}
