"""Checks of lesson 12, Kubernetes; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Callable, Iterable
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import EmulatedKubernetes, Kubernetes, check
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.launchers.source import PACKAGE
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, is_missing, result_of
from workshop_utils.lessons.checks.open_question import OpenQuestion
from workshop_utils.runs import RunFailed, RunState

JOBS = PACKAGE.parent / "jobs"
LAST_LINES = 3  # of a pod that failed
LENGTHS = {"create": 4, "delete": 2, "condition": 2}  # of an action


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


def a_pytorchjob(
    name: str = "digits", workers: int = 2, restart: str = "OnFailure", clean: str = "Running"
) -> dict[str, Any]:
    """A PyTorchJob with a Master and Workers, `workers` in all, as an operator finds it: nothing has been made yet."""
    settings = {"name": name, "workers": workers}
    job = copy.deepcopy(Kubernetes().render(_digits().replace(**settings)).resource)
    job["spec"]["runPolicy"]["cleanPodPolicy"] = clean
    for replica in job["spec"]["pytorchReplicaSpecs"].values():
        replica["restartPolicy"] = restart
    return {**job, "status": {}}


@exercise
def reconcile(answer: Callable[[dict[str, Any], dict[str, str]], list[tuple[Any, ...]]]) -> str:
    """`answer(job, pods)` is one pass of the loop of a PyTorchJob's operator; in the end it keeps a real job."""
    names = ("digits-master-0", "digits-worker-0", "digits-worker-1")
    job, running = a_pytorchjob(workers=3), dict.fromkeys(names, "Running")
    _expect_actions(answer, job, {}, {("create", name) for name in names}, "there is no pod yet")
    _check_created(answer, a_pytorchjob("other", 4), {})
    twice = "a pass that finds all as it is wanted changes nothing"
    _expect_actions(answer, job, running, set(), twice)
    _expect_actions(answer, job, dict.fromkeys(names, "Pending"), set(), "they exist, and will start")
    for lost in names:
        rest = {name: phase for name, phase in running.items() if name != lost}
        _expect_actions(answer, job, rest, {("create", lost)}, "one is missing, whoever took it away")
        _check_created(answer, job, rest)
    for first in names[1:]:
        pods = {**running, first: "Succeeded"}
        _expect_actions(answer, job, pods, set(), "the job has succeeded when its master has, not before")
    done = {**running, names[0]: "Succeeded"}
    _expect_actions(
        answer, job, done, {("condition", "Succeeded")}, "the master has succeeded", _deletions(done)
    )
    for name in names:
        failed = {**running, name: "Failed"}
        why = (
            "restartPolicy is OnFailure: it is deleted now; a later pass finds it missing, and makes it again"
        )
        _expect_actions(answer, job, failed, {("delete", name)}, why)
        never, why = a_pytorchjob(workers=3, restart="Never"), "restartPolicy is Never"
        _expect_actions(answer, never, failed, {("condition", "Failed")}, why, _deletions(failed))
    left = {names[0]: "Succeeded", names[1]: "Running", names[2]: "Pending"}
    for condition in ("Succeeded", "Failed"):
        for clean, removed in (("Running", names[1:]), ("All", names), ("None", ())):
            ended = {**a_pytorchjob(workers=3, clean=clean), "status": {"condition": condition}}
            why = f"the job has ended ({condition}), and cleanPodPolicy is {clean}"
            _expect_actions(answer, ended, left, _deletions(removed), why)
            gone = {names[0]: left[names[0]]}
            kept = _deletions(gone) if clean == "All" else set()
            _expect_actions(answer, ended, gone, kept, f"{why}; no pod is made for a job that has ended")
    return _keeps_a_training(answer)


def _deletions(names: Iterable[str]) -> set[tuple[str, str]]:
    return {("delete", name) for name in names}


def _actions(answer: Callable[..., Any], job: dict[str, Any], pods: dict[str, str]) -> list[tuple[Any, ...]]:
    """What the learner's function says for copies of both, which it must leave as they are."""
    given = copy.deepcopy((job, pods))
    got = result_of(answer, *given)
    if given != (job, pods):
        raise Wrong(
            "your function changes `job` or `pods`: they are what it sees; say in actions what to change."
        )
    if not isinstance(got, (list, tuple)):
        raise Wrong(f"your function gave {got!r}; it must be a list of actions.")
    for action in got:
        if not isinstance(action, (list, tuple)) or len(action) != LENGTHS.get(next(iter(action), None)):
            forms = "('create', name, labels, variables), ('delete', name) or ('condition', 'Succeeded')"
            raise Wrong(f"{action!r} is no action; it must be like {forms}.")
    return [tuple(action) for action in got]


def _expect_actions(
    answer: Callable[..., Any],
    job: dict[str, Any],
    pods: dict[str, str],
    wanted: set[tuple[str, str]],
    why: str,
    optional: Iterable[tuple[str, str]] = (),
) -> None:
    got = [action[:2] for action in _actions(answer, job, pods)]
    text = _shown(pods)
    if len(set(got)) < len(got):
        raise Wrong(f"{text}: an action comes twice in {got}.")
    for action in sorted(set(got) - wanted - set(optional)):
        raise Wrong(f"{text}: {action} is one action too many; {why}.")
    for action in sorted(wanted - set(got)):
        raise Wrong(f"{text}: {action} is missing; {why}.")


def _check_created(answer: Callable[..., Any], job: dict[str, Any], pods: dict[str, str]) -> None:
    """Raise Wrong unless each pod that is made has the job's label, and the variables that the operator sets."""
    name = job["metadata"]["name"]
    right = {pod.name: pod.variables for pod in pods_of(Manifest(job))}
    for _, pod, labels, variables in _actions(answer, job, pods):
        label = {"training.kubeflow.org/job-name": name}
        if not isinstance(labels, dict) or not label.items() <= labels.items():
            raise Wrong(f"{pod} has the labels {labels!r}; without {label} nobody finds the pods of a job.")
        for key in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
            if not isinstance(variables, dict) or variables.get(key) != right[pod][key]:
                told = variables.get(key) if isinstance(variables, dict) else variables
                raise Wrong(f"{pod} is told {key}={told!r}; it must be {right[pod][key]!r}.")


def _shown(pods: dict[str, str]) -> str:
    return "with " + (", ".join(f"{name} {phase}" for name, phase in pods.items()) or "no pods")


def _keeps_a_training(answer: Callable[..., Any]) -> str:
    """Start a real training under the learner's loop, take its worker's pod away once it runs, and see it end."""
    arguments = {"steps": 30, "step-seconds": 0.03}
    job = TrainingJob.load(JOBS / "digits_resumable").replace(arguments=arguments, timeout="40s")
    manifest = copy.deepcopy(Kubernetes().render(job).resource)
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        replica["restartPolicy"] = "OnFailure"
    with EmulatedKubernetes().launch(job, Manifest(manifest), reconcile=answer) as run:
        while not run.records and run.state is RunState.RUNNING:
            time.sleep(0.02)
        try:
            run.delete_pod(f"{run.name}-worker-0")
            run.wait()
        except (RunFailed, JobError) as failed:
            raise Wrong(
                f"the states were right, but a real training under your loop was not: {failed}"
            ) from None
    accuracy = run.metrics["accuracy"].dropna().iloc[-1]
    lost = "under your loop a real training lost its worker's pod, and yet came to its end"
    return f"{lost}; the model recognises {accuracy:.0%} of the test images."


@exercise
def admit(answer: Callable[[list[tuple[str, int]], int], list[str]]) -> str:
    """`answer(queue, free)` are the jobs of `queue`, names and pods, that start now on so many `free` places."""
    cases = (
        ([("a", 3), ("b", 3)], 4, ["a"], "b does not fit beside a, so none of its pods may start"),
        ([("a", 2), ("b", 2)], 4, ["a", "b"], "both fit"),
        ([("a", 4)], 4, ["a"], "it fits exactly"),
        ([("a", 5)], 4, [], "no pod starts of a job that does not fit whole"),
        ([("a", 1)], 0, [], "there is no place"),
        ([], 4, [], "nobody waits"),
        ([("a", 5), ("b", 2)], 4, ["b"], "a does not fit, and b, behind it, does"),
        ([("a", 3), ("b", 3), ("c", 1)], 4, ["a", "c"], "c fits beside a, though b, before it, waits"),
        ([("b", 2), ("a", 2), ("c", 2)], 5, ["b", "a"], "the first in the queue come first, not by name"),
        ([("a", 1), ("b", 3), ("c", 4)], 4, ["a", "b"], "the first in the queue come first, not the largest"),
        (
            [("a", 3), ("b", 1), ("c", 1)],
            4,
            ["a", "b"],
            "the first in the queue come first, not the smallest",
        ),
    )
    for queue, free, right, why in cases:
        given = list(queue)
        got = result_of(answer, given, free)
        if given != queue:
            raise Wrong("your function changes `queue`: who waits is the cluster's affair; return names.")
        if not isinstance(got, (list, tuple)) or list(got) != right:
            raise Wrong(
                f"with {free} free and the queue {queue} it gave {got!r}; it must be {right!r}: {why}."
            )
    return "a job gets all of its places or none, so no job holds places that another one waits for."


seconds_lost = OpenQuestion(
    "seconds",
    (0.5, 60),
    "worker-0 holds the store in which the agents meet. Without it the other agent fails at once, and so does its "
    "pod: the operator makes both again, and two new agents meet in a new store, with nobody to wait for. After the "
    "loss of worker-1 the old store was still there, with the lost agent in it, until three of its signs of life, "
    "5 s apart, had not come.",
    predictable=(0.1, 600),
)


def broken_manifest() -> dict[str, Any]:
    """A PyTorchJob with three mistakes: a check finds two of them, and only a run finds the third."""
    manifest = _whole_manifest()
    master, worker = (_container(manifest, role) for role in ("Master", "Worker"))
    master["name"] = "torch"
    worker["imagee"] = worker.pop("image")
    worker["command"][1] = "/workshop/job/trian.py"
    return manifest


def _whole_manifest() -> dict[str, Any]:
    """Its Worker differs from its Master on purpose: it asks for cheap nodes, which may be taken away."""
    manifest = copy.deepcopy(Kubernetes().render(_digits()).resource)
    template = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    template["spec"]["nodeSelector"] = {"eks.amazonaws.com/capacityType": "SPOT"}
    return manifest


def _container(manifest: dict[str, Any], role: str) -> dict[str, Any]:
    container: dict[str, Any] = manifest["spec"]["pytorchReplicaSpecs"][role]["template"]["spec"][
        "containers"
    ][0]
    return container


def _digits() -> TrainingJob:
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
        with EmulatedKubernetes().launch(_digits(), Manifest(got)) as run:
            run.wait()
    except JobError as refused:
        raise Wrong(f"no pod could start so: {refused}.") from None
    except RunFailed as failed:
        first, *rest = str(failed).splitlines()
        last = " ".join([first, *rest[-LAST_LINES:]])
        raise Wrong(f"a cluster takes it, but the run fails: {last}") from None
    whole = _whole_manifest()
    selectors = [
        each["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"].get("nodeSelector")
        for each in (got, whole)
    ]
    if selectors[0] != selectors[1]:
        raise Wrong(
            "both pods ran, but the Worker has lost its nodeSelector: a Master's text is not a Worker's."
        )
    if got != whole:
        raise Wrong("both pods ran, but more was changed than the three mistakes: leave the rest as it is.")
    accuracy = run.metrics["accuracy"].dropna().iloc[-1]
    return f"both pods ran, and their model recognises {accuracy:.0%} of the test images."
