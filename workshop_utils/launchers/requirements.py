"""The packages that a job's folder asks for in its requirements.txt, compared with those that are installed."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from workshop_utils.jobs import JobError
from workshop_utils.launchers.output import SECRET_VALUE

FEW = 5  # are named in a message
BUILDS = ("cpu", "gpu", "headless", "binary")  # of the same modules, such as tensorflow-cpu
# Prints name and version of every package, and what markers such as `python_version < '3.11'` ask for.
LIST = """
import platform
from importlib import metadata
for one in metadata.distributions():
    print(one.metadata["Name"], one.version)
print("python_version=" + ".".join(platform.python_version_tuple()[:2]))
print("python_full_version=" + platform.python_version())
print("platform_python_implementation=" + platform.python_implementation())
"""
ARCHIVE = r"[^\s;@]+\.(?:whl|zip|tar\.gz|tgz|tar\.bz2)(?:[\s;]|$)"
PATH = re.compile(rf"[./~\\]|file:|(?![\w+.-]+://)(?:[^\s;@]*[/\\]|{ARCHIVE})")


def require(file: Path, python: str = sys.executable) -> None:
    """Raise JobError, with the command that installs them, if `python` lacks packages that `file` asks for.

    Options such as `--index-url`, and paths, say where packages are, not which, and are passed over.
    """
    is_other = python != sys.executable
    installed, markers = _packages_of(python)
    lacking = {
        text: _version(text, installed) for text in _lines(file) if not _is_met(text, installed, markers)
    }
    if not lacking:
        return
    # PyTorch's packages for this machine's GPU, or for CPUs; which those are on Slurm's nodes is not known.
    where, backend = (python, "") if is_other else ("this environment", "--torch-backend=auto ")
    missing = [text for text, version in lacking.items() if version is None]
    pinned = [f"{_masked(text)}, but {version} is installed" for text, version in lacking.items() if version]
    reasons = []
    if missing:
        shown = [*map(_masked, missing)]
        by_file = len(missing) > FEW or shown != missing
        words = f"-r {shlex.quote(str(file))}" if by_file else shlex.join(missing)
        install = f"uv pip install {backend}--python {shlex.quote(python)} {words}"
        them = "it" if len(missing) == 1 else "them"
        reasons.append(f"{_few(shown)}, which {where} lacks: `{install}` installs {them}")
    reasons += [_few(pinned, "; and for ")] if pinned else []
    raise JobError(
        f"{file.name} asks for {'; and for '.join(reasons)}; with requirements: false in job.yaml (--no-requirements) "
        "the script gets what is there"
    )


def _few(texts: Sequence[str], comma: str = ", ") -> str:
    more = f" and {len(texts) - FEW} more" if len(texts) > FEW else ""
    return comma.join(texts[:FEW]) + more


def _masked(text: str) -> str:
    """`text` without the users of addresses, who may be keys, and without keys elsewhere."""
    text = re.sub(r"(?<!ssh)://[^/\s]+@", "://****@", text)
    return re.sub(rf"(?:{SECRET_VALUE.pattern})\S*", "****", text)


def _lines(file: Path, named_by: frozenset[Path] = frozenset()) -> Iterator[str]:
    """What the lines of `file`, and of the files that it names, ask for."""
    files = named_by | {file.resolve()}
    for line in re.sub(r"\\\n", " ", file.read_text(encoding="utf-8-sig", errors="replace")).splitlines():
        text = re.split(r"(?:^|\s)#|(?<=\S)\s+--?[A-Za-z]", line)[0].strip()
        if other := re.match(r"(?:-r|--requirement)[ =]*(\S+)", text):
            path = file.parent / other[1]
            if path.resolve() not in files:
                yield from _lines(path, files) if path.is_file() else [text]
        elif text and not text.startswith("-") and not PATH.match(text):
            yield text


def _packages_of(python: str) -> tuple[dict[str, str], dict[str, str]]:
    """The versions of an interpreter's packages by name, and its values of markers where it is not this one.

    Of two copies the first counts, as for an import. Raises JobError if the interpreter does not run here.
    """
    if python == sys.executable:
        packages, markers = [(one.metadata["Name"], one.version) for one in metadata.distributions()], {}
    else:
        listed = _listed_by(python)
        packages = re.findall(r"^([\w.-]+) (\d\S*)$", listed, re.MULTILINE)
        markers = dict(re.findall(r"^(p\w+)=(\S+)$", listed, re.MULTILINE))
    # A folder without metadata has no name.
    return {
        canonicalize_name(name): version for name, version in reversed(packages) if name and version
    }, markers


def _listed_by(python: str) -> str:
    try:
        return subprocess.run([python, "-c", LIST], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        raise JobError(f"{python} does not run here, to list its packages: use --no-requirements") from None


def _is_met(text: str, installed: Mapping[str, str], markers: Mapping[str, str]) -> bool:
    wanted = _requirement(text)
    if wanted is not None and wanted.marker is not None and not wanted.marker.evaluate({**markers}):
        return True
    version = _version(text, installed)
    return bool(wanted and version and wanted.specifier.contains(version, prereleases=True))


def _version(text: str, installed: Mapping[str, str]) -> str | None:
    """The version of what `text` asks for that is installed, in any of its builds; None if there is none."""
    wanted = _requirement(text)
    name = canonicalize_name(wanted.name) if wanted else ""
    plain = re.sub(rf"-({'|'.join(BUILDS)})$", "", name)
    names = (name, plain, *(f"{plain}-{build}" for build in BUILDS))
    return next((installed[each] for each in names if each in installed), None)


def _requirement(text: str) -> Requirement | None:
    """What a line asks for; None if that is not said in a package's name."""
    if "://" in text and "@" not in text.partition("://")[0]:  # an address: a package of that name will do
        path, _, fragment = text.partition("#")
        egg = re.search(r"egg=([\w.-]+)", fragment)
        name = egg or re.search(r"([\w.-]+?)(?:-\d[^/]*\.(?:whl|zip|tar\.gz)|\.git)?(?:@[^/]*)?/?$", path)
        text = name[1] if name else text
    try:
        return Requirement(text)
    except InvalidRequirement:
        return None
