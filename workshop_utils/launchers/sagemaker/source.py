"""What a training job brings along: its script with the modules that it imports, and own drivers."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.source import shipped
from workshop_utils.strategies import strategy_of

LEFT_OUT = {"__pycache__", ".ipynb_checkpoints", ".git", ".venv"}
HERE = Path(__file__).parent
# The container's entry point, and what it imports or starts.
DRIVERS = (
    HERE / "container.py",
    HERE / "contract.py",
    HERE / "parameter_server.py",
    HERE.parent / "horovod_rendezvous.py",
)


def driver_files() -> dict[str, str]:
    """The text of own drivers by name; they need Python's standard library alone."""
    return {path.name: path.read_text(encoding="utf-8") for path in DRIVERS}


def packed(job: TrainingJob) -> bytes:
    """`sourcedir.tar.gz` of `job`: its folder, and beside the script the modules that it may import.

    The same job gives the same bytes: times and owners are left out.
    """
    contents = {
        path.relative_to(job.folder).as_posix(): path.read_bytes()
        for path in sorted(job.folder.rglob("*"))
        if path.is_file() and not LEFT_OUT & set(path.relative_to(job.folder).parts)
    }
    contents |= {name: text.encode() for name, text in shipped(strategy_of(job)).items()}
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz", compresslevel=6) as file:
        for name, content in sorted(contents.items()):
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            file.addfile(entry, io.BytesIO(content))
    data = bytearray(archive.getvalue())
    data[4:8] = bytes(4)  # gzip writes the time of packing here (RFC 1952, section 2.3.1)
    return bytes(data)
