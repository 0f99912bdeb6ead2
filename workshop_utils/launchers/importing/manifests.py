"""Manifests of Kubernetes: a TFJob, PyTorchJob, MPIJob, TrainJob (with its runtime, if that is in the file) or Job.

What has a place in job.yaml or place.yaml is taken out of the manifest; what is left in it is dropped.
"""

from __future__ import annotations

import copy
import re
from typing import Any, NamedTuple

import yaml

from workshop_utils.jobs import JobError, parsed
from workshop_utils.launchers.importing import shell
from workshop_utils.launchers.importing.imported import (
    TABLES,
    UNKNOWN,
    WORDS,
    Imported,
    left,
    plain,
    refuse_template,
    take,
)
from workshop_utils.launchers.output import SECRET
from workshop_utils.launchers.template import expanded

KINDS: dict[str, dict[str, Any]] = TABLES["manifests"]
RUNTIMES = ("TrainingRuntime", "ClusterTrainingRuntime")
HELPERS = ("PS", "Launcher")  # roles of pods that do not train
# What a claim is for, by the name of its volume or folder.
CLAIMS = {"checkpoints": "check|ckpt", "outputs": "model|out|result|log|save", "data": ""}
# A word with a placeholder of Helm's or Jinja's, or one that envsubst would fill in.
TEMPLATE = re.compile(r"[^\s'\"()]*(\{[{%])[^{}\n]*\}\}?[^\s'\"()]*|\$\{?\w+\}?")


class Role(NamedTuple):
    """Pods that are alike: how many, where their spec is in the file, its fields and those of `containers[0]`."""

    replicas: int
    path: str
    fields: dict[str, Any]

    def take(self, name: str) -> Any:
        """Take a field of the container."""
        return self.fields.pop(f"containers[0].{name}", None)


def read(text: str, result: Imported) -> None:
    """Note in `result` what a manifest describes. Raises JobError if that is no job, or more than one."""
    try:
        read = parsed(result.file, lambda text: list(yaml.safe_load_all(text)))
    except JobError:
        if template := re.search(r"\{\{|\{%", text):
            line = text.count("\n", 0, template.start()) + 1
            refuse_template(f"{result.file}, line {line}", template[0])
        raise
    documents = [each for document in read if document for each in take(document, "items") or [document]]
    by_kind = [(_kind(each), each) for each in documents]
    jobs = [each for kind, each in by_kind if kind in KINDS]
    if len(jobs) != 1:
        held = f"{len(jobs)} jobs" if jobs else ", ".join(str(kind) for kind, _ in by_kind)
        raise JobError(f"{result.file}: it holds {held}; it must hold one job, a {', a '.join(KINDS)}")
    runtimes = [each for kind, each in by_kind if kind in RUNTIMES and jobs[0]["kind"] == "TrainJob"]
    for kind, each in by_kind:
        if each not in (*jobs, *runtimes):
            result.note(f"{kind} {take(each, 'metadata.name') or ''}".strip())
    for each in (*jobs, *runtimes):
        _refuse_templates(each, str(each["kind"]), result, text)
    _take_job(jobs[0], runtimes[0] if runtimes else {}, result)


def _kind(document: Any) -> str:
    """The kind of a document, with its API where that is another than the kind's usual one."""
    if not isinstance(document, dict):
        return "no object"
    kind, version = str(document.get("kind")), document.get("apiVersion")
    group = "trainer.kubeflow.org" if kind in RUNTIMES else KINDS.get(kind, {}).get("group")
    return f"{kind} of {version}" if group and version and version.split("/")[0] != group else kind


def _refuse_templates(tree: Any, path: str, result: Imported, text: str) -> None:
    """Raise JobError where a value in `tree`, at `path` of the manifest `text`, is a template's alone.

    In code, such signs are the code's own.
    """
    if isinstance(tree, str):
        if template := TEMPLATE.fullmatch(tree):
            line = text.count("\n", 0, max(0, text.find(tree))) + 1
            refuse_template(f"{result.file}, line {line}, {path}", template[1] or tree)
        return
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for name, value in items:
        if isinstance(tree, dict) or not str(value).startswith("$"):  # `args: [$CODE]` may be a shell's
            at = f"{path}.{name}" if isinstance(tree, dict) else f"{path}[{name}]"
            _refuse_templates(value, at, result, text)


def _take_job(job: dict[str, Any], runtime: dict[str, Any], result: Imported) -> None:
    table, result.target, result.says["pods"] = KINDS[job["kind"]], "kubernetes", ""
    result.take_fields(job, table["fields"])
    if "workers" in table:
        if not (roles := _roles(take(job, table["roles"]) or {}, table, result)):
            raise JobError(f"{result.file} has no {table['roles']}: {job.get('apiVersion')} is not read")
    else:
        is_plain = job["kind"] == "Job"
        template = take(job, "spec.template") if is_plain else _trainer(job, runtime, result)
        roles = _roles({"": {"template": template}}, table, result)
    workers = [roles[name] for name in table.get("workers", [""]) if name in roles and roles[name].replicas]
    main = workers[0] if workers else Role(1, table["roles"], {})
    driver, fields = roles.get("Launcher", main), dict(main.fields)
    _take_place(main, driver, result)
    _take_resources(main, result)
    strategy, nodes = table.get("strategy"), sum(role.replicas for role in workers)
    if "PS" in roles:
        result.job["parameter_servers"] = roles["PS"].replicas
        strategy, nodes = "parameter_server", main.replicas
        if not {"Chief", "Master"} & roles.keys():
            result.note(table["roles"], "changed: a chief hands out the steps")
    nodes *= int(result.says.get("nodes", 1))
    _take_start(_take_command(driver, result), driver.path, result, nodes, strategy)
    rest = [*left(job, ""), *left(runtime, runtime.get("kind", ""))]
    for role in roles.values():  # a Master, say, is like the Workers
        is_read = role in (main, driver)
        own = {name: value for name, value in role.fields.items() if is_read or value != fields.get(name)}
        rest += left(own, role.path)
    for path in rest:
        result.note(path)


def _take_start(words: list[str], where: str, result: Imported, nodes: int, strategy: str | None) -> None:
    """Note what `words` start, and what nothing in them says."""
    if code := shell.take_command(words, result, where):
        shell.read(code, result, where, nodes, strategy)
    else:
        shell.settle(result, where, nodes, strategy)
    if {"script", "module"} & result.job.keys():
        return
    what = "its command names no script of Python's: name yours in job.yaml, with its arguments"
    if "".join(words[:1]).startswith("-"):  # no command, but the arguments of one
        result.take_arguments(where, words)
        what = "the image's ENTRYPOINT starts what its args are for: name your script in job.yaml"
    result.note(where, what)


def _trainer(job: dict[str, Any], runtime: dict[str, Any], result: Imported) -> dict[str, Any]:
    """The template of a TrainJob's pods: its runtime's, with what its trainer says instead."""
    result.place["kind"] = "TrainJob"
    if take(job, "spec.runtimeRef") and not runtime:
        result.note("spec.runtimeRef", "not read, since the runtime is not in the file")
    result.take_fields(runtime, TABLES["runtime"])
    for path in ("metadata.name", "metadata.namespace"):
        take(runtime, path)
    jobs = take(runtime, "spec.template.spec.replicatedJobs") or []
    node: Any = next((each for each in jobs if each["name"] == "node"), {})
    template: dict[str, Any] = take(node, "template.spec.template") or {"spec": {"containers": [{}]}}
    container = template["spec"]["containers"][0]
    for path, name in TABLES["trainer"].items():
        if (value := take(job, path)) is not None:
            container[name] = [*container.get(name, []), *value] if name == "env" else value
    return template


def _roles(found: dict[str, Any], table: dict[str, Any], result: Imported) -> dict[str, Role]:
    """The pods by role, of those that a job here has, too."""
    roles: dict[str, Role] = {}
    path = table["roles"]
    for name, each in found.items():
        if name not in (*table.get("workers", [""]), *HELPERS):
            result.note(f"{path}.{name}", "dropped, since a job here has no such role")
            continue
        at = f"{path}.{name}.template.spec" if name else path
        replicas = copy.deepcopy(each)  # which an alias may share with another
        count, pod = take(replicas, "replicas"), take(replicas, "template.spec") or {}
        container, *others = pod.pop("containers", [{}])
        container.pop("name", None)
        for index in range(len(others)):
            result.note(f"{at}.containers[{index + 1}]")
        for where in left(replicas, f"{path}.{name}"):
            result.note(where)
        fields = pod | {f"containers[0].{field}": value for field, value in container.items()}
        roles[name] = Role(1 if count is None else int(count), at, fields)
    return roles


def _take_place(main: Role, driver: Role, result: Imported) -> None:
    """Take what says where a job runs: image, nodes, queue, claims."""
    place, fields = result.place, main.fields
    images = driver.take("image"), main.take("image")
    if all(images) and len({*images}) > 1:
        where = f"{driver.path}.containers[0].image"
        result.note(f"{where}: {images[0]}", f"dropped, since the workers' is {images[1]}")
    if image := images[1] or images[0]:
        place["image"] = image
    result.take_fields(fields, {"nodeSelector": "place.node_selector"})
    if fields.get("schedulerName") == "volcano":
        place["gang"] = fields.pop("schedulerName")
    if "gang" not in place and place.pop("queue", None):
        result.note("spec.runPolicy.schedulingPolicy.queue", "dropped, since the pods name no gang scheduler")
    mounts = main.take("volumeMounts") or []
    words = str([driver.fields.get(f"containers[0].{name}") for name in ("command", "args", "env")])
    mounts.sort(key=lambda mount: not re.search(re.escape(mount["mountPath"]) + r"(?!\w)", words))
    volumes = fields.pop("volumes", [])
    claims = {volume["name"]: take(volume, "persistentVolumeClaim.claimName") for volume in volumes}
    paths = {name: f"{main.path}.volumes[{index}]" for index, name in enumerate(claims)}
    for mount in (each for each in mounts if claims.get(each["name"])):
        name, folder = mount["name"], mount["mountPath"]
        use = next(use for use, pattern in CLAIMS.items() if re.search(pattern, f"{name} {folder}"))
        kept, key = (place, "data_claim") if use == "data" else (result.job, use)
        what = f"dropped, since {key} is {kept.get(key)}"
        if key not in kept:
            kept[key] = claims[name] if use == "data" else f"claim:{claims[name]}"
            inner = f"/{mount['subPath']}" if use == "data" and "subPath" in mount else ""
            word = "{model}" if use == "outputs" else f"{{{use}}}{inner}"
            what = f"changed: {folder} is {word}"
            result.paths[folder] = word
        result.note(paths[name], what)
    for name, claim in claims.items():
        if not (claim and name in [mount["name"] for mount in mounts]):
            result.note(paths[name])


def _take_command(driver: Role, result: Imported) -> list[str]:
    """Take the variables; the words of the command, with their values in it."""
    known = dict(WORDS)
    for each in driver.take("env") or []:
        name, value = each["name"], each.get("value", None if "valueFrom" in each else "")
        value = value and expanded(str(value), known)
        is_secret = "secretKeyRef" in str(each)
        result.take_variable(f"{driver.path}.containers[0].env.{name}", name, value, is_secret)
        known[name] = UNKNOWN if value is None or SECRET.search(name) else str(value)
    words = [*(driver.take("command") or []), *(driver.take("args") or [])]
    return [expanded(str(word), known) for word in words]


def _take_resources(main: Role, result: Imported) -> None:
    """Take what one pod gets."""
    resources = main.take("resources") or {}
    limits, requests = resources.get("limits", {}), resources.get("requests", {})
    if requests and requests != limits:
        result.note(f"{main.path}.containers[0].resources.requests", "changed: they are the limits, too")
    amounts = {name: str(amount) for name, amount in {**requests, **limits}.items()}
    cpu = re.fullmatch(r"([\d.]+)(m?)", amounts.pop("cpu", "0"))
    result.says["cpus_node"] = str(float(cpu[1]) / (1000 if cpu[2] else 1)) if cpu else "0"
    result.says |= {"memory": amounts.pop("memory", ""), "gpus_node": amounts.pop("nvidia.com/gpu", "")}
    if amounts:
        result.place["pod_resources"] = {name: plain(each) for name, each in amounts.items()}
