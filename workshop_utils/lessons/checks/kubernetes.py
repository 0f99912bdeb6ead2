"""Checks of lesson 12, Kubernetes; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
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
# Pods of the jobs a, b and c, free places, who starts, and why.
ADMITTED = (
    ("33", 4, "a", "b does not fit beside a, so none of its pods may start"),
    ("22", 4, "ab", "both fit"),
    ("4", 4, "a", "it fits exactly"),
    ("5", 4, "", "no pod starts of a job that does not fit whole"),
    ("1", 0, "", "there is no place"),
    ("", 4, "", "nobody waits"),
    ("311", 4, "ab", "the first in the queue come first, not the smallest"),
    ("134", 4, "ab", "the first in the queue come first, not the largest"),
    ("52", 4, "b", "a does not fit, and b, behind it, does"),
    ("331", 4, "ac", "c fits beside a, though b, before it, waits"),
)
Loop = Callable[[dict[str, Any], dict[str, str]], list[tuple[Any, ...]]]
LENGTHS: dict[Any, int] = {"create": 4, "delete": 2, "condition": 2}  # of an action


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
def reconcile(answer: Loop) -> str:
    """`answer(job, pods)` is one pass of the loop of a PyTorchJob's operator; in the end it keeps a real job."""
    master, *workers = names = ("digits-master-0", "digits-worker-0", "digits-worker-1")
    job, running = a_pytorchjob(workers=3), dict.fromkeys(names, "Running")
    never = a_pytorchjob(workers=3, restart="Never")
    later = "restartPolicy is OnFailure: it is deleted now; a later pass finds it missing, and makes it again"
    _pass(answer, job, {}, "create", names, "there is no pod yet")
    _pass(
        answer,
        a_pytorchjob("other", 2),
        {},
        "create",
        ("other-master-0", "other-worker-0"),
        "there is no pod yet",
    )
    _pass(answer, job, running, "", (), "a pass that finds all as it is wanted changes nothing")
    _pass(answer, job, dict.fromkeys(names, "Pending"), "", (), "they exist, and will start")
    for name in workers:
        pods = {**running, name: "Succeeded"}
        _pass(answer, job, pods, "", (), "the job has succeeded when its master has, not before")
    _pass(
        answer, job, {**running, master: "Succeeded"}, "condition", ["Succeeded"], "the master has succeeded"
    )
    for name in names:
        rest = {other: phase for other, phase in running.items() if other != name}
        _pass(answer, job, rest, "create", [name], "one is missing, whoever took it away")
        _pass(answer, job, {**running, name: "Failed"}, "delete", [name], later)
        _pass(answer, never, {**running, name: "Failed"}, "condition", ["Failed"], "restartPolicy is Never")
    left = {master: "Succeeded", workers[0]: "Running", workers[1]: "Pending"}
    for condition in ("Succeeded", "Failed"):
        for clean, removed in (("Running", workers), ("All", names), ("None", ())):
            ended = {**a_pytorchjob(workers=3, clean=clean), "status": {"condition": condition}}
            why = f"the job has ended ({condition}), and cleanPodPolicy is {clean}"
            _pass(answer, ended, left, "delete", removed, why)
            rest = {master: "Succeeded"}
            why += "; no pod is made for a job that has ended"
            _pass(answer, ended, rest, "delete", [name for name in removed if name == master], why)
    return _keeps_a_training(answer)


def _pass(
    answer: Loop, job: dict[str, Any], pods: dict[str, str], verb: str, subjects: Sequence[str], why: str
) -> None:
    """Raise Wrong unless the learner's function answers with `verb` on each of `subjects`, and nothing else."""
    given = copy.deepcopy((job, pods))
    got = result_of(answer, *given)
    if given != (job, pods):
        raise Wrong(
            "your function changes `job` or `pods`: they are what it sees; actions say what to change."
        )
    if not isinstance(got, (list, tuple)):
        raise Wrong(f"your function gave {got!r}; it must be a list of actions.")
    for action in got:
        if not isinstance(action, (list, tuple)) or len(action) != LENGTHS.get(next(iter(action), None)):
            forms = "('create', name, labels, variables), ('delete', name) or ('condition', 'Succeeded')"
            raise Wrong(f"{action!r} is no action; it must be like {forms}.")
    short, wanted = [tuple(action[:2]) for action in got], {(verb, subject) for subject in subjects}
    # Whoever says how the job has ended may clean up in the same pass.
    allowed = wanted | {("delete", pod) for pod in pods if verb == "condition"}
    where = "with " + (", ".join(f"{name} {phase}" for name, phase in pods.items()) or "no pods")
    if len(set(short)) < len(short):
        raise Wrong(f"{where}: an action comes twice in {short}.")
    for wrong in sorted(set(short) ^ wanted):
        if wrong not in allowed or wrong in wanted:
            how = "is missing" if wrong in wanted else "is one action too many"
            raise Wrong(f"{where}: {wrong} {how}; {why}.")
    right = {pod.name: pod.variables for pod in pods_of(Manifest(job))}
    label = {"training.kubeflow.org/job-name": job["metadata"]["name"]}
    for _, pod, labels, told in (action for action in got if action[0] == "create"):
        if not isinstance(labels, dict) or not label.items() <= labels.items():
            raise Wrong(f"{pod} has the labels {labels!r}; without {label} nobody finds the pods of a job.")
        for key in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
            if not isinstance(told, dict) or told.get(key) != right[pod][key]:
                was = told.get(key) if isinstance(told, dict) else told
                raise Wrong(f"{pod} is told {key}={was!r}; it must be {right[pod][key]!r}.")


def _keeps_a_training(answer: Loop) -> str:
    """Start a real training under the learner's loop, take its master's pod away once it runs, and see it end."""
    arguments = {"steps": 30, "step-seconds": 0.03}
    job = TrainingJob.load(JOBS / "digits_resumable").replace(arguments=arguments, timeout="40s")
    manifest = copy.deepcopy(Kubernetes().render(job).resource)
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        replica["restartPolicy"] = "OnFailure"
    with EmulatedKubernetes().launch(job, Manifest(manifest), reconcile=answer) as run:
        while not run.records and run.state is RunState.RUNNING:
            time.sleep(0.02)
        try:
            run.delete_pod(f"{run.name}-master-0")
            run.wait()
        except (RunFailed, JobError) as failed:
            raise Wrong(
                f"the states were right, but a real training under your loop was not: {failed}"
            ) from None
    accuracy = run.metrics["accuracy"].dropna().iloc[-1]
    lost = "under your loop a real training lost its master's pod, and yet came to its end"
    return f"{lost}; the model recognises {accuracy:.0%} of the test images."


@exercise
def admit(answer: Callable[[list[tuple[str, int]], int], list[str]]) -> str:
    """`answer(queue, free)` are the jobs of `queue`, names and pods, that start now on so many `free` places."""
    for pods, free, right, why in ADMITTED:
        queue = [(name, int(count)) for name, count in zip("abc", pods, strict=False)]
        given = list(queue)
        got = result_of(answer, given, free)
        if given != queue:
            raise Wrong("your function changes `queue`: who waits is the cluster's affair; return names.")
        if not isinstance(got, (list, tuple)) or list(got) != list(right):
            raise Wrong(f"with {free} free and {queue} it gave {got!r}; it must be {list(right)}: {why}.")
    return "a job gets all of its places or none, so no job holds places that another one waits for."


seconds_lost = OpenQuestion(
    "seconds",
    (0.5, 120),
    "worker-0 holds the store in which the agents meet. Without it the other agent fails at once, and so does its "
    "pod: the operator makes both again, and two new agents meet in a new store, with nobody to wait for. After the "
    "loss of worker-1 the old store was still there, with the lost agent in it, until three of its signs of life, "
    "5 s apart, had not come. What remains is starting processes, which takes longer on a busy machine.",
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
