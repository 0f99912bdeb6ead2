"""The job that measures threads: every combination is reported, and wrong words are not taken."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunFailed

JOB = Path(__file__).parents[2] / "jobs" / "measure_threads"


@pytest.mark.usefixtures("nothing_is_left")
def test_every_width_is_measured_with_every_number_of_threads_in_every_repeat() -> None:
    arguments = {"widths": "8,16", "threads": "1,2", "batch-size": 4, "repeats": 2}
    table = Local().launch(TrainingJob.load(JOB).replace(arguments=arguments)).wait(120).metrics
    found = sorted(map(tuple, table[["width", "threads", "step"]].astype(int).to_numpy().tolist()))
    assert found == [(width, threads, step) for width in (8, 16) for threads in (1, 2) for step in (1, 2)]
    assert (table["samples_per_second"] > 0).all()


@pytest.mark.usefixtures("nothing_is_left")
def test_numbers_of_threads_must_be_numbers_above_zero() -> None:
    for threads in ("0", "many"):
        with pytest.raises(RunFailed, match="threads is"):
            Local().launch(TrainingJob.load(JOB).replace(arguments={"threads": threads})).wait(120)
