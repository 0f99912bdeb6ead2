"""Environments are made for real, from a wheel that is written here, so that no test needs a network."""

from __future__ import annotations

import os
import re
import threading
import zipfile
from pathlib import Path

import pytest

from workshop_utils import environments
from workshop_utils.environments import REQUIREMENTS, Environment, EnvironmentFailed

PROGRAM = """
import os, sys, time

def main():
    print("greetings", *sys.argv[1:], sys.stdin.read())
    if "fail" in sys.argv:
        sys.exit("it was asked to fail")
    if "linger" in sys.argv:
        time.sleep(60)
    print(os.environ.get("PYTHONPATH", "no path"), os.environ.get("ADDED", "nothing added"))
"""


def write_wheel(folder: Path) -> Path:
    """A wheel of one module and one program, `greet`."""
    file = folder / "greetings-1.0-py3-none-any.whl"
    info = "greetings-1.0.dist-info"
    members = {
        "greetings.py": PROGRAM,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: greetings\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": "[console_scripts]\ngreet = greetings:main\n",
    }
    members[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*members, f"{info}/RECORD"])
    with zipfile.ZipFile(file, "w") as wheel:
        for name, text in members.items():
            wheel.writestr(name, text)
    return file


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def requirements(tmp_path: Path) -> Path:
    file = tmp_path / "greetings.txt"
    file.write_text(f"--no-index\ngreetings @ {write_wheel(tmp_path).as_uri()}\n")
    return file


@pytest.fixture
def environment(requirements: Path) -> Environment:
    return Environment("greetings", "Greetings", requirements=requirements)


def test_it_is_made_on_demand_and_only_once(
    environment: Environment, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somebody/elses")
    assert not environment.is_built
    said = environment.run("greet", "world", text="and all", variables={"ADDED": "more"})
    assert said == "greetings world and all\nno path more\n"
    captured = capfd.readouterr()
    assert captured.out == ""  # a command that renders YAML stays YAML
    assert "Greetings: installing its packages in an environment of their own, once" in captured.err
    assert environment.is_built
    assert environment.run("greet").startswith("greetings")
    assert capfd.readouterr().err == ""


def test_it_has_its_own_packages_alone(environment: Environment) -> None:
    with pytest.raises(EnvironmentFailed, match="No module named 'pydantic'"):
        environment.run("python", "-c", "import greetings, pydantic")


def test_other_requirements_give_another_environment(environment: Environment, requirements: Path) -> None:
    before = environment.folder
    requirements.write_text(requirements.read_text() + "# a later choice\n")
    assert environment.folder != before


def test_without_its_packages_the_message_names_the_requirements_and_nothing_is_left(
    environment: Environment, requirements: Path
) -> None:
    good = requirements.read_text()
    requirements.write_text("--no-index\nno-such-thing==1.0\n")
    with pytest.raises(
        EnvironmentFailed, match=r"Greetings could not be made from .*greetings\.txt"
    ) as failed:
        environment.build()
    assert "no-such-thing" in str(failed.value)
    assert "is there a network" in str(failed.value)
    assert not environment.folder.exists()
    requirements.write_text(good)
    assert environment.run("greet").startswith("greetings")


def test_an_interrupted_one_is_not_taken_for_whole(
    environment: Environment, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(environments.packages, "install", interrupted)
        with pytest.raises(KeyboardInterrupt):
            environment.build()
    assert not environment.folder.exists()
    # As a killed process leaves it, which cannot tidy up.
    (environment.folder / "bin").mkdir(parents=True)
    (environment.folder / "bin" / "python").symlink_to("/bin/true")
    (environment.folder / "half").touch()
    assert not environment.is_built
    assert environment.run("greet").startswith("greetings")
    assert not (environment.folder / "half").exists()


def test_one_whose_python_has_gone_is_made_anew(environment: Environment) -> None:
    environment.build()
    (environment.folder / "bin" / "python").unlink()
    assert not environment.is_built
    assert environment.run("greet").startswith("greetings")


def test_two_that_come_at_once_make_it_once(
    environment: Environment, capfd: pytest.CaptureFixture[str]
) -> None:
    threads = [threading.Thread(target=environment.build) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert environment.is_built
    assert capfd.readouterr().err.count("in an environment of their own, once") == 1


def test_a_command_that_fails_lingers_or_is_not_there_is_named(environment: Environment) -> None:
    with pytest.raises(EnvironmentFailed, match=r"greet fail ended with code 1:\n  it was asked to fail"):
        environment.run("greet", "fail")
    with pytest.raises(EnvironmentFailed, match=r"greet did not end within 0\.5 s"):
        environment.run("greet", "linger", timeout_seconds=0.5)
    with pytest.raises(EnvironmentFailed, match="Greetings has no program 'gret'"):
        environment.run("gret")


def test_its_own_programs_come_before_the_workshops(environment: Environment) -> None:
    folders = environment.variables()["PATH"].split(os.pathsep)
    assert folders[0] == str(environment.folder / "bin")
    assert (Path(folders[1]) / "torchrun").exists()


def test_a_cache_that_cannot_be_written_is_named(
    environment: Environment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "file"))
    with pytest.raises(EnvironmentFailed, match="name another cache folder in WORKSHOP_CACHE"):
        environment.build()


def test_one_without_requirements_is_refused() -> None:
    with pytest.raises(EnvironmentFailed, match=r"there is no file .*nowhere\.txt"):
        Environment("nowhere", "Nowhere").build()


@pytest.mark.parametrize("file", sorted(REQUIREMENTS.glob("*.in")), ids=lambda file: file.stem)
def test_every_version_is_fixed_and_nothing_that_was_asked_for_is_missing(file: Path) -> None:
    lines = [line.split("#")[0].strip() for line in file.with_suffix(".txt").read_text().splitlines()]
    fixed = {re.split(r"[=<>!~ ;\[]", line)[0].lower() for line in lines if line}
    assert all(re.fullmatch(r"[\w.-]+(\[[\w,-]+\])?==\S+( ; .+)?", line) for line in lines if line)
    wanted = [line.split("#")[0].strip() for line in file.read_text().splitlines()]
    assert {re.split(r"[=<>!~ ;\[]", line)[0].lower() for line in wanted if line} <= fixed


def test_there_is_a_requirements_file_to_look_at() -> None:
    assert environments.REQUIREMENTS.is_dir()
    assert (REQUIREMENTS / "torchx.in").is_file()
