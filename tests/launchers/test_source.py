"""What travels with a job's script, and that each launcher can be imported by itself."""

import io
import os
import subprocess
import sys
import tarfile

import pytest

from workshop_utils.jobs import JobError
from workshop_utils.launchers.source import packed, packed_data, shipped, unpack

EACH_ALONE = """
import importlib, sys
from workshop_utils.launchers.targets import TARGETS

for name in TARGETS:
    for loaded in [each for each in sys.modules if each.startswith("workshop_utils")]:
        del sys.modules[loaded]
    targets = importlib.import_module("workshop_utils.launchers.targets")
    try:
        targets.launcher_for(name)
    except targets.JobError as error:  # of a target that wants a place.yaml
        assert "--config is missing" in str(error)
"""


@pytest.mark.processes
def test_a_target_is_the_first_that_a_process_imports():
    subprocess.run([sys.executable, "-c", EACH_ALONE], check=True, timeout=120)


@pytest.mark.parametrize(
    ("script", "folders"),
    [
        ("from workshop_utils import place", {"training"}),
        ("from workshop_utils.comm import tcp", {"training", "comm"}),
        ("import workshop_utils.comm.process_group", {"training", "comm"}),
        ("def f():\n    from workshop_utils import parallel", {"training", "comm", "parallel"}),  # needs comm
        ("from workshop_utils.parallel.data import average", {"training", "comm", "parallel"}),
    ],
)
def test_the_message_passing_travels_where_a_script_imports_it(make_job, script, folders):
    files = shipped(make_job(script, strategy="torch_ddp"))
    assert {name.split("/")[1] for name in files if name.count("/") == 2} == folders
    assert "workshop_utils/place.py" in files


def test_an_archive_is_unpacked_into_its_folder_and_nowhere_else(tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    assert unpack(_archive("inside/file"), folder) == [folder / "inside/file"]
    for name, links_to in (("../outside", ""), ("link", "/etc/passwd")):
        with pytest.raises(tarfile.TarError):
            unpack(_archive(name, links_to), folder)
    assert [*tmp_path.rglob("*")] == [folder, folder / "inside", folder / "inside/file"]


def test_a_folder_travels_whole_but_for_what_the_job_reads_and_writes_and_for_secrets(make_job, tmp_path):
    job = make_job("")
    fields = {"outputs": str(job.folder / "out"), "data": {"train": str(job.folder / "corpora/train")}}
    job = job.replace(**fields, checkpoints=str(job.folder))  # the script's own folder travels all the same
    stays = {"out/model", "corpora/train/a.txt", "venv/pyvenv.cfg", ".env", ".aws/credentials", "lib/key.pem"}
    stays |= {
        "mlruns/0/meta.yaml",
        ".envrc",
        ".git-credentials",
        ".kube/config",
        "keys/id_ed25519",
        "lost+found",
    }
    for name, content in (
        ("lib/model.py", b"x = 1"),
        ("env/model.py", b""),
        ("wandb/__init__.py", b""),
        ("checkpoints.py", b""),
        ("logo.png", b"\x89PNG\xff"),
        *((name, b"") for name in stays),
    ):
        (job.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (job.folder / name).write_bytes(content)
    (job.folder / "results").mkdir()
    (job.folder / "run.sh").write_text("echo")
    (job.folder / "run.sh").chmod(0o755)
    archive = packed(job)
    unpack(archive, tmp_path / "there")
    there = {path.relative_to(tmp_path / "there").as_posix() for path in (tmp_path / "there").rglob("*")}
    assert {
        "train.py",
        "lib/model.py",
        "env/model.py",
        "wandb/__init__.py",
        "checkpoints.py",
        "logo.png",
        "run.sh",
        "results",
        "workshop_utils/place.py",
    } <= there
    assert not stays & there
    assert (tmp_path / "there" / "logo.png").read_bytes() == b"\x89PNG\xff"
    assert os.access(tmp_path / "there" / "run.sh", os.X_OK)
    assert packed(job) == archive


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda folder: (folder / "data").symlink_to("/etc"), "data is a link that leads out of the folder, to /etc"),
        (lambda folder: _link_to_each_other(folder / "x", folder / "y"), "x/l/l is a link that leads back into itself"),
        (lambda folder: (folder / "workshop_utils").mkdir() or (folder / "workshop_utils/a.py").touch(), "rename it"),
        (lambda folder: os.truncate(os.open(folder / "big", os.O_RDWR | os.O_CREAT), 3 * 10**9), r"big 3,000.0 MB"),
    ],
)  # fmt: skip
def test_a_folder_that_cannot_travel_is_refused_in_a_sentence(make_job, spoil, said):
    job = make_job("")
    spoil(job.folder)
    with pytest.raises(JobError, match=said):
        packed(job)


def test_a_folder_that_cannot_be_listed_does_not_travel_empty(make_job, monkeypatch):
    job, scandir = make_job(""), os.scandir
    (job.folder / "locked").mkdir()

    def refused(path):
        if str(path).endswith("locked"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refused)
    with pytest.raises(JobError, match=r"locked cannot be read \(Permission denied\), so it cannot travel"):
        packed(job)


def test_data_travel_with_a_folder_for_each_channel(make_job, tmp_path):
    (tmp_path / "corpus.txt").write_text("to be")
    job = make_job("", data={"train": str(tmp_path / "corpus.txt"), "test": "digits"})
    unpack(packed_data(job), tmp_path / "there")
    assert (tmp_path / "there/train/corpus.txt").read_text() == "to be"
    assert len([*(tmp_path / "there/test").iterdir()]) == 4
    (tmp_path / "data" / "more").mkdir(parents=True)
    (tmp_path / "data" / "more" / "again").symlink_to("..")
    with pytest.raises(JobError, match="again is a link that leads back into itself"):
        packed_data(job.replace(data=str(tmp_path / "data")))


def test_a_link_in_an_archive_becomes_a_copy(tmp_path):
    (tmp_path / "last").write_text("weights")
    (tmp_path / "newest").symlink_to("last")
    (tmp_path / "same").hardlink_to(tmp_path / "last")
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as file:
        for name in ("last", "newest", "same"):
            file.add(tmp_path / name, f"model/{name}")
    written = unpack(content.getvalue(), tmp_path / "folder")
    assert [path.name for path in written] == ["last", "newest", "same"]
    assert all(path.read_text() == "weights" and not path.is_symlink() for path in written)


def _link_to_each_other(*folders):
    for folder, other in zip(folders, reversed(folders), strict=True):
        folder.mkdir()
        (folder / "l").symlink_to(other)


def _archive(name, links_to=""):
    content, entry = io.BytesIO(), tarfile.TarInfo(name)
    entry.type, entry.linkname = (tarfile.SYMTYPE if links_to else tarfile.REGTYPE), links_to
    with tarfile.open(fileobj=content, mode="w:gz") as file:
        file.addfile(entry)
    return content.getvalue()
