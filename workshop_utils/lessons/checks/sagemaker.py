"""Checks of lesson 11, SageMaker; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from workshop_utils.launchers.sagemaker.toolkit import MASTER_PORT, SERVER_PORT, host_names
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, is_missing, result_of
from workshop_utils.lessons.checks.open_question import OpenQuestion
from workshop_utils.training import checkpoints

interruption = OpenQuestion(
    "seconds",
    (0.2, 120),
    "Here the steps that are repeated cost least. New processes must start, import their framework and meet before the "
    "first of them; on SageMaker, minutes more until an instance is found and has pulled its image.",
)


# Who is who


@exercise
def tf_config(answer: Callable[[Mapping[str, str]], dict[str, Any]]) -> str:
    """`answer(environment)` is TF_CONFIG, for TensorFlow 2, of a host of a job with a parameter server on each."""
    for hosts in (*(list(host_names(count)) for count in (2, 3, 12)), ["algo-7", "algo-9"]):
        for rank, host in enumerate(hosts):
            environment = {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host}
            config = result_of(answer, dict(environment))
            # As the variable has it, which is text.
            config = json.loads(config if isinstance(config, str) else json.dumps(config, default=repr))
            if not (isinstance(config, dict) and set(config) >= {"cluster", "task"}):
                raise Wrong(f"on {host} it gave {config!r}; it must be a dictionary with cluster and task.")
            where = f"with {len(hosts)} hosts{', of which algo-7 is the first' * (hosts[0] == 'algo-7')}, on {host}, "
            _judge_cluster(config["cluster"], hosts, where)
            task = {"type": "worker" if rank else "chief", "index": rank - 1 if rank else 0}
            if (
                config["task"] != task or type(config["task"]["index"]) is not int
            ):  # 0.0 and False are equal to 0
                because = "the first of SM_HOSTS is the chief, and a worker's index is its place in the list of workers"
                raise Wrong(f"{where}task is {config['task']}; it must be {task}: {because}.")
    return (
        "on 2, 3 and 12 hosts, each host finds the same cluster and its own place in it: the first of SM_HOSTS is the "
        "chief, the others are workers in the order of the list, which is sorted as text, and all have a server."
    )


def _judge_cluster(cluster: Any, hosts: list[str], where: str) -> None:
    right = {
        "chief": [f"{hosts[0]}:{MASTER_PORT}"],
        "worker": [f"{host}:{MASTER_PORT}" for host in hosts[1:]],
        "ps": [f"{host}:{SERVER_PORT}" for host in hosts],
    }
    if not isinstance(cluster, dict) or set(cluster) != set(right):
        given = list(cluster) if isinstance(cluster, dict) else cluster
        hint = " (TensorFlow 2 calls the toolkit's master chief)" if "master" in given else ""
        raise Wrong(f"{where}the roles in cluster are {given}; they must be chief, worker and ps{hint}.")
    for role, addresses in right.items():
        if cluster[role] == addresses:
            continue
        because = ""
        if isinstance(cluster[role], list) and sorted(cluster[role]) == sorted(addresses):
            because = ": keep the order of SM_HOSTS, which is sorted as text"
        elif role == "ps" and cluster[role] == addresses[1:]:
            because = ": there is a server on every host, on the chief's too"
        elif role == "worker" and isinstance(cluster[role], list) and len(cluster[role]) == len(hosts):
            because = ": the chief hands out steps and is no worker"
        raise Wrong(f"{where}{role} is {cluster[role]}; it must be {addresses}{because}.")


# Who may do what

_BUCKET = "arn:aws:s3:::sagemaker-workshop-us-east-1-123456789012"
_SAGEMAKER = "arn:aws:sagemaker:us-east-1:123456789012"
_ROLE = "arn:aws:iam::123456789012:role"
# A role that is handed to SageMaker alone: stricter than what is asked for, and right with PassRole.
HANDED_TO_SAGEMAKER = [
    {"StringEquals": {"iam:PassedToService": service}}
    for service in ("sagemaker.amazonaws.com", ["sagemaker.amazonaws.com"])
]
# Each action: its resource, with * where names are new each time; what is forgotten without it; what more would be.
NEEDED = {
    "sagemaker:CreateTrainingJob": (
        f"{_SAGEMAKER}:training-job/*",
        "jobs have new names each time, so the resource ends in training-job/*",
        "jobs of this region and account are enough",
    ),
    "iam:PassRole": (
        f"{_ROLE}/workshop-training",
        "SageMaker acts as the role that she hands over, and she must be allowed to",
        "a job could then act as another role",
    ),
    "s3:ListBucket": (
        _BUCKET,
        "a bucket is listed, so its own ARN is the resource, without /",
        "one bucket is to be listed",
    ),
    "s3:GetObject": (
        f"{_BUCKET}/workshop/models/*",
        "objects are read, so the resource is the bucket's ARN, / and the keys",
        "only models of this bucket are to be read",
    ),
}


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _granted(statements: list[Any], effect: str, action: str) -> list[str]:
    return [
        resource
        for statement in statements
        if statement["Effect"] == effect
        and any(fnmatchcase(action.lower(), given.lower()) for given in _listed(statement["Action"]))
        for resource in _listed(statement["Resource"])
    ]


@functools.cache
def _overlap(one: str, other: str) -> bool:
    """Whether some name matches both patterns, in which * stands for any text and ? for one character."""
    for a, b in ((one, other), (other, one)):
        if a[:1] == "*":
            return _overlap(a[1:], b) or (b != "" and _overlap(a, b[1:]))
    if not (one and other):
        return one == other
    return (one[0] == other[0] or "?" in (one[0], other[0])) and _overlap(one[1:], other[1:])


@exercise
def least_policy(answer: list[dict[str, Any]]) -> str:
    """`answer` is the Statement of a policy that allows the calls that are NEEDED, and nothing else."""
    if isinstance(answer, dict):
        answer = answer.get("Statement", [answer])
    statements = _listed(answer)
    if not statements or any(is_missing(statement) for statement in statements):
        raise NotYet("write the statements, then run this again.")
    for number, statement in enumerate(statements, start=1):
        if not isinstance(statement, dict):
            raise Wrong(f"statement {number} is {statement!r}; it must be a dictionary.")
        if any(is_missing(each) for value in statement.values() for each in _listed(value)):
            raise NotYet(f"fill in statement {number}, then run this again.")
        lacking = {"Effect", "Action", "Resource"} - set(statement)
        unknown = set(statement) - {"Effect", "Action", "Resource", "Sid", "Condition"}
        if lacking or unknown:
            what = f"has no {', '.join(sorted(lacking))}" if lacking else f"has {', '.join(sorted(unknown))}"
            raise Wrong(f"statement {number} {what}; here it takes Effect, Action and Resource (and Sid).")
        if "Condition" in statement and (
            [str(each).lower() for each in _listed(statement["Action"])] != ["iam:passrole"]
            or statement["Effect"] != "Allow"
            or statement["Condition"] not in HANDED_TO_SAGEMAKER
        ):
            only = f"the one that may stand here is {HANDED_TO_SAGEMAKER[0]}, where iam:PassRole alone is allowed"
            raise Wrong(f"statement {number} has a Condition; {only}.")
        if statement["Effect"] not in ("Allow", "Deny"):
            raise Wrong(f"statement {number} has Effect {statement['Effect']!r}; it must be Allow or Deny.")
        for name in ("Action", "Resource"):
            if not all(isinstance(value, str) for value in _listed(statement[name])):
                raise Wrong(
                    f"statement {number} has {name} {statement[name]!r}; it must be text, or a list of it."
                )
        if statement["Effect"] == "Allow":
            for action in _listed(statement["Action"]):
                if "*" in action or "?" in action:
                    raise Wrong(
                        f"Action {action!r} also allows what AWS adds to it next year: name each action."
                    )
                if action.lower() not in map(str.lower, NEEDED):
                    raise Wrong(f"it also allows {action}, which nobody asked for.")
            if "*" in _listed(statement["Resource"]):
                raise Wrong(
                    f"statement {number} has Resource '*', which is everything in the account: name it."
                )
    for number, statement in enumerate(statements, start=1):
        for action, (resource, *_) in NEEDED.items():
            if any(_overlap(each, resource) for each in _granted([statement], "Deny", action)):
                denied = f"statement {number} denies {action} on some of {resource}, which Ada needs"
                raise Wrong(
                    f"{denied}: it does not allow {action} there. What no statement allows is denied anyhow."
                )
    resources = {resource for resource, *_ in NEEDED.values()}  # those of other actions allow nothing more
    for action, (resource, because, too_wide) in NEEDED.items():
        name = resource.replace("*", "a/new-1" if action.startswith("s3") else "new-1")
        allowed = _granted(statements, "Allow", action)
        if not any(fnmatchcase(name, each) for each in allowed):
            raise Wrong(f"it does not allow {action} on {name}; {because}.")
        for each in {each.replace("?*", "*") for each in allowed} - resources:
            raise Wrong(
                f"it allows {action} on {each}: {too_wide}. A * belongs only where names are new each time."
            )
    return (
        "it allows the four actions on what they need and on nothing else: no other role to pass on, no other bucket, "
        "no data. The workshop's own policies add conditions: time limits, types of instances, tags."
    )


# After an interruption


class Interrupted(BaseException):
    """The instance is gone: what comes after, in the same process, did not happen."""


class Failed(RuntimeError):
    """A step failed; the process ends with it, as an interrupted one does."""


EVERY = 5  # steps


@exercise
def resume(answer: Callable[..., Any]) -> str:
    """`answer(folder, state, steps, advance)` makes `steps` steps, saves every EVERY, and goes on from there."""
    begun = np.array([0.0, 4.0])

    def advanced(state: np.ndarray) -> np.ndarray:
        return 0.9 * np.asarray(state, dtype=float) + 1

    # Steps after which the instance is taken away, one after the other: before and after a checkpoint, and twice.
    for steps, lives in ((23, ((), (3,), (13,), (20,), (7, 8), (13, 1, 9))), (11, ((), (6,)))):
        for interruptions in lives:
            with tempfile.TemporaryDirectory() as name:
                _judge_lives(answer, Path(name), begun, steps, advanced, interruptions)
    with tempfile.TemporaryDirectory() as name:
        _judge_lives(answer, Path(name), begun, 11, advanced, (7,), Failed)
    return (
        "interrupted before and after checkpoints, even three times, it reaches the state of 11 or 23 steps made at "
        f"once; fewer than {EVERY} steps are repeated each time, and a job that had ended takes none."
    )


def _judge_lives(
    answer: Callable[..., Any],
    folder: Path,
    begun: np.ndarray,
    steps: int,
    advanced: Callable[[np.ndarray], np.ndarray],
    interruptions: tuple[int, ...],
    ends: type[BaseException] = Interrupted,
) -> None:
    right = begun
    for _ in range(steps):
        right = advanced(right)
    for life, limit in enumerate((*interruptions, None, None)):
        before = checkpoints.newest(folder)
        kept = before.step if before else 0
        calls: list[int] = []
        taken: list[int] = []  # the instance, once: an answer that swallows it goes on, and is found out

        def advance(
            state: np.ndarray, limit: int | None = limit, calls: list[int] = calls, taken: list[int] = taken
        ) -> np.ndarray:
            if len(calls) == limit and not taken:
                taken.append(1)
                raise ends
            calls.append(1)
            if len(calls) > 2 * steps:
                raise Wrong(
                    f"it makes more than {steps} steps, the number it was given: it counts those made before, too."
                )
            return advanced(state)

        when = f"interrupted after {' and '.join(map(str, interruptions))} steps, " if interruptions else ""
        try:
            result = answer(folder, begun.copy(), steps, advance)
        except ends:
            newest = checkpoints.newest(folder)
            reached, saved = kept + len(calls), newest.step if newest else 0
            if newest and newest.arrays["state"].dtype != begun.dtype:
                kinds = f"{newest.arrays['state'].dtype}, and the state is of {begun.dtype}"
                raise Wrong(f"{when}the checkpoint holds numbers of {kinds}: save it as it is.") from None
            if saved % EVERY:
                raise Wrong(
                    f"{when}there is a checkpoint of step {saved}: save after every {EVERY} steps, and not on the way "
                    "out, since on an instance that is taken away no `except` and no `finally` is run."
                ) from None
            if reached - saved >= EVERY:
                raise Wrong(
                    f"{when}step {reached} was made, but the newest checkpoint is of step {saved}."
                ) from None
            continue
        if is_missing(result):
            raise NotYet("your function gave nothing: write it, then run this again.")
        if limit is not None:
            what = "interruption" if ends is Interrupted else "error of a step that failed"
            raise Wrong(f"{when}it went on as if nothing had happened: let the {what} through.")
        if kept + len(calls) != steps:
            again = "after all steps were made, a new start" if kept == steps else f"{when}life {life + 1}"
            raise Wrong(
                f"{again} made {len(calls)} steps; after the checkpoint of step {kept}, {steps - kept} remain."
            )
        if np.shape(result) != right.shape or not np.allclose(np.asarray(result, dtype=float), right):
            found = f"{np.asarray(result)}; made at once, {steps} steps give {right}"
            raise Wrong(
                f"{when}it ends with {found}: does the checkpoint hold the state after the step it names?"
            )
        newest = checkpoints.newest(folder)
        if newest is None or newest.step != steps:
            raise Wrong(
                f"{when}no checkpoint holds the last step, {steps}: a job that starts again would redo it."
            )
