"""Checks of lesson 11, SageMaker; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from workshop_utils.launchers.sagemaker.toolkit import MASTER_PORT, SERVER_PORT, host_names
from workshop_utils.lessons.checks import NotYet, Wrong, exercise, is_missing, refuse, result_of
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.training import checkpoints

interruption = question(__name__, "interruption")


# Who is who


@exercise
def tf_config(answer: Callable[[Mapping[str, str]], dict[str, Any]]) -> str:
    """`answer(environment)` is TF_CONFIG, for TensorFlow 2, of a host of a job with a parameter server on each."""
    for hosts in (*(list(host_names(count)) for count in (2, 3, 12)), ["algo-7", "algo-9"]):
        addresses = [f"{host}:{MASTER_PORT}" for host in hosts]
        cluster = {
            "chief": addresses[:1], "worker": addresses[1:], "ps": [f"{host}:{SERVER_PORT}" for host in hosts]
        }  # fmt: skip
        for rank, host in enumerate(hosts):
            config: Any = result_of(answer, {"SM_HOSTS": json.dumps(hosts), "SM_CURRENT_HOST": host})
            # As the variable has it, which is text.
            config = json.loads(config if isinstance(config, str) else json.dumps(config, default=repr))
            whole = isinstance(config, dict) and {"cluster", "task"} <= set(config)
            refuse(not whole, f"on {host} it gave {config!r}; it must be a dictionary with cluster and task.")
            where = f"with {len(hosts)} hosts{', of which algo-7 is the first' * (hosts[0] == 'algo-7')}, on {host}, "
            given, task = config["cluster"], config["task"]
            roles = list(given) if isinstance(given, dict) else given
            hint = " (TensorFlow 2 calls the toolkit's master chief)" * ("master" in str(roles))
            due = f"they must be chief, worker and ps{hint}"
            roles_are = f"{where}the roles in cluster are {roles}; {due}"
            refuse(not isinstance(given, dict) or set(given) != set(cluster), f"{roles_are}.")
            for role, right in cluster.items():
                got = given[role] if isinstance(given[role], list) else []
                hints = {
                    "keep the order of SM_HOSTS, which is sorted as text": sorted(map(str, got))
                    == sorted(right),
                    "there is a server on every host, on the chief's too": role == "ps" and got == right[1:],
                    "the chief hands out steps and is no worker": role == "worker" and len(got) == len(hosts),
                }
                because = ": ".join(["", *(hint for hint, fits in hints.items() if fits)][:2])
                due = f"it must be {right}{because}"
                refuse(given[role] != right, f"{where}{role} is {given[role]!r}; {due}.")
            due_task = {"type": "worker" if rank else "chief", "index": rank - 1 if rank else 0}
            because = "the first host is the chief; a worker's index is its place in the list of workers"
            # As text, since 0.0 and False are equal to 0.
            is_right = json.dumps(task, sort_keys=True) == json.dumps(due_task, sort_keys=True)
            refuse(not is_right, f"{where}task is {task}; it must be {due_task}: {because}.")
    return (
        "on 2, 3 and 12 hosts, each host finds the same cluster and its own place in it: the first of SM_HOSTS is the "
        "chief, the others are workers in the order of the list, which is sorted as text, and all have a server."
    )


# Who may do what

_BUCKET = "arn:aws:s3:::sagemaker-workshop-us-east-1-123456789012"
_ACCOUNT = "us-east-1:123456789012"
# The one condition that may stand there, as text or in a list: stricter than what is asked for, and right.
HANDED_TO_SAGEMAKER = [
    {"StringEquals": {"iam:PassedToService": service}}
    for service in ("sagemaker.amazonaws.com", ["sagemaker.amazonaws.com"])
]
# Each action: its resource, with * where names are new each time; what is forgotten without it; what more would be.
NEEDED = {
    "sagemaker:CreateTrainingJob": (
        f"arn:aws:sagemaker:{_ACCOUNT}:training-job/*",
        "jobs have new names each time, so the resource ends in training-job/*",
        "jobs of this region and account are enough",
    ),
    "iam:PassRole": (
        "arn:aws:iam::123456789012:role/workshop-training",
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


def _meets(pattern: str, resource: str) -> bool:
    """Whether `pattern` matches some of `resource`, which may end in *."""
    ends = range(len(pattern) + 1) if resource.endswith("*") else [len(pattern)]
    return any(fnmatchcase(resource.removesuffix("*"), pattern[:end]) for end in ends)


@exercise
def least_policy(answer: list[dict[str, Any]]) -> str:
    """`answer` is the Statement of a policy that allows the calls that are NEEDED, and nothing else."""
    if isinstance(answer, dict):
        answer = answer.get("Statement", [answer])
    statements = _listed(answer)
    if not statements or any(is_missing(statement) for statement in statements):
        raise NotYet("write the statements, then run this again.")
    allowed: dict[str, set[str]] = {action.lower(): set() for action in NEEDED}
    for number, statement in enumerate(statements, start=1):
        of = f"statement {number}"
        refuse(not isinstance(statement, dict), f"{of} is {statement!r}; it must be a dictionary.")
        if any(is_missing(each) for value in statement.values() for each in _listed(value)):
            raise NotYet(f"fill in {of}, then run this again.")
        takes = "here it takes Effect, Action and Resource (and Sid)"
        for lacking in [each for each in ("Effect", "Action", "Resource") if not statement.get(each)]:
            raise Wrong(f"{of} has no {lacking}; {takes}.")
        for unknown in set(statement) - {"Effect", "Action", "Resource", "Sid", "Condition"}:
            raise Wrong(f"{of} has {unknown}; {takes}.")
        effect, sid = statement["Effect"], str(statement.get("Sid", "None"))
        refuse(not sid.encode().isalnum(), f"{of} has Sid {sid!r}; IAM takes letters and digits alone.")
        is_twice = sid in [str(each.get("Sid")) for each in statements[: number - 1] if "Sid" in each]
        refuse(is_twice, f"{of} has Sid {sid!r}, as another does; IAM takes each once.")
        actions, resources = (_listed(statement[name]) for name in ("Action", "Resource"))
        refuse(effect not in ("Allow", "Deny"), f"{of} has Effect {effect!r}; it must be Allow or Deny.")
        for value in actions + resources:
            refuse(not isinstance(value, str), f"{of} has {value!r}, which is not text, nor a list of it.")
        condition = statement.get("Condition", HANDED_TO_SAGEMAKER[0])
        alone = "Condition" not in statement or [each.lower() for each in actions] == ["iam:passrole"]
        only = f"the one that may stand here is {HANDED_TO_SAGEMAKER[0]}, where iam:PassRole alone is allowed"
        refuse(condition not in HANDED_TO_SAGEMAKER or not alone, f"{of} has a Condition; {only}.")
        for action, (resource, *_) in NEEDED.items() if effect == "Deny" else ():
            is_meant = any(fnmatchcase(action.lower(), each.lower()) for each in actions)
            denied = f"{of} denies {action} on some of {resource}: what no statement allows is denied anyhow."
            refuse(is_meant and any(_meets(each, resource) for each in resources), denied)
        if effect == "Deny":
            continue
        for action in actions:
            added = f"Action {action!r} also allows what AWS adds to it next year: name each action."
            refuse({"*", "?"} & set(action), added)
            refuse(action.lower() not in allowed, f"it also allows {action}, which nobody asked for.")
            allowed[action.lower()] |= set(resources)
        refuse("*" in resources, f"{of} has Resource '*', which is everything in the account: name it.")
    needed = {resource for resource, *_ in NEEDED.values()}  # those of other actions allow nothing more
    for action, (resource, because, too_wide) in NEEDED.items():
        name = resource.replace("*", "a/new-1" if action.startswith("s3") else "new-1")
        reached = any(fnmatchcase(name, each) for each in allowed[action.lower()])
        refuse(not reached, f"it does not allow {action} on {name}; {because}.")
        for each in {each.replace("?*", "*") for each in allowed[action.lower()]} - needed:
            raise Wrong(f"it allows {action} on {each}: {too_wide}. A * belongs only where names are new.")
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
    # Steps after which the instance is taken away, one after the other: before and after a checkpoint, and twice.
    lives: tuple[tuple[int, ...], ...] = ((), (3,), (13,), (20,), (7, 8), (13, 1, 9))
    for steps, interruptions, ends in (
        *((23, each, Interrupted) for each in lives), (3, (), Interrupted), (20, (), Interrupted),
        (11, (6,), Interrupted), (11, (7,), Failed),
    ):  # fmt: skip
        with tempfile.TemporaryDirectory() as name:
            _judge_lives(answer, Path(name), steps, interruptions, ends)
    return (
        "interrupted before and after checkpoints, even three times, it reaches the state of 11 or 23 steps made at "
        f"once; fewer than {EVERY} steps are repeated each time, and a job that had ended takes none."
    )


def _judge_lives(
    answer: Callable[..., Any],
    folder: Path,
    steps: int,
    interruptions: tuple[int, ...],
    ends: type[BaseException],
) -> None:
    begun = np.array([0.0, 4.0])
    right = 10 + (begun - 10) * 0.9**steps  # each step makes 0.9 x + 1 of x
    when = f"interrupted after {' and '.join(map(str, interruptions))} steps, " if interruptions else ""
    for life, limit in enumerate((*interruptions, None, None)):
        calls: list[Any] = []

        def advance(state: Any, limit: int | None = limit, calls: list[Any] = calls) -> Any:
            calls.append(state)
            if len(calls) - 1 == limit:  # once: an answer that swallows it goes on, and is found out
                raise ends(_newest(folder)[0])
            more = f"it makes more than {steps} steps, the number it was given: it counts those made before, too."
            refuse(len(calls) > 2 * steps, more)
            return 0.9 * np.asarray(state, dtype=float) + 1

        kept = _newest(folder)[0]
        try:
            result = result_of(answer, folder, begun.copy(), steps, advance)
        except ends as end:
            reached, (saved, state) = kept + (limit or 0), _newest(folder)
            kinds = f"{state.dtype}, and the state is of {begun.dtype}: save it as it is."
            refuse(saved and state.dtype != begun.dtype, f"{when}the checkpoint holds numbers of {kinds}")
            odd = f"{when}there is a checkpoint of step {saved}: save after every {EVERY} steps, and not on the way out"
            because = "since on an instance that is taken away no `except` and no `finally` is run"
            refuse(saved % EVERY or end.args != (saved,), f"{odd}, {because}.")
            late = f"{when}step {reached} was made, but the newest checkpoint is of step {saved}."
            refuse(reached - saved >= EVERY, late)
            continue
        what = "interruption" if ends is Interrupted else "error of a step that failed"
        unstopped = f"{when}it went on as if nothing had happened: let the {what} through."
        refuse(limit is not None, unstopped)
        again = "after all steps were made, a new start" if kept == steps else f"{when}life {life + 1}"
        remain = f"after the checkpoint of step {kept}, {steps - kept} remain"
        refuse(kept + len(calls) != steps, f"{again} made {len(calls)} steps; {remain}.")
        names = f"made at once, {steps} steps give {right}: does the checkpoint hold the state after the step it names?"
        is_right = np.shape(result) == right.shape and np.allclose(np.asarray(result, dtype=float), right)
        refuse(not is_right, f"{when}it ends with {np.asarray(result)}; {names}")
        redone = f"{when}no checkpoint holds the last step, {steps}: a job that starts again would redo it."
        refuse(_newest(folder)[0] != steps, redone)


def _newest(folder: Path) -> tuple[int, np.ndarray]:
    """Step and state of the newest checkpoint, or 0 and nothing."""
    newest = checkpoints.newest(folder)
    return (newest.step, newest.arrays["state"]) if newest else (0, np.empty(0))
