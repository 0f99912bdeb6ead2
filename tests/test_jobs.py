import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.strategies import STRATEGIES

SHIPPED_JOBS = Path(__file__).parents[1] / "jobs"


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
        ({"workers": 0}, "workers is 0; it must be greater"),
        ({"arguments": None}, "arguments is None; it must hold fields"),
        ({"environment": ["A"]}, "environment is ['A']; it must hold fields"),
        ({"worker": 2}, "worker: unknown field; did you mean workers?"),
    ],
)
def test_replace_validates(changes: dict[str, Any], sentence: str, folder: Path) -> None:
    with pytest.raises(JobError) as caught:
        TrainingJob(name="job", folder=folder).replace(**changes)
    assert str(caught.value).startswith(sentence)


def test_arguments_become_words_in_the_order_of_their_keys(folder: Path) -> None:
    job = TrainingJob(
        name="job", folder=folder, arguments={"learning-rate": 0.05, "batch_size": 32, "fast": True}
    )
    assert job.command_line_arguments == ["--batch_size", "32", "--fast", "True", "--learning-rate", "0.05"]


TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
JOBS = st.fixed_dictionaries(
    {"name": st.from_regex(r"[a-z]([-a-z0-9]{0,20}[a-z0-9])?", fullmatch=True)},
    optional={
        "strategy": st.sampled_from(sorted(STRATEGIES)),
        "workers": st.integers(1, 10_000),
        "parameter_servers": st.integers(1, 10),
        "arguments": st.dictionaries(
            st.text(string.ascii_letters + "-_", min_size=1),
            TEXT | st.integers() | st.floats(allow_nan=False) | st.booleans(),
        ),
        "data": TEXT,
        "image": st.none() | TEXT,
        "timeout": st.sampled_from(["1s", "10min", "2h", "90"]) | st.integers(1, 10**6),
        "environment": st.dictionaries(TEXT.filter(lambda name: name and "=" not in name), TEXT),
        "resources": st.fixed_dictionaries(
            {},
            optional={
                "cpu": st.floats(0, 1000, exclude_min=True),
                "gpu": st.integers(0, 8),
                "memory": st.sampled_from(["1Gi", "512Mi", 1024]),
            },
        ),
    },
)


@settings(max_examples=50)
@given(JOBS)
def test_a_job_survives_being_saved_and_loaded(
    tmp_path_factory: pytest.TempPathFactory, values: dict[str, Any]
) -> None:
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").touch()
    job = TrainingJob(folder=folder, **values)
    job.save(folder)
    loaded = TrainingJob.load(folder)
    assert loaded == job
    assert [type(value) for value in loaded.arguments.values()] == [
        type(value) for value in job.arguments.values()
    ]
    assert loaded.replace() == job


@given(
    st.text(st.characters(exclude_categories=["Cs"]))
    | st.text("abc:-[]{}'\"#&*!|>%@`0129.\n\t ,?~=<", max_size=30)
)
def test_any_text_is_a_job_or_a_job_error(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    folder = tmp_path_factory.mktemp("job")
    (folder / "train.py").touch()
    (folder / "job.yaml").write_text(text, encoding="utf-8")
    with pytest.raises(JobError):
        TrainingJob.load(folder)
