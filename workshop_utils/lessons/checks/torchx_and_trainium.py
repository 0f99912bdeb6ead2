"""Checks of lesson 13, TorchX and Trainium; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import contextlib
import copy
import io
import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from workshop_utils.launchers.torchx.launcher import DESCRIBE, ENVIRONMENT, RENDER_SECONDS
from workshop_utils.lessons.checks import NotYet, Verdict, Wrong, exercise, expect, is_missing, result_of
from workshop_utils.lessons.checks.open_question import OpenQuestion

if TYPE_CHECKING:
    import torch

MASK = 4
IMAGE = "workshop-neuron:trn1"
NEEDED = ("name", "image", "entrypoint", "args", "num_replicas")
READING = {"item", "tolist", "numpy", "is_nonzero"} | {
    f"__{name}__" for name in ("array", "bool", "float", "format", "index", "int", "repr")
}
OPTIONS = {
    "--nnodes": "how many agents there are",
    "--nproc-per-node": "how many ranks each agent starts",
    "--rdzv-backend": "through what the agents meet",
    "--rdzv-endpoint": "where the agents meet",
    "--rdzv-id": "by which name the agents of one job know each other",
}


class _GraphRatio(OpenQuestion):
    def __call__(self, predicted: Any = None, measured: Any = None, why: Any = None) -> Verdict:
        if isinstance(measured, int | float) and measured == 32:
            passes = "as if the one graph held passes only"
            return Verdict(
                "wrong", f"`measured` is 32, {passes}: measure with `traced`, and keep the decimals."
            )
        return super().__call__(predicted, measured, why)


graph_ratio = _GraphRatio(
    "times",
    (27, 35),
    "the one graph holds 32 passes p and the update u; with marks the largest graph is a pass. If both loops do the "
    "same in a pass, the ratio is (32 p + u) / p = 32 + u / p. With marks there are more graphs (ours: 4 different "
    "ones from 2 passes on, instead of 2), but what the compiler sees no longer depends on the accumulation.",
    predictable=(1, 100),
)


@exercise
def role_of_torchrun(answer: Callable[[str, int, int, str], Any]) -> str:
    """`answer(script, nodes, per_node, endpoint)` is a role of TorchX: on each node a torchrun, meeting by etcd-v2."""
    for script, nodes, per_node, endpoint in (
        ("fit.py", 2, 3, "meet:2379"),
        ("/job/train.py", 3, 5, "etcd:99"),
    ):
        role = result_of(answer, script, nodes, per_node, endpoint)
        if not isinstance(role, Mapping):
            raise Wrong(f"it gave {type(role).__name__}; a role is a dictionary with {', '.join(NEEDED)}.")
        if missing := [name for name in NEEDED if is_missing(role.get(name))]:
            raise Wrong(f"{missing[0]} is missing in the role.")
        if role["num_replicas"] != nodes:
            each = f"for {nodes} nodes it must be {nodes}, an agent on each"
            raise Wrong(f"num_replicas is {role['num_replicas']!r}; {each}.")
        if role["image"] != IMAGE:
            raise Wrong(f"image is {role['image']!r}; it must be {IMAGE!r}.")
        right = dict(zip(OPTIONS, (nodes, per_node, "etcd-v2", endpoint, "${app_id}"), strict=True))
        _compare_options(_words(role), script, right)
    job = _volcano_job(dict(role))
    tasks, name = job["spec"]["tasks"], job["metadata"]["name"]
    commands = {" ".join(task["template"]["spec"]["containers"][0]["command"]) for task in tasks}
    if len(tasks) != nodes or len(commands) != 1 or name not in min(commands):
        raise Wrong(
            f"TorchX made {len(tasks)} tasks of it, with {min(commands)!r}; the job is called {name}."
        )
    return f"TorchX made a Volcano Job of it: {nodes} tasks with the same command, which meet under the job's name."


def _words(role: Mapping[str, Any]) -> list[str]:
    """The command of the role from torchrun on, also where a shell or Python's module starts it."""
    args = role["args"]
    if (
        not isinstance(args, Sequence)
        or isinstance(args, str)
        or not all(isinstance(each, str) for each in args)
    ):
        raise Wrong(f"args is {args!r}; it must be a list of strings, one for each word of the command.")
    if len(str(role["entrypoint"]).split()) != 1:
        raise Wrong(
            f"entrypoint is {role['entrypoint']!r}; it is the program alone, its words belong in args."
        )
    words = [role["entrypoint"], *args]
    if words[0] in ("bash", "sh") and words[1:2] == ["-c"] and len(words) == 3:
        words = shlex.split(words[2].removeprefix("exec "))
    if words[0] in ("python", "python3") and words[1:3] == ["-m", "torch.distributed.run"]:
        words = ["torchrun", *words[3:]]
    if words[0] != "torchrun":
        raise Wrong(f"the command begins with {words[0]!r}; it is torchrun that starts the ranks.")
    return words


def _compare_options(words: list[str], script: str, right: Mapping[str, Any]) -> None:
    """Raise Wrong unless torchrun itself reads `right`, and `script` behind it, in the command."""
    from torch.distributed.run import get_args_parser

    parser, told = get_args_parser(), io.StringIO()
    parser.prog = "torchrun"
    try:
        with contextlib.redirect_stderr(told):
            given = parser.parse_args(words[1:])
    except SystemExit:
        raise Wrong(f"torchrun refuses the command: {told.getvalue().splitlines()[-1]}") from None
    if given.training_script != script:
        raise Wrong(f"torchrun would start {given.training_script!r}, and not the script, {script!r}.")
    if given.standalone:
        raise Wrong("with --standalone each node is a job of its own, and meets nobody.")
    if given.no_python:
        raise Wrong("with --no-python the script is run as a program, and not by Python.")
    if given.module:
        raise Wrong("with -m (--module) torchrun takes the script for the name of a module.")
    for name, value in right.items():
        field = name.strip("-").replace("-", "_")
        got = getattr(given, field)
        if got == parser.get_default(field) != str(value):
            raise Wrong(f"{name} is missing before the script: it says {OPTIONS[name]}.")
        if got != str(value):
            own = "a name of its own for each job, which TorchX puts in"
            why = own if name == "--rdzv-id" else OPTIONS[name]
            raise Wrong(f"{name} is {got!r}; it must be {str(value)!r}: {why}.")


def _volcano_job(role: dict[str, Any]) -> dict[str, Any]:
    """What TorchX's own scheduler for Kubernetes makes of a role; nothing is sent."""
    role |= {"resource": {"cpu": 1, "gpu": 0, "memMB": 1000}, "mounts": role.get("mounts", [])}
    asked = {"name": "exercise", "role": role, "scheduler": "kubernetes", "settings": {"queue": "workshop"}}
    variables = {"WORKSHOP_APPLICATION": json.dumps(asked)}
    folder = DESCRIBE.parent
    printed = ENVIRONMENT.run(
        "python", str(DESCRIBE), timeout_seconds=RENDER_SECONDS, variables=variables, folder=folder
    )
    return dict(json.loads(printed.splitlines()[-1])[1])


@exercise
def marked_step(answer: Callable[..., Any]) -> str:
    """`answer(model, optimizer, batches, mark)` takes one step on the mean of `batches`, a graph for each pass."""
    for accumulated in (3, 1, 8):
        _take_steps(answer, accumulated)
    return "each graph holds one pass, however many are accumulated, and the weights are those of one large batch."


def _take_steps(answer: Callable[..., Any], accumulated: int) -> None:
    """Raise Wrong unless two steps of `answer` are those of one large batch, and hold one pass in each graph."""
    import torch

    graphs: list[tuple[int, int, bool]] = []  # in each: passes forward, passes backward, is there the update?
    counts, marked = [0, 0], [torch.empty(0)]  # those of the present graph; the weights at its beginning

    class Trace(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            if (name := getattr(function, "__name__", "")) in READING:
                raise Wrong(f"it reads a number of the device (`{name}`), which waits for it each time.")
            return function(*args, **(kwargs or {}))

    def mark() -> None:
        nonlocal marked
        graphs.append((counts[0], counts[1], updated()))
        counts[:], marked = [0, 0], [each.detach().clone() for each in mine.parameters()]

    def updated() -> bool:
        return not all(map(torch.equal, marked, mine.parameters()))

    def count(_: Any, __: Any, made: torch.Tensor) -> None:
        counts[0] += 1
        if made.requires_grad:
            made.register_hook(count_back)

    def count_back(_: Any) -> None:
        counts[1] += 1

    torch.manual_seed(accumulated)
    mine = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    ours = copy.deepcopy(mine)
    mine[0].register_forward_hook(count)  # so that `model.forward(x)` counts, too
    marked = [each.detach().clone() for each in mine.parameters()]
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (mine, ours))
    for _ in range(2):
        batches = [(torch.randn(4, 5), torch.randn(4, 2)) for _ in range(accumulated)]
        graphs.clear()
        with Trace():
            answer(mine, optimizer, batches, mark)
        _compare_graphs(graphs, (counts[0], counts[1], updated()), accumulated)
        reference.zero_grad()
        for x, y in batches:
            (((ours(x) - y) ** 2).mean() / accumulated).backward()
        reference.step()
        _compare_weights(mine, ours, accumulated)


def _compare_graphs(
    graphs: list[tuple[int, int, bool]], waiting: tuple[int, int, bool], accumulated: int
) -> None:
    many = f"with {accumulated} micro-batches"
    if not graphs and not waiting[0]:
        raise NotYet("no forward pass was made: write the function, then run this again.")
    if not graphs:
        raise Wrong(
            f"{many}, `mark` was never called: all operations wait, and the graph grows from step to step."
        )
    if any(waiting):
        what = "the update" if waiting[2] else "a pass"
        raise Wrong(f"{many}, {what} waits unmarked at the end of the step: mark once more after it.")
    for forward, backward, is_updated in graphs:
        if max(forward, backward) > 1:
            name, most = ("forward", forward) if forward > 1 else ("backward", backward)
            raise Wrong(f"{many}, one graph holds {most} {name} passes; mark after each pass.")
        if forward != backward:
            raise Wrong(f"{many}, a forward pass and its backward pass are in two graphs: mark after both.")
        if forward and is_updated:
            raise Wrong(f"{many}, a pass and the update share a graph: mark between them, too.")
    if (made := sum(forward for forward, *_ in graphs)) != accumulated:
        raise Wrong(f"{many}, {made} forward passes were made; it must be one for each.")


def _compare_weights(mine: torch.nn.Module, ours: torch.nn.Module, accumulated: int) -> None:
    import torch

    for own, right in zip(mine.parameters(), ours.parameters(), strict=True):
        if not torch.allclose(own, right, rtol=1e-4, atol=1e-6):
            usual = "divide each loss by their number, clear the gradients once before, and update once after"
            raise Wrong(
                f"with {accumulated} micro-batches the weights are not those of one large batch: {usual}."
            )


@exercise
def sequences_of_a_step(answer: Callable[[dict[str, Any]], int]) -> str:
    """`answer(volcano_job)` is how many sequences all ranks together have in one step."""
    above = "--checkpoint-steps 50 --corpus /data/corpus --device neuron"
    for tasks, per_node, batch, accumulation, between in (
        ((1, 1, 1), 4, 8, None, ""),
        ((1, 1), 32, 16, 32, above),
        ((5,), 2, 3, 7, ""),
        ((1, 3), 8, 16, 3, "--layers 2"),
    ):
        nodes = sum(tasks)
        options = [f"--batch-size {batch}", between]
        options += [f"--grad-accumulation {accumulation}"] if accumulation else []
        of_script = " ".join(options if nodes < 4 else options[::-1])
        torchrun = f"exec torchrun --nnodes={nodes} --nproc-per-node={per_node} --rdzv-backend=etcd-v2"
        torchrun += " --rdzv-endpoint=etcd-server:2379 --max-restarts=3" if between else ""
        command = ["bash", "-c", f"{torchrun} -- /workshop/job/train.py {of_script} --steps 200"]
        container = {
            "name": "worker",
            "command": command,
            "resources": {"limits": {"aws.amazon.com/neuron": "16"}},
        }
        spec = {
            "tasks": [
                {
                    "name": f"worker-{index}",
                    "replicas": replicas,
                    "template": {"spec": {"containers": [container]}},
                }
                for index, replicas in enumerate(tasks)
            ]
        }
        job = {"kind": "Job", "metadata": {"name": "job"}, "spec": {"minAvailable": 1, **spec}}
        got = result_of(answer, copy.deepcopy(job))
        right = nodes * per_node * batch * (accumulation or 1)
        what = f"with {nodes} nodes of {per_node} ranks, batches of {batch}, " + (
            f"accumulated {accumulation} times" if accumulation else "without --grad-accumulation"
        )
        if got == right // (accumulation or 1) != right:
            raise Wrong(f"{what} it gave {got}: every rank makes {accumulation} passes before the update.")
        if got == right // nodes != right:
            raise Wrong(f"{what} it gave {got}: that is one node's part.")
        expect(got, right, what, f"{nodes} · {per_node} · {batch} · {accumulation or 1}")
    return "nodes × ranks × batch × accumulation, read from what would be sent: 32,768 for the job above."


@exercise
def hide(answer: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> str:
    """`answer(tokens, chosen, luck, others)`: the tokens as the model sees them.

    `chosen` are positions; `luck`, in [0, 1), and `others`, tokens, have one entry for each of them. Where luck is
    below 0.8, the model sees MASK; below 0.9, the other token; otherwise the token itself.
    """
    _compare_hidden(answer, [1, 3, 4, 6, 7], [0.1, 0.8, 0.9, 0.799, 0.899])
    _compare_hidden(answer, [9, 2, 5, 0], [0.95, 0.1, 0.85, 0.3])
    return "and since every sequence has as many chosen tokens, the mean of the ranks' losses is the batch's."


def _compare_hidden(answer: Callable[..., Any], positions: list[int], lucks: list[float]) -> None:
    tokens, others = np.arange(11, 12 + max(positions)), np.arange(90, 90 + len(positions))
    chosen, luck = np.array(positions), np.array(lucks)
    given = [each.copy() for each in (tokens, chosen, luck, others)]
    got = np.asarray(result_of(answer, *given))
    if not np.array_equal(given[0], tokens):
        raise Wrong("it changed the tokens that it was given, and they are the labels: change a copy.")
    if not all(map(np.array_equal, given[1:], (chosen, luck, others))):
        raise Wrong("it changed `chosen`, `luck` or `others`, which it was only given to read.")
    if got.shape != tokens.shape:
        raise Wrong(f"it gave an array of shape {got.shape}; it must be that of the tokens, {tokens.shape}.")
    if not np.issubdtype(got.dtype, np.integer):
        raise Wrong(f"it gave numbers of type {got.dtype}; tokens are whole numbers.")
    for position, token in enumerate(tokens.tolist()):
        right, reason = token, f"position {position} was not chosen; {token} stays there"
        if position in positions:
            index = positions.index(position)
            at = lucks[index]
            what, right = (
                ("what stood there", token) if at >= 0.9 else ("the other token", int(others[index]))
            )
            what, right = ("MASK", MASK) if at < 0.8 else (what, right)
            reason = f"position {position} has luck {at:g}, so it must be {what}, {right}"
        if got[position] != right:
            raise Wrong(f"with chosen = {positions}, {reason}; it gave {got[position]}.")
