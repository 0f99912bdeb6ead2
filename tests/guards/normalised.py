"""What `workshop launch --render` prints, with a marker for each thing that depends on the machine or the moment."""

from __future__ import annotations

import os
import re
import site
import sys
import tempfile
from pathlib import Path

import yaml
from adapter import PACKAGE, ROOT


class Block(yaml.SafeDumper):
    """Writes what occurs twice twice, since it is to be read."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def rendering(text: str) -> str:
    """`text`, what was printed, with markers; lines of YAML are broken where no path or name was long."""
    text = without_accidents(text)
    if re.search(r"^(apiVersion|name|kind): ", text, re.MULTILINE) and "\nWORKSHOP_DATA=" not in text:
        comment = re.match(r"(#.*\n)*", text)[0]
        documents = yaml.safe_load_all(text)
        text = comment + yaml.dump_all(documents, Dumper=Block, sort_keys=False, width=110)
    return text


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
    text = re.sub(r"(CACHE/environments/\w+)-[0-9a-f]{12}\b", r"\1-PYTHON", text)  # one for each Python
    text = re.sub(r"(?<=-)\d{14}(-[0-9a-f]{4})?\b", "MOMENT", text)  # names of jobs on SageMaker
    text = re.sub(r'("?workshop_utils"?[-= ]+v?)\d+\.\d+\.\d+', r"\1VERSION", text)
    ports: dict[str, str] = {}

    def port(found: re.Match[str]) -> str:
        return found[1] + ports.setdefault(found[2], f"PORT{len(ports)}")

    # Ports that were free just now: of an address of this machine, of a variable that is called so, of torchrun.
    return re.sub(r"((?:127\.0\.0\.1[: ]|localhost\}?:|_PORT=|c10d: ))([1-9]\d{3,4})\b", port, text)
