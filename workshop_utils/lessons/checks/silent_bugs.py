"""Checks of lesson 17, silent bugs; see `workshop_utils.lessons.checks` for how they speak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from workshop_utils.lessons.checks import NotYet, Wrong, exercise, is_missing, listed, number_of, refuse
from workshop_utils.lessons.checks.open_question import measured
from workshop_utils.lessons.checks.processes import values_on_ranks
from workshop_utils.lessons.gauntlet.planting import (
    Change,
    Row,
    compiled,
    function_at,
    planted,
    row_of,
    swapped,
)

Verifier = Callable[[Callable[..., Any], Any, list[Any], Any], Any]

SCRIPT = "workshop_utils.lessons.gauntlet.pytorch_script"
LAYOUT = {"data": 2, "tensor": 2}  # of its ranks
SHOWN = "sum_goes_back_as_a_sum", "norm_of_a_stage", "moments_begin_anew"  # in the lesson's first section
CHECKS = "falls", "loss_equals", "gradients", "invariants", "types", "bytes"
RIGHT = "right variant"
WHOLE = {"loss", "norm", "evaluation", "resume"}  # what else than parameters a verifier may name
FOLLOWS = {  # what else is wrong from the next step on, where a verifier goes on beside one process
    "gradient": {"loss", "norm", "evaluation"},
    "norm": {"gradient", "loss", "evaluation"},
    "resume": {"gradient", "loss", "norm", "evaluation"},
}
EXAMPLES = 8, 12, 8  # of the batches that a verifier gets
NOISE = 0.1  # on all weights, of which many are zero at first
HINTS = {  # by what a false alarm names
    "gradient": (
        "Orders of the same sum differ by rounding: compare with a parameter's largest number, which may be a "
        "million times the smallest."
    ),
    "loss": "It is the mean over all targets that count, and None on a rank that does not know it.",
    "norm": "It is that of the whole gradient, before clipping.",
    "evaluation": "It is the mean over all targets that count, with the weights that the training has by then.",
    "resume": "Both must take the same steps behind the state that one saves and the other loads.",
}


@measured
def caught(results: Any) -> float:
    """In how many pairs of a bug and a check the check finds the bug; `results` is what `matrix.matrix` gives."""
    refuse(
        not hasattr(results, "columns"),
        "`results` is no table: give what `matrix.matrix(three, people)` returned.",
    )
    bugs, missing = [*map(str, results.index)], {*CHECKS} - {*results.columns}
    refuse(
        sorted(bugs) != sorted(SHOWN), f"`results` has the bugs {listed(bugs)}; it must have {listed(SHOWN)}."
    )
    refuse(missing, f"`results` lacks the checks {listed(sorted(missing))}; give the whole table.")
    verdicts = [str(each) for each in results[[*CHECKS]].to_numpy().flat]
    failed = [each for each in verdicts if each.startswith("error")]
    refuse(failed, f"a run has failed, {failed[:1]}: run it again.")
    return float(verdicts.count("caught"))


@exercise
def my_verifier(answer: Verifier) -> str:
    """`answer(make, model, batches, mesh)` is a list of what is wrong on this rank: names, of parameters and others."""
    cases = hidden()
    values = values_on_ranks("on 2 ranks", 2, _verdicts, {"answer": answer, "cases": cases}, timeout="120s")
    judged = zip(cases, zip(*values, strict=True), strict=True)
    for row, verdicts in sorted(
        judged, key=lambda each: each[0].kind != RIGHT
    ):  # an alarm explains more than a miss
        _judge(row, verdicts)
    bugs = sum(row.kind != RIGHT for row in cases)
    return (
        f"it finds all {bugs} bugs that you have not seen, in data, tensor and pipeline parallelism, evaluation and "
        f"resume, and raises no alarm in {len(cases) - bugs} trainings that are right."
    )


def hidden() -> list[Row]:
    """Bugs and right variants of `mutants.yaml`."""
    text = Path(__file__).with_name("mutants.yaml").read_text(encoding="utf-8")
    return [row_of(each) for each in yaml.safe_load(text)]


def _verdicts(communicator: Any, answer: Verifier, cases: Sequence[Row]) -> list[Any]:
    """On a rank: what `answer` gives in each case; Wrong where it stops."""
    import torch

    from workshop_utils.lessons.gauntlet.model import ragged, whole_model
    from workshop_utils.lessons.gauntlet.trainer import Training
    from workshop_utils.parallel import gpt
    from workshop_utils.parallel.mesh import mesh_of

    given = []
    for row in cases:
        model, groups = whole_model(**row.options), mesh_of(communicator, **row.layout)
        torch.manual_seed(0)
        for each in model.parameters():
            each.data.add_(NOISE * torch.randn_like(each))
        before = [each.detach().clone() for each in model.parameters()]
        batches = [
            ragged(gpt.batch_of(gpt.manual(), step, examples, model.sizes.sequence))
            for step, examples in enumerate(EXAMPLES)
        ]

        def make(whole: Any, mesh: Any, options: dict[str, Any] = row.options) -> Training:
            return Training(whole, mesh, **options)

        with planted(row):
            names = answer(make, model, batches, groups)
        changed = any(not one.equal(other) for one, other in zip(model.parameters(), before, strict=True))
        refuse(changed, "your function changes `model`; work on a copy.")
        if is_missing(names):
            raise NotYet("your function gave nothing: write it, then run this again.")
        is_list = isinstance(names, list | tuple | set) and all(isinstance(each, str) for each in names)
        refuse(not is_list, f"your function gave {names!r}; it must give a list of names, or an empty one.")
        allowed = WHOLE | {name for name, _ in model.named_parameters()}
        others = sorted({*names} - allowed)
        known = f"names are those of `model.named_parameters()`, and {listed(sorted(WHOLE))}"
        refuse(others, f"your function names {others[:1]}; {known}.")
        given.append(sorted(set(names)))
    return given


def _judge(row: Row, verdicts: Sequence[list[str]]) -> None:
    """Raise Wrong if a bug was missed, blamed on what is right, or seen where there is none."""
    named = {name for verdict in verdicts for name in verdict}
    kinds = {name if name in WHOLE else "gradient" for name in named}
    cut = f"with {listed(f'{direction} {size}' for direction, size in row.layout.items())}"
    if row.kind == RIGHT:
        few = listed(sorted(named)[:3])
        hint = " ".join(sentence for kind, sentence in HINTS.items() if kind in kinds)
        refuse(named, f"a false alarm, {cut}: it names {few}, but all is right: {row.says}. {hint}")
        return
    advice = f"{row.says[0].upper()}{row.says[1:]}."
    refuse(not named, f"it misses a bug, {cut}: {row.kind}. {advice}")
    must, *may = row.like.split()
    parameters = sorted(named - WHOLE)
    right = [name for name in parameters if any(each[1:] in name for each in may if each[0] == "!")]
    others = f"of which the first step's gradients are right; something else is wrong: {row.kind}. {advice}"
    refuse(right, f"it names {listed(right[:2])}, {cut}, {others}")
    later = set().union(*(FOLLOWS.get(each, set()) for each in must.split("/")))
    wrong = sorted(kinds - {*must.split("/"), *may} - later)
    blamed = listed(f"`{each}`" if each in WHOLE else "a parameter" for each in wrong)
    refuse(wrong, f"it names {blamed}, {cut}, where something else is wrong: {row.kind}. {advice}")
    noticed = listed(sorted(named))
    vague = f"it names {noticed}, {cut}, but not what is wrong: {row.kind}. {advice}"
    refuse(not kinds & {*must.split("/")}, vague)


@exercise
def mended(answer: tuple[str, str, str]) -> str:
    """`answer` is (function, old text, new text): with it, PyTorch's script is the training of one process."""
    is_change = isinstance(answer, tuple | list) and len(answer) == 3
    is_change = is_change and all(isinstance(each, str) for each in answer)
    refuse(not is_change, f"`mended` is {answer!r}; it must be (function, old, new), three texts.")
    function, old, new = answer
    change = Change(f"{SCRIPT}:{function.removeprefix(f'{SCRIPT}:')}", old, new)
    try:
        compiled(function_at(change.where)[0], change)
    except (AttributeError, SyntaxError, ValueError) as error:
        raise Wrong(f"it cannot be planted: {error}.") from None
    where, arguments = "on 4 ranks of PyTorch", {"change": change}
    values = values_on_ranks(where, 4, _verified, arguments, framework="torch", timeout="180s")
    found, shares, whole, collectives = values[0]
    refuse(found, f"`verify` still finds something wrong: {found}.")
    few = f"each rank holds {shares[1]:,} of {whole:,} numbers, with the script as it was {shares[0]:,}"
    refuse(shares[1] != shares[0], f"{few}: mend the sum, and keep the cut.")
    for name, (before, after) in collectives.items():
        counts = f"a step has {number_of(after, name)}, with the script as it was {before}"
        each = "between layers each rank has its part of the sequence alone"
        refuse(after != before, f"{counts}: {each}; mend the sum, and keep the cut.")
    return "under each cut of data 2 × tensor 2 the script now is the training of one process, to float64's rounding."


def _verified(dist: Any, change: Change) -> tuple[str, tuple[int, int], int, dict[str, tuple[int, int]]]:
    """On a rank: the first finding, how many numbers this rank holds without and with the change, and all there are.

    Then, if there is no finding, how often a step gathers and scatters without and with it: whoever gathers the
    sequence for a norm, or leaves it whole, changes that; sums of gradients are all-reduces.
    """
    from torch import nn
    from torch.distributed.tensor import DTensor
    from torch.nn.functional import cross_entropy
    from torch.utils._python_dispatch import TorchDispatchMode

    from workshop_utils.lessons.gauntlet import pytorch_script as script
    from workshop_utils.parallel.verify import device_mesh, verify

    def loss(model: nn.Module, batch: Any) -> Any:
        tokens, targets = batch
        return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    def held() -> int:
        parts = script.make(script.build(), mesh).module.parameters()
        return sum(each.to_local().numel() if hasattr(each, "to_local") else each.numel() for each in parts)

    class Names(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.called: list[str] = []

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if any(issubclass(each, DTensor) for each in types):
                return NotImplemented  # then it calls its collectives, which come here
            self.called.append(func.name())
            return func(*args, **(kwargs or {}))

    def collectives() -> dict[str, int]:
        training = script.make(script.build(), mesh)
        with Names() as names:
            training.step(batch)
        called = [each for each in names.called if "c10d" in each]
        kinds = {"all-gather": "gather", "reduce-scatter": "scatter"}
        return {kind: sum(part in each for each in called) for kind, part in kinds.items()}

    mesh = dist.init_device_mesh("cpu", tuple(LAYOUT.values()), mesh_dim_names=tuple(LAYOUT))
    batch = script.batch_of(script.paragraphs(), 12, 0)
    before, gathers = held(), collectives()
    with swapped(change):
        after = held()
        report = verify(script.build, loss, script.make, batch, LAYOUT, mesh=device_mesh)
        changed = gathers if report.findings else collectives()
    first = str(report.findings[0]).partition("\n")[0] if report.findings else ""
    both = {name: (count, changed[name]) for name, count in gathers.items()}
    return first, (before, after), sum(each.numel() for each in script.build().parameters()), both
