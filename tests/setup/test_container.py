"""The container: one Dockerfile for Docker, dev containers and Codespaces, as far as files show it."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from workshop_utils.setup import bootstrap

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".devcontainer"
STAGES = re.split(r"^FROM ", (FOLDER / "Dockerfile").read_text(), flags=re.MULTILINE)[1:]
FINAL = STAGES[-1]
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]["lab"]
DEV_CONTAINER = json.loads((FOLDER / "devcontainer.json").read_text())
HADOLINT = Path(sys.prefix) / "bin" / "hadolint"


@pytest.mark.processes
@pytest.mark.skipif(not HADOLINT.is_file(), reason="hadolint's wheel is for Linux")
def test_hadolint_finds_nothing_in_the_dockerfile():
    checked = subprocess.run([HADOLINT, FOLDER / "Dockerfile"], capture_output=True, text=True)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_compose_and_the_dev_container_build_the_same_image():
    built = COMPOSE["build"]
    assert (ROOT / built["context"] / built["dockerfile"]).samefile(FOLDER / "Dockerfile")
    built = DEV_CONTAINER["build"]
    assert (FOLDER / built["dockerfile"]).samefile(FOLDER / "Dockerfile")
    assert (FOLDER / built["context"]).samefile(ROOT)


def test_the_learner_is_not_root_and_cannot_become_root():
    user = re.findall(r"^USER (\d+)$", FINAL, flags=re.MULTILINE)[-1]
    assert int(user) > 0
    assert f"--uid {user} " in FINAL
    assert f" {DEV_CONTAINER['remoteUser']} " in FINAL
    assert COMPOSE["cap_drop"] == ["ALL"]
    assert COMPOSE["security_opt"] == ["no-new-privileges:true"]


def test_slow_links_get_the_same_capability_in_both():
    assert COMPOSE["cap_add"] == DEV_CONTAINER["capAdd"] == ["SYS_ADMIN"]


def test_jupyterlab_is_reached_from_this_machine_alone_and_asks_for_its_token():
    assert all(port.startswith("127.0.0.1:") for port in COMPOSE["ports"])
    assert "token" not in FINAL.split("CMD")[1]


def test_what_runs_has_no_compiler_and_what_compiles_has_what_horovod_needs():
    for tool in ("g++", "make", "python3-dev"):
        assert tool not in FINAL.split()
        assert tool in STAGES[1].split()


def test_the_image_has_all_that_the_wheel_is_built_from():
    ignored = (FOLDER / "Dockerfile.dockerignore").read_text().split("\n")
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    wheel = project["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert {*wheel["packages"], *wheel["force-include"], project["project"]["readme"]} <= sent
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", "".join(STAGES), flags=re.MULTILINE)
    for name in (*sent, *(name for line in copied for name in line.split())):
        assert (ROOT / name).exists(), name


def test_the_image_s_python_has_a_list_of_tested_versions():
    # Debian 12 has Python 3.11, Debian 13 has 3.13.
    for version in (11, 13):
        assert version in bootstrap.supported_python(ROOT)[1]
        assert (ROOT / f"workshop_utils/setup/requirements/python3.{version}.txt").is_file()


def test_the_dev_container_gets_what_workshop_doctor_asks_for():
    assert int(DEV_CONTAINER["hostRequirements"]["memory"].removesuffix("gb")) >= 6
