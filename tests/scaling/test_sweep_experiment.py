"""Sweeps: what is run, what is kept, and what makes a measurement another one."""

import platform
from itertools import product
from pathlib import Path

import pandas as pd
import pytest

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.scaling import experiment
from workshop_utils.scaling.experiment import Setting, Store, grid, measure_all, missing, parts_of

SCRIPT = """
import argparse
from workshop_utils import place

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1)
parser.add_argument("--batch-size", type=int, default=8)
options = parser.parse_args()
place.here()
if options.width == 13:
    raise SystemExit("thirteen will not do")
for step, seconds in enumerate((9.0, 0.2, 0.4, 0.3), start=1):
    place.report(
        step=step, loss=1 / step, step_seconds=seconds, compute_seconds=seconds / 2,
        communication_seconds=seconds / 4, bytes_sent=100 * options.width, gradient_nbytes=100,
    )
"""


@pytest.fixture
def job(make_job):
    return make_job(SCRIPT, arguments={"batch-size": 8})


STEP_JOB = TrainingJob.load(Path(__file__).parents[2] / "jobs" / "measure_step")


def test_a_grid_has_every_combination_once_a_repeat_and_goes_round():
    settings = grid(STEP_JOB, ["ring", "torch_ddp"], [1, 2], repeats=2, width=[8, 16])
    seen = [(s.job.strategy, s.job.workers, s.job.arguments["width"], s.repeat) for s in settings]
    assert seen == [
        (*each, turn) for turn in (0, 1) for each in product(["ring", "torch_ddp"], [1, 2], [8, 16])
    ]


@pytest.mark.parametrize(("scaling", "batches"), [("weak", [64, 64]), ("strong", [64, 16])])
def test_weak_scaling_keeps_a_worker_s_batch_and_strong_scaling_that_of_all(scaling, batches):
    settings = grid(STEP_JOB, workers=[1, 4], repeats=1, scaling=scaling, batch_size=[64])
    assert [setting.job.arguments["batch-size"] for setting in settings] == batches


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"strategies": ["ring", "single"]}, "strategy 'single' has one worker"),
        ({"networks": ["100Mbit,worker-7=10Mbit"]}, "there is no worker-7 in this job"),
        ({"workers": [3], "scaling": "strong"}, r"batch-size is 64; .* a multiple of 3 workers"),
    ],
)
def test_what_cannot_be_run_is_refused_before_anything_starts(arguments, message):
    with pytest.raises(JobError, match=message):
        grid(STEP_JOB, **{"workers": [2]} | arguments)


def test_a_run_s_row_leaves_out_the_first_step_and_says_where_time_went(job, tmp_path, nothing_is_left):
    table = measure_all(grid(job, workers=[1], repeats=1), Store(tmp_path / "store"))
    (row,) = table.to_dict("records")
    assert (row["state"], row["batch_size"], row["network"]) == ("succeeded", 8, "full speed")
    assert row["step_seconds"] == pytest.approx(0.3)
    parts = ["compute_seconds", "transfer_seconds", "waiting_seconds"]
    assert [row[part] for part in parts] == pytest.approx([0.15, 0.075, 0])
    assert row["samples_per_second"] == pytest.approx(8 / 0.3)
    assert (row["bytes_sent"], row["loss"]) == (100, 0.25)


def test_an_interrupted_sweep_goes_on_where_it_was(job, tmp_path, monkeypatch):
    store, settings = Store(tmp_path / "store"), grid(job, workers=[1], repeats=3)
    launched = []

    class Interrupted(experiment.Local):
        def launch(self, described):
            if len(launched) == 1:
                raise KeyboardInterrupt
            launched.append(described)
            return super().launch(described)

    with monkeypatch.context() as patch:
        patch.setattr(experiment, "Local", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            measure_all(settings, store)
    assert missing(settings, store) == settings[1:]
    table = measure_all(settings, store)
    assert list(table["cached"]) == [True, False, False]
    assert missing(settings, store) == []
    assert list(measure_all(settings[:1], store, fresh=True)["cached"]) == [False]


def test_a_run_that_fails_is_a_row_and_is_tried_again(job, tmp_path):
    store, settings = Store(tmp_path / "store"), grid(job, workers=[1], repeats=1, width=[13, 1])
    table = measure_all(settings, store)
    assert list(table["state"]) == ["failed", "succeeded"]
    assert "thirteen will not do" in table["reason"][0]
    assert missing(settings, store) == settings[:1]


def test_the_key_changes_with_all_that_a_result_depends_on_and_with_nothing_else(job, monkeypatch):
    setting = Setting(job)
    keys = [setting.key()]
    assert Setting(job, scaling="strong").key() == keys[0]
    for changed in ({"arguments": {"width": 2}}, {"environment": {"A": "b"}}, {"data": "mnist"}):
        keys.append(Setting(job.replace(**changed)).key())
    keys.append(Setting(job, repeat=1).key())
    for name in ("machine", "package"):
        with monkeypatch.context() as patch:
            patch.setattr(experiment, name, lambda: "another")
            keys.append(setting.key())
    with (Path(job.data) / "more").open("wb"):
        keys.append(setting.key())
    (Path(job.data) / "more").unlink()
    job.script_path.write_text(SCRIPT + "\nprint('changed')\n", encoding="utf-8")
    keys.append(setting.key())
    assert len(set(keys)) == len(keys) == 9
    assert platform.node() not in experiment.machine()  # a container made again has another


def test_parts_add_up_to_the_slowest_worker_s_step():
    columns = ["step", "step_seconds", "compute_seconds", "communication_seconds"]
    parts = parts_of(pd.DataFrame([(2, 1.0, 0.4, 0.5), (2, 1.1, 0.6, 0.3)], columns=columns))
    assert [float(values.iloc[0]) for values in parts.values()] == pytest.approx([0.5, 0.3, 0.1, 0.2])
