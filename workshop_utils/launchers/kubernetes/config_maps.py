"""What travels to a cluster beside the manifest: the job's folder, and its data, each an archive in a ConfigMap."""

from __future__ import annotations

import base64
import io
import json
import shlex
import tarfile
from pathlib import Path
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import source
from workshop_utils.training import data

# Of a ConfigMap's values together, counted before they are written in base64.
# Source: kubernetes, pkg/apis/core/validation, `ValidateConfigMap`.
LARGEST_NBYTES = 1 << 20
JOB, DATA = "job.tgz", "data.tgz"  # the keys
RENDERED = "kubernetes.yaml"  # beside job.yaml
ON_A_CLAIM = "put it on a volume, and name its PersistentVolumeClaim in data_claim"


def data_name(job: TrainingJob) -> str:
    """The name of the ConfigMap that holds the data."""
    return f"{job.name}-data"


def packed(job: TrainingJob, in_image: bool = False) -> bytes:
    """The archive of the job's folder; without its files if they are `in_image`.

    Raises:
        JobError: if it cannot travel, or is too large for a ConfigMap.
    """
    advice = (
        "delete what an earlier run has left in it, put data on a claim (data_claim in place.yaml), or build an image "
        "that has the folder, and say where (image and folder in place.yaml)"
    )
    archive = source.packed_modules(job) if in_image else source.packed(job)
    return _fitting(archive, "folder", str(job.folder), advice)


def packed_data(job: TrainingJob) -> bytes:
    """The archive of the job's data. Raises JobError as `packed` does, and DataError."""
    return _fitting(source.packed_data(job), "data", job.data, ON_A_CLAIM)


def _fitting(archive: bytes, field: str, value: Any, advice: str) -> bytes:
    if len(archive) > LARGEST_NBYTES:
        with tarfile.open(fileobj=io.BytesIO(archive)) as file:
            sizes = source.largest({member.name: member.size for member in file})
        held = f"packed it has {len(archive) / 1e6:.1f} MB ({sizes}), and a ConfigMap holds 1 MiB"
        raise JobError(f"{field} is {value!r}; {held}: {advice}")
    return archive


def check_data(job: TrainingJob) -> None:
    """Raise JobError where the data cannot travel."""
    for channel, where in job.channels.items():
        field = "data" if isinstance(job.data, str) else f"data.{channel}"
        if where == "mnist":
            raise JobError(f"{field} is 'mnist'; it has 12 MB, and a ConfigMap holds 1 MiB: {ON_A_CLAIM}")
        try:
            data.refuse_address(where)
        except data.DataError as error:
            raise JobError(f"{field}{str(error).removeprefix('data')}; or {ON_A_CLAIM}") from None
    if any(where != "digits" for where in job.channels.values()):  # they are known to be small
        packed_data(job)


def archives(job: TrainingJob, archive: bytes, with_data: bool) -> dict[tuple[str, str], bytes]:
    """What travels, by a ConfigMap's name and its key: the `archive` of the folder, and that of the data.

    Raises:
        JobError: if the data is too large.
        DataError: if there is no such data.
    """
    travels = with_data and job.data is not None
    return {(job.name, JOB): archive, **({(data_name(job), DATA): packed_data(job)} if travels else {})}


def config_maps(job: TrainingJob, archive: bytes, with_data: bool) -> list[dict[str, Any]]:
    """The ConfigMaps of `job`, without namespace or labels, that hold its `archives`. Raises as that does."""
    kind = {"apiVersion": "v1", "kind": "ConfigMap"}
    return [
        {**kind, "metadata": {"name": name}, "binaryData": {key: base64.b64encode(content).decode()}}
        for (name, key), content in archives(job, archive, with_data).items()
    ]


def as_json(job: TrainingJob, in_image: bool = False, with_data: bool = True) -> str:
    """The ConfigMaps of `job` as a text for kubectl."""
    made = config_maps(job, packed(job, in_image), with_data)
    return json.dumps({"apiVersion": "v1", "kind": "List", "items": made})


def printed_by(job: TrainingJob, folder: str, with_data: bool, in_image: bool) -> str:
    """The command that prints `as_json(job)`, run where the job's folder is called `folder`."""
    fields = {"folder": folder, **job.model_dump(include={"name", "script", "module"}, exclude_defaults=True)}
    if job.needs_start:
        fields["arguments"] = job.command_line_arguments
    sources = {channel: _anywhere(where) for channel, where in job.channels.items()}
    if not with_data:  # what it names in the folder is left out of the archive all the same
        sources = {channel: where for channel, where in sources.items() if Path(where).is_absolute()}
    if sources:
        fields["data"] = sources["training"] if isinstance(job.data, str) else sources
    words = ", ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
    module = "workshop_utils.launchers.kubernetes.config_maps"
    end = ", in_image=True" if in_image else ""
    end += ", with_data=False" if sources and not with_data else ""
    code = f"\nfrom {module} import TrainingJob, as_json\nprint(as_json(TrainingJob({words}){end}))"
    return f"python -c {shlex.quote(code)}"


def _anywhere(where: str) -> str:
    """A source of data as it may be named from any folder."""
    return where if where in data.NAMED else str(Path(where).expanduser().absolute())
