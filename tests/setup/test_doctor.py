"""The check-up: what is missing is named, with what to do."""

import platform
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest

import workshop_utils
from workshop_utils import optional
from workshop_utils.setup import doctor, horovod_build

ROOT = Path(__file__).parents[2]


@pytest.fixture
def bare(monkeypatch, tmp_path):
    """A machine without programs, where a container lets nobody make a network namespace."""
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor.network, "availability", lambda: "none")
    monkeypatch.setattr(doctor.install, "is_own_environment", lambda: False)


def findings():
    return {finding.subject: finding for finding in doctor.examine()}


@pytest.mark.processes
def test_this_environment_has_what_the_lessons_need():
    results = findings()
    assert {*doctor.PURPOSES, "system", "slow networks"} <= set(results)
    assert [finding for finding in results.values() if finding.state == "missing"] == []
    assert not re.search(r"/home|/root|/usr|\.venv", "\n".join(map(str, results.values())))  # nobody's paths


def test_what_is_optional_is_a_limit_and_what_every_lesson_needs_is_to_mend(bare, monkeypatch, capsys):
    monkeypatch.setattr(optional, "find_spec", lambda _: None)
    results = findings()
    for name in doctor.PURPOSES:
        needed = name in ("torch", "lessons")
        assert (results[name].state, "lesson" in results[name].text) == (
            "missing" if needed else "limited",
            True,
        )
        assert results[name].remedy.endswith(f"`workshop install {name}`")
    doctor.show(results.values())
    printed = capsys.readouterr().out
    assert "✗ torch           not installed: PyTorch, for most lessons\n" in printed
    assert "– tensorflow      not installed: TensorFlow and JAX, for lessons 06" in printed
    assert "\n2 to mend before all lessons can run here." in printed
    doctor.show([finding for finding in results.values() if finding.state != "missing"])
    assert capsys.readouterr().out.endswith("\nAll lessons can run here, but for what is marked –.\n")


def test_a_horovod_for_other_frameworks_is_to_be_built_again_and_its_tools_come_first(bare, monkeypatch):
    monkeypatch.setattr(horovod_build, "has_horovod", lambda: False)
    monkeypatch.setattr(doctor.optional, "missing", lambda *_: [])
    horovod = findings()["horovod"]
    assert (horovod.state, "lesson 05" in horovod.text) == ("limited", True)
    assert re.search(r"apt-get install g\+\+ make patch, then `workshop install horovod`$", horovod.remedy)


def test_every_extra_of_a_lesson_stands_in_the_check_up():
    lessons = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "notebooks").glob("*.ipynb"))
    asked_for = re.findall(r"\bneed\(([^)]*)\)", lessons)
    assert {*re.findall(r"[a-z]+", " ".join(asked_for))} <= doctor.PURPOSES.keys() <= optional.MODULES.keys()


@pytest.mark.parametrize(
    ("system", "release", "says", "compiler"),
    [
        ("Darwin", "24.6.0", "Darwin arm64: not tried. Bytes of frameworks are not counted", "xcode-select --install"),
        ("Linux", "6.6.87.2-microsoft-standard-WSL2", "Linux arm64 in WSL2: not tried.", "install g++ make patch"),
    ],
)  # fmt: skip
def test_a_system_that_was_not_tried_is_told_so_and_has_its_own_remedies(
    system, release, says, compiler, bare, monkeypatch
):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(sys, "platform", system.lower())
    monkeypatch.setattr(optional, "find_spec", lambda _: None)
    results = findings()
    assert (results["system"].state, results["system"].text.startswith(says)) == ("limited", True)
    assert results["horovod"].remedy.endswith(f"{compiler}, then `workshop install horovod`")
    assert ("iproute2" in results["slow networks"].remedy) == (system == "Linux")  # macOS has no remedy


def test_a_container_without_rights_is_told_which_one_it_lacks(bare, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Linux")
    monkeypatch.setattr(shutil, "which", lambda name: None if "nvidia" in name else f"/bin/{name}")
    slow = findings()["slow networks"]
    assert (slow.state, "frameworks feel no `network=`" in slow.text) == (
        "limited",
        True,
    )  # what it lacks has its price
    assert slow.remedy.endswith("--cap-add=SYS_ADMIN")


def test_windows_itself_is_told_where_the_workshop_runs(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="does not run on Windows itself: use WSL2 or the container"):
        runpy.run_path(workshop_utils.__file__)
