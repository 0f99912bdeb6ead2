"""Packages come by uv, from where pip is configured to take them, and PyTorch without CUDA where no GPU is."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from test_environments import write_wheel

from workshop_utils import packages
from workshop_utils.logged_command import CommandFailed

CONFIGURED = """\
:env:.find-links='/own/wheels ~/wheels'
:env:.disable-pip-version-check='1'
global.extra-index-url='https://one.example/simple https://two.example/simple'
global.find-links='/wheels'
global.constraint='/etc/constraints.txt'
global.proxy='http://proxy.example:3128'
global.timeout='15.5'
install.index-url='https://mirror.example/simple'
global.index-url='https://other.example/simple'
"""


@pytest.fixture(autouse=True)
def unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this machine tells pip and uv is of no account."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)


def test_what_pip_was_told_reaches_uv_with_pips_own_precedence() -> None:
    assert packages.uv_settings(CONFIGURED, {}) == {
        "UV_FIND_LINKS": f"/own/wheels,{Path.home()}/wheels",  # a variable beats a file
        "UV_DEFAULT_INDEX": "https://mirror.example/simple",  # [install] beats [global]
        "UV_INDEX": "https://one.example/simple https://two.example/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_CONSTRAINT": "/etc/constraints.txt",
        "HTTPS_PROXY": "http://proxy.example:3128",
        "HTTP_PROXY": "http://proxy.example:3128",
        "UV_HTTP_TIMEOUT": "16",
    }


@pytest.mark.parametrize(
    ("variable", "kept"),
    [
        ("UV_FIND_LINKS", "UV_FIND_LINKS"),
        ("UV_INDEX_URL", "UV_DEFAULT_INDEX"),
        ("UV_INDEX_STRATEGY", "UV_INDEX_STRATEGY"),
    ],
)
def test_what_uv_was_told_itself_stays(variable: str, kept: str) -> None:
    assert kept not in packages.uv_settings(CONFIGURED, {variable: "mine"})


def test_without_a_configuration_uv_is_told_nothing() -> None:
    assert packages.uv_settings("", {}) == {}


def test_a_wheel_is_installed_from_a_folder_that_only_pip_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_wheel(tmp_path)
    (tmp_path / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {tmp_path}\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    python = Path(sys.executable)
    target = ["--target", str(tmp_path / "installed"), "greetings==1.0"]
    packages.install(python, target, tmp_path / "log", pip=python, label="Greetings")
    assert (tmp_path / "installed" / "greetings.py").is_file()


def test_a_package_that_cannot_be_had_is_named_with_the_log(tmp_path: Path) -> None:
    python = Path(sys.executable)
    wanted = ["--no-index", "--target", str(tmp_path / "installed"), "no-such-thing==1.0"]
    with pytest.raises(CommandFailed, match=r"(?s)Greetings failed.*/log.*no-such-thing"):
        packages.install(python, wanted, tmp_path / "log", pip=python, label="Greetings")


def test_a_configuration_that_pip_cannot_read_is_quoted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip.conf").write_text("no section\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    with pytest.raises(CommandFailed, match=r"(?s)pip config list failed: .*pip\.conf"):
        packages.environment_for_uv(Path(sys.executable))


def test_an_older_uv_on_the_path_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(tmp_path)
    (tmp_path / "uv").write_text("#!/bin/sh\nexit 2\n")
    (tmp_path / "uv").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    python = Path(sys.executable)
    wanted = [
        "--no-index",
        "--find-links",
        str(tmp_path),
        "--target",
        str(tmp_path / "installed"),
        "greetings",
    ]
    packages.install(python, wanted, tmp_path / "log", pip=python, label="Greetings")


# PyTorch


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is reported on a Linux without a GPU."""
    monkeypatch.setattr(packages.platform, "system", lambda: "Linux")
    monkeypatch.setattr(packages, "has_nvidia_gpu", lambda: False)
    return []


def uv_that(folder: Path, does: str) -> str:
    """A program in uv's place: it notes its arguments and the proxy, and then `does` something."""
    file = folder / "uv"
    file.write_text(f'#!/bin/sh\necho "$* $HTTPS_PROXY" > {folder}/asked\n{does}\n')
    file.chmod(0o755)
    return str(file)


def test_without_a_gpu_pytorch_comes_in_its_cpu_build(said: list[str], tmp_path: Path) -> None:
    environment = {"PATH": os.environ["PATH"], "HTTPS_PROXY": "http://proxy.example"}
    arguments = packages.pytorch_arguments(
        uv_that(tmp_path, "exit 0"), Path("python"), environment, said.append
    )
    assert arguments == ["--torch-backend=cpu"]
    assert said == ["Found no NVIDIA GPU: PyTorch comes in its CPU build."]
    asked = (tmp_path / "asked").read_text()
    assert asked == (
        "pip install --dry-run --no-deps --python python --torch-backend=cpu torch http://proxy.example\n"
    )


def test_with_a_gpu_it_comes_with_cuda_unless_the_user_says_otherwise(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "has_nvidia_gpu", lambda: True)
    assert packages.pytorch_arguments("uv", Path("python"), {}, said.append) == []
    assert "several GB (UV_TORCH_BACKEND=cpu for the CPU build)" in said[0]
    chosen = {"UV_TORCH_BACKEND": "cpu"}  # uv reads it by itself
    assert packages.pytorch_arguments("uv", Path("python"), chosen, said.append) == []
    assert said[1] == "PyTorch comes in its build for cpu, as UV_TORCH_BACKEND says."


def test_where_its_index_cannot_be_reached_it_comes_from_where_the_others_do_and_that_is_said(
    said: list[str], tmp_path: Path
) -> None:
    uv = uv_that(tmp_path, "echo 'error: a request failed' >&2; echo '  no route to host' >&2; exit 2")
    assert packages.pytorch_arguments(uv, Path("python"), dict(os.environ), said.append) == []
    assert "cannot be reached (no route to host)" in said[0]


def test_elsewhere_than_on_linux_every_build_is_one_without_cuda(
    said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages.platform, "system", lambda: "Darwin")
    assert packages.pytorch_arguments("uv", Path("python"), {}, said.append) == []
    assert said == []
