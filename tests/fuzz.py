"""Jobs are read for as long as one likes: `make fuzz`, ten minutes, or FUZZ_MINUTES of them.

Whatever a job.yaml holds, it is a job or an error of ours; nothing else may be raised. Hypothesis keeps what it found
under .hypothesis/ and tries it first the next time.
"""

import os
import tempfile
import time
from pathlib import Path

import pytest
import yaml
from conftest import save
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.training.data import DataError

SECONDS = 60 * float(os.environ.get("FUZZ_MINUTES", "10"))
TARGETS = 2
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
            if job.data is None or (":" not in job.data and job.data != "mnist"):  # nothing is fetched here
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


@pytest.mark.parametrize("a_round_of", [fields_of_any_kind, damaged_text])
def test_whatever_a_job_holds_it_is_taken_or_refused(a_round_of):
    deadline, rounds = time.monotonic() + SECONDS / TARGETS, 0
    while time.monotonic() < deadline:
        a_round_of()
        rounds += 1
    print(f"{rounds} rounds of {EXAMPLES} examples")
