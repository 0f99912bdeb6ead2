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
from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    exercise,
    expect,
    explain,
    is_missing,
    mistakes,
    result_of,
)
from workshop_utils.runs import RunFailed

JOBS = PACKAGE.parent / "jobs"
LAST_LINES = 3  # of a pod that failed


@exercise
def pods_made_and_awaited(answer: tuple[int, int]) -> str:
    """`answer` is how many pods a TFJob with 4 workers and 2 servers has, and how many end an MPIJob's run."""
    if not isinstance(answer, tuple) or len(answer) != 2:
        raise Wrong(f"the answer is {answer!r}; give both numbers, the TFJob's pods first.")
    made, awaited = answer
    if any(map(is_missing, answer)):
        raise NotYet("put both numbers in place of the dots, then run this again.")
    for number, kind in ((made, "made"), (awaited, "awaited")):
        explain(number, {why: wrong() for why, wrong in mistakes(__name__, kind).items()})
    expect(made, 7, "the TFJob's pods", "a chief, 2 parameter servers and 4 workers: each is a pod")
    expect(awaited, 1, "the MPIJob's pods that end by themselves", "an sshd has nothing to wait for")
    return "7 pods: a chief, 2 servers, 4 workers; and 1 pod, the launcher, whose mpirun ends with the ranks."


@exercise
def tf_config(answer: Callable[[str, int, int], dict[str, Any]]) -> str:
    """`answer(name, workers, index)` is the TF_CONFIG of worker `index` of a TFJob with that many workers."""
    mirrored = TrainingJob.load(JOBS / "mnist_multi_worker_mirrored")
    for name, workers, index in (("digits", 2, 1), ("digits", 3, 0), ("other", 12, 10)):
        got = result_of(answer, name, workers, index)
        pod = pods_of(Kubernetes().render(mirrored.replace(name=name, workers=workers)))[index]
        _compare(got, json.loads(pod.variables["TF_CONFIG"]), f"TF_CONFIG of {pod.name}, one of {workers}")
    return "all workers are told the same cluster, in the same order, and each its own index in it."


def _compare(got: Any, right: dict[str, Any], what: str) -> None:
    """Raise Wrong at the first difference; only cluster and task matter."""
    if isinstance(got, str):
        raise Wrong(f"{what} is a string; return the dictionary, since the operator itself writes the JSON.")
    if not isinstance(got, dict) or not {"cluster", "task"} <= got.keys():
        raise Wrong(f"{what} is {got!r}; it must be a dictionary with cluster and task.")
    task = got["task"]
    if task != right["task"]:
        because = ""
        if isinstance(task, dict) and task.get("index") != right["task"]["index"]:
            because = ": an index is a number, and indices begin with 0, as the pods' names do"
        raise Wrong(f"{what}: task is {task!r}; it must be {right['task']!r}{because}.")
    cluster, expected_addresses = got["cluster"], right["cluster"]["worker"]
    if not isinstance(cluster, dict) or list(cluster) != ["worker"]:
        raise Wrong(f"{what}: cluster is {cluster!r}; it has one role, worker, with a list of addresses.")
    addresses = cluster["worker"]
    if not isinstance(addresses, (list, tuple)):
        raise Wrong(f"{what}: cluster.worker is {addresses!r}; it must be a list, one address per worker.")
    if len(addresses) != len(expected_addresses):
        raise Wrong(f"{what}: cluster.worker has {len(addresses)} addresses; there must be one per worker.")
    for place, (address, expected) in enumerate(zip(addresses, expected_addresses, strict=True)):
        if address != expected:
            other = ": the numbers begin with 0, and a worker's place is its number"
            because = other if address in expected_addresses else ""
            raise Wrong(f"{what}: cluster.worker[{place}] is {address!r}; it must be {expected!r}{because}.")


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
    got = answer(broken_manifest())
    if is_missing(got):
        raise NotYet("your function gave nothing: let it return the manifest, then run this again.")
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
