"""What comes from outside is read for as long as one likes: `make fuzz`, ten minutes, or FUZZ_MINUTES of them.

Whatever a job.yaml holds, it is a job or an error of ours; whatever comes in on a link, it is the message that is due
or a CommunicationError. Nothing else may be raised, nothing may hang. Hypothesis keeps what it found under
.hypothesis/ and tries it first the next time.
"""

import os
import socket
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import yaml
from conftest import save
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from workshop_utils.comm import control, frames
from workshop_utils.comm.communicator import CommunicationError
from workshop_utils.comm.tcp import TcpCommunicator
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.training.data import DataError

SECONDS = 60 * float(os.environ.get("FUZZ_MINUTES", "10"))
TARGETS = 4
JOBS = sorted((Path(__file__).parents[1] / "jobs").glob("*/job.yaml"))
EXAMPLES = 300  # in one round; rounds follow each other until the time is over

a_round = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=30),
    st.dates(),
    st.binary(max_size=8),
)
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(scalars, inner), max_leaves=8
)
fields = st.sampled_from(sorted(TrainingJob.model_fields)) | st.text(max_size=12)


def is_a_job_or_a_job_error(content):
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "train.py").write_text("")
        (Path(folder) / "job.yaml").write_bytes(content)
        try:
            job = TrainingJob.load(folder)
            if ":" not in job.data and job.data != "mnist":  # nothing is fetched here
                str(Local().render(job))
        except (JobError, DataError):
            event("refused")
        else:
            event("taken")
            save(job)
            assert TrainingJob.load(folder) == job


@a_round
@given(st.dictionaries(fields, values, max_size=8), st.sampled_from(JOBS))
def fields_of_any_kind(changes, path):
    content = {**yaml.safe_load(path.read_text()), **changes}
    is_a_job_or_a_job_error(
        yaml.safe_dump(content, allow_unicode=True, sort_keys=False).encode("utf-8", "surrogatepass")
    )


pieces = st.binary(max_size=3) | st.sampled_from(
    [b"\t", b"&a ", b"*a", b"!!python/object:os.system ", b"{", b"- ", b": ", b"'"]
)
damages = st.tuples(st.integers(0, 600), st.integers(0, 9), pieces)


@a_round
@given(st.sampled_from(JOBS), st.lists(damages, min_size=1, max_size=12))
def damaged_text(path, changes):
    content = bytearray(path.read_bytes())
    for start, length, piece in changes:
        content[start : start + length] = piece
    is_a_job_or_a_job_error(bytes(content))


headers = st.binary(min_size=frames.HEADER.size, max_size=frames.HEADER.size) | st.builds(
    frames.HEADER.pack,
    st.just(frames.MAGIC),
    st.sampled_from([b"", b"ring_all_reduce"]) | st.binary(max_size=32),
    st.sampled_from([b"float32", b"float64"]) | st.binary(max_size=16),
    st.integers(0, 2**32 - 1),
    st.integers(0, 2**64 - 1),
    st.integers(0, 2**64 - 1),
)


reports = st.builds(
    control._FRAME.pack,
    st.sampled_from([control._ASK, control._WAITS, control._ABORT]),
    st.integers(0, 2**32 - 1),
    st.integers(0, 255),
    st.integers(0, 65535),
)


@a_round
@given(headers, st.binary(max_size=64))
def bytes_on_a_data_link(header, payload):
    due = np.zeros(3, np.float32)
    raised = received(lambda communicator: communicator.recv(1, due), data=header + payload)
    expected = frames.message("", 1, due)
    whole = header == expected and len(payload) >= due.nbytes
    assert isinstance(raised, CommunicationError) != whole, raised


@a_round
@given(st.lists(reports | st.binary(max_size=40), max_size=3), st.binary(max_size=64))
def bytes_on_a_control_link(frames_sent, rest):
    raised = received(
        lambda communicator: communicator.recv(1, np.zeros(3, np.float32)),
        control=b"".join(frames_sent) + rest,
    )
    assert isinstance(raised, CommunicationError), raised


def received(program, data=b"", control=b""):
    """What `program` raises at rank 0 of two when rank 1 sends these bytes and then leaves."""
    pairs = [socket.socketpair(), socket.socketpair()]
    communicator = TcpCommunicator(0, 2, {1: pairs[0][0]}, {1: pairs[1][0]}, timeout_seconds=1.0)
    raised = []

    def run():
        try:
            program(communicator)
        except BaseException as error:  # whatever it is, the property judges it
            raised.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    for (_, theirs), content in zip(pairs, (control, data), strict=True):
        try:
            theirs.sendall(content)
        except OSError:
            event("left before it had read all")
        theirs.close()
    thread.join(20)
    assert not thread.is_alive(), "it hangs"
    communicator.close()
    for own, _ in pairs:
        own.close()
    return raised[0] if raised else None


@pytest.mark.parametrize(
    "a_round_of", [fields_of_any_kind, damaged_text, bytes_on_a_data_link, bytes_on_a_control_link]
)
def test_what_comes_from_outside_is_taken_or_refused(a_round_of):
    deadline, rounds = time.monotonic() + SECONDS / TARGETS, 0
    while time.monotonic() < deadline:
        a_round_of()
        rounds += 1
    print(f"{rounds} rounds of {EXAMPLES} examples")
