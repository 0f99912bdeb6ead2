from pathlib import Path

import pytest
from conftest import save

from workshop_utils.jobs import JobError, TrainingJob


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "train.py").touch()
    return tmp_path


def test_a_script_outside_any_folder_is_looked_for_where_python_runs(folder, monkeypatch):
    monkeypatch.chdir(folder)
    assert TrainingJob(name="job").script_path == Path("train.py")


def test_replace_merges_arguments_and_environment_and_replaces_the_rest(folder):
    job = TrainingJob(
        name="job", folder=folder, arguments={"epochs": 3, "seed": 1}, environment={"A": "1"}, timeout="1min"
    )
    changed = job.replace(workers=4, strategy="mpi", arguments={"epochs": 2}, environment={"B": "2"})
    assert changed.arguments == {"epochs": 2, "seed": 1}
    assert changed.environment == {"A": "1", "B": "2"}
    assert (changed.workers, changed.strategy, changed.timeout) == (4, "mpi", "1min")
    assert (job.workers, job.arguments["epochs"]) == (1, 3)


def test_a_folder_may_have_a_colon_in_it(make_job):
    job = make_job(outputs="/data:/models", checkpoints="runs/12:30:/kept")
    assert job.storage("outputs", "folder") == "/data:/models"


def test_a_job_survives_being_saved_and_loaded(folder):
    job = TrainingJob(
        name="a-job",
        folder=folder,
        strategy="parameter_server",
        workers=3,
        parameter_servers=2,
        arguments={"epochs": 3, "rate": 1e-7, "fast": True, "word": "yes", "number": "3"},
        data="s3://bucket/data",
        image="",
        timeout=90,
        environment={"TEXT": "a: [#]\n'ü", "EMPTY": ""},
        resources={"cpu": 0.5, "gpu": 1, "memory": "1Gi"},
    )
    save(job)
    loaded = TrainingJob.load(folder)
    assert loaded == job
    assert [type(value) for value in loaded.arguments.values()] == [int, float, bool, str, str]
    assert loaded.replace() == job


@pytest.mark.parametrize(
    ("given", "layout"),
    [
        ({"workers": 4}, (4, None, None)),
        ({"nodes": 2}, (2, 2, 1)),
        ({"processes_per_node": 4}, (4, 1, 4)),
        ({"nodes": 2, "processes_per_node": 3}, (6, 2, 3)),
        ({"workers": 6, "nodes": 2}, (6, 2, 3)),
        ({"workers": 6, "processes_per_node": 2}, (6, 3, 2)),
    ],
)
def test_workers_are_nodes_times_processes_per_node(make_job, given, layout):
    job = make_job("", strategy="torch_ddp").replace(**given)
    assert (job.workers, job.nodes, job.processes_per_node) == layout


def test_a_new_number_of_workers_nodes_or_processes_per_node_replaces_what_follows_from_it(make_job):
    job = make_job("", strategy="torch_ddp", nodes=2, processes_per_node=2)
    assert job.replace(workers=6).nodes == 3
    assert job.replace(nodes=4).workers == 8
    assert job.replace(workers=8, nodes=8).processes_per_node == 1
    with pytest.raises(JobError, match=r"workers is 5; it must be nodes × processes_per_node, here 2 × 2"):
        job.replace(workers=5)
