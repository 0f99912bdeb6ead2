"""What learners mistype is answered at once, by name, in words: no traceback, and nothing has been started.

The inputs, and the words that their answers must hold, are in `bad_inputs.yaml`.
"""

import shlex
import sys
from pathlib import Path

import pytest
import yaml
from adapter import ROOT, problems_of_manifest, workshop
from conftest import STARTS

CORPUS = yaml.safe_load(Path(__file__).with_name("bad_inputs.yaml").read_text(encoding="utf-8"))
JOBS = {
    "JOB": "strategy: single",
    "RING": "strategy: ring\nworkers: 2",
    "DDP": "strategy: torch_ddp\nworkers: 2",
    "MPI": "strategy: mpi\nworkers: 2",
    "TF": "strategy: parameter_server\nworkers: 2",
    "PS": "strategy: workshop_parameter_server\nworkers: 2",
}
ROLE = "role: arn:aws:iam::123456789012:role/workshop\nregion: us-east-1"
# What the package may ask while it looks at the input, though it starts nothing of a run: the machine's own programs.
forbidden = False


class Started(BaseException):
    """A process or a connection was begun; not an Exception, so that nothing takes it for an answer of its own."""


def _watch(event, arguments):
    if forbidden and event in {*STARTS, "socket.connect"}:
        raise Started(f"{event}: {arguments}")


sys.addaudithook(_watch)


@pytest.fixture
def nothing_may_start(monkeypatch):
    """Whatever begins a process or a connection ends in a traceback."""
    global forbidden
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE", "KUBECONFIG"):
        monkeypatch.delenv(name, raising=False)
    forbidden = True
    yield
    forbidden = False


def named(entries, *keys):
    """The entries as parameters of a test, called after what is wrong with them."""
    return [
        pytest.param(entry, id=" ".join(str(entry[key]) for key in keys if key in entry).replace("\n", "; "))
        for entry in entries
    ]


def job_folder(folder, text):
    """A job with a script that ends at once; `text` is its job.yaml."""
    folder.mkdir(parents=True)
    (folder / "train.py").write_text("")
    (folder / "job.yaml").write_text(text)
    return folder


def assert_refused(answer, says, folder):
    """`answer` is one of a mistake that was foreseen, and holds all words of `says`."""
    assert not answer.traceback, f"not an answer, but a traceback:\n{answer.traceback}"
    assert answer.code == 2, f"the exit code is {answer.code}; it said:\n{answer.out}{answer.err}"
    assert "Traceback" not in answer.err
    lacking = [word for word in says if str(word).replace("TMP", str(folder)) not in answer.err]
    assert not lacking, f"{lacking} are not in the answer:\n{answer.err}"


@pytest.mark.parametrize("entry", named(CORPUS["commands"], "line"))
def test_a_mistyped_command_is_answered_with_what_is_wrong(entry, tmp_path, monkeypatch, nothing_may_start):
    given = tmp_path / "given"
    given.mkdir()
    for name, text in entry.get("files", {}).items():
        (given / name).parent.mkdir(parents=True, exist_ok=True)
        (given / name).write_text(text)
    places = {"TMP": given, "SINK": tmp_path / "sink"}
    for name, text in JOBS.items():
        if name in entry["line"]:
            places[name] = job_folder(
                tmp_path / name.lower(), f"name: {name.lower()}\ndata: digits\n{text}\n"
            )
    words = []
    for word in shlex.split(entry["line"]):
        first, slash, rest = word.partition("/")
        words.append(f"{places[first]}{slash}{rest}" if first in places else word)
    monkeypatch.chdir(places.get(entry.get("in", ""), ROOT))
    assert_refused(workshop(*words), entry["says"], given)
    assert not (tmp_path / "sink").exists()


@pytest.mark.parametrize("entry", named(CORPUS["jobs"], "text"))
def test_a_wrong_job_is_answered_with_its_field(entry, tmp_path, monkeypatch, nothing_may_start):
    monkeypatch.chdir(ROOT)
    name = "" if "name:" in entry["text"] or not entry.get("name", True) else "name: job\n"
    words = ["launch", job_folder(tmp_path / "job", name + entry["text"])]
    if "where" in entry:
        words += ["--on", entry["where"], "--config", f"jobs/clusters/{entry['where']}/place.yaml"]
    assert_refused(workshop(*words), entry["says"], tmp_path)


@pytest.mark.parametrize("entry", named(CORPUS["places"], "where", "job", "text"))
def test_a_wrong_place_is_answered_with_its_field(entry, tmp_path, monkeypatch, nothing_may_start):
    monkeypatch.chdir(ROOT)
    described = entry.get("job", "DDP")
    job = job_folder(tmp_path / "job", f"name: job\n{JOBS.get(described, described)}\n")
    place = tmp_path / "place.yaml"
    place.write_text(entry["text"].replace("ROLE", ROLE))
    assert_refused(
        workshop("launch", job, "--on", entry["where"], "--config", place), entry["says"], tmp_path
    )


def manifest(file):
    """The text of a manifest; where a job's is not kept as a file, what `--render` shows of it."""
    text = file.read_text() if file.is_file() else ""
    if "kind: " in text:
        return text
    return workshop("launch", file if text else file.parent, "--on", "kubernetes", "--render").out


@pytest.mark.parametrize("entry", named(CORPUS["manifests"], "file", "path", "to"))
def test_a_wrong_manifest_is_answered_with_its_field(entry, nothing_may_start):
    documents = list(yaml.safe_load_all(manifest(ROOT / "jobs" / entry["file"])))
    described = next(document for document in documents if document["kind"] != "ConfigMap")
    assert problems_of_manifest(described) == []
    *way, last = [int(step) if step.isdigit() else step for step in entry["path"].split(".")]
    inner = described
    for step in way:
        inner = inner[step]
    if entry.get("drop"):
        del inner[last]
    else:
        inner[last] = entry["to"]
    problems = problems_of_manifest(described)
    said = "\n".join(problems)
    lacking = [word for word in entry["says"] if word not in said]
    assert problems, "nobody has anything against it"
    assert not lacking, f"{lacking} are not in the answer:\n{said}"
