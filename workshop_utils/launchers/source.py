"""What travels with a job's script to any place, so that it finds there what it imports."""

from __future__ import annotations

import gzip
import io
import os
import re
import tarfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.jobs.function import TRAVELS, TRAVELS_IF_USED
from workshop_utils.jobs.imports import imported
from workshop_utils.strategies import strategy_of
from workshop_utils.training import data

PACKAGE = Path(__file__).parents[1]
# What tools leave in a folder, and where people keep passwords and keys.
LEFT_OUT = (
    r"__pycache__|node_modules|lost\+found|\.(git|venv|tox|ipynb_checkpoints)|\.env(rc|\..*)?|.*\.pem"
    r"|id_(rsa|dsa|ecdsa|ed25519)(_sk)?|\.(ssh|aws|kube|docker|dockercfg|netrc|pgpass|pypirc|git-credentials|huggingface)"
)
TRACKERS = ("wandb", "mlruns", "lightning_logs")  # have the runs of before; a package of such a name is code
MOST_NBYTES = 200_000_000  # of a folder that travels with a job, before it is packed


def shipped(job: TrainingJob) -> dict[str, str]:
    """The modules of this package that the job's script may import: text by path below `workshop_utils/`.

    For every script `place`, and of `training` what a rank can use (TRAVELS); where they are used also the message
    passing, and what splits a model with it, which needs PyTorch.
    """
    files = {PACKAGE / f"{name.replace('.', '/')}.py" for name in TRAVELS}
    if job.needs_start:
        files.add(PACKAGE / "start.py")
    imports = imported(job.script_path)
    full_names = {f"{module}.{name}" for module, names in imports.items() for name in ("", *names)}
    used = {full.split(".")[1] for full in full_names if full.startswith("workshop_utils.")}
    for place, folder in enumerate(TRAVELS_IF_USED):
        if strategy_of(job).uses_comm or used & {*TRAVELS_IF_USED[place:]}:
            files |= set((PACKAGE / folder).glob("*.py"))
    text = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(files)}
    return {f"workshop_utils/{name}": content for name, content in {"__init__.py": "", **text}.items()}


def unpack(archive: bytes, folder: Path) -> list[Path]:
    """Write what a `.tar.gz` holds into `folder`, and nothing outside it, no device and no odd owner; the files' paths.

    In place of a link to a file stands a copy of that file.

    Raises:
        tarfile.TarError: if it holds something else; nothing is written then.
    """
    with tarfile.open(fileobj=io.BytesIO(archive)) as file:
        contents = []
        for member in file.getmembers():  # Python before 3.11.4 has no filter for it
            try:
                content = file.extractfile(member)  # of a link, what it leads to in the archive
            except (KeyError, RecursionError):
                content = None
            path = folder / member.name
            if not path.resolve().is_relative_to(folder.resolve()) or not (content or member.isdir()):
                raise tarfile.ExtractError(f"{member.name!r} is no file or folder below the archive's own")
            contents.append((path, member.mode, content))
        for path, mode, content in contents:
            (path.parent if content else path).mkdir(parents=True, exist_ok=True)
            if content:
                path.write_bytes(content.read())
                path.chmod(0o600 | mode & 0o755)
        return [path for path, _, content in contents if content]


def packed(job: TrainingJob, texts: Mapping[str, str] | None = None, left_out: Iterable[str] = ()) -> bytes:
    """A `.tar.gz` of the job's folder, with the modules that its script may import beside the script.

    It holds what a link points to in place of the link, which would lead nowhere on another machine. What `data` names
    in the folder travels by itself, and what the job writes there, as `outputs` and `checkpoints`, stays; what holds
    the script is neither. `texts` are more files, by name, and what the names in `left_out` are called stays as well.

    Raises:
        JobError: if a link leads out of the folder, the folder is too large, or it has a module of this package's name.
    """
    sources = set(job.channels.values()).difference(data.NAMED)
    apart = {Path(path).expanduser().resolve() for path in (job.outputs, job.checkpoints, *sources) if path}
    apart -= {job.script_path.resolve(), *job.script_path.resolve().parents}
    files = {name: path for name, path in paths_below(job.folder, apart) if name not in left_out}
    if any(Path(name).parts[0] in ("workshop_utils", "workshop_utils.py") for name in files):
        if (job.folder / "workshop_utils").resolve() != PACKAGE:
            raise JobError(
                f"{job.folder / 'workshop_utils'} has the name of the package that travels with a job: rename it"
            )
        files = {name: path for name, path in files.items() if Path(name).parts[0] != "workshop_utils"}
    return _archive(files, "folder", shipped(job) | dict(texts or {}))


def packed_modules(job: TrainingJob) -> bytes:
    """A `.tar.gz` of what its script may import of this package, where the job's folder need not travel."""
    return _archive({}, "folder", shipped(job))


def packed_data(job: TrainingJob) -> bytes:
    """A `.tar.gz` of the job's data, with a folder for each channel where it has several.

    Raises:
        DataError: if there is no such data.
        JobError: if it is too large.
    """
    return _archive(dict(paths_below(data.prepare_all(job.data or {}))), "data")


def files_below(folder: Path) -> Iterator[tuple[str, Path]]:
    """The files of data in `folder` by relative path, those behind links too. Raises as `paths_below` does."""
    return ((name, path) for name, path in paths_below(folder) if path.is_file())


def paths_below(folder: Path, apart: set[Path] | None = None) -> Iterator[tuple[str, Path]]:
    """The files and folders below `folder` by relative path, those behind links too.

    Of a job's folder, `apart` are the resolved paths that are left out; for data it is None.

    Raises:
        JobError: for a folder that cannot be read, a link that leads back, or in a job's folder one that leads out.
    """
    top, inside = folder.resolve(), apart is not None
    trackers = {name for name in TRACKERS if inside and not (folder / name / "__init__.py").exists()}
    for below, subfolders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        here = Path(below)
        left_out = trackers if here == folder else set()
        kept = sorted(name for name in {*names, *subfolders} - left_out if not re.fullmatch(LEFT_OUT, name))
        subfolders.clear()
        if here != folder and "pyvenv.cfg" in names:  # a virtual environment
            continue
        for path in (here / name for name in kept):
            if not path.exists():  # an editor's lock is a link that leads nowhere
                continue
            target = path.resolve()
            if apart and apart & {target, *target.parents}:
                continue
            leads_out = inside and not target.is_relative_to(top)
            if path.is_symlink() and (
                leads_out or any(above.resolve().is_relative_to(target) for above in path.parents)
            ):
                leads = "out of the folder" if leads_out else "back into itself"
                raise JobError(
                    f"{path} is a link that leads {leads}, to {target}: copy it or name it in data"
                )
            if path.is_dir():
                subfolders.append(path.name)
            if path.is_dir() or path.is_file():
                yield path.relative_to(folder).as_posix(), path


def _refuse(error: OSError) -> None:
    raise JobError(f"{error.filename} cannot be read ({error.strerror}), so it cannot travel with the job")


def _archive(files: Mapping[str, Path], field: str, texts: Mapping[str, str] | None = None) -> bytes:
    sizes = {name: path.stat().st_size for name, path in files.items() if path.is_file()}
    if sum(sizes.values()) > MOST_NBYTES:
        way = {
            "folder": "keep data and models outside the folder, and name them in data, outputs and checkpoints",
            "data": "name where the target finds it, such as an s3:// address or a claim",
        }
        raise JobError(
            f"{field} has {_megabytes(sum(sizes.values()))} ({largest(sizes)}); at most {_megabytes(MOST_NBYTES)} can "
            f"travel with a job: {way[field]}"
        )
    archive = io.BytesIO()
    # Without times and names of users, so that the same files are the same bytes.
    with (
        gzip.GzipFile(fileobj=archive, mode="wb", mtime=0) as zipped,
        tarfile.open(fileobj=zipped, mode="w") as file,
    ):
        for name, path in files.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = sizes.get(name, 0), path.stat().st_mode & 0o777
            if path.is_dir():
                entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            try:
                with path.open("rb") if entry.size else io.BytesIO() as content:
                    file.addfile(entry, content)
            except PermissionError as error:
                _refuse(error)
        for name, text in (texts or {}).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            file.addfile(entry, io.BytesIO(text.encode()))
    return archive.getvalue()


def largest(sizes: Mapping[str, int]) -> str:
    """The largest of files, three at most, with their sizes, for a message."""
    names = sorted(sizes, key=lambda name: -sizes[name])[:3]
    return ", ".join(
        f"{name} {_megabytes(sizes[name])}" for name in names if 20 * sizes[name] > sizes[names[0]]
    )


def _megabytes(nbytes: int) -> str:
    return f"{nbytes / 1e6:,.1f} MB"
