import string
import textwrap
from pathlib import Path
from typing import Any

import pytest
from conftest import MakeJob
from hypothesis import given, settings
from hypothesis import strategies as st

from workshop_utils.data import DataError
from workshop_utils.jobs import JobError, Resources, TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.processes import group
from workshop_utils.strategies import STRATEGIES

SHIPPED_JOBS = Path(__file__).parents[1] / "jobs"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    return tmp_path


@pytest.fixture
def nothing_may_start(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise AssertionError("something was started")

    monkeypatch.setattr(group.ProcessGroup, "__init__", fail)


def sentence_about(folder: Path, text: str) -> str:
    """What loading, then launching, a job.yaml that holds `text` answers, without the file's name."""
    file = folder / "job.yaml"
    file.write_text(textwrap.dedent(text), encoding="utf-8")
    with pytest.raises((JobError, DataError)) as caught:
        Local().launch(TrainingJob.load(folder))
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__ or caught.value.__context__ is None
    assert "pydantic" not in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(str(file)).removeprefix(": ")


@pytest.mark.usefixtures("nothing_may_start")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("workers: 0", "workers is 0; it must be greater than or equal to 1"),
        ("workers: -3", "workers is -3; it must be greater than or equal to 1"),
        ("workers: true", "workers is True; it must be a valid integer"),
        ("workers: '2'", "workers is '2'; it must be a valid integer"),
        ("workers: 2.5", "workers is 2.5; it must be a valid integer"),
        ("workers: 2\nstrategy: single", "workers is 2; strategy 'single' has one worker"),
        ("workers: 1\nstrategy: parameter_server", "workers is 1; strategy 'parameter_server' needs at least 2"),
        ("parameter_servers: 2", "parameter_servers is 2; strategy 'single' has no parameter servers"),
        ("strategy: gossip", "strategy is 'gossip'; it must be one of 'single', 'ring', "),
        ("script: missing.py", "script is 'missing.py'; there is no such file in "),
        ("name: My Job", "name is 'My Job'; it must be lower-case letters, digits and '-'"),
        ("name: 2nd-job", "name is '2nd-job'; it must be lower-case letters, digits and '-'"),
        ("resources: {memory: lots}", "resources.memory is 'lots'; it must be a size such as '512Mi'"),
        ("resources: {memory: 0}", "resources.memory is 0; it must be more than zero"),
        ("resources: {cpu: .inf}", "resources.cpu is inf; it must be a finite number"),
        ("resources: {gpus: 1}", "resources.gpus: unknown field; did you mean gpu?"),
        ("resources: 2Gi", "resources is '2Gi'; it must hold fields of its own, as in 'memory: 2Gi'"),
        ("worker: 2", "worker: unknown field; did you mean workers?"),
        ("colour: red", "colour: unknown field; the fields are name, "),
        ("self: red", "self: unknown field; "),
        ("folder: elsewhere", "folder: unknown field; a job.yaml lies in its own folder"),
        ("timeout: soon", "timeout is 'soon'; it must be a duration such as '50us'"),
        ("timeout: 0s", "timeout is '0s'; it must be more than zero"),
        ("data: [1, 2]", "data is [1, 2]; it must be a valid string"),
        ("data: nowhere", "data is 'nowhere': "),
        ("arguments: [epochs]", "arguments is ['epochs']; it must hold fields of its own"),
        ("arguments: {sizes: [1, 2]}", "arguments.sizes is [1, 2]; it must be a text, a number or true or false"),
        ("environment: {THREADS: 2}", "environment.THREADS is 2; it must be a valid string"),
    ],
)  # fmt: skip
def test_a_wrong_field_is_answered_with_one_sentence_before_anything_starts(
    text: str, sentence: str, folder: Path
) -> None:
    name = "" if text.startswith("name") else "name: job\n"
    assert sentence_about(folder, name + text).startswith(sentence)


@pytest.mark.usefixtures("nothing_may_start")
@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("workers: 2", "name is missing"),
        ("name: job\n\tworkers: 2", ", line 2: there is a tab; YAML is indented with spaces"),
        ("name: job\nresources:\n\tcpu: 2", ", line 3: there is a tab; YAML is indented with spaces"),
        ("name: [job", ", line 1: "),
        ("name: job: two", ", line 1: mapping values are not allowed here"),
        ("", "holds None; it must hold fields such as 'name: my-job'"),
        ("just a text", "holds 'just a text'; it must hold fields such as 'name: my-job'"),
        ("- name: job", "holds [{'name': 'job'}]; it must hold fields such as 'name: my-job'"),
        ("1: job", "holds {1: 'job'}; it must hold fields such as 'name: my-job'"),
        ("name: 2026-13-45", "is not readable as YAML: month must be in 1..12"),
        ("name: !!python/name:os.system job", ", line 1: could not determine a constructor"),
        ("[" * 2000, "is not readable as YAML: "),
    ],
    ids=range(12),
)
def test_what_is_not_a_job_description_is_answered_with_file_and_line(
    text: str, sentence: str, folder: Path
) -> None:
    assert sentence_about(folder, text).strip().startswith(sentence)


def test_every_wrong_field_has_a_line_of_its_own(folder: Path) -> None:
    resources: dict[str, Any] = {"resources": {"memory": "lots", "cpu": -1}}
    with pytest.raises(JobError) as caught:
        TrainingJob(name="job", folder=folder, workers=0, timeout="soon", **resources)
    fields = [line.partition(" ")[0] for line in str(caught.value).splitlines()]
    assert sorted(fields) == ["resources.cpu", "resources.memory", "timeout", "workers"]


def test_a_file_that_is_no_text_is_answered_with_one_sentence(folder: Path) -> None:
    (folder / "job.yaml").write_bytes(b"name: \xff\xfe")
    with pytest.raises(JobError, match=r"^\S+job\.yaml is not readable as YAML: .*\S$"):
        TrainingJob.load(folder)


def test_a_job_that_is_not_there_is_answered_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"there is no job at \S+/nowhere: it must be a job\.yaml"):
        TrainingJob.load(tmp_path / "nowhere")


def test_a_script_outside_any_folder_is_looked_for_where_python_runs(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert TrainingJob(name="job").script_path == Path("train.py")


def test_a_job_cannot_be_changed(folder: Path) -> None:
    job = TrainingJob(name="job", folder=folder)
    with pytest.raises(ValueError, match="frozen"):
        job.workers = 2


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


def test_quantities_are_kept_as_written_and_read_as_numbers(folder: Path) -> None:
    job = TrainingJob(name="job", folder=folder, timeout="10min", resources=Resources(memory="512Mi"))
    assert (job.timeout, job.timeout_seconds) == ("10min", 600)
    assert (job.resources.memory, job.resources.memory_nbytes) == ("512Mi", 512 * 2**20)


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


def test_every_shipped_job_can_be_loaded_and_rendered() -> None:
    folders = sorted(file.parent for file in SHIPPED_JOBS.glob("*/job.yaml"))
    assert folders
    for job in map(TrainingJob.load, folders):
        assert STRATEGIES[job.strategy].members(job)


@pytest.mark.usefixtures("nothing_may_start")
def test_rendering_starts_nothing_and_shows_commands_and_variables(make_job: MakeJob) -> None:
    job = make_job("", strategy="torch_ddp", workers=2, arguments={"epochs": 3})
    request = Local().render(job)
    assert [process.name for process in request.processes] == ["worker-0", "worker-1"]
    assert all(process.argv[-2:] == ("--epochs", "3") for process in request.processes)
    assert "RANK=1 \\\n" in str(request)
    assert "MASTER_ADDR=127.0.0.1 \\\n" in str(request)


def test_resources_whose_fields_have_no_names_are_refused():
    with pytest.raises(JobError, match=r"resources.*its fields must have names"):
        TrainingJob(name="j", folder=".", resources={None: 1})
