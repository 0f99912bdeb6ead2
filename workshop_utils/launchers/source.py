"""What travels with a job's script to any place, so that it finds there what it imports."""

from __future__ import annotations

import io
import os
import tarfile
from pathlib import Path

from workshop_utils.jobs import TrainingJob
from workshop_utils.jobs.function import TRAVELS, TRAVELS_IF_USED
from workshop_utils.jobs.imports import imported
from workshop_utils.strategies import strategy_of

PACKAGE = Path(__file__).parents[1]
LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", ".git", ".venv"}


def shipped(job: TrainingJob) -> dict[str, str]:
    """The modules of this package that the job's script may import: text by path below `workshop_utils/`.

    For every script `place`, and of `training` what a rank can use (TRAVELS); where they are used also the message
    passing, and what splits a model with it, which needs PyTorch.
    """
    files = {PACKAGE / f"{name.replace('.', '/')}.py" for name in TRAVELS}
    imports = imported(job.script_path)
    full_names = {f"{module}.{name}" for module, names in imports.items() for name in ("", *names)}
    used = {full.split(".")[1] for full in full_names if full.startswith("workshop_utils.")}
    for place, folder in enumerate(TRAVELS_IF_USED):
        if strategy_of(job).uses_comm or used & {*TRAVELS_IF_USED[place:]}:
            files |= set((PACKAGE / folder).glob("*.py"))
    text = {path.relative_to(PACKAGE).as_posix(): path.read_text(encoding="utf-8") for path in sorted(files)}
    return {f"workshop_utils/{name}": content for name, content in {"__init__.py": "", **text}.items()}


def unpack(archive: bytes, folder: Path) -> list[Path]:
    """Write the files of a `.tar.gz` into `folder`, and nothing outside it, no device and no odd owner; their paths.

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
            if content:
                contents.append((path, member.mode, content))
        for path, mode, content in contents:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content.read())
            path.chmod(0o600 | mode & 0o755)
        return [path for path, *_ in contents]


def packed(job: TrainingJob) -> bytes:
    """A `.tar.gz` of the job's folder, with the modules that its script may import beside the script.

    It holds what a link points to in place of the link, which would lead nowhere on another machine.
    """
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", dereference=True) as file:
        for folder, subfolders, names in os.walk(job.folder, followlinks=True):
            subfolders[:] = sorted(set(subfolders) - LEFT_OUT)
            for path in sorted(Path(folder, name) for name in set(names) - LEFT_OUT):
                if path.is_file():  # not a link that leads nowhere
                    file.add(path, path.relative_to(job.folder).as_posix())
        for name, text in shipped(job).items():
            entry = tarfile.TarInfo(name)
            entry.size = len(text.encode())
            file.addfile(entry, io.BytesIO(text.encode()))
    return archive.getvalue()
