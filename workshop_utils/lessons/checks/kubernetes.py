"""Checks of lesson 12, Kubernetes; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import functools
import itertools
import json
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.kubernetes import EmulatedKubernetes, Kubernetes, check, operators
from workshop_utils.launchers.kubernetes.emulator import Loop
from workshop_utils.launchers.kubernetes.manifest import Manifest
from workshop_utils.launchers.kubernetes.operators import pods_of
from workshop_utils.launchers.source import PACKAGE
from workshop_utils.lessons.checks import Wrong, exercise, refuse, result_of
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.runs import RunFailed, RunState

JOBS = PACKAGE.parent / "jobs"
LAST_LINES = 3  # of a pod that failed
# Jobs, each with its number of pods; free places; who starts, and why.
ADMITTED = (
    ("a3 b3", 4, "a", "b does not fit beside a, so none of its pods may start"),
    ("a2 b2", 4, "ab", "both fit"),
    ("a4", 4, "a", "it fits exactly"),
    ("a5", 4, "", "no pod starts of a job that does not fit whole"),
    ("a1", 0, "", "there is no place"),
    ("", 4, "", "nobody waits"),
    ("a3 b1 c1", 4, "ab", "the first in the queue come first, not the smallest"),
    ("a1 b3 c4", 4, "ab", "the first in the queue come first, not the largest"),
    ("a5 b2", 4, "b", "a does not fit, and b, behind it, does"),
    ("a3 b3 c1", 4, "ac", "c fits beside a, though b, before it, waits"),
    ("a1 b1 c1", 4, "abc", "all three fit"),
    ("a5 b5 c5 d1 e1", 4, "de", "d and e fit, however many before them do not"),
    ("b3 a2", 4, "b", "the first in the queue come first, whatever their names"),
    ("a3 b2 c2", 4, "a", "the first in the queue come first, though b and c would fill all places"),
    ("a5 b5 c5 d5 e5 f5 g5 h5 i1", 4, "i", "i fits, however many before it do not"),
    ("a1 b1 c1 d1 e1 f1", 6, "abcdef", "all six fit"),
)
LENGTHS: dict[Any, int] = {"create": 4, "delete": 2, "condition": 2}  # of an action
PHASES = ("Running", "Succeeded", "Failed", "Pending", "")  # none: the pod is missing


def a_pytorchjob(
    name: str = "digits",
    workers: int = 2,
    restart: Sequence[str] = ("OnFailure", "OnFailure"),
    clean: str = "Running",
) -> dict[str, Any]:
    """A PyTorchJob with a Master and Workers, `workers` in all, as an operator finds it: nothing has been made yet."""
    job = copy.deepcopy(_rendered(name, workers))
    job["spec"]["runPolicy"]["cleanPodPolicy"] = clean
    for role, policy in zip(("Master", "Worker"), restart, strict=True):
        job["spec"]["pytorchReplicaSpecs"][role]["restartPolicy"] = policy
    return {**job, "status": {}}


@exercise
def reconcile(answer: Loop) -> str:
    """`answer(job, pods)` is one pass of the loop of a PyTorchJob's operator; in the end it keeps a real job."""
    names = ("digits-master-0", "digits-worker-0", "digits-worker-1")
    combined = sorted(itertools.product(PHASES, repeat=3), key=lambda phases: -phases.count("Running"))
    states = [{name: phase for name, phase in zip(names, each, strict=True) if phase} for each in combined]
    pending = dict.fromkeys(names, "Pending")
    _passes(answer, a_pytorchjob(workers=3), [{}])
    for restart in itertools.product(("OnFailure", "Never"), repeat=2):
        _passes(answer, a_pytorchjob(workers=3, restart=restart), [states[0], pending, *states])
    for condition, clean in itertools.product(("Succeeded", "Failed", None), ("Running", "All", "None")):
        job = a_pytorchjob(workers=3, restart=("Never", "Never"), clean=clean)
        job["status"] = {"condition": condition} if condition else {}
        _passes(answer, job, [{**pending, names[0]: "Succeeded", names[1]: "Running"}, *states[:20]])
    other = [{}, {"an-other-master-0": "Succeeded"}, {"an-other-worker-0": "Failed"}]
    _passes(answer, a_pytorchjob("an-other", workers=5), other)
    return _keeps_a_training(answer)


def _passes(answer: Loop, job: dict[str, Any], states: Sequence[dict[str, str]]) -> None:
    """Raise Wrong unless the learner's function does in each state what the workshop's own loop does."""
    wanted_pods = pods_of(Manifest(job))
    made = {pod.name: pod.variables for pod in wanted_pods}
    label = {"training.kubeflow.org/job-name": job["metadata"]["name"]}
    for pods in states:
        wanted = {action[:2] for action in operators.reconcile(job, pods, wanted_pods)}
        # What failed may go before what is missing is made, and who says how a job has ended may clean up at once.
        optional = {each for each in wanted if each[0] == "create" and "Failed" in pods.values()}
        for _, condition in [each for each in wanted if each[0] == "condition"]:
            optional |= set(operators.reconcile({**job, "status": {"condition": condition}}, pods, ()))
        got = _actions(answer, job, pods)
        short = [tuple(action[:2]) for action in got]
        where = "with " + (", ".join(f"{name} {phase}" for name, phase in pods.items()) or "no pods")
        refuse(len(set(short)) < len(short), f"{where}: an action comes twice in {short}.")
        for wrong in sorted((set(short) ^ wanted) - optional):
            how = "is missing" if wrong in wanted else "is one action too many"
            raise Wrong(f"{where}: {wrong} {how}; {_why(job, pods, wanted)}.")
        for _, pod, labels, told in (action for action in got if action[0] == "create"):
            labelled = isinstance(labels, dict) and label.items() <= labels.items()
            without = f"without {label} nobody finds the pods of a job"
            refuse(not labelled, f"{pod} has the labels {labels!r}; {without}.")
            for key in ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"):
                was, due = told.get(key) if isinstance(told, dict) else told, made[pod][key]
                refuse(was != due, f"{pod} is told {key}={was!r}; it must be {due!r}.")


def _actions(answer: Loop, job: dict[str, Any], pods: dict[str, str]) -> Sequence[tuple[Any, ...]]:
    given = copy.deepcopy((job, pods))
    got: Sequence[tuple[Any, ...]] = result_of(answer, *given)
    changes = "your function changes `job` or `pods`: they are what it sees; return actions instead."
    refuse(given != (job, pods), changes)
    refuse(not isinstance(got, list | tuple), f"your function gave {got!r}; it must be a list of actions.")
    forms = "('create', name, labels, variables), ('delete', name) or ('condition', 'Succeeded')"
    for action in got:
        fits = isinstance(action, list | tuple) and len(action) == LENGTHS.get(next(iter(action), None))
        refuse(not fits, f"{action!r} is no action; it must be like {forms}.")
    return got


def _why(job: dict[str, Any], pods: dict[str, str], wanted: set[tuple[Any, ...]]) -> str:
    """Why `wanted` is right: the first of these that holds."""
    spec, condition, phases = job["spec"], job["status"].get("condition"), set(pods.values())
    policy = f"cleanPodPolicy is {spec['runPolicy']['cleanPodPolicy']}"
    ended = f"the job has ended ({condition}), and {policy}; no pod is made for a job that has ended"
    of_roles = [f"{each['restartPolicy']} ({role})" for role, each in spec["pytorchReplicaSpecs"].items()]
    final = ("condition", "Failed") in wanted
    then = "that is final" if final else "it goes, and a later pass makes it again"
    return next(
        why
        for why, holds in {
            ended: condition,
            "the master has succeeded, and that decides": ("condition", "Succeeded") in wanted,
            f"restartPolicy is {', '.join(of_roles)}: {then}": "Failed" in phases,
            "one is missing, whoever took it away": wanted and pods,
            "there is no pod yet": wanted,
            "the job has succeeded when its master has, not before": "Succeeded" in phases,
            "they exist, and will start": "Pending" in phases,
            "a pass that finds all as it is wanted changes nothing": True,
        }.items()
        if holds
    )


def _keeps_a_training(answer: Loop) -> str:
    """Start a real training under the learner's loop, take its master's pod away once it runs, and see it end."""
    arguments = {"steps": 30, "step-seconds": 0.03}
    job = TrainingJob.load(JOBS / "digits_resumable").replace(arguments=arguments, timeout="40s")
    manifest = copy.deepcopy(Kubernetes().render(job).resource)
    for replica in manifest["spec"]["pytorchReplicaSpecs"].values():
        replica["restartPolicy"] = "OnFailure"
    with EmulatedKubernetes().launch(job, Manifest(manifest), reconcile=answer) as run:
        deadline = time.monotonic() + 60  # a loop may make no pod at all
        while not run.records and run.state is RunState.RUNNING and time.monotonic() < deadline:
            time.sleep(0.02)
        try:
            run.delete_pod(f"{run.name}-master-0")
            run.wait(60)
        except (RunFailed, JobError, TimeoutError) as failed:
            states = "the states were right, but a real training under your loop was not"
            raise Wrong(f"{states}: {failed}") from None
    accuracy = run.metrics["accuracy"].dropna().iloc[-1]
    lost = "under your loop a real training lost its master's pod, began again at its first step, and came to its end"
    return f"{lost}; the model recognises {accuracy:.0%} of the test images."


@exercise
def admit(answer: Callable[[list[tuple[str, int]], int], list[str]]) -> str:
    """`answer(queue, free)` are the jobs of `queue`, names and pods, that start now on so many `free` places."""
    for pods, free, right, why in ADMITTED:
        queue = [(each[0], int(each[1:])) for each in pods.split()]
        given = list(queue)
        got = result_of(answer, given, free)
        changes = "your function changes `queue`: who waits is the cluster's affair; return names."
        refuse(given != queue, changes)
        refuse(not isinstance(got, list | tuple), f"it gave {got!r}; return a list of names.")
        due = f"it must be {list(right)}: {why}"
        refuse(list(got) != list(right), f"with {free} free and {queue} it gave {got!r}; {due}.")
    return "a job gets all of its places or none, so no job holds places while it waits for more."


seconds_lost = question(__name__, "seconds_lost")


def broken_manifest() -> dict[str, Any]:
    """A PyTorchJob with three mistakes: a check finds two of them, and only a run finds the third."""
    manifest = _whole_manifest()
    replicas = manifest["spec"]["pytorchReplicaSpecs"]
    master, worker = (replicas[role]["template"]["spec"]["containers"][0] for role in ("Master", "Worker"))
    master["name"] = "torch"
    worker["imagee"] = worker.pop("image")
    worker["command"][1] = "trian.py"
    return manifest


def _whole_manifest() -> dict[str, Any]:
    """Its Worker differs from its Master on purpose: it asks for cheap nodes, which may be taken away."""
    manifest = copy.deepcopy(_rendered(_digits().name, 2))
    template = manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]
    template["spec"]["nodeSelector"] = {"eks.amazonaws.com/capacityType": "SPOT"}
    return manifest


@functools.cache
def _rendered(name: str, workers: int) -> dict[str, Any]:
    return Kubernetes().render(_digits().replace(name=name, workers=workers)).resource


def _digits() -> TrainingJob:
    job = TrainingJob.load(JOBS / "mnist_torch_ddp")
    return job.replace(workers=2, arguments={"epochs": 1}, timeout="2min")


@exercise
def mended(answer: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    """`answer(manifest)` is the broken manifest without its mistakes, as a run of its pods shows."""
    got = result_of(answer, broken_manifest())
    whole = isinstance(got, dict) and "kind" in got
    refuse(not whole, "your function must return the whole manifest, a dict with `kind` and `spec`.")
    problems = check.problems_of(got)
    refuse(problems, "a cluster would not take it yet: " + "; ".join(problems))
    pods = pods_of(Manifest(got))
    refuse(len(pods) != 2, f"it has {len(pods)} pod(s) now; mend what is there, and keep both.")
    try:
        with EmulatedKubernetes().launch(_digits(), Manifest(got)) as run:
            run.wait()
    except JobError as refused:
        raise Wrong(f"no pod could start so: {refused}.") from None
    except RunFailed as failed:
        first, *rest = str(failed).partition("\nThe whole log is in ")[0].splitlines()
        last = " ".join([first, *rest[-LAST_LINES:]])
        raise Wrong(f"a cluster takes it, but the run fails: {last}") from None
    lost = "but the Worker has lost its nodeSelector: a Master's text is not a Worker's."
    refuse("nodeSelector" not in str(got), f"both pods ran, {lost}")
    more = "both pods ran, but more was changed than the three mistakes: leave the rest as it is."
    # The script may be named as in the Master, or by its whole path.
    named_alike = json.loads(re.sub(r'"(/workshop/job|\.)/train\.py"', '"train.py"', json.dumps(got)))
    refuse(named_alike != _whole_manifest(), more)
    accuracy = run.metrics["accuracy"].dropna().iloc[-1]
    return f"both pods ran, and their model recognises {accuracy:.0%} of the test images."
