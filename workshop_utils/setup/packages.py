"""Calls uv, which makes environments and installs packages, so that it takes them from where pip is configured to.

uv is several times as fast as pip, but does not read pip's configuration. A mirror, a folder of wheels, a proxy or a
certificate that somebody gave to pip would be overlooked, so `uv_settings` passes them on.

Standard library only, since the set-up runs it before anything else is installed.
"""

from __future__ import annotations

import ast
import math
import os
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path

from workshop_utils.setup.logged_command import LAST_LINES, SetupError, say

UV = "uv>=0.9,<1"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_SECONDS = "5"

# pip's option, and the variables that say the same to uv.
# Sources: pip's "Configuration" and "pip install", uv's "Environment variables", in their documentation.
PIP_OPTIONS = {
    "index-url": ("UV_DEFAULT_INDEX",),
    "extra-index-url": ("UV_INDEX",),
    "find-links": ("UV_FIND_LINKS",),
    "constraint": ("UV_CONSTRAINT",),
    "no-index": ("UV_NO_INDEX",),
    "trusted-host": ("UV_INSECURE_HOST",),
    "proxy": ("HTTPS_PROXY", "HTTP_PROXY"),
    "cert": ("SSL_CERT_FILE",),
    "client-cert": ("SSL_CLIENT_CERT",),
    "timeout": ("UV_HTTP_TIMEOUT",),
    "default-timeout": ("UV_HTTP_TIMEOUT",),
}
OLDER_NAMES = {"UV_DEFAULT_INDEX": "UV_INDEX_URL", "UV_INDEX": "UV_EXTRA_INDEX_URL"}


def uv_settings(pip_configuration: str, environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that make uv take packages from where pip takes them.

    Args:
        pip_configuration: what `pip config list` prints, lines such as `global.find-links='/wheels'`.
        environment: this process's variables; those that uv reads already stay as they are.
    """
    settings: dict[str, str] = {}
    # pip's own order of precedence: files, the section [install], variables.
    for section in ("global.", "install.", ":env:."):
        for line in pip_configuration.splitlines():
            key, _, value = line.partition("=")
            variables = PIP_OPTIONS.get(key[len(section) :], ()) if key.startswith(section) else ()
            for variable in variables:
                if not {variable, OLDER_NAMES.get(variable, variable)} & environment.keys():
                    settings[variable] = _in_words_of_uv(variable, str(ast.literal_eval(value)))
    if "UV_INDEX" in settings and "UV_INDEX_STRATEGY" not in environment:
        # pip takes the best version that any of its indexes has; uv by default takes the first index's.
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return settings


def _in_words_of_uv(variable: str, value: str) -> str:
    if variable == "UV_HTTP_TIMEOUT":
        return str(math.ceil(float(value)))
    words = [os.path.expanduser(word) for word in value.split()]  # noqa: PTH111  not every word is a path
    return ("," if variable == "UV_FIND_LINKS" else " ").join(words)


def run_uv(pip: Path, *arguments: str, quiet: bool = False, **variables: str) -> None:
    """Run uv, which belongs to the environment of `pip`, and is installed there where it is missing.

    Args:
        pip: a Python that has pip, whose configuration counts.
        arguments: uv's.
        quiet: whether what uv prints is kept for the message; else its reports are seen.
        variables: more of them, for uv.

    Raises:
        SetupError: if uv fails, as where a package cannot be had; the message has the end of what it printed.
    """
    uv = pip.with_name("uv")  # not one on the PATH, which may be older than what is asked of it
    if not uv.exists():
        run([str(pip), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", UV])
    configuration = run([str(pip), "-m", "pip", "config", "list"])
    environment = {**os.environ, **uv_settings(configuration, os.environ), **variables}
    run([str(uv), *arguments], environment, quiet=quiet)


def run(command: list[str], environment: Mapping[str, str] | None = None, *, quiet: bool = True) -> str:
    """What a command prints on standard output; where it is not `quiet`, its reports go to standard error.

    Raises:
        SetupError: if it fails; where it is `quiet`, the message has the end of what it reported.
    """
    errors = subprocess.PIPE if quiet else None
    answer = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors, text=True
    )
    if answer.returncode != 0:
        tail = "\n    ".join((answer.stderr or "its reason is above").strip().splitlines()[-LAST_LINES:])
        raise SetupError(f"{' '.join(command)} failed:\n    {tail}")
    return answer.stdout


def pytorch_arguments(python: Path) -> list[str]:
    """The arguments with which uv installs PyTorch's CPU build, for `python`, where there is no NVIDIA GPU.

    On Linux the default package index has PyTorch built for CUDA, several GB; PyTorch's own index has the CPU build.
    Where uv cannot reach that, PyTorch comes from where the other packages do. The variable UV_TORCH_BACKEND, which is
    uv's own, decides otherwise.
    """
    if platform.system() != "Linux":
        return []
    if chosen := os.environ.get("UV_TORCH_BACKEND"):
        say(f"PyTorch comes in its build for {chosen}, as UV_TORCH_BACKEND says.")
        return []
    if has_nvidia_gpu():
        say(
            "Found an NVIDIA GPU: PyTorch comes with CUDA, several GB (UV_TORCH_BACKEND=cpu for the CPU build)."
        )
        return []
    backend = ["--torch-backend=cpu"]
    trial = ["pip", "install", "--dry-run", "--reinstall", "--no-deps", "--python", str(python), *backend]
    patience = {"UV_HTTP_TIMEOUT": INDEX_TIMEOUT_SECONDS, "UV_HTTP_RETRIES": "0"}
    try:  # the proxy and the certificates are uv's, so uv is asked
        run_uv(python, *trial, "torch", quiet=True, **patience)
    except SetupError as error:
        reason = str(error).splitlines()[-1].strip()
        say(
            f"Found no NVIDIA GPU, but PyTorch's CPU index cannot be reached ({reason}): PyTorch comes from where "
            "the other packages do, perhaps with CUDA, several GB."
        )
        return []
    say("Found no NVIDIA GPU: PyTorch comes in its CPU build.")
    return backend


def has_nvidia_gpu() -> bool:
    """Whether NVIDIA's driver runs on this machine, or under WSL2 on the Windows below it."""
    drivers = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")
    return any(Path(driver).exists() for driver in drivers)
