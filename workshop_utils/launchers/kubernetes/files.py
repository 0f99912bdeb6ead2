"""What a job brings along into a cluster: ConfigMaps with its script, what that imports, and small data."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.source import shipped
from workshop_utils.strategies import strategy_of
from workshop_utils.training import data

LARGEST_NBYTES = 1 << 20  # of a ConfigMap, all values together (Kubernetes, "ConfigMaps")
RENDERED = "kubernetes.yaml"  # beside job.yaml
NOT_SHIPPED = ("job.yaml", RENDERED)


def data_name(job: TrainingJob) -> str:
    """The name of the ConfigMap that holds the data."""
    return f"{job.name}-data"


def sources(job: TrainingJob) -> dict[str, str]:
    """The text of what the job's folder holds, and of the modules that its script may import, by path in the pod."""
    own = {
        path.name: path.read_text(encoding="utf-8")
        for path in sorted(job.folder.iterdir())
        if path.is_file()
        and path.name not in NOT_SHIPPED
        and path.suffix in {".py", ".yaml", ".json", ".txt"}
    }
    # A package may do without __init__.py, and a ConfigMap's empty value says nothing to a reader.
    modules = {name: text for name, text in shipped(strategy_of(job)).items() if text}
    return {job.script: job.script_path.read_text(encoding="utf-8"), **own, **modules}


def paths(job: TrainingJob) -> dict[str, str]:
    """The path in the pod by key of the ConfigMap: a key has no slashes."""
    return {Path(path).name: path for path in sources(job)}


def config_maps(job: TrainingJob, with_data: bool) -> list[dict[str, Any]]:
    """The ConfigMaps of `job`, without namespace or labels.

    Raises:
        JobError: if they would be too large.
        DataError: if there is no such data.
    """
    by_key = {Path(path).name: text for path, text in sources(job).items()}
    made: list[dict[str, Any]] = [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": job.name}, "data": by_key}
    ]
    if sum(len(text.encode()) for text in by_key.values()) > LARGEST_NBYTES:
        raise JobError(f"script is {job.script!r}; with what it brings along it is larger than 1 MiB")
    if with_data:
        made.append(_data(job))
    return made


def _data(job: TrainingJob) -> dict[str, Any]:
    folder = data.prepare(job.data)
    found = [
        path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name.startswith(("t10k", "train"))
    ]
    nbytes = sum(path.stat().st_size for path in found)
    if nbytes > LARGEST_NBYTES:
        raise JobError(
            f"data is {job.data!r}, {nbytes / 1e6:.0f} MB; a ConfigMap holds 1 MiB: put it on a volume, and name its "
            "PersistentVolumeClaim in data_claim"
        )
    content = {path.name: base64.b64encode(path.read_bytes()).decode() for path in found}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": data_name(job)},
        "binaryData": content,
    }
