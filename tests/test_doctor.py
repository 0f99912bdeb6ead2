"""The check-up: what is missing is named, with what to do."""

import re
import shutil
import subprocess
import sys
from dataclasses import replace

import pytest

from workshop_utils import doctor


@pytest.fixture
def findings():
    return {finding.subject: finding for finding in doctor.examine()}


def test_this_environment_has_what_the_lessons_need(findings):
    assert {"PyTorch", "TensorFlow", "Horovod", "MPI", "build tools", "slow networks"} <= set(findings)
    assert [finding for finding in findings.values() if finding.state == "missing"] == []


def test_nothing_tells_of_a_path_or_a_user(findings):
    text = "\n".join(map(str, findings.values()))
    assert not re.search(r"/home|/root|/usr|\.venv", text)


def test_what_is_missing_comes_with_what_to_do(monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    finding = doctor._build_tools()
    assert finding.state == "missing"
    assert "a C++ compiler" in finding.text
    assert "g++" in finding.remedy


def test_an_old_python_is_named(monkeypatch):
    monkeypatch.setattr(doctor.sys, "version_info", (3, 9, 1))
    monkeypatch.setattr(doctor.platform, "python_version", lambda: "3.9.1")
    finding = doctor._python()
    assert finding.state == "missing"
    assert "3.9.1" in finding.text


def test_a_machine_without_namespaces_is_told_what_that_costs(monkeypatch):
    monkeypatch.setattr(doctor.network, "availability", lambda: "none")
    finding = doctor._network()
    assert finding.state == "limited"
    assert "--network" in finding.text


def test_a_horovod_that_was_built_for_another_torch_is_to_be_built_anew(monkeypatch):
    recipe = doctor.horovod_build.this_recipe(None)
    monkeypatch.setattr(
        doctor.horovod_build, "installed_recipe", lambda: replace(recipe, torch="torch-1.0.0")
    )
    finding = doctor._horovod()
    assert finding.state == "missing"
    assert "torch-1.0.0" in finding.text
    assert "tensorflow" not in finding.text
    assert finding.remedy == "workshop install-horovod"


def test_a_horovod_without_mpi_is_said_to_have_gloo_alone(monkeypatch):
    recipe = doctor.horovod_build.this_recipe(None)
    monkeypatch.setattr(doctor.horovod_build, "installed_recipe", lambda: recipe)
    assert doctor._horovod().text.endswith("with Gloo")


def test_a_system_that_cannot_watch_over_the_owner_of_a_run_is_said_to_be_limited(monkeypatch):
    monkeypatch.delattr(doctor.os, "pidfd_open", raising=False)
    finding = doctor._clean_up()
    assert finding.state == "limited"
    assert "run.stop()" in finding.remedy


def test_no_check_imports_a_framework():
    code = (
        "import sys; from workshop_utils import doctor; doctor.examine();"
        "print({'torch', 'tensorflow', 'horovod', 'pandas'} & set(sys.modules))"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert answer.stdout.strip() == "set()"


def test_the_whole_is_summed_up_in_a_sentence(capsys):
    doctor.show([doctor.Finding("x", "missing", "not there", "get it")])
    printed = capsys.readouterr().out
    assert "✗ x" in printed
    assert "→ get it" in printed
    assert "1 to mend" in printed
