"""Installs Python packages with uv, from where pip is configured to take them.

uv is several times as fast as pip, but does not read pip's configuration. A mirror, a folder of wheels, a proxy or a
certificate that somebody gave to pip would be overlooked, so `uv_settings` passes them on.

Standard library only, since the set-up runs it before anything else is installed.
"""

from __future__ import annotations

import ast
import math
import os
import platform
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from workshop_utils.logged_command import CommandFailed, Report, run_logged, say

UV = "uv>=0.9,<1"
PYTORCH_CPU_INDEX = "https://download.pytorch.org/whl/cpu"
INDEX_TIMEOUT_SECONDS = "5"

# pip's option, the variables that say the same to uv, and what separates several values in them.
# Sources: pip's "Configuration" and "pip install", uv's "Environment variables", in their documentation.
PIP_OPTIONS = {
    "index-url": (("UV_DEFAULT_INDEX",), " "),
    "extra-index-url": (("UV_INDEX",), " "),
    "find-links": (("UV_FIND_LINKS",), ","),
    "constraint": (("UV_CONSTRAINT",), " "),
    "no-index": (("UV_NO_INDEX",), " "),
    "trusted-host": (("UV_INSECURE_HOST",), " "),
    "proxy": (("HTTPS_PROXY", "HTTP_PROXY"), " "),
    "cert": (("SSL_CERT_FILE",), " "),
    "client-cert": (("SSL_CLIENT_CERT",), " "),
    "timeout": (("UV_HTTP_TIMEOUT",), " "),
    "default-timeout": (("UV_HTTP_TIMEOUT",), " "),
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
    sections = ("global.", "install.", ":env:.")
    lines = [
        line for section in sections for line in pip_configuration.splitlines() if line.startswith(section)
    ]
    for line in lines:
        key, _, value = line.partition("=")
        variables, separator = PIP_OPTIONS.get(key.rpartition(".")[2], ((), ""))
        # As pip does: it splits at spaces, and knows ~.
        words = [os.path.expanduser(word) for word in str(ast.literal_eval(value)).split()]  # noqa: PTH111
        if "UV_HTTP_TIMEOUT" in variables:
            words = [str(math.ceil(float(word))) for word in words]
        for variable in variables:
            if variable not in environment and OLDER_NAMES.get(variable, variable) not in environment:
                settings[variable] = separator.join(words)
    if "UV_INDEX" in settings and "UV_INDEX_STRATEGY" not in environment:
        # pip takes the best version that any of its indexes has; uv by default takes the first index's.
        settings["UV_INDEX_STRATEGY"] = "unsafe-best-match"
    return settings


def environment_for_uv(pip: Path) -> dict[str, str]:
    """This process's variables, with those that pass on what `pip`, a Python that has pip, is configured to use.

    Raises:
        CommandFailed: if that configuration cannot be read; the message is pip's.
    """
    command = [str(pip), "-m", "pip", "config", "list"]
    answer = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if answer.returncode != 0:
        raise CommandFailed(f"{' '.join(command)} failed: {answer.stderr.strip()}")
    return {**os.environ, **uv_settings(answer.stdout, os.environ)}


def install(
    python: Path,
    arguments: Sequence[str],
    log: Path,
    *,
    pip: Path,
    label: str,
    without_cuda: bool = False,
    report: Report = say,
) -> None:
    """Run `uv pip install` with `arguments` for the environment of `python`; what uv prints goes to `log`.

    `pip` is a Python that has pip: its configuration counts, and where there is no uv, it installs one beside itself.
    With `without_cuda`, PyTorch comes in its CPU build where no NVIDIA GPU could use another.

    Raises:
        CommandFailed: if a package cannot be had or does not fit; the message has the end of the log.
    """
    environment = environment_for_uv(pip)
    uv = shutil.which(pip.with_name("uv"))  # not one on the PATH, which may be older than what is asked of it
    if uv is None:
        command = [str(pip), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", UV]
        run_logged(command, log, label=f"{label}: uv itself", report=report)
        uv = str(pip.with_name("uv"))
    backend = pytorch_arguments(uv, python, environment, report) if without_cuda else []
    # As pip does, and uv by default does not: else the first imports, perhaps in a measurement, would compile.
    command = [uv, "pip", "install", "--compile-bytecode", "--python", str(python), *backend, *arguments]
    run_logged(
        command, log, label=label, env=environment, describe=_progress, every_seconds=10, report=report
    )


def _progress(line: str) -> str | None:
    """`Resolved 297 packages in 2.1s` becomes `resolved 297 packages`; other lines say nothing."""
    words = line.split()
    if words[:1] and words[0] in ("Resolved", "Prepared", "Installed"):
        return " ".join(words[:3]).lower()
    return None


def pytorch_arguments(
    uv: str, python: Path, environment: Mapping[str, str], report: Report = say
) -> list[str]:
    """The arguments with which `uv` installs PyTorch's CPU build where there is no NVIDIA GPU.

    On Linux the default package index has PyTorch built for CUDA, several GB; PyTorch's own index has the CPU build.
    Where uv, with its `environment`, cannot reach that, PyTorch comes from where the other packages do. The variable
    UV_TORCH_BACKEND, which is uv's own, decides otherwise. `report` is told which it is.
    """
    if platform.system() != "Linux":
        return []
    if chosen := environment.get("UV_TORCH_BACKEND"):
        report(f"PyTorch comes in its build for {chosen}, as UV_TORCH_BACKEND says.")
        return []
    if has_nvidia_gpu():
        report(
            "Found an NVIDIA GPU: PyTorch comes with CUDA, several GB (UV_TORCH_BACKEND=cpu for the CPU build)."
        )
        return []
    backend = ["--torch-backend=cpu"]
    # The proxy and the certificates are uv's, so uv is asked.
    trial = [uv, "pip", "install", "--dry-run", "--no-deps", "--python", str(python), *backend, "torch"]
    patience = {"UV_HTTP_TIMEOUT": INDEX_TIMEOUT_SECONDS, "UV_HTTP_RETRIES": "0"}
    answer = subprocess.run(
        trial, env={**environment, **patience}, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    if answer.returncode == 0:
        report("Found no NVIDIA GPU: PyTorch comes in its CPU build.")
        return backend
    reason = (answer.stderr.strip().splitlines() or ["no reason given"])[-1].strip()
    report(
        f"Found no NVIDIA GPU, but PyTorch's CPU index cannot be reached ({reason}): PyTorch comes from where "
        "the other packages do, perhaps with CUDA, several GB."
    )
    return []


def has_nvidia_gpu() -> bool:
    """Whether NVIDIA's driver runs on this machine, or under WSL2 on the Windows below it."""
    drivers = ("/proc/driver/nvidia/version", "/usr/lib/wsl/lib/libcuda.so.1")
    return any(Path(driver).exists() for driver in drivers)
