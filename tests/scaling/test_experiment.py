"""Sweeps: what is run, what is kept, and what makes a measurement another one."""

import platform
from pathlib import Path

import pandas as pd
import pytest
from conftest import save
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.jobs import JobError
from workshop_utils.network.devices import EmulatedDevice
from workshop_utils.scaling import experiment
from workshop_utils.scaling.experiment import Setting, Store, measure_all, summary

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


def test_a_run_s_row_leaves_out_the_first_step(job, tmp_path, nothing_is_left):
    table = measure_all([Setting(job)], Store(tmp_path / "store"))
    (row,) = table.to_dict("records")
    assert (row["state"], row["batch_size"], row["network"]) == ("succeeded", 8, "full speed")
    assert row["step_seconds"] == pytest.approx(0.3)
    assert row["samples_per_second"] == pytest.approx(8 / 0.3)
    assert row["loss"] == 0.25
    assert row.keys() - {"batch_size"} <= experiment.COLUMNS


@pytest.mark.parametrize("name", ["workers", "run-seconds", "loss", "efficiency"])
def test_an_argument_named_as_a_column_is_refused(name, job):
    with pytest.raises(JobError, match=f"arguments.{name} is 7; the table of measurements has a column"):
        Setting(job.replace(arguments={name: 7}))


def test_two_arguments_of_one_column_are_refused(job):
    with pytest.raises(JobError, match=r"arguments\.batch-size is 8; the table of measurements has a column"):
        Setting(job.replace(arguments={"batch_size": 16}))


def test_words_that_a_script_reports_are_no_number(make_job, tmp_path):
    job = make_job("from workshop_utils import place\nplace.report(1, loss='low', step_seconds=0.5)")
    row = measure_all([Setting(job)], Store(tmp_path / "store")).iloc[0]
    assert (row["state"], row["step_seconds"]) == ("succeeded", 0.5)
    assert pd.isna(row["loss"])


def test_an_argument_named_device_is_refused_only_where_one_is_emulated(job):
    job = job.replace(arguments={"device": "cpu"})
    assert Setting(job).described()["device"] == "cpu"
    with pytest.raises(JobError, match=r"arguments\.device is 'cpu'"):
        Setting(job, device=EmulatedDevice(seconds="400ms"))


def test_an_interrupted_sweep_goes_on_where_it_was(job, tmp_path, monkeypatch):
    store, settings = Store(tmp_path / "store"), [Setting(job, repeat=repeat) for repeat in range(3)]
    launched = []

    class Interrupted(experiment.Local):
        def launch(self, described):
            launched.append(described)
            if len(launched) == 2:
                raise KeyboardInterrupt
            return super().launch(described)

    monkeypatch.setattr(experiment, "Local", Interrupted)
    with pytest.raises(KeyboardInterrupt):
        measure_all(settings, store)
    table = measure_all(settings, store)
    assert len(launched) == 4  # the first one is kept, the second begun again
    assert measure_all(settings, store).equals(table)
    assert len(launched) == 4


def test_a_run_that_fails_is_a_row_and_is_tried_again(job, tmp_path):
    store = Store(tmp_path / "store")
    settings = [Setting(job.replace(arguments={"width": width})) for width in (13, 1)]
    table = measure_all(settings, store)
    assert list(table["state"]) == ["failed", "succeeded"]
    assert "thirteen will not do" in table["reason"][0]
    assert [store.get(setting.key()) is None for setting in settings] == [True, False]


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


def run(workers, speed, **more):
    return {"workers": workers, "state": "succeeded", "samples_per_second": speed} | more


def test_efficiency_is_by_medians_over_the_speed_with_the_fewest_workers():
    rows = summary(pd.DataFrame([*(run(4, speed) for speed in (3.1, 3.2, 9.0)), run(1, 1.0)]))
    assert rows["samples_per_second"].tolist() == [1.0, 3.2]
    assert rows["efficiency"].tolist() == pytest.approx([1.0, 0.8])
    steps = pd.DataFrame([run(workers, 0.0, step_seconds=workers / 2) for workers in (1, 2)])
    assert summary(steps)["efficiency"].tolist() == [1, 0.5]


def test_failed_runs_are_left_out_and_a_table_of_nothing_else_is_refused():
    table = pd.DataFrame([run(1, 1.0), run(2, float("nan"), state="failed")])
    assert summary(table)["workers"].tolist() == [1]
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


def test_measure_says_how_a_job_scales_and_what_failed(make_job, monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))
    job = make_job(SCRIPT, strategy="torch_ddp")
    save(job)

    def measure(width):
        words = ["scaling", "measure", str(job.folder), "--workers", "1,2", "-a", f"width={width}"]
        return CliRunner().invoke(cli.app, [*words, "--repeats", "1"])

    result = measure(2)
    assert result.exit_code == 0, result.output
    *_, head, one, two = (line.split() for line in result.stdout.splitlines())
    assert (head[0], head[-1], one[0], two[0], two[-1]) == ("workers", "efficiency", "1", "2", "1.0")
    result = measure(13)
    assert result.exit_code == 1
    assert "2 workers: " in result.stdout
    assert "thirteen will not do" in result.stdout
