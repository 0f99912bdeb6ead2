"""Environments are made for real, from a wheel that is written here, so that no test needs a network."""

import re
import zipfile

import pytest

from workshop_utils.setup.environments import Environment
from workshop_utils.setup.logged_command import SetupError
from workshop_utils.setup.packages import REQUIREMENTS

pytestmark = pytest.mark.processes

PROGRAM = """
import os, shutil, sys, time

def main():
    print("greetings", *sys.argv[1:])
    if "fail" in sys.argv:
        sys.exit("it was asked to fail")
    if "linger" in sys.argv:
        time.sleep(60)
    print(os.environ.get("PYTHONPATH", "no path"), os.environ.get("ADDED", "nothing added"))
    print(sys.prefix in shutil.which("python"), shutil.which("torchrun") is not None)
"""


def write_wheel(folder):
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


@pytest.fixture
def requirements(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))
    file = tmp_path / "greetings.txt"
    file.write_text(f"--no-index\ngreetings @ {write_wheel(tmp_path).as_uri()}\n")
    return file


@pytest.fixture
def environment(requirements):
    return Environment("greetings", "Greetings", requirements=requirements)


def test_it_is_made_on_demand_and_only_once(environment, capfd, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/somebody/elses")
    answer = environment.run("greet", "world", variables={"ADDED": "more"})
    assert answer == "greetings world\nno path more\nTrue True\n"
    captured = capfd.readouterr()
    assert captured.out == ""  # a command that renders YAML stays YAML
    assert "Greetings: installing its packages in an environment of their own, once" in captured.err
    assert environment.run("greet").startswith("greetings")
    assert capfd.readouterr().err == ""
    with pytest.raises(SetupError, match="No module named 'pydantic'"):
        environment.run("python", "-c", "import greetings, pydantic")
    with pytest.raises(SetupError, match=r"greet fail failed with exit code 1:\n    it was asked to fail"):
        environment.run("greet", "fail")
    with pytest.raises(SetupError, match=r"greet linger did not end within 0\.5 s"):
        environment.run("greet", "linger", timeout_seconds=0.5)


def test_other_requirements_give_another_environment_and_are_named_where_there_are_no_packages(
    environment, requirements
):
    before = environment.folder
    requirements.write_text("--no-index\nno-such-thing==1.0\n")
    assert environment.folder != before
    with pytest.raises(SetupError, match=r"Greetings could not be made from .*greetings\.txt") as failed:
        environment.build()
    assert "no-such-thing" in str(failed.value)
    assert "is there a network" in str(failed.value)


@pytest.mark.parametrize("wanted", list(REQUIREMENTS.glob("*.in")), ids=lambda path: path.stem)
def test_every_version_is_fixed_and_nothing_that_was_asked_for_is_missing(wanted):
    lines = re.findall(r"^[^\s#].*", wanted.with_suffix(".txt").read_text(), re.MULTILINE)
    fixed = [re.fullmatch(r"([\w.-]+)(\[[\w,-]+\])?==\S+( ; .+)?", line.split("  #")[0]) for line in lines]
    assert all(fixed)
    assert set(re.findall(r"^[\w.-]+", wanted.read_text(), re.MULTILINE)) <= {line[1] for line in fixed}
