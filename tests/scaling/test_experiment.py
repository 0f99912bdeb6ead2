"""Sweeps: what is run, what is kept, and what makes a measurement another one."""

import platform
import re
from itertools import product
from pathlib import Path

import pandas as pd
import pytest
from conftest import save
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.scaling import experiment
from workshop_utils.scaling.experiment import Setting, Store, grid, measure_all, missing, summary
from workshop_utils.scaling.scale_model import JOB

pytestmark = pytest.mark.processes

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
    place.report(step=step, loss=options.width / step, step_seconds=seconds)
"""


@pytest.fixture
def job(make_job):
    return make_job(SCRIPT, arguments={"batch-size": 8})


STEP_JOB = TrainingJob.load(JOB)


def test_a_grid_has_every_combination_once_a_repeat_and_goes_round():
    settings = grid(STEP_JOB, ["ring", "torch_ddp"], [1, 2], repeats=2, batch_size=[8, 16])
    seen = [(s.job.strategy, s.job.workers, s.job.arguments["batch-size"], s.repeat) for s in settings]
    assert seen == [
        (*each, turn) for turn in (0, 1) for each in product(["ring", "torch_ddp"], [1, 2], [8, 16])
    ]
    with pytest.raises(JobError, match="there is no worker-7 in this job"):
        grid(STEP_JOB, workers=[2], networks=["100Mbit,worker-7=10Mbit"])


def test_a_run_s_row_leaves_out_the_first_step(job, tmp_path, nothing_is_left):
    table = measure_all(grid(job, workers=[1], repeats=1), Store(tmp_path / "store"))
    (row,) = table.to_dict("records")
    assert (row["state"], row["batch_size"], row["network"]) == ("succeeded", 8, "full speed")
    assert row["step_seconds"] == pytest.approx(0.3)
    assert row["samples_per_second"] == pytest.approx(8 / 0.3)
    assert row["loss"] == 0.25


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


def run(strategy, workers, speed, **more):
    row = {"strategy": strategy, "workers": workers, "network": "100Mbit", "state": "succeeded", "reason": ""}
    return row | {"samples_per_second": speed, "repeat": 0} | more


def test_efficiency_is_by_medians_over_the_fastest_strategy_with_the_fewest_workers_and_the_same_sizes():
    runs = [run("ring", 4, speed, width=8) for speed in (3.1, 3.2, 9.0)]
    others = run("ring", 1, 1.0, width=8), run("servers", 1, 0.5, width=8), run("ring", 4, 1.0, width=16)
    rows = summary(pd.DataFrame([*runs, *others]))
    assert rows["samples_per_second"].tolist() == [3.2, 1.0, 0.5, 1.0]
    assert rows["efficiency"].tolist() == pytest.approx([0.8, 1.0, 0.5, 1.0])
    steps = pd.DataFrame([run("ring", workers, 0.0, step_seconds=workers / 2) for workers in (1, 2)])
    assert summary(steps)["efficiency"].tolist() == [1, 0.5]


def test_failed_runs_are_left_out_and_named_and_a_table_of_nothing_else_is_refused():
    failed = run("ring", 2, float("nan"), state="failed", reason="worker-1 was killed")
    table = pd.DataFrame([run("ring", 1, 1.0), failed])
    assert summary(table)["workers"].tolist() == [1]
    assert experiment.failures(table) == ["ring with 2: worker-1 was killed"]
    with pytest.raises(JobError, match="no run has succeeded and said how fast it was"):
        summary(table[1:])


# What is kept: whole or not at all


@pytest.fixture
def store(tmp_path):
    return Store(tmp_path / "measurements")


def test_a_damaged_file_counts_as_missing(store):
    store.put("a", pd.DataFrame({"workers": [1]}))
    path = store.folder / "a.parquet"
    path.write_bytes(path.read_bytes()[:20])
    assert store.get("a") is None


def test_an_interrupt_while_writing_leaves_what_was_there_and_nothing_else(store, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    store.put("a", pd.DataFrame({"workers": [1]}))
    monkeypatch.setattr(pd.DataFrame, "to_parquet", interrupted)
    with pytest.raises(KeyboardInterrupt):
        store.put("a", pd.DataFrame({"workers": [2]}))
    assert store.get("a")["workers"].tolist() == [1]
    assert [path.name for path in store.folder.iterdir()] == ["a.parquet"]


# From the command line


def command(*words):
    result = CliRunner().invoke(cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


def test_measure_writes_a_table_and_says_what_was_measured_before(make_job, monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))
    job, output = make_job(SCRIPT), tmp_path / "t.parquet"
    save(job)
    words = f"scaling measure {job.folder} --workers 1 -a width=1,2 --repeats 2 --output {output}".split()
    planned = command(*words, "--dry-run")
    assert planned.startswith("4 runs, 0 of them measured before")
    assert len(re.findall(r"strategy=single .* width=", planned)) == 4
    assert not output.exists()
    command(*words)
    measured = pd.read_parquet(output)
    assert sorted(measured["width"]) == [1, 1, 2, 2]
    assert measured.groupby("width")["loss"].first().tolist() == [0.25, 0.5]
    assert command(*words).startswith("4 runs, 4 of them measured before")
