"""The versions that are tested, for each Python: they fit together, and name neither hosts nor this machine."""

import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from workshop_utils.setup import bootstrap
from workshop_utils.setup.packages import pinned

ROOT = Path(__file__).parents[2]
PYTHONS = [f"3.{minor}" for minor in bootstrap.supported_python(ROOT)[1]]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
NAME = re.compile(r"^[\w.-]+", re.MULTILINE)


def constraints(python):
    return Path(pinned(tuple(map(int, python.split("."))))[1])


@pytest.mark.parametrize("python", PYTHONS)
def test_every_version_is_fixed_by_hashes_but_pytorchs(python):
    text = constraints(python).read_text()
    lines = re.sub(r" \\\n +--hash=sha256:[0-9a-f]{64}", " HASH", text).splitlines()
    assert all(re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==[\w.]+( ; [^\\]+?)?( HASH)+", line) for line in lines)
    assert not re.search(r"://|/opt|/root|/home|find-links|nvidia|triton", text)
    asked_for = itertools.chain(PROJECT["dependencies"], *PROJECT["optional-dependencies"].values())
    names = {NAME.match(each)[0].lower() for each in asked_for} - {"torch", "workshop-utils"}
    assert names <= {*NAME.findall(text)}


@pytest.mark.processes
@pytest.mark.parametrize("links", ["with", "without"])
@pytest.mark.parametrize("python", PYTHONS)
def test_they_fit_together_with_and_without_a_folder_of_wheels(python, links, tmp_path):
    """uv resolves all extras within them; `--universal` stands for every system."""
    environment = {name: os.environ[name] for name in os.environ if not name.startswith("UV_")}
    if links == "with":
        environment["UV_FIND_LINKS"] = str(tmp_path)
    words = ["pip", "compile", "pyproject.toml", "--all-extras", "--universal", "--python-version", python]
    resolved = subprocess.run(
        [sys.executable, "-m", "uv", *words, "--constraints", constraints(python), "--no-header", "--no-annotate"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert resolved.returncode == 0, resolved.stderr
    assert "torch==2.13.0" in resolved.stdout
