"""The packages that a job's folder asks for in its requirements.txt, compared with those that are installed."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from workshop_utils.jobs import JobError


def require(file: Path) -> None:
    """Raise JobError, with the command that installs them, if this environment lacks packages that `file` asks for.

    Options such as `--index-url` say where packages are, not which, and are passed over.
    """
    lacking = [text for text in _lines(file) if not _is_met(text)]
    if lacking:
        install = f"uv pip install --python {shlex.quote(sys.executable)} -r {shlex.quote(str(file))}"
        raise JobError(
            f"{file.name} asks for {', '.join(lacking)}, which this environment lacks: `{install}` installs it, "
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


def _is_met(text: str) -> bool:
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
        version = metadata.version(wanted.name)
    except metadata.PackageNotFoundError:
        return False
    return wanted.specifier.contains(version, prereleases=True)
