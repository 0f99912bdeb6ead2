"""Horovod's timeline, from a file as Horovod writes it."""

import json

import pytest

from workshop_utils.training import horovod_timeline
from workshop_utils.training.horovod_timeline import TimelineSpan


def named(pid, name):
    return {"name": "process_name", "ph": "M", "pid": pid, "args": {"name": name}}


def begin(pid, name, ts):
    return {"ph": "B", "name": name, "ts": ts, "pid": pid}


def end(pid, ts):
    return {"ph": "E", "ts": ts, "pid": pid}


def fused(first, pids, sent=100):
    """The events of gradients that wait 10 µs, are copied in, sent and copied out together."""
    events = [begin(pid, "NEGOTIATE_ALLREDUCE", first + pid) for pid in pids]
    events += [end(pid, first + 10 + pid) for pid in pids]
    events += [begin(pid, "ALLREDUCE", first + 20) for pid in pids]
    now = first + 20
    for name, length in (
        ("MEMCPY_IN_FUSION_BUFFER", 5),
        ("GLOO_ALLREDUCE", sent),
        ("MEMCPY_OUT_FUSION_BUFFER", 5),
    ):
        events += [begin(pid, name, now + pid) for pid in pids]
        now += length
        events += [end(pid, now + pid) for pid in pids]
    return [*events, *(end(pid, now + 9) for pid in pids)]


HEAD = [
    {"name": "process_name", "ph": "M", "pid": 0, "args": {"start_time_since_epoch_in_micros": 17}},
    named(1, "allreduce.2.bias"),
    named(2, "allreduce.2.weight"),
    named(3, "allreduce.0.bias"),
]


@pytest.fixture
def written(tmp_path):
    def write(events):
        path = tmp_path / "timeline.json"
        path.write_text(json.dumps([*HEAD, *events]))
        return path

    return write


def test_activities_have_their_gradient_and_their_times(written):
    spans = horovod_timeline.read_timeline(written([*fused(1000, [1])]))
    assert spans[0] == TimelineSpan("allreduce.2.bias", "NEGOTIATE_ALLREDUCE", 0.0, pytest.approx(10e-6))
    seconds = {span.activity: span.seconds for span in spans[1:]}
    copied = {f"MEMCPY_{way}_FUSION_BUFFER": pytest.approx(5e-6) for way in ("IN", "OUT")}
    assert seconds == copied | {"GLOO_ALLREDUCE": pytest.approx(100e-6), "ALLREDUCE": pytest.approx(119e-6)}


def test_gradients_that_were_packed_together_are_one_message(written):
    together, alone = fused(1000, [1, 2]), fused(1400, [3])
    spans = horovod_timeline.read_timeline(written([*together, *alone]))
    assert horovod_timeline.messages(spans) == [
        ["allreduce.2.bias", "allreduce.2.weight"],
        ["allreduce.0.bias"],
    ]


def test_what_was_under_way_when_recording_began_or_ended_is_left_out(written):
    events = [end(1, 5), *fused(10, [1]), begin(2, "NEGOTIATE_ALLREDUCE", 500)]
    assert {span.tensor for span in horovod_timeline.read_timeline(written(events))} == {"allreduce.2.bias"}


@pytest.mark.parametrize(
    "text", ["", "[", "{}", '{"a": 1}', "[1]", '[{"ph": "B", "ts": 1}]', '[{"no": "phase"}]']
)
def test_a_file_that_is_no_timeline_is_named(text, tmp_path):
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"other\.json is not a timeline of Horovod"):
        horovod_timeline.read_timeline(path)
