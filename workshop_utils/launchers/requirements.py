"""The packages that a job's folder asks for in its requirements.txt, compared with those that are installed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from workshop_utils.jobs import JobError

# Prints name and version of every package.
LIST = "from importlib import metadata\nfor one in metadata.distributions(): print(one.metadata['Name'], one.version)"


def require(file: Path, python: str = sys.executable) -> None:
    """Raise JobError, with the command that installs them, if `python` lacks packages that `file` asks for.

    Options such as `--index-url` say where packages are, not which, and are passed over.
    """
    installed = None if python == sys.executable else _packages_of(python)
    lacking = [text for text in _lines(file) if not _is_met(text, installed)]
    if lacking:
        # PyTorch's packages for this machine's GPU, or for CPUs; which those are on Slurm's nodes is not known.
        where, backend = ("this environment", "--torch-backend=auto ") if installed is None else (python, "")
        install = f"uv pip install {backend}--python {shlex.quote(python)} -r {shlex.quote(str(file))}"
        raise JobError(
            f"{file.name} asks for {', '.join(lacking)}, which {where} lacks: `{install}` installs it, "
            "and requirements: false in job.yaml (--no-requirements) launches without"
        )


def _lines(file: Path) -> Iterator[str]:
    """What the lines of `file`, and of the files that it names, ask for."""
    for line in re.sub(r"\\\n", " ", file.read_text(encoding="utf-8", errors="replace")).splitlines():
        text = re.split(r"(?:^|\s)#|\s--hash", line)[0].strip()
        if other := re.match(r"(?:-r|--requirement)[ =]*(\S+)", text):
            yield from _lines(file.parent / other[1]) if (file.parent / other[1]).is_file() else [text]
        elif text and not text.startswith("-"):
            yield text


def _packages_of(python: str) -> dict[str, str]:
    """The versions of the packages of another interpreter, by name; none if it does not run here."""
    try:
        listed = subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return {}
    return {canonicalize_name(name): version for name, version in map(str.split, listed.splitlines())}


def _is_met(text: str, installed: Mapping[str, str] | None) -> bool:
    if "://" in text and "@" not in text.partition("://")[0]:  # an address: a package of that name will do
        name = re.search(r"#egg=([\w.-]+)|/([\w.-]+?)(?:\.git)?(?:@[^/]*)?/?$", text)
        text = (name[1] or name[2]) if name else text
    try:
        wanted = Requirement(text)
    except InvalidRequirement:
        return False
    if wanted.marker is not None and not wanted.marker.evaluate():
        return True
    try:
        package = canonicalize_name(wanted.name)
        version = metadata.version(package) if installed is None else installed[package]
    except (KeyError, metadata.PackageNotFoundError):
        return False
    return wanted.specifier.contains(version, prereleases=True)
