"""The check-up: what is missing is named, with what to do."""

import platform
import re
import sys

import pytest

from workshop_utils.setup import doctor


def findings():
    return {finding.subject: finding for finding in doctor.examine()}


@pytest.mark.processes
def test_this_environment_has_what_the_lessons_need():
    results = findings()
    assert {"PyTorch", "TensorFlow", "Horovod", "MPI", "build tools", "slow networks"} <= set(results)
    assert [finding for finding in results.values() if finding.state == "missing"] == []
    assert not re.search(r"/home|/root|/usr|\.venv", "\n".join(map(str, results.values())))  # nobody's paths


def test_what_is_missing_comes_with_what_to_do_and_is_counted(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(doctor.network, "availability", lambda: "none")
    results = findings()
    slow = results["slow networks"]
    assert (slow.state, "--network" in slow.text) == ("limited", True)  # what it lacks has its price
    doctor.show(results.values())
    printed = capsys.readouterr().out
    assert "✗ build tools     no g++, no make, no patch\n" in printed
    assert re.search("→ .*apt-get install g\\+\\+ make patch\n", printed)
    assert "\n1 to mend before all lessons can run here." in printed


@pytest.mark.parametrize(
    ("system", "release", "says", "compiler"),
    [
        ("Darwin", "24.6.0", "Darwin arm64: not tried", "xcode-select --install"),
        ("Linux", "6.6.87.2-microsoft-standard-WSL2", "Linux arm64 in WSL2: not tried", "install g++ make patch"),
    ],
)  # fmt: skip
def test_a_system_that_was_not_tried_is_told_so_and_has_its_own_remedies(
    system, release, says, compiler, monkeypatch, tmp_path
):
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(platform, "release", lambda: release)
    monkeypatch.setattr(sys, "platform", system.lower())
    monkeypatch.setattr(doctor.network, "availability", lambda: "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    results = findings()
    assert (results["system"].state, results["system"].text.startswith(says)) == ("limited", True)
    assert results["build tools"].remedy.endswith(compiler)
    assert ("iproute2" in results["slow networks"].remedy) == (system == "Linux")
