"""Python that trains on SageMaker, by an estimator or a ModelTrainer: its text is read, and nothing of it is run."""

from __future__ import annotations

import ast
import contextlib
import json
import operator
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import PurePosixPath
from typing import Any, NamedTuple

from workshop_utils.jobs import JobError
from workshop_utils.launchers.importing import shell
from workshop_utils.launchers.importing.imported import TABLES, UNKNOWN, Imported, left, take
from workshop_utils.launchers.instances import gpus_of

ESTIMATORS = ("PyTorch", "TensorFlow", "HuggingFace", "Estimator", "ModelTrainer")
CLASS = "()"  # the key of a class's name among its arguments
STARTS = ("fit", "train")
SOURCES = ("s3_data", "data_source", "s3_uri", "0")  # where a channel's arguments name its data
CHANNEL = (CLASS, "channel_name")  # what else is read of a channel
PROCESSES = ("processes_per_host", "process_count_per_node")
# Methods that change what they are called on.
CHANGING = re.compile("(set|with|add|update|append|extend|insert|remove|pop|popitem|clear|setdefault)(_.*)?")
WITHOUT_GPUS = re.compile(r"ml\.[cmrt]\d")
NUMBERS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)
EVERYWHERE = (1 << 30, 0)


class Computed(str):
    """What only running it would tell: the name of what computes it, or its line."""


class Assignment(NamedTuple):
    """What a name is assigned, None if that is computed, and from where to where in the text that holds."""

    value: ast.expr | None
    line: int
    start: tuple[int, int]
    end: tuple[int, int] = EVERYWHERE


class Names:
    """What the names in a text stand for: of the same function, or the module, the last assignment above a use counts.

    Attributes:
        assigned: the assignments to a name, or to an attribute such as `self.role`.
        changes: where else a name, or what it holds, is changed: the line, the name, and the method if one does it.
        used: the names that have been looked up.
        notes: what has been found on the way, and is to be said.
    """

    def __init__(self, nodes: Sequence[ast.AST]) -> None:
        self.assigned: dict[str, list[Assignment]] = {}
        self.changes: list[tuple[int, str, str]] = []
        self.used: set[str] = set()
        self.notes: list[tuple[str, str]] = []
        values: dict[ast.AST, ast.expr | None] = {}
        for node in nodes:
            if isinstance(node, ast.Assign):
                values |= dict.fromkeys(node.targets, node.value)
            elif isinstance(node, ast.AnnAssign):
                values[node.target] = node.value
            elif isinstance(node, FUNCTIONS):
                for each in (arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)):
                    self._assign(each.arg, Assignment(None, each.lineno, _start(node), _end(node)))
        ends = [(_start(each), _end(each)) for each in nodes if isinstance(each, FUNCTIONS)]
        augmented = {node.target for node in nodes if isinstance(node, ast.AugAssign)}
        for node in nodes:
            if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                value = values.get(node)
                if node not in augmented and (value or node not in values):  # no declaration such as `a: int`
                    is_local = isinstance(node, ast.Name)  # no attribute, such as self.role
                    around = [end for start, end in ends if is_local and start <= _start(node) <= end]
                    end = min(around, default=EVERYWHERE)
                    self._assign(ast.unparse(node), Assignment(value, node.lineno, _end(value or node), end))
            self.changes += _changes(node)

    def _assign(self, name: str, assignment: Assignment) -> None:
        self.assigned.setdefault(name, []).append(assignment)

    def value(self, node: ast.expr) -> Any:
        """What `node` is, as far as the text says."""
        if isinstance(node, ast.Name | ast.Attribute):
            value = self._assigned_to(node)
            return Computed(_described(node)) if value is None else self.value(value)
        if isinstance(node, ast.List | ast.Tuple):
            items = [self.value(each) for each in node.elts]
            return Computed(_described(node)) if any(isinstance(each, Computed) for each in items) else items
        if isinstance(node, ast.Dict):
            keys = [None if key is None else self.value(key) for key in node.keys]
            return self._merged(zip(keys, node.values, strict=True))
        if isinstance(node, ast.Call) and (_name(node)[:1].isupper() or _name(node) in (*STARTS, "dict")):
            is_dict = _name(node) == "dict"
            pairs = [(None if is_dict else str(number), each) for number, each in enumerate(node.args)]
            given = self._merged([*pairs, *((each.arg, each.value) for each in node.keywords)])
            return given if is_dict else given | {CLASS: _name(node)}
        if isinstance(node, ast.BinOp) and type(node.op) in NUMBERS:
            operands = [self.value(node.left), self.value(node.right)]
            if all(isinstance(each, int | float) for each in operands):
                with contextlib.suppress(ArithmeticError):
                    return NUMBERS[type(node.op)](*operands)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):
            return Computed(_described(node))

    def _assigned_to(self, node: ast.Name | ast.Attribute) -> ast.expr | None:
        """The last assignment to a name before `node`; None if that is computed, or if there is none."""
        name, at = ast.unparse(node), _start(node)
        above = [each for each in self.assigned.get(name, ()) if each.start <= at <= each.end]
        if not above:
            return None
        self.used.add(name)
        if len(lines := sorted({each.line for each in above})) > 1:
            *first, last = map(str, lines)
            self.notes.append(
                (f"{name} is assigned in lines {', '.join(first)} and {last}", "the last is taken")
            )
        return max(above, key=lambda each: each.start).value

    def _merged(self, pairs: Iterable[tuple[Any, ast.expr]]) -> dict[Any, Any]:
        """A dictionary; a pair without a key is another one, which is added to it."""
        merged: dict[Any, Any] = {}
        for key, node in pairs:
            value = self.value(node)
            if key is not None and not isinstance(key, Computed):
                merged[key] = value
            elif key is None and isinstance(value, dict) and CLASS not in value:
                merged |= value
            else:
                what = f"the key {key}" if key else f"**{_described(node)}"
                self.notes.append((f"line {node.lineno}", f"{what} is computed: not read, look at job.yaml"))
        return merged


def read(text: str, result: Imported) -> None:
    """Note in `result` what the estimator in `text` would train. Raises JobError if there is none, or more than one."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError as error:
        raise JobError(f"{result.file}, line {error.lineno}: {error.msg}; it must be Python") from None
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    made = [call for call in calls if _name(call) in ESTIMATORS and call.keywords]
    if len(made) != 1:
        held = (
            " and ".join(f"{_name(call)} in line {call.lineno}" for call in made) or "no SageMaker estimator"
        )
        raise JobError(f"{result.file}: it makes {held}; it must make one of {', '.join(ESTIMATORS)}")
    where, result.target = f"line {made[0].lineno}", "sagemaker"
    fields = _fields(made[0], calls, Names(nodes), result)
    if str(fields.get("0")).endswith(".py"):
        fields["entry_point"] = fields.pop("0")
    found: dict[str, Any] = {}
    for path, field in TABLES["estimators"].items():
        value = take(fields, path)
        if isinstance(value, Computed) and field != "channels":
            file = "place.yaml" if field.startswith("place.") else "job.yaml"
            result.note(f"{where}: {path}", f"not read, since it is computed ({value}): say it in {file}")
        elif isinstance(value, str | list) and field in ("environment", "distribution"):
            result.note(f"{where}: {path}", "not read, since it is no dictionary")
        elif value is not None and ("." in field or field in ("nodes", "name", "time")):
            result.take_fields({"": int(value) if isinstance(value, float) else value}, {"": field})
        elif value is not None:
            found[field] = value
    _take(found, result, where)
    for path in left(fields, ""):
        result.note(f"{where}: {path}")


def _fields(made: ast.Call, calls: Sequence[ast.Call], names: Names, result: Imported) -> dict[str, Any]:
    """The arguments of the estimator that is `made`, and of its fit."""
    fields, whole = names.value(made), ast.unparse(made)
    called = {whole}
    for name, values in names.assigned.items():
        called |= {name for each in values if each.value and _holder(ast.unparse(each.value), {whole})}
    starts = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr in STARTS]
    starts = [call for call in starts if _holder(ast.unparse(call.func).rpartition(".")[0], called)]
    for call in starts:
        given = names.value(call)
        fields |= {"inputs": given.pop("0", None), **given, CLASS: _name(made)}
    if len(starts) != 1:
        lines = " and ".join(str(call.func.end_lineno) for call in starts)
        taken = f"is started in lines {lines}: the last is taken"
        what = taken if starts else "has no fit or train that is found: add its data to job.yaml"
        names.notes.append((f"line {made.lineno}", f"{_name(made)} {what}"))
    for line, changed, method in sorted(names.changes):
        if name := _holder(changed, names.used | called):
            how = f" by {method}" if method else ""
            name = _name(made) if name == whole else name
            result.note(f"line {line}", f"{name} is changed here{how}: not read, look at job.yaml")
    for where, what in names.notes:
        result.note(where, what)
    return fields


def _holder(text: str, names: Iterable[str]) -> str:
    """Which of `names` the expression `text` is, or begins with, as `a.b` and `a.b()` begin with `a`; or ""."""
    return next((name for name in names if f"{text}.".startswith(f"{name}.")), "")


def _take(found: Mapping[str, Any], result: Imported, where: str) -> None:
    """Note what is neither a number nor a name."""
    for name, value in found.get("environment", {}).items():
        result.take_variable(f"{where}: {name}", name, value if _is_known(value) else None)
    if "channels" in found:
        result.job["data"] = _data(found["channels"], result, where)
    single = "/training" if isinstance(result.job.get("data"), str) else ""
    result.paths = {f"/opt/ml/input/data{single}": "{data}", "/opt/ml/model": "{model}"}
    result.paths["/opt/ml/checkpoints"] = "{checkpoints}"
    strategy = _take_distribution(found.get("distribution") or {}, "command" in found, result, where)
    folder = _folder(found, result, where)
    given = _hyperparameters(found.get("arguments", {}), result, where)
    if program := given.pop("sagemaker_program", None):
        name = str(program).strip('"') if _is_known(program) else UNKNOWN
        found = {"script": name, **found}
    words = _words(given, result, where)
    _take_start(found, words, result, where, strategy)
    if result.job.get("script", "").startswith(f"{PurePosixPath(folder)}/"):
        result.note(f"{where}: source_dir", f"changed: --output {folder} makes that the job's folder")


def _take_start(
    found: Mapping[str, Any], words: list[str], result: Imported, where: str, strategy: str | None
) -> None:
    """Note what is started: a command, or a script with `words`."""
    if "command" in found:
        if words:
            result.note(f"{where}: hyperparameters", "dropped, since a command is not given them")
        shell.read(found["command"], result, f"{where}: command", int(result.says.get("nodes", 1)), strategy)
    else:
        if "script" in found:
            result.take_script(found["script"])
        else:
            started = "what its image starts is" if "image" in result.place else "its script is"
            result.note(where, f"{started} not known: name your script in job.yaml, with its arguments")
        result.take_arguments(where, words)
        shell.settle(result, where, strategy=strategy)


def _folder(found: Mapping[str, Any], result: Imported, where: str) -> str:
    """Where below the estimator's file scripts may lie."""
    folder = str(found.get("folder", "."))
    if "://" in folder:
        what = "not read, since it is not on this machine: put its files beside job.yaml"
        result.note(f"{where}: source_dir", what)
        folder = "."
    result.folders.append(folder)
    return folder


def _hyperparameters(given: Any, result: Imported, where: str) -> dict[Any, Any]:
    """The hyperparameters, which may be in a file of JSON."""
    if isinstance(given, str):
        try:
            given = dict(json.loads((result.file.parent / given).read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            result.note(
                f"{where}: hyperparameters", f"not read: no JSON is in {given}; add them to arguments"
            )
            given = {}
    return dict(given)


def _words(given: Mapping[Any, Any], result: Imported, where: str) -> list[str]:
    """The hyperparameters as the script gets them, without those for SageMaker's toolkit."""
    words: list[str] = []
    for name, value in given.items():
        if str(name).startswith("sagemaker_"):
            result.note(
                f"{where}: {name}", "dropped, since it is for SageMaker's toolkit, not for the script"
            )
            continue
        text = json.dumps(value) if isinstance(value, list | dict) else str(value)
        words += ["-" * min(2, len(str(name))) + str(name), text if _is_known(value) else UNKNOWN]
    return words


def _take_distribution(given: dict[str, Any], has_command: bool, result: Imported, where: str) -> str | None:
    """The strategy that is `given`; note how many processes it has on a machine, unless a command says so."""
    enabled = _enabled(given)
    if "modelparallel" in str(enabled):
        raise JobError(f"{result.file}: distribution is smdistributed.modelparallel, SageMaker's alone")
    program = enabled.get(CLASS) or next(iter(enabled), None)
    if program == "smdistributed":
        result.note(f"{where}: distribution", "changed: smdistributed is torch_ddp, over NCCL or gloo")
    strategy: str | None = TABLES["distributions"].get(program)
    others = [name for name in enabled if name != program and CLASS not in enabled]
    unread = [*others, *_unread(enabled.get(program, enabled))] if strategy else [program] if program else []
    for path in unread:
        result.note(f"{where}: distribution: {path}")
    options = enabled.get(program, enabled)
    options = options if isinstance(options, dict) else {}
    gpus = gpus_of(result.place.get("instance_type", "")) or 0
    usual = gpus if strategy == "torch_ddp" else 1
    is_counted = gpus or has_command or any(map(options.get, PROCESSES))
    kind = result.place.get("instance_type", "its instance")
    if strategy == "torch_ddp" and not is_counted and not WITHOUT_GPUS.match(kind):
        what = f"how many GPUs {kind} has is not known: one process a machine is taken"
        result.note(f"{where}: distribution", what)
    count = next((options[name] for name in PROCESSES if options.get(name)), usual or 1)
    if strategy or not has_command:
        result.says["per_node"] = UNKNOWN if isinstance(count, Computed) else str(count)
    result.says["gpus_node"] = str(gpus)
    if strategy is None and result.says.get("nodes", "1") != "1":
        result.says["srun"] = ""  # several, of which nothing says how they co-operate
    return strategy


def _enabled(tree: Any) -> Any:
    """A distribution without what is not enabled."""
    if not isinstance(tree, dict):
        return tree
    kept = {
        name: _enabled(each)
        for name, each in tree.items()
        if not isinstance(each, dict) or each.get("enabled", True)
    }
    return {name: each for name, each in kept.items() if each or not tree[name]}


def _unread(options: Any) -> Iterator[str]:
    """The names of what a distribution says, too."""
    for name, value in options.items() if isinstance(options, dict) else [(options, options)]:
        if isinstance(value, dict):
            yield from _unread(value)
        elif isinstance(value, Computed) and name not in PROCESSES:
            yield f"{name}, which is computed"
        elif value is not None and name not in (CLASS, "enabled", *PROCESSES):
            yield name


def _is_known(value: Any) -> bool:
    """Whether nothing in `value` is computed."""
    if isinstance(value, dict):
        return CLASS not in value and all(map(_is_known, value.values()))
    return not isinstance(value, Computed) and (not isinstance(value, list) or all(map(_is_known, value)))


def _data(inputs: Any, result: Imported, where: str) -> str | dict[str, str]:
    """The sources by channel, or the single one."""
    if isinstance(inputs, list):
        inputs = {each.get("channel_name", "training"): each for each in inputs if isinstance(each, dict)}
    channels = inputs if isinstance(inputs, dict) and CLASS not in inputs else {"training": inputs}
    sources = {}
    for name, source in channels.items():
        channel, kind = f"{where}: channel {name}", ""
        while isinstance(source, dict):
            kind = str(source.get(CLASS))
            key = next((key for key in SOURCES if key in source), None)
            for path in left({each: source[each] for each in source if each not in (key, *CHANNEL)}, ""):
                result.note(f"{channel}: {path}")
            source = source.get(key)
        if not isinstance(source, str) or isinstance(source, Computed):
            is_files = kind.startswith("FileSystem")
            what = "a file system, which jobs here do not read" if is_files else f"computed ({source})"
            result.note(channel, f"{what}: say it in job.yaml")
            source = str(name)
        sources[name] = source.removeprefix("file://")
    return sources if channels is inputs else sources["training"]


def _changes(node: ast.AST) -> list[tuple[int, str, str]]:
    """What `node` changes without assigning to its name: the line, the text of what is changed, and the method."""
    match node:
        case (
            ast.Subscript(value=value, ctx=ast.Store() | ast.Del())
            | ast.Attribute(value=value, ctx=ast.Store())
        ):
            while isinstance(value, ast.Subscript):
                value = value.value
            return [(node.lineno, ast.unparse(value), "")]
        case ast.AugAssign(target=ast.Name() | ast.Attribute() as target):
            return [(node.lineno, ast.unparse(target), "")]
        case ast.Call(func=ast.Attribute(value=value, attr=name) as method) if CHANGING.fullmatch(name):
            return [(method.end_lineno or node.lineno, ast.unparse(value), name)]
    return []


def _start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _name(call: ast.Call) -> str:
    """The name of what is called, without the module or object that it belongs to."""
    return ast.unparse(call.func).rpartition(".")[2]


def _described(node: ast.expr) -> str:
    """`node` in a message: a name, or what is called; of anything else its line, since its text may hold a secret."""
    called, arguments = node, ""
    if isinstance(node, ast.Call):
        called, arguments = node.func, "(…)" if node.args or node.keywords else "()"
    text = ast.unparse(called)
    return f"{text}{arguments}" if re.fullmatch(r"[\w.]+", text) else f"line {node.lineno}"
