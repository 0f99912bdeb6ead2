"""What `workshop launch --render` prints, as data in which nothing depends on the machine or the moment."""

from __future__ import annotations

import json
import os
import re
import shlex
import site
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from adapter import PACKAGE, ROOT

# Of the package itself only that something of it travels is of interest, not how its modules are called.
MODULES = "MODULES"


def rendering(text: str) -> Any:
    """`text`, what was printed, as JSON, YAML documents, or processes with their variables and commands."""
    text = without_accidents(text)
    if text.lstrip().startswith("{"):
        request, *files = _blocks(text)
        return (
            json.loads(request) if not files else {"request": json.loads(request)} | dict(map(_file, files))
        )
    if re.search(r"^(apiVersion|name|kind): ", text, re.MULTILINE) and "\nWORKSHOP_DATA=" not in text:
        return _documents(text)
    return _processes(text)


def without_accidents(text: str) -> str:
    """`text` with a marker for each path, port, time and random name; the same port has the same marker."""
    folders = {
        str(ROOT): "CHECKOUT",
        sys.executable: "PYTHON",
        os.environ.get("WORKSHOP_CACHE", str(Path.home() / ".cache/workshop-utils")): "CACHE",
        str(Path.home()): "HOME",
        site.getsitepackages()[0]: "PACKAGES",
        sys.prefix: "ENVIRONMENT",
        tempfile.gettempdir(): "SCRATCH",
    }
    for folder in sorted(folders, key=len, reverse=True):
        text = re.sub(rf"(?<![\w.-]){re.escape(folder)}(?=[/\s'\":;,]|$)", folders[folder], text)
    text = re.sub(rf"CHECKOUT/{PACKAGE}/[\w/]+\.py", "MODULE", text)
    text = text.replace("/mpirun --allow-run-as-root", "/mpirun")  # here, which it wants where root runs it
    text = re.sub(r"python -c '[^']*'", "python -c DATA", text)
    text = re.sub(r"(?<=-)\d{14}(-[0-9a-f]{4})?\b", "MOMENT", text)  # names of jobs on SageMaker
    text = re.sub(r"\b(bert-\w+|digits-\w+|mnist-\w+)-[a-z0-9]{11,14}\b", r"\1-RANDOM", text)  # of TorchX
    text = re.sub(
        r"(?m)^#   --from-file=" + PACKAGE + r"/\S+\.py( \\)?\n(?=#   --from-file=" + PACKAGE + ")", "", text
    )
    text = re.sub(rf"(--from-file=){PACKAGE}/\S+\.py", rf"\1{MODULES}", text)
    text = re.sub(r'("?workshop_utils"?[-= ]+v?)\d+\.\d+\.\d+', r"\1VERSION", text)
    ports: dict[str, str] = {}

    def port(found: re.Match[str]) -> str:
        return found[1] + ports.setdefault(found[2], f"PORT{len(ports)}")

    # Ports that were free just now: of an address of this machine, of a variable that is called so, of torchrun.
    return re.sub(
        r"((?:127\.0\.0\.1[: ]|localhost\}?:|_PORT=|c10d: ))([1-9]\d{3,4})\b",
        port,
        text,
    )


def _documents(text: str) -> dict[str, Any]:
    """YAML documents, and the comment before them, which holds commands that people copy."""
    lines = text.splitlines()
    comment = [line for line in lines if line.startswith("#")]
    documents = [_without_module_names(document) for document in yaml.safe_load_all(text)]
    return {"comment": comment, "documents": documents} if comment else {"documents": documents}


def _without_module_names(value: Any) -> Any:
    """`value` with one item in place of all that name a file of the package in a ConfigMap."""
    if isinstance(value, dict):
        return {key: _without_module_names(item) for key, item in value.items()}
    if not isinstance(value, list):
        return value
    kept = [_without_module_names(item) for item in value if not _names_a_module(item)]
    return kept if len(kept) == len(value) else [*kept, MODULES]


def _names_a_module(item: Any) -> bool:
    return isinstance(item, dict) and str(item.get("path", "")).startswith(f"{PACKAGE}/")


def _blocks(text: str) -> list[str]:
    return re.split(r"\n\n(?=# )", text.strip())


def _file(block: str) -> tuple[str, Any]:
    """What travels along: of a JSON file, which processes a host has, and what these are told."""
    title, _, content = block.partition("\n")
    if not title.endswith(".json"):
        return title, content.splitlines()
    return title, {
        host: {member["name"]: member["environment"] for member in members}
        for host, members in json.loads(content).items()
    }


def _processes(text: str) -> dict[str, Any]:
    """`# name` before the variables and the command of each process; other such blocks are kept as lines."""
    blocks: dict[str, Any] = {}
    for block in _blocks(text):
        title, _, content = block.partition("\n")
        name = title.removeprefix("# ")
        words = shlex.split(content.replace("\\\n", " ")) if " \\\n" in content else []
        if not words:
            blocks[name] = content.splitlines()
            continue
        start = next(number for number, word in enumerate(words) if not re.match(r"[A-Z]\w*=", word))
        variables = dict(word.split("=", 1) for word in words[:start])
        blocks[name] = {"variables": variables, "command": shlex.join(words[start:])}
    return blocks
