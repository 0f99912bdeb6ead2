"""The same by hand: for each step in a job's life, kubectl's line beside that in Python.

side_by_side(Kubernetes().render(job), folder="jobs/mnist_torch_ddp")
"""

from __future__ import annotations

from dataclasses import dataclass

from workshop_utils.launchers.kubernetes import files, kinds
from workshop_utils.launchers.kubernetes.cluster import job_label, plural
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.operators import pods_of

# Kinds that are made of Kubernetes's own Jobs: these end with another condition, and give pods letters of their own.
MADE_OF_JOBS = {"TrainJob", "Job"}
INDEX_LABEL = "batch.kubernetes.io/job-completion-index"


@dataclass(frozen=True)
class Step:
    """What is done, and its line in either language."""

    what: str
    kubectl: str
    python: str


class SideBySide(tuple[Step, ...]):
    """Steps, which a notebook shows as a table."""

    def _repr_markdown_(self) -> str:
        rows = [f"| {step.what} | `{step.kubectl}` | `{step.python}` |" for step in self]
        return "\n".join(["| | kubectl | Python |", "| --- | --- | --- |", *rows])

    def __str__(self) -> str:
        width = max(len(step.what) for step in self)
        return "\n".join(f"{step.what:{width}}  {step.kubectl}\n{'':{width}}  {step.python}" for step in self)

    __repr__ = __str__


def side_by_side(manifest: Manifest, folder: str = ".") -> SideBySide:
    """The steps of the job of `manifest`, whose kubernetes.yaml lies in `folder`.

    In Python, `place` is a `Kubernetes` or a `StandIn`, `job` the TrainingJob, and `run` what its launch gave.
    """
    kind, metadata = manifest.resource["kind"], manifest.resource["metadata"]
    name, namespace = metadata["name"], metadata.get("namespace", "default")
    kubectl = "kubectl" if namespace == "default" else f"kubectl --namespace {namespace}"
    this, file = f"{plural(kind)} {name}", f"{folder}/{files.RENDERED}"
    ended = "Complete" if kind in MADE_OF_JOBS else "Succeeded"
    return SideBySide(
        (
            Step("try", f"{kubectl} create --dry-run=server -f {file}", "print(place.dry_run(job))"),
            Step("create", f"{kubectl} create -f {file}", "run = place.launch(job)"),
            Step("get", f"{kubectl} get {this}", "run.state"),
            Step("pods", f"{kubectl} get pods -l {job_label(manifest.resource)}={name}", "run.pods()"),
            Step("describe", f"{kubectl} describe {this}", "print(run.describe())"),
            Step("logs", f"{kubectl} logs -f {_first_pod(manifest)}", 'run.logs(follow=True, worker="worker-0")'),
            Step("wait", f"{kubectl} wait --for=condition={ended} --timeout=600s {this}", "run.wait(600)"),
            Step("delete", f"{kubectl} delete -f {file}", "run.stop()"),
        )
    )  # fmt: skip


def _first_pod(manifest: Manifest) -> str:
    """What kubectl calls the pod from which `worker-0` is heard; the name of a Job's pod is not known before."""
    kind, name = manifest.resource["kind"], manifest.resource["metadata"]["name"]
    if kind == "MPIJob":
        return f"jobs/{name}-{kinds.LAUNCHER}"
    if kind in MADE_OF_JOBS:
        return f"-l {job_label(manifest.resource)}={name},{INDEX_LABEL}=0"
    return next(pod.name for pod in pods_of(manifest) if pod.worker == "worker-0")
