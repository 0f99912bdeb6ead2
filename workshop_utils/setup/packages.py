"""Calls uv, which creates environments and installs packages, with the package sources that pip is configured to use.

uv is several times as fast as pip, but does not read pip's configuration: the indexes, the folder of wheels and the
certificates in it. `uv_settings` passes them on. uv reads the usual variables, such as HTTPS_PROXY, by itself.

Standard library only, since set-up runs it before anything else is installed.
"""

from __future__ import annotations

import ast
import contextlib
import os
import platform
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from workshop_utils.setup.logged_command import LAST_LINES, UNTIL_PIPE_CLOSES, SetupError, announce
from workshop_utils.setup.machine import nvidia_gpus

UV = "uv>=0.9.8,<1"
MARKER = ".workshop"  # in an environment that the set-up has made: what of it is complete
REQUIREMENTS = Path(__file__).with_name("requirements")
OVERRIDES = ("--overrides", str(REQUIREMENTS / "overrides.txt"))
INDEX_TIMEOUT_SECONDS = "5"
DOWNLOAD_FAILED = (
    r"dns error|error sending request|name resolution|NewConnectionError|network timeout|connection closed|"
    "response body|TimeoutError"
)
GRACE_SECONDS = 15.0  # between SIGTERM and SIGKILL; TorchX gives its own processes ten

# pip's options, uv's variables of the same meaning, and what separates several values.
# Sources: pip's "Configuration" and "pip install", uv's "Environment variables", in their documentation.
PIP_OPTIONS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "cert": ("SSL_CERT_FILE", " "),
}


def uv_settings(pip_configuration: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make uv use pip's package sources.

    Args:
        pip_configuration: the output of `pip config list`, lines such as `global.find-links='/wheels'`.
        environment: this process's variables; uv's own among them are left as they are.
    """
    # pip takes the best version of all its indexes; by default uv takes the first index that has the package.
    settings = {"UV_INDEX_STRATEGY": "unsafe-best-match"}
    # pip's own order of precedence: files, the section [install], variables.
    for section in ("global.", "install.", ":env:."):
        for line in pip_configuration.splitlines():
            key, _, value = line.partition("=")
            option = key.removeprefix(section)
            if key != option and option in PIP_OPTIONS:
                variable, separator = PIP_OPTIONS[option]
                settings[variable] = separator.join(str(ast.literal_eval(value)).split())
    return {name: value for name, value in settings.items() if name not in environment}


def pinned(version: tuple[int, ...] = sys.version_info[:2]) -> list[str]:
    """uv's arguments that select the versions that were tested with this version of Python."""
    versions = str(REQUIREMENTS / f"python{version[0]}.{version[1]}.txt")
    return ["--constraints", versions, "torch==2.13.0", *OVERRIDES]


def run_uv(
    python: Path, *arguments: str, quiet: bool = False, log: TextIO | None = None, **variables: str
) -> None:
    """Run the uv of the environment that `python` belongs to; install it there first if it is missing.

    Args:
        python: a Python; if it has pip, or there is one on the PATH, pip's configuration counts.
        arguments: uv's.
        quiet: keep uv's reports for the error message instead of showing them.
        log: a file for uv's reports.
        variables: further environment variables for uv.

    Raises:
        SetupError: if uv fails, for example because a package cannot be downloaded.
    """
    try:
        run_command([str(python), "-c", "import uv"])
    except SetupError:
        run_command(
            [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--retries=1", UV]
        )
    environment = {**os.environ, **uv_settings(_pip_configuration(python), os.environ), **variables}
    run_command([str(python), "-m", "uv", *arguments], environment, quiet=quiet, log=log)


def _pip_configuration(python: Path) -> str:
    for pip in ([str(python), "-m", "pip"], ["pip"]):  # uv's environments have none
        with contextlib.suppress(SetupError, FileNotFoundError):
            return run_command([*pip, "config", "list"])
    return ""


def run_command(
    command: list[str],
    environment: Mapping[str, str] | None = None,
    *,
    quiet: bool = True,
    log: TextIO | None = None,
    folder: Path | None = None,
    timeout_seconds: float | None = None,
) -> str:
    """Run a command, in `folder` if given, and return its standard output.

    Its standard error goes to `log`, or is kept for the message of an error if `quiet`, or is shown. If this call is
    interrupted, or the time is over, the command gets SIGTERM, and time to end what it has started. If this process is
    killed, the command is, too.

    Raises:
        SetupError: if it fails or takes longer; the message has the end of its standard error, unless that was shown.
    """
    name = " ".join([Path(command[0]).name, *command[1:4]])
    alive, held = os.pipe()
    with os.fdopen(held, "wb"), subprocess.Popen(
        [*UNTIL_PIPE_CLOSES, *command], env=environment, stdin=alive, stdout=subprocess.PIPE, cwd=folder, text=True,
        stderr=log or (subprocess.PIPE if quiet else None), errors="replace", start_new_session=True,
    ) as process:  # fmt: skip
        os.close(alive)
        try:
            output, errors = process.communicate(timeout=timeout_seconds)
        except BaseException as error:
            # It leads a group of its own, in which all stay that it has started.
            with contextlib.suppress(ProcessLookupError):  # it may have ended meanwhile
                os.killpg(process.pid, signal.SIGTERM)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.communicate(timeout=GRACE_SECONDS)
                os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                raise SetupError(f"{name} did not end within {timeout_seconds:g} s") from None
            raise
    if process.returncode != 0:
        reason = (errors or (Path(log.name).read_text(errors="replace") if log else output)).strip()
        if not reason:
            raise SetupError(
                f"{name} failed; its reason is above. Mend that and run it again: it goes on from here"
            )
        advice = _advice(reason)
        tail = "\n    ".join(reason.splitlines()[-3 if advice else -LAST_LINES :])
        raise SetupError(f"{name} failed with exit code {process.returncode}{advice}:\n    {tail}")
    return output


def _advice(reason: str) -> str:
    """What to do about a failed download, or a full disk."""
    if re.search(r"No space left", reason):
        return (
            ", since a disk is full. Make room, or move UV_CACHE_DIR, and run it again; it goes on from here"
        )
    if re.search(DOWNLOAD_FAILED, reason):
        return ". Is there a network? When there is, run it again; it goes on from here"
    return ""


def pytorch_arguments(python: Path) -> list[str]:
    """uv's arguments that select PyTorch's CPU build for `python` on a machine without an NVIDIA GPU.

    On Linux the default package index has PyTorch for CUDA, several GB; PyTorch's own index has the CPU build. If uv
    cannot reach that, PyTorch comes from the same source as the other packages. uv's own variable UV_TORCH_BACKEND
    overrides all of this.
    """
    if platform.system() != "Linux" or os.environ.get("UV_TORCH_BACKEND"):
        return []
    if nvidia_gpus():
        announce("Found an NVIDIA GPU: PyTorch comes with CUDA, several GB; UV_TORCH_BACKEND=cpu avoids it.")
        return []
    backend = ["--torch-backend=cpu"]
    trial = ["pip", "install", "--dry-run", "--reinstall", "--no-deps", "--python", str(python), *backend]
    try:  # only uv knows whether its proxy and certificates work
        run_uv(
            python, *trial, "torch", quiet=True, UV_HTTP_TIMEOUT=INDEX_TIMEOUT_SECONDS, UV_HTTP_RETRIES="0"
        )
    except SetupError as error:
        reason = str(error).splitlines()[-1].strip()
        announce(
            f"Found no NVIDIA GPU, but PyTorch's CPU index cannot be reached ({reason}): PyTorch comes from the same "
            "source as the other packages, perhaps with CUDA, several GB."
        )
        return []
    announce("Found no NVIDIA GPU: PyTorch comes in its CPU build.")
    return backend
