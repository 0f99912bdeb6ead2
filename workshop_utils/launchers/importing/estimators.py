"""Python that trains on SageMaker, by an estimator or a ModelTrainer: its text is read, and nothing of it is run."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping
from typing import Any

from workshop_utils.jobs import JobError
from workshop_utils.launchers.importing import shell
from workshop_utils.launchers.importing.imported import TABLES, UNKNOWN, Imported, left, take
from workshop_utils.launchers.instances import gpus_of

ESTIMATORS = ("PyTorch", "TensorFlow", "HuggingFace", "Estimator", "ModelTrainer")
CLASS = "()"  # the key of a class's name among its arguments
STARTS = ("fit", "train")
SOURCES = ("s3_data", "data_source", "s3_uri", "0")  # where a channel's arguments name its data


class Computed(str):
    """The text of what only running it would tell."""


def read(text: str, result: Imported) -> None:
    """Note in `result` what the estimator in `text` would train. Raises JobError if there is none, or more than one."""
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except SyntaxError as error:
        raise JobError(f"{result.file}, line {error.lineno}: {error.msg}; it must be Python") from None
    assigned = [
        node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
    ]
    names = {ast.unparse(node.targets[0]): node.value for node in assigned}
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    made = [call for call in calls if _name(call) in ESTIMATORS and call.keywords]
    if len(made) != 1:
        held = " and ".join(f"{_name(call)} in line {call.lineno}" for call in made) or "none"
        raise JobError(f"{result.file}: it makes {held}; it must make one of {', '.join(ESTIMATORS)}")
    fields, where, result.target = _value(made[0], names), f"line {made[0].lineno}", "sagemaker"
    called = {ast.unparse(made[0]), *(name for name, value in names.items() if value is made[0])}
    for call in calls:
        if ast.unparse(call.func).rpartition(".")[::2] in {(each, how) for each in called for how in STARTS}:
            given = _value(call, names)
            fields |= {"inputs": given.pop("0", None), **given, CLASS: _name(made[0])}
    if str(fields.get("0")).endswith(".py"):
        fields["entry_point"] = fields.pop("0")
    found: dict[str, Any] = {}
    for path, field in TABLES["estimators"].items():
        value = take(fields, path)
        if isinstance(value, Computed) and field != "channels":
            file = "place.yaml" if field.startswith("place.") else "job.yaml"
            result.note(f"{where}: {path}", f"not read, since it is computed ({value}): say it in {file}")
        elif value is not None and ("." in field or field in ("nodes", "name", "time")):
            result.take_fields({"": value}, {"": field})
        elif value is not None:
            found[field] = value
    _take(found, result, where)
    for path in left(fields, ""):
        result.note(f"{where}: {path}")


def _take(found: Mapping[str, Any], result: Imported, where: str) -> None:
    """Note what is neither a number nor a name."""
    for name, value in found.get("environment", {}).items():
        result.take_variable(f"{where}: {name}", name, None if isinstance(value, Computed) else value)
    if "channels" in found:
        result.job["data"] = _data(found["channels"], result, where)
    single = "/training" if isinstance(result.job.get("data"), str) else ""
    result.paths = {f"/opt/ml/input/data{single}": "{data}", "/opt/ml/model": "{model}"}
    result.paths["/opt/ml/checkpoints"] = "{checkpoints}"
    words: list[str] = []
    for name, value in found.get("arguments", {}).items():
        text = json.dumps(value) if isinstance(value, list | dict) else str(value)
        words += ["-" * min(2, len(name)) + name, UNKNOWN if isinstance(value, Computed) else text]
    if "script" in found:
        result.take_script(f"{(folder := found.get('folder', '.'))}/{found['script']}")
        if "folder" in found and result.job["script"] != found["script"]:
            result.note(f"{where}: source_dir", f"changed: --output {folder} makes that the job's folder")
    result.take_arguments(where, words)
    distribution = found.get("distribution") or {}
    program = distribution.get(CLASS) or next(iter(distribution), None)
    options = distribution.get(program, distribution)
    if "modelparallel" in str(distribution):
        raise JobError(f"{result.file}: distribution is smdistributed.modelparallel, SageMaker's alone")
    if program == "smdistributed":
        result.note(f"{where}: distribution", "changed: smdistributed is torch_ddp, over NCCL or gloo")
    options = options if isinstance(options, dict) else {}
    strategy, gpus = TABLES["distributions"].get(program), gpus_of(result.place.get("instance_type", "")) or 0
    usual = gpus if strategy == "torch_ddp" else 1
    each = options.get("processes_per_host", options.get("process_count_per_node")) or usual or 1
    result.says |= {"per_node": str(each), "gpus_node": str(gpus)}
    if strategy is None and result.says.get("nodes", "1") != "1":
        result.says["srun"] = ""  # several, of which nothing says how they co-operate
    shell.settle(result, where, strategy=strategy)


def _data(inputs: Any, result: Imported, where: str) -> str | dict[str, str]:
    """The sources by channel, or the single one."""
    if isinstance(inputs, list):
        inputs = {each.get("channel_name", "training"): each for each in inputs if isinstance(each, dict)}
    channels = inputs if isinstance(inputs, dict) and CLASS not in inputs else {"training": inputs}
    sources = {}
    for name, source in channels.items():
        while isinstance(source, dict):
            source = next((source[key] for key in SOURCES if key in source), None)
        if not isinstance(source, str) or isinstance(source, Computed):
            result.note(f"{where}: channel {name}", f"computed ({source}): say it in job.yaml")
            source = str(name)
        sources[name] = source.removeprefix("file://")
    return sources if channels is inputs else sources["training"]


def _name(call: ast.Call) -> str:
    """The name of what is called, without the module or object that it belongs to."""
    return ast.unparse(call.func).rpartition(".")[2]


def _value(node: ast.expr, names: Mapping[str, ast.expr]) -> Any:
    """What `node` is, as far as its text says, where `names` have been given to others."""
    if isinstance(node, ast.Name) and node.id in names:
        return _value(names[node.id], {name: value for name, value in names.items() if name != node.id})
    if isinstance(node, ast.List | ast.Tuple):
        items = [_value(each, names) for each in node.elts]
        return Computed(ast.unparse(node)) if any(isinstance(each, Computed) for each in items) else items
    if isinstance(node, ast.Dict):
        pairs = [(key, value) for key, value in zip(node.keys, node.values, strict=True) if key is not None]
        return {_value(key, names): _value(value, names) for key, value in pairs}
    if isinstance(node, ast.Call) and (_name(node)[:1].isupper() or _name(node) in (*STARTS, "dict")):
        given = {str(number): _value(each, names) for number, each in enumerate(node.args)}
        given |= {str(each.arg): _value(each.value, names) for each in node.keywords}
        return given | ({} if _name(node) == "dict" else {CLASS: _name(node)})
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError):
        return Computed(ast.unparse(node))
