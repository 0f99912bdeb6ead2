"""Checks of lesson 13, TorchX and Trainium; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import contextlib
import copy
import io
import shlex
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import yaml

from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    exercise,
    expect,
    is_missing,
    refuse,
    result_of,
)
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.setup.environments import Environment
from workshop_utils.setup.logged_command import SetupError

if TYPE_CHECKING:
    import torch

TORCHX = Environment("torchx", "TorchX")
COMPONENT = """
from torchx import specs


def component() -> specs.AppDef:
    return specs.AppDef("exercise", [specs.Role(**{role!r})])
"""
DRY_RUN = "run --dryrun --workspace= -s kubernetes -cfg queue=workshop component.py:component"
RENDER_SECONDS = 120.0
SLOW_START_SECONDS = 60  # that a pod may take to pull its image
MASK = 4
IMAGE = "workshop-neuron:trn1"
NEEDED = ("name", "image", "entrypoint", "args", "num_replicas")
READING = {"allclose", "argwhere", "cpu", "equal", "is_nonzero", "item", "nonzero", "numpy", "tolist"} | {
    *("masked_select", "unique"),  # whose results have a shape that depends on the numbers
    "untyped_storage",  # what torch.save writes
    *(f"__{name}__" for name in ("array", "bool", "complex", "float", "format", "index", "int", "repr")),
}
OPTIONS = {
    "--nnodes": "how many agents there are",
    "--nproc-per-node": "how many ranks each agent starts",
    "--rdzv-backend": "through what the agents meet",
    "--rdzv-endpoint": "where the agents meet",
    "--rdzv-id": "under what name the agents meet, a name of its own for each job, which TorchX puts in",
}


graph_ratio = question(__name__, "graph_ratio")


@exercise
def role_of_torchrun(answer: Callable[[str, int, int, str], Any]) -> str:
    """`answer(script, nodes, per_node, endpoint)` is a role of TorchX: on each node a torchrun, meeting by etcd-v2."""
    for script, nodes, per_node, endpoint in (
        ("fit.py", 2, 3, "meet:2379"),
        ("/job/train.py", 3, 5, "etcd:99"),
    ):
        role = result_of(answer, script, nodes, per_node, endpoint)
        gave = f"it gave {type(role).__name__}; a role is a dictionary with {', '.join(NEEDED)}."
        refuse(not isinstance(role, Mapping), gave)
        for missing in [name for name in NEEDED if is_missing(role.get(name))]:
            raise Wrong(f"{missing} is missing in the role.")
        each = f"for {nodes} nodes it must be {nodes}, an agent on each"
        count = role["num_replicas"]
        refuse(type(count) is not int or count != nodes, f"num_replicas is {count!r}; {each}.")
        fewest, alone = role.get("min_replicas"), "Volcano would start some pods without the others"
        refuse(fewest not in (None, nodes), f"min_replicas is {fewest!r}: {alone}; leave it out.")
        again = "Volcano would start the job again under a name whose rendezvous is closed; leave it out"
        refuse(role.get("max_retries"), f"max_retries is {role.get('max_retries')!r}: {again}.")
        refuse(role["image"] != IMAGE, f"image is {role['image']!r}; it must be {IMAGE!r}.")
        right = dict(zip(OPTIONS, (nodes, per_node, "etcd-v2", endpoint, "${app_id}"), strict=True))
        _compare_options(_words(role), script, right)
    tasks = len(_volcano_job(dict(role))["spec"]["tasks"])
    return f"TorchX made a Volcano Job of it: {tasks} tasks with the same command, which meet under the job's name."


def _words(role: Mapping[str, Any]) -> list[str]:
    """The command of the role from torchrun on, also where a shell or Python's module starts it."""
    args, entrypoint = role["args"], role["entrypoint"]
    texts = isinstance(args, list | tuple) and all(isinstance(each, str) for each in args)
    refuse(not texts, f"args is {args!r}; it must be a list of strings, one for each word of the command.")
    alone = "it is the program alone, its words belong in args"
    refuse(len(str(entrypoint).split()) != 1, f"entrypoint is {entrypoint!r}; {alone}.")
    words = [str(entrypoint), *args]
    if Path(words[0]).name in ("bash", "sh") and words[1:2] == ["-c"] and len(words) == 3:
        words = shlex.split(words[2].removeprefix("exec "))
    if Path(words[0]).name in ("python", "python3") and words[1:3] == ["-m", "torch.distributed.run"]:
        words = ["torchrun", *words[3:]]
    begins = f"the command begins with {words[0]!r}; it is torchrun that starts the ranks."
    refuse(words[0] != "torchrun", begins)
    return words


def _compare_options(words: list[str], script: str, right: Mapping[str, Any]) -> None:
    """Raise Wrong unless torchrun itself reads `right`, and `script` behind it, in the command."""
    from torch.distributed.elastic.rendezvous.utils import _parse_rendezvous_config
    from torch.distributed.run import get_args_parser

    parser, told = get_args_parser(), io.StringIO()
    parser.prog = "torchrun"
    try:
        with contextlib.redirect_stderr(told):
            given = parser.parse_args(words[1:])
    except SystemExit:
        raise Wrong(f"torchrun refuses the command: {told.getvalue().splitlines()[-1]}") from None
    started = f"torchrun would start {given.training_script!r}, and not the script, {script!r}."
    refuse(given.training_script != script, started)
    refuse(given.standalone, "with --standalone each node is a job of its own, and meets nobody.")
    refuse(given.no_python, "with --no-python the script is run as a program, and not by Python.")
    refuse(given.module, "with -m (--module) torchrun takes the script for the name of a module.")
    try:
        waits = int(_parse_rendezvous_config(given.rdzv_conf).get("join_timeout", "600"))
    except ValueError as error:
        raise Wrong(f"torchrun refuses --rdzv-conf: {error}") from None
    early = f"with a join_timeout of {waits} s an agent gives up before another node's pod has started."
    refuse(waits < SLOW_START_SECONDS, early)
    alike = "with --local-addr all nodes announce the same address, and one can't reach the other."
    refuse(given.local_addr, alike)
    for name, value in right.items():
        field = name.strip("-").replace("-", "_")
        got, why = getattr(given, field), OPTIONS[name]
        if name == "--nnodes":
            got = got.removeprefix(f"{value}:")  # from 2 to 2 agents are 2
        missing = got == parser.get_default(field) != str(value)
        refuse(missing, f"{name} is missing before the script: it says {why}.")
        refuse(got != str(value), f"{name} is {got!r}; it must be {str(value)!r}: {why}.")
    refuse(given.training_script_args, f"the script would be given {given.training_script_args}.")


def _volcano_job(role: dict[str, Any]) -> dict[str, Any]:
    """What `torchx run --dryrun` would send to Volcano for an application of this role."""
    TORCHX.build()  # what fails here is not the answer's fault
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "component.py").write_text(COMPONENT.format(role=role), encoding="utf-8")
        try:
            shown = TORCHX.run("torchx", *DRY_RUN.split(), timeout_seconds=RENDER_SECONDS, folder=folder)
        except SetupError as error:
            if "exit code" not in str(error):
                raise
            told = str(error).strip().splitlines()[-1].strip()
            raise Wrong(f"TorchX refuses the role: {told}") from None
    return dict(yaml.safe_load(shown.partition("=== SCHEDULER REQUEST ===")[2]))


@exercise
def marked_step(answer: Callable[..., Any]) -> str:
    """`answer(model, optimizer, batches, mark)` takes one step on the mean of `batches`, a graph for each pass."""
    for accumulated in (3, 1, 8):
        _take_steps(answer, accumulated)
    return "each graph holds one pass, however many are accumulated, and the weights are those of one large batch."


def _take_steps(answer: Callable[..., Any], accumulated: int) -> None:
    """Raise Wrong unless two steps of `answer` are those of one large batch, and hold one pass in each graph."""
    import torch

    class Trace(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(function, "__name__", "")
            values = (*args, *(kwargs or {}).values())
            # `x.to(device)` is right, and here such a device is the CPU; numbers need not be moved.
            kinds = str if name == "to" and args[0].dim() else (str, torch.device)
            places = [str(each) for each in values if isinstance(each, kinds)]
            copied = name == "to" and any(each.startswith("cpu") for each in places)
            if sys._getframe(1).f_globals.get("__name__") == "torch.nn.utils.clip_grad":
                copied = False  # it brings norms to the device of the gradients
            reads = f"it reads a number from the device (`{name}`), which waits for it each time"
            refuse(name in READING or copied, f"{reads}.")
            return function(*args, **(kwargs or {}))

    torch.manual_seed(accumulated)
    mine = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Tanh(), torch.nn.Linear(7, 2))
    ours = copy.deepcopy(mine)
    optimizer, reference = (torch.optim.SGD(each.parameters(), 0.1, momentum=0.9) for each in (mine, ours))
    graphs: list[_Graph] = []

    def mark() -> None:
        """Begin a graph; the one before is complete."""
        weights = torch.nn.utils.parameters_to_vector(mine.parameters()).detach()
        if graphs:
            with torch._C.DisableTorchFunction():  # this comparison is no part of the answer
                same = torch.equal(graphs[-1].weights, weights)
            graphs[-1] = graphs[-1]._replace(updated=not same)
        graphs.append(_Graph(weights, []))

    def count(_: Any, __: Any, made: torch.Tensor) -> None:
        graphs[-1].passes.append("forward")
        if made.requires_grad:
            made.register_hook(lambda _: graphs[-1].passes.append("backward"))

    mine[0].register_forward_hook(count)  # so that `model.forward(x)` counts, too
    for _ in range(2):
        batches = [(torch.randn(4, 5), torch.randn(4, 2)) for _ in range(accumulated)]
        graphs.clear()
        mark()
        with Trace():
            answer(mine, optimizer, batches, mark)
        mark()
        _compare_graphs(graphs[:-1], accumulated)
        reference.zero_grad()
        for x, y in batches:
            (((ours(x) - y) ** 2).mean() / accumulated).backward()
        reference.step()
        for own, right in zip(mine.parameters(), ours.parameters(), strict=True):
            usual = "divide each loss by their number, clear the gradients once before, and update once after"
            differ = f"with {accumulated} micro-batches the weights are not those of one large batch: {usual}"
            refuse(not torch.allclose(own, right, rtol=1e-4, atol=1e-6), f"{differ}.")


class _Graph(NamedTuple):
    weights: torch.Tensor  # at its beginning
    passes: list[str]
    updated: bool = False


def _compare_graphs(graphs: list[_Graph], accumulated: int) -> None:
    many, made = f"with {accumulated} micro-batches", sum(graph.passes.count("forward") for graph in graphs)
    if not made:
        raise NotYet("no forward pass was made: write the function, then run this again.")
    never = "`mark` was never called: all operations wait, and the graph grows from step to step."
    refuse(len(graphs) == 1, f"{many}, {never}")
    *marked, waiting = graphs
    what = "the update" if waiting.updated else "a pass"
    end = "waits unmarked at the end of the step: mark once more after it"
    refuse(waiting.updated or waiting.passes, f"{many}, {what} {end}.")
    for _, passes, updated in marked:
        for name in ("forward", "backward"):
            most = f"one graph holds {passes.count(name)} {name} passes; mark after each pass."
            refuse(passes.count(name) > 1, f"{many}, {most}")
        halves = "a forward pass and its backward pass are in two graphs: mark after both."
        refuse(len(passes) == 1, f"{many}, {halves}")
        refuse(passes and updated, f"{many}, a pass and the update share a graph: mark between them, too.")
    refuse(made != accumulated, f"{many}, {made} forward passes were made; it must be one for each.")


@exercise
def sequences_of_a_step(answer: Callable[[dict[str, Any]], int]) -> str:
    """`answer(volcano_job)` is how many sequences all ranks together have in one step."""
    above = "--checkpoint-steps 50 --corpus /data/corpus --device neuron"
    for replicas, per_node, batch, accumulation, between in (
        ((1, 1, 1), 4, 8, None, ""),
        ((1, 1), 32, 16, 32, above),
        ((5,), 2, 3, 7, ""),
        ((1, 3), 8, 16, 3, "--layers 2"),
    ):
        nodes, passes = sum(replicas), accumulation or 1
        options = [f"--batch-size {batch}", between]
        options += [f"--grad-accumulation {accumulation}"] if accumulation else []
        of_script = " ".join(options if nodes < 4 else options[::-1])
        torchrun = f"exec torchrun --nnodes={nodes} --nproc-per-node={per_node} --rdzv-backend=etcd-v2"
        torchrun += " --rdzv-endpoint=etcd-server:2379 --max-restarts=3" if between else ""
        command = ["bash", "-c", f"{torchrun} -- /workshop/job/train.py {of_script} --steps 200"]
        limits = {"limits": {"aws.amazon.com/neuron": "16"}}
        template = {"spec": {"containers": [{"name": "worker", "command": command, "resources": limits}]}}
        tasks = [
            {"name": f"worker-{index}", "replicas": each, "template": template}
            for index, each in enumerate(replicas)
        ]
        spec = {"minAvailable": 1, "tasks": tasks}
        job = {"kind": "Job", "metadata": {"name": "job"}, "spec": copy.deepcopy(spec)}
        right = nodes * per_node * batch * passes
        accumulated = f"accumulated {passes} times" if accumulation else "without --grad-accumulation"
        what = f"with {nodes} nodes of {per_node} ranks, batches of {batch}, {accumulated}"
        because = f"{nodes} · {per_node} · {batch} · {passes}"
        slips = {f"every rank makes {passes} passes before the update": right // passes}
        slips |= {"that is one node's part": right // nodes}
        expect(result_of(answer, job), right, what, because, slips=slips)
    return "nodes × ranks × batch × accumulation, read from what would be sent: 32,768 for the job above."


@exercise
def hide(answer: Callable[[np.ndarray, np.ndarray, np.ndarray, np.ndarray], np.ndarray]) -> str:
    """`answer(tokens, chosen, luck, others)`: the tokens as the model sees them.

    `chosen` are positions; `luck`, in [0, 1), and `others`, tokens, have one entry for each of them. Where luck is
    below 0.8, the model sees MASK; below 0.9, the other token; otherwise the token itself.
    """
    for positions, lucks in (
        ([1, 3, 4, 6, 7], [0.1, 0.8, 0.9, 0.799, 0.899]),
        ([9, 2, 5, 0], [0.95, 0.1, 0.85, 0.3]),
    ):
        tokens = np.arange(11, 12 + max(positions))
        case = (tokens, np.array(positions), np.array(lucks), np.arange(90, 90 + len(positions)))
        given = copy.deepcopy(case)
        got = np.asarray(result_of(answer, *given))
        labels = "it changed the tokens that it was given, and they are the labels: change a copy."
        refuse(not np.array_equal(given[0], tokens), labels)
        only = "it changed `chosen`, `luck` or `others`, which it was only given to read."
        refuse(not all(map(np.array_equal, given, case)), only)
        shape = f"it gave an array of shape {got.shape}; it must be that of the tokens, {tokens.shape}."
        refuse(got.shape != tokens.shape, shape)
        kind = f"it gave numbers of type {got.dtype}; tokens are whole numbers."
        refuse(not np.issubdtype(got.dtype, np.integer), kind)
        why = {
            at: (token, f"was not chosen; {token} stays there") for at, token in enumerate(tokens.tolist())
        }
        for at, luck, other in zip(*(each.tolist() for each in case[1:]), strict=True):
            what, right = ("the other token", other) if luck < 0.9 else ("what stood there", why[at][0])
            what, right = ("MASK", MASK) if luck < 0.8 else (what, right)
            why[at] = right, f"has luck {luck:g}, so it must be {what}, {right}"
        for at, (right, reason) in why.items():
            where = f"with chosen = {positions}, position {at}"
            refuse(got[at] != right, f"{where} {reason}; it gave {got[at]}.")
    return "since every sequence has the same number of chosen tokens, the mean of the ranks' losses is the batch's."
