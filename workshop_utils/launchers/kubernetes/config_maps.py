"""What travels to a cluster beside the manifest: the job's files and its data, as ConfigMaps."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.source import shipped
from workshop_utils.training import data

LARGEST_NBYTES = 1 << 20  # of a ConfigMap, all values together (Kubernetes, "ConfigMaps")
RENDERED = "kubernetes.yaml"  # beside job.yaml


def data_name(job: TrainingJob) -> str:
    """The name of the ConfigMap that holds the data."""
    return f"{job.name}-data"


def sources(job: TrainingJob) -> dict[str, str]:
    """The text of what the job's folder holds, and of the modules that its script may import, by path in the pod."""
    own = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(job.folder.iterdir())
        if path.is_file()
        and path.name not in ("job.yaml", RENDERED)
        and path.suffix in {".py", ".yaml", ".json", ".txt"}
        and not _describes_a_job(path)
    }
    # A package may do without __init__.py, and a ConfigMap's empty value says nothing to a reader.
    modules = {name: text for name, text in shipped(job).items() if text}
    return {job.script: job.script_path.read_text(encoding="utf-8"), **own, **modules}


def _describes_a_job(path: Path) -> bool:
    """Whether `path` is a variant's description, which lies beside its script and which no pod needs."""
    try:
        return path.suffix == ".yaml" and bool(TrainingJob.load(path))
    except JobError:
        return False


def config_maps(job: TrainingJob, files: Mapping[str, str], with_data: bool) -> list[dict[str, Any]]:
    """The ConfigMaps of `job`, without namespace or labels: one of `files`, text by path, and one of its data.

    A key is a file's name, as it can hold no slash.

    Raises:
        JobError: if they would be too large.
        DataError: if there is no such data.
    """
    texts = {Path(path).name: text for path, text in files.items()}
    if sum(len(text.encode()) for text in texts.values()) > LARGEST_NBYTES:
        raise JobError(f"script is {job.script!r}; with what it brings along it is larger than 1 MiB")
    made = [_config_map(job.name, data=texts)]
    if with_data and job.data is not None:
        paths = [path for path in sorted(data.prepare_all(job.data).iterdir()) if path.is_file()]
        contents = {path.name: path.read_bytes() for path in paths if path.name.startswith(("t10k", "train"))}
        nbytes = sum(map(len, contents.values()))
        if nbytes > LARGEST_NBYTES:
            advice = "put it on a volume, and name its PersistentVolumeClaim in data_claim"
            raise JobError(f"data is {job.data!r}, {nbytes / 1e6:.0f} MB; a ConfigMap holds 1 MiB: {advice}")
        encoded = {name: base64.b64encode(content).decode() for name, content in contents.items()}
        made.append(_config_map(data_name(job), binaryData=encoded))
    return made


def _config_map(name: str, **content: dict[str, str]) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, **content}
