"""uv takes packages from where pip is configured to take them, and PyTorch without CUDA where no GPU is."""

import os
import sys
from pathlib import Path

import pytest

from workshop_utils.setup import packages

PYTHON = Path(sys.executable)
CONFIGURED = """\
:env:.find-links='/own/wheels /more/wheels'
:env:.disable-pip-version-check='1'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/wheels'
global.cert='/etc/certificates.pem'
install.index-url='https://mirror.example/simple'
global.index-url='https://other.example/simple'
"""


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch):
    """What this machine tells pip and uv is of no account."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)


def test_what_pip_was_told_reaches_uv_with_pips_own_precedence_and_what_uv_was_told_itself_stays():
    assert packages.uv_settings(CONFIGURED, {}) == {
        "UV_FIND_LINKS": "/own/wheels,/more/wheels",  # a variable beats a file
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",  # [install] beats [global]
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "SSL_CERT_FILE": "/etc/certificates.pem",
    }
    own = {"UV_FIND_LINKS": "mine", "UV_DEFAULT_INDEX": "mine", "UV_INDEX_STRATEGY": "mine"}
    assert not packages.uv_settings(CONFIGURED, own).keys() & own.keys()


# PyTorch


def program(file, script):
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return file


@pytest.mark.processes
@pytest.mark.parametrize(
    ("chosen", "has_gpu", "uv", "arguments", "report"),
    [
        ("", False, "exit 0", ["--torch-backend=cpu"], "no NVIDIA GPU: PyTorch comes in its CPU build."),
        ("", False, "echo 'no route to host' >&2; exit 2", [], "cannot be reached (no route to host)"),
        ("", True, "exit 2", [], "Found an NVIDIA GPU: PyTorch comes with CUDA"),
        ("cpu", True, "exit 2", [], ""),
    ],
)
def test_pytorch_comes_in_its_cpu_build_where_no_gpu_is_and_its_index_can_be_reached(
    chosen, has_gpu, uv, arguments, report, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(packages.platform, "system", lambda: "Linux")
    monkeypatch.setattr(packages, "nvidia_gpus", lambda: int(has_gpu))
    monkeypatch.setenv("UV_TORCH_BACKEND", chosen)
    python = program(tmp_path / "python", f'test "$2" != uv || {{ {uv}; }}')  # as in `python -m uv`
    assert packages.pytorch_arguments(python) == arguments
    assert report in capsys.readouterr().err
    monkeypatch.setattr(packages.platform, "system", lambda: "Darwin")  # for which there is one build
    assert packages.pytorch_arguments(python) == []
    assert capsys.readouterr().err == ""
