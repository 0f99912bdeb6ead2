from pathlib import Path
from typing import Any

import pytest

from workshop_utils.jobs import JobError, TrainingJob


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


def test_every_wrong_field_has_a_line_of_its_own(folder: Path) -> None:
    resources: dict[str, Any] = {"resources": {"memory": "lots", "cpu": -1}}
    with pytest.raises(JobError) as caught:
        TrainingJob(name="job", folder=folder, workers=0, timeout="soon", **resources)
    fields = [line.partition(" ")[0] for line in str(caught.value).splitlines()]
    assert sorted(fields) == ["resources.cpu", "resources.memory", "timeout", "workers"]


def test_a_script_outside_any_folder_is_looked_for_where_python_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert TrainingJob(name="job").script_path == Path("train.py")


def test_replace_merges_arguments_and_environment_and_replaces_the_rest(folder: Path) -> None:
    job = TrainingJob(
        name="job", folder=folder, arguments={"epochs": 3, "seed": 1}, environment={"A": "1"}, timeout="1min"
    )
    changed = job.replace(workers=4, strategy="mpi", arguments={"epochs": 2}, environment={"B": "2"})
    assert changed.arguments == {"epochs": 2, "seed": 1}
    assert changed.environment == {"A": "1", "B": "2"}
    assert (changed.workers, changed.strategy, changed.timeout) == (4, "mpi", "1min")
    assert (job.workers, job.arguments["epochs"]) == (1, 3)


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"arguments": None}, "arguments is None; it must hold fields"),
        ({"environment": ["A"]}, "environment is ['A']; it must hold fields"),
        ({"worker": 2}, "worker: unknown field; did you mean workers?"),
    ],
)
def test_replace_validates(changes: dict[str, Any], sentence: str, folder: Path) -> None:
    with pytest.raises(JobError) as caught:
        TrainingJob(name="job", folder=folder).replace(**changes)
    assert str(caught.value).startswith(sentence)


def test_a_job_survives_being_saved_and_loaded(folder: Path) -> None:
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
    job.save(folder)
    loaded = TrainingJob.load(folder)
    assert loaded == job
    assert [type(value) for value in loaded.arguments.values()] == [int, float, bool, str, str]
    assert loaded.replace() == job
