"""Workers that change shared parameters themselves: the digits are learnt, and what gets lost is counted."""

import pytest
from launching import launched

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("locking", "servers"), [("lock", 2), ("none", 1)])
def test_the_digits_are_learnt_in_shared_memory(locking, servers, nothing_is_left):
    arguments = {"epochs": 6, "consistency": "asynchronous", "locking": locking, "log_pushes": 1}
    changes = {"workers": 3, "parameter_servers": servers, "arguments": arguments}
    metrics = launched("digits_parameter_server", **changes).metrics
    assert float(metrics["accuracy"].dropna().iloc[-1]) > 0.85
    ends = metrics.dropna(subset=["staleness_mean"])
    pushes = 3 * 6 * (500 // 32)
    assert ends["step"].tolist() == [pushes] * servers
    assert len(metrics.dropna(subset=["pusher"])) == pushes


@pytest.mark.parametrize("stride", [1, 100])
def test_with_a_lock_nothing_is_lost_and_no_pull_is_overlapped(stride, nothing_is_left):
    arguments = {"locking": "lock", "steps": 300, "stride": stride}
    (record,) = launched("measure_hogwild", workers=3, arguments=arguments).records
    assert record["additions"] == 3 * 300 * 10_000 // stride
    assert (record["lost"], record["overlapped"]) == (0, 0)


def test_without_a_lock_no_more_can_be_lost_than_was_added(nothing_is_left):
    (record,) = launched("measure_hogwild", workers=3, arguments={"steps": 300}).records
    assert 0 <= record["lost"] < record["additions"] == 3 * 300 * 10_000
    assert 0 <= record["overlapped"] <= 1
