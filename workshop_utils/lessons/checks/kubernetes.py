"""Checks of lesson 12, Kubernetes; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import EmulatedKubernetes, Kubernetes, check
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.launchers.source import PACKAGE
from workshop_utils.lessons.checks import Verdict, Wrong, exercise, questions, result_of
from workshop_utils.runs import RunFailed

JOBS = PACKAGE.parent / "jobs"
LAST_LINES = 3  # of a pod that failed

__getattr__ = questions(__name__)


def pods_made_and_awaited(answer: tuple[int, int]) -> Verdict:
    """`answer` is how many pods a TFJob with 4 workers and 2 servers has, and how many end an MPIJob's run."""
    asked = zip(("pods_made", "pods_awaited"), answer, strict=True)
    verdicts = [__getattr__(name)(count) for name, count in asked]
    right = Verdict("right", " ".join(each.text for each in verdicts))
    return next((each for each in verdicts if each.state != "right"), right)


@exercise
def tf_config(answer: Callable[[str, int, int], dict[str, Any]]) -> str:
    """`answer(name, workers, index)` is the TF_CONFIG of worker `index` of a TFJob with that many workers."""
    mirrored = TrainingJob.load(JOBS / "mnist_multi_worker_mirrored")
    for name, workers, index in (("digits", 2, 1), ("digits", 3, 0), ("other", 12, 10)):
        got = result_of(answer, name, workers, index)
        pod = pods_of(Kubernetes().render(mirrored.replace(name=name, workers=workers)))[index]
        right = json.loads(pod.variables["TF_CONFIG"])
        right = {name: right[name] for name in ("cluster", "task")}
        if isinstance(got, dict):
            got = {name: value for name, value in got.items() if name in right}  # the rest does not matter
        _compare(got, right, f"TF_CONFIG of {pod.name}, one of {workers}")
    return "all workers are told the same cluster, in the same order, and each its own index in it."


def _compare(got: Any, right: Any, what: str) -> None:
    """Raise Wrong at the first difference."""
    if type(got) is not type(right):
        raise Wrong(f"{what} is {got!r}; it must be of type {type(right).__name__}.")
    if isinstance(right, dict):
        if got.keys() != right.keys():
            raise Wrong(f"{what} has {', '.join(got) or 'nothing'}; it must have {', '.join(right)}.")
        for name, value in right.items():
            _compare(got[name], value, f"{what}: {name}")
    elif isinstance(right, list):
        if len(got) != len(right):
            raise Wrong(f"{what} has {len(got)} addresses; there must be one per worker.")
        for place, value in enumerate(right):
            _compare(got[place], value, f"{what}[{place}]")
    elif got != right:
        raise Wrong(f"{what} is {got!r}; it must be {right!r}; indices begin with 0, as the pods' names do.")


def broken_manifest() -> dict[str, Any]:
    """A PyTorchJob with three mistakes: a check finds two of them, and only a run finds the third."""
    manifest = copy.deepcopy(Kubernetes().render(_broken_job()).resource)
    (container,) = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["containers"]
    container["imagee"] = container.pop("image")
    container["name"] = "torch"
    container["command"][1] = "/workshop/job/trian.py"
    return manifest


def _broken_job() -> TrainingJob:
    return TrainingJob.load(JOBS / "mnist_torch_ddp").replace(workers=2, arguments={"epochs": 1})


@exercise
def mended(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """`answer(manifest)` is the broken manifest without its mistakes, as a run of its pods shows."""
    got = result_of(answer, broken_manifest())
    if problems := check.problems_of(got):
        raise Wrong("a cluster would not take it yet: " + "; ".join(problems))
    pods = pods_of(Manifest(got))
    if len(pods) != 2:
        raise Wrong(f"it has {len(pods)} pod(s) now; mend what is there, and keep both.")
    try:
        with EmulatedKubernetes().launch(_broken_job(), Manifest(got)) as run:
            run.wait()
    except JobError as refused:
        raise Wrong(f"no pod could start so: {refused}.") from None
    except RunFailed as failed:
        first, *rest = str(failed).splitlines()
        last = " ".join([first, *rest[-LAST_LINES:]])
        raise Wrong(f"a cluster takes it, but the run fails: {last}") from None
    if got != Kubernetes().render(_broken_job()).resource:
        raise Wrong("both pods ran, but more was changed than the three mistakes: leave the rest as it is.")
    accuracy = run.metrics["accuracy"].dropna().iloc[-1]
    return f"both pods ran, and their model recognises {accuracy:.0%} of the test images."
