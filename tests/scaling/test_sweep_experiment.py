"""Sweeps: what is run, what is kept, and what makes a measurement another one."""

import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.network import Network
from workshop_utils.scaling import experiment, identity
from workshop_utils.scaling.experiment import Setting, grid, measure_all, missing, short
from workshop_utils.scaling.rows import parts_of
from workshop_utils.scaling.store import Store

JOBS = Path(__file__).parents[2] / "jobs"

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


@pytest.fixture
def step_job():
    return TrainingJob.load(JOBS / "measure_step")


def test_a_grid_has_every_combination_once_a_repeat_and_goes_round(step_job):
    settings = grid(step_job, ["ring", "torch_ddp"], [1, 2], repeats=2, width=[8, 16])
    seen = [(s.repeat, s.job.strategy, s.job.workers, s.job.arguments["width"]) for s in settings]
    assert len(seen) == len(set(seen)) == 2 * 2 * 2 * 2
    assert [repeat for repeat, *_ in seen] == [0] * 8 + [1] * 8


def test_weak_scaling_keeps_a_worker_s_batch_and_strong_scaling_that_of_all(step_job):
    weak = grid(step_job, workers=[1, 4], repeats=1, batch_size=[64])
    strong = grid(step_job, workers=[1, 4], repeats=1, scaling="strong", batch_size=[64])
    assert [setting.job.arguments["batch-size"] for setting in weak] == [64, 64]
    assert [setting.job.arguments["batch-size"] for setting in strong] == [64, 16]


def test_a_batch_that_the_workers_cannot_share_is_refused(step_job):
    with pytest.raises(JobError, match=r"batch-size is 64; .* a multiple of 3 workers"):
        grid(step_job, workers=[3], scaling="strong")


def test_strong_scaling_of_a_job_without_a_batch_is_refused():
    with pytest.raises(JobError, match="no argument batch-size"):
        grid(TrainingJob.load(JOBS / "measure_all_reduce"), scaling="strong")


def test_what_cannot_be_run_is_refused_before_anything_starts(step_job):
    with pytest.raises(JobError, match="strategy 'single' has one worker"):
        grid(step_job, ["ring", "single"], workers=[2])
    with pytest.raises(JobError, match="repeats is 0"):
        grid(step_job, repeats=0)
    with pytest.raises(JobError, match="there is no worker-7 in this job"):
        grid(step_job, workers=[2], networks=["100Mbit,worker-7=10Mbit"])


def test_a_run_s_row_leaves_out_the_first_step_and_says_where_time_went(job, tmp_path, nothing_is_left):
    table = measure_all(grid(job, workers=[1], repeats=1), Store(tmp_path / "store"))
    (row,) = table.to_dict("records")
    assert (row["state"], row["strategy"], row["batch_size"], row["network"]) == (
        "succeeded", "single", 8, "full speed",
    )  # fmt: skip
    assert row["step_seconds"] == pytest.approx(0.3)
    assert (row["step_seconds_low"], row["step_seconds_high"]) == (pytest.approx(0.25), pytest.approx(0.35))
    assert row["compute_seconds"] == pytest.approx(0.15)
    assert row["transfer_seconds"] == pytest.approx(0.075)
    assert row["waiting_seconds"] == pytest.approx(0)
    assert row["samples_per_second"] == pytest.approx(8 / 0.3)
    assert row["bytes_sent"] == 100
    assert not row["cached"]


def test_what_was_measured_is_not_measured_again_unless_fresh(job, tmp_path):
    store, settings = Store(tmp_path / "store"), grid(job, workers=[1], repeats=2)
    first = measure_all(settings, store)
    again = measure_all(settings, store)
    assert list(again["cached"]) == [True, True]
    pd.testing.assert_frame_equal(first.drop(columns="cached"), again.drop(columns="cached"))
    assert list(measure_all(settings[:1], store, fresh=True)["cached"]) == [False]


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


def test_a_run_that_fails_is_a_row_and_is_tried_again(job, tmp_path):
    store, settings = Store(tmp_path / "store"), grid(job, workers=[1], repeats=1, width=[13, 1])
    table = measure_all(settings, store)
    assert list(table["state"]) == ["failed", "succeeded"]
    assert "thirteen will not do" in table["reason"][0]
    assert missing(settings, store) == settings[:1]


def test_the_key_changes_with_all_that_a_result_depends_on_and_with_nothing_else(job, monkeypatch):
    setting = Setting(job)
    key = setting.key()
    assert Setting(job, scaling="strong").key() == key
    others = [
        Setting(job, repeat=1),
        Setting(job.replace(arguments={"width": 2})),
        Setting(job.replace(environment={"A": "b"})),
        Setting(job.replace(data="mnist")),
    ]
    if experiment.Network(bandwidth="1Mbit") and _can_emulate():
        others += [Setting(job, Network(bandwidth="1Mbit")), Setting(job, Network(bandwidth="2Mbit"))]
    keys = {key, *(other.key() for other in others)}
    assert len(keys) == 1 + len(others)
    for name in ("machine", "package"):
        with monkeypatch.context() as patch:
            patch.setattr(identity, name, lambda *_: "another")
            assert setting.key() not in keys
    job.script_path.write_text(SCRIPT + "\nprint('changed')\n", encoding="utf-8")
    assert setting.key() not in keys


def test_the_key_holds_all_that_a_launch_imports_and_the_programs_that_it_starts():
    listed = {path.relative_to(identity.PACKAGE).with_suffix("").as_posix() for path in identity.host_files()}
    code = (
        "import sys, workshop_utils.launchers.local\n"
        "print(*(name for name, each in sys.modules.items()"
        " if name.startswith('workshop_utils.') and not hasattr(each, '__path__')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = {name.removeprefix("workshop_utils.").replace(".", "/") for name in done.stdout.split()}
    assert "launchers/mpirun" in imported
    assert imported - listed == {"place"}  # it travels with every script
    programs = {"horovod_rendezvous", "horovod_elastic", "mpi_host", "spark/driver", "spark/rank"}
    assert {f"launchers/{name}" for name in programs} <= listed
    assert {"processes/supervisor", "processes/warm_server"} <= listed


def test_a_changed_module_of_a_run_is_another_package(monkeypatch, tmp_path):
    (tmp_path / "launchers").mkdir()
    (tmp_path / "launchers" / "mpi_host.py").write_text("first")
    monkeypatch.setattr(identity, "PACKAGE", tmp_path)
    monkeypatch.setattr(identity, "HOST_MODULES", ("launchers",))
    package = identity.package.__wrapped__  # what is kept for the process is not read again
    first = package("mpi")
    assert package("mpi") == first
    (tmp_path / "launchers" / "mpi_host.py").write_text("second")
    assert package("mpi") != first


def _can_emulate() -> bool:
    from workshop_utils import network

    return network.availability() != "none"


def test_a_data_folder_that_has_changed_makes_another_key(job):
    folder = Path(job.data)
    key = Setting(job).key()
    (folder / "more").write_bytes(b"more")
    try:
        assert Setting(job).key() != key
    finally:
        (folder / "more").unlink()


def test_parts_add_up_to_the_slowest_worker_s_step():
    steps = pd.DataFrame(
        {
            "worker": ["worker-0", "worker-1"],
            "step": [2, 2],
            "step_seconds": [1.0, 1.1],
            "compute_seconds": [0.4, 0.6],
            "communication_seconds": [0.5, 0.3],
        }
    )
    parts = {name: float(values.iloc[0]) for name, values in parts_of(steps).items()}
    assert parts == pytest.approx(
        {"compute_seconds": 0.5, "transfer_seconds": 0.3, "waiting_seconds": 0.1, "other_seconds": 0.2}
    )
    assert sum(parts.values()) == pytest.approx(1.1)


@pytest.mark.parametrize("text", ["100Mbit", "100Mbit,latency=1ms", "100Mbit,worker-1=10Mbit"])
def test_a_network_s_short_name_reads_back_as_the_same_network(text):
    network = Network.parse(text)
    assert short(network) == text
    assert Network.parse(short(network)) == network


@pytest.mark.slow
def test_an_all_reduce_job_gives_a_row_for_each_size(tmp_path):
    job = TrainingJob.load(JOBS / "measure_all_reduce").replace(
        arguments={"nbytes": "400,4000", "repeats": 2}
    )
    table = measure_all(grid(job, workers=[2], repeats=1), Store(tmp_path))
    assert list(zip(table["nbytes"], table["seconds"] > 0, strict=True)) == [(400, True), (4000, True)]
