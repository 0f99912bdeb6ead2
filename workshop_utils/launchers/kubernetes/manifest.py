"""The objects of one job, and the YAML in which people write them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import yaml

from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.kubernetes import files, kinds, rules
from workshop_utils.launchers.kubernetes.settings import Kind, Settings
from workshop_utils.launchers.source import PACKAGE

RENDERERS: dict[Kind, Callable[[TrainingJob, Settings], dict[str, Any]]] = {
    "TFJob": kinds.tfjob,
    "PyTorchJob": kinds.pytorchjob,
    "MPIJob": kinds.mpijob,
    "TrainJob": kinds.trainjob,
    "Job": kinds.plain_job,
}
PREPARED = "$(python -c 'from workshop_utils import data; print(data.prepare(\"{source}\"))')"


@dataclass(frozen=True)
class Manifest:
    """What is sent: `resource` is the job itself, `before` what it refers to; printed, it is YAML for kubectl."""

    resource: dict[str, Any]
    before: tuple[dict[str, Any], ...] = ()
    comment: str = ""

    @property
    def objects(self) -> tuple[dict[str, Any], ...]:
        """All of it, in the order in which it is made."""
        return (*self.before, self.resource)

    def __str__(self) -> str:
        return self.comment + yaml_of(self.objects)

    __repr__ = __str__


def build(job: TrainingJob, settings: Settings) -> Manifest:
    """The manifest of `job`.

    Raises:
        JobError: for what Kubernetes, or an operator, would refuse.
    """
    kind = settings.kind_for(job)
    before = (kinds.runtime(job, settings),) if kind == "TrainJob" else ()
    manifest = Manifest(RENDERERS[kind](job, settings), before, _how_to(job, settings))
    for described in manifest.objects:
        rules.body(described)
    return manifest


def _how_to(job: TrainingJob, settings: Settings) -> str:
    """How to send the same with kubectl."""
    folder = job.folder.resolve()
    if folder.is_relative_to(PACKAGE.parent):
        folder = folder.relative_to(PACKAGE.parent)
    modules = [path for path in files.sources(job) if path.startswith("workshop_utils/")]
    own = [(folder / path).as_posix() for path in files.sources(job) if path not in modules]
    space = f" --namespace {settings.namespace}" if settings.namespace != "default" else ""
    manifest = (folder / files.RENDERED).as_posix()
    lines = [
        f"By hand: keep this text as {manifest}; then, from the repository's root:",
        f"kubectl create{space} configmap {job.name} \\",
        *(f"  --from-file={path} \\" for path in [*own, *modules][:-1]),
        f"  --from-file={[*own, *modules][-1]}",
    ]
    if settings.data_claim is None:
        source = PREPARED.format(source=job.data)
        lines += [f"kubectl create{space} configmap {files.data_name(job)} \\", f'  --from-file="{source}"']
    lines.append(f"kubectl create -f {manifest}")
    return "".join(f"# {line}\n" for line in lines)


class _Dumper(yaml.SafeDumper):
    """Short lists on one line; the same object written twice, not by reference."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_list(dumper: yaml.SafeDumper, values: list[Any]) -> yaml.Node:
    flow = all(not isinstance(value, dict | list) for value in values)
    return dumper.represent_sequence("tag:yaml.org,2002:seq", values, flow_style=flow)


_Dumper.add_representer(list, _represent_list)


def yaml_of(objects: Iterable[dict[str, Any]]) -> str:
    """`objects` as YAML, each a document of its own."""
    texts = [yaml.dump(each, Dumper=_Dumper, sort_keys=False, width=100) for each in objects]
    return "---\n".join(texts)
