"""Workers that change shared parameters themselves: the digits are learnt, and what gets lost is counted."""

from pathlib import Path

import pytest

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunFailed

JOBS = Path(__file__).parents[2] / "jobs"

pytestmark = pytest.mark.slow


def run_of(name, **changes):
    return Local(warm=True).launch(TrainingJob.load(JOBS / name).replace(**changes))


@pytest.mark.parametrize(("locking", "servers"), [("lock", 2), ("none", 1)])
def test_the_digits_are_learnt_in_shared_memory(locking, servers, nothing_is_left):
    run = run_of(
        "digits_parameter_server",
        workers=3,
        parameter_servers=servers,
        arguments={"epochs": 6, "consistency": "asynchronous", "locking": locking, "log-pushes": 1},
    ).wait(120)
    metrics = run.metrics
    assert float(metrics["accuracy"].dropna().iloc[-1]) > 0.85
    ends = metrics.dropna(subset=["staleness_mean"])
    pushes = 3 * 6 * (500 // 32)
    assert ends["step"].tolist() == [pushes] * servers
    assert len(metrics.dropna(subset=["pusher"])) == pushes


@pytest.mark.parametrize("stride", [1, 100])
def test_with_a_lock_nothing_is_lost_and_no_pull_is_overlapped(stride, nothing_is_left):
    arguments = {"locking": "lock", "steps": 300, "stride": stride}
    (record,) = run_of("measure_hogwild", workers=3, arguments=arguments).wait(60).records
    assert record["additions"] == 3 * 300 * 10_000 // stride
    assert (record["lost"], record["overlapped"]) == (0, 0)


def test_without_a_lock_no_more_can_be_lost_than_was_added(nothing_is_left):
    (record,) = run_of("measure_hogwild", workers=3, arguments={"steps": 300}).wait(60).records
    assert 0 <= record["lost"] < record["additions"] == 3 * 300 * 10_000
    assert 0 <= record["overlapped"] <= 1


@pytest.mark.parametrize(
    ("name", "changes", "said"),
    [
        ("measure_hogwild", {"arguments": {"stride": 3}}, "stride is 3; it must divide"),
        ("measure_hogwild", {"arguments": {"steps": 0}}, "steps is 0; it must be at least 1"),
        ("measure_hogwild", {"parameter_servers": 2}, "parameter_servers is 2"),
        ("digits_parameter_server", {"arguments": {"locking": "none"}}, "give consistency 'asynchronous'"),
    ],
)
def test_what_does_not_go_together_is_said_before_anything_is_trained(name, changes, said, nothing_is_left):
    with pytest.raises(RunFailed, match=said):
        run_of(name, **changes).wait(60)
