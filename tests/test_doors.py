"""The doors into the workshop: each script is run, with programs that only record how they are called."""

from __future__ import annotations

import base64
import json
import os
import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator

ROOT = Path(__file__).parents[1]
SAGEMAKER = ROOT / "jobs" / "clusters" / "sagemaker"
README = (ROOT / "README.md").read_text()
STUDIO = SAGEMAKER / "lifecycle" / "studio.sh"
MOST_CHARACTERS = (
    16_384  # of a lifecycle configuration, in base64: CreateStudioLifecycleConfig, and notebooks' alike
)
SECONDS = 60.0

RECORD = 'echo "$(basename "$0") $*" >> "$CALLS"\n'


class Machine:
    """A folder that stands for a machine: programs that record their calls in `calls`, and go on when they may."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.programs = root / "bin"
        self.programs.mkdir()
        self.record = root / "calls"
        self.record.touch()
        self.may_go_on = root / "go-on"

    def program(self, name: str, then: str = "") -> None:
        file = self.programs / name
        file.write_text(f"#!/bin/bash\n{RECORD}{then}")
        file.chmod(0o755)

    def environment(self, **added: str) -> dict[str, str]:
        kept = {"PATH": f"{self.programs}:/usr/bin:/bin", "CALLS": str(self.record), "HOME": str(self.root)}
        return kept | {"TMPDIR": str(self.root)} | added

    def run(self, script: str, **added: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", script], env=self.environment(**added), cwd=self.root, capture_output=True, text=True,
            timeout=SECONDS, stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def calls(self) -> list[str]:
        return self.record.read_text().splitlines()

    def wait_for(self, beginning: str) -> None:
        """Until a call begins so."""
        end = time.monotonic() + SECONDS
        while not any(call.startswith(beginning) for call in self.calls()):
            assert time.monotonic() < end, f"{beginning} was not called within {SECONDS:g} s: {self.calls()}"
            time.sleep(0.02)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    for name in ("apt-get", "dnf"):
        made.program(name)
    # A clone has programs of its own once it is set up, which takes until the test says so.
    programs = 'for name in python workshop; do cp "$(dirname "$0")/apt-get" "$3/.venv/bin/$name"; done\n'
    made.program("git", f'mkdir -p "$3/.venv/bin"\n{programs}')
    made.program("make", wait_until(made.may_go_on))
    made.program(
        "sudo", 'while [ "$1" = -u ] || [ "$1" = ec2-user ] || [ "$1" = --login ]; do shift; done\n"$@"\n'
    )
    return made


def wait_until(file: Path) -> str:
    return f'for turn in $(seq 1200); do test -e "{file}" && exit 0; sleep 0.05; done; exit 1\n'


def notebook_instance(machine: Machine) -> str:
    """What a notebook instance runs at its start, as CloudFormation fills it in, with the machine's folders."""
    text = (SAGEMAKER / "templates" / "notebook.yaml").read_text()
    template = yaml.load(text, Loader=Lenient)
    script: str = template["Resources"]["SetUp"]["Properties"]["OnStart"][0]["Content"]["Fn::Base64"]
    filled = {
        "Repository": "https://example.org/w.git",
        "IdleMinutes": "60",
        "AWS::Region": "eu-west-1",
        "Name": "n",
    }
    for name, value in filled.items():
        script = script.replace(f"${{{name}}}", value)
    folders = {"/home/ec2-user/SageMaker": "", "/usr/local/bin": "/bin", "/etc/cron.d": ""}
    assert len(base64.b64encode(script.encode())) <= MOST_CHARACTERS
    for name, place in folders.items():
        script = script.replace(name, f"{machine.root}{place}")
    return script


class Lenient(yaml.SafeLoader):
    """Reads CloudFormation's `!Sub text` as the text."""


Lenient.add_multi_constructor("!", lambda loader, _, node: loader.construct_scalar(node))


# Binder


def test_binder_builds_horovod_without_keeping_a_second_copy_and_lays_out_the_lessons(
    machine: Machine,
) -> None:
    machine.program(
        "workshop",
        '[ "$1" != install-horovod ] || { test -d "$WORKSHOP_CACHE" && touch "$WORKSHOP_CACHE/x"; }\n',
    )
    answer = machine.run(str(ROOT / "postBuild"))
    assert answer.returncode == 0, answer.stderr
    assert machine.calls() == ["workshop install-horovod", "workshop copy-lessons my_lessons"]
    assert [path.name for path in machine.root.iterdir() if path.name.startswith("tmp")] == []


def test_binder_s_build_fails_where_horovod_does(machine: Machine) -> None:
    machine.program("workshop", "exit 3\n")
    assert machine.run(str(ROOT / "postBuild")).returncode == 3
    assert machine.calls() == ["workshop install-horovod"]


# Codespaces


def test_the_dev_container_asks_for_a_machine_that_is_large_enough() -> None:
    container: dict[str, Any] = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    wanted = container["hostRequirements"]
    assert wanted["cpus"] >= 2
    assert int(wanted["memory"].removesuffix("gb")) >= 6  # what `workshop doctor` asks for
    assert int(wanted["storage"].removesuffix("gb")) >= 16


# SageMaker


def test_a_studio_space_starts_at_once_and_sets_the_workshop_up_behind_it(machine: Machine) -> None:
    text = STUDIO.read_text()
    assert len(base64.b64encode(text.encode())) <= MOST_CHARACTERS
    answer = machine.run(str(STUDIO), REPOSITORY="https://example.org/w.git")
    assert answer.returncode == 0, answer.stderr
    _sets_up_in_the_background(machine, "make setup")


def test_a_notebook_instance_starts_at_once_and_sets_the_workshop_up_behind_it(machine: Machine) -> None:
    answer = machine.run(notebook_instance(machine))
    assert answer.returncode == 0, answer.stderr
    _sets_up_in_the_background(machine, "make setup PYTHON=python3.11")
    assert (machine.root / "stop-when-idle").read_text().endswith("/bin/stop-when-idle\n")
    packages = next(call for call in machine.calls() if call.startswith("dnf"))
    assert {"gcc-c++", "python3.11", "python3.11-devel", "make", "git"} <= set(packages.split())


def _sets_up_in_the_background(machine: Machine, make: str) -> None:
    machine.wait_for("make")
    assert not any(call.startswith("python") for call in machine.calls())  # the script is back, make is not
    machine.may_go_on.touch()
    machine.wait_for("python")
    calls = machine.calls()
    assert "git clone https://example.org/w.git workshop" in calls
    assert make in calls
    kernel = next(call for call in calls if call.startswith("python"))
    assert kernel.startswith("python -m ipykernel install --user --name workshop")
    assert f"--env PATH {machine.root}/workshop/.venv/bin:" in kernel
    assert calls.index("workshop copy-lessons my_lessons") < calls.index(kernel)
    log = machine.root / "workshop-set-up.log"
    end = time.monotonic() + SECONDS
    while "choose the kernel Workshop" not in log.read_text():
        assert time.monotonic() < end, log.read_text()
        time.sleep(0.02)


def test_a_second_start_clones_nothing(machine: Machine) -> None:
    machine.may_go_on.touch()
    for name in ("python", "workshop"):
        file = machine.root / "workshop" / ".venv" / "bin" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"#!/bin/bash\n{RECORD}")
        file.chmod(0o755)
    machine.run(str(STUDIO))
    machine.wait_for("python")
    assert not any(call.startswith("git") for call in machine.calls())


def test_the_readme_attaches_the_script_to_studio_by_a_request_that_aws_would_read() -> None:
    (text,) = re.findall(
        r"^\*\*SageMaker Studio\.\*\*.*?```sh\n(.*?)```", README, flags=re.MULTILINE | re.DOTALL
    )
    operations = {
        "create-studio-lifecycle-config": "CreateStudioLifecycleConfig",
        "update-domain": "UpdateDomain",
    }
    model = botocore.session.get_session().get_service_model("sagemaker")
    commands = [shlex.split(line, comments=True) for line in text.replace("\\\n", " ").splitlines()]
    assert [command[2] for command in commands] == list(operations)
    for command in commands:
        names = ["".join(map(str.capitalize, word[2:].split("-"))) for word in command[3::2]]
        values = [json.loads(word) if word.startswith("{") else word for word in command[4::2]]
        shape = model.operation_model(operations[command[2]]).input_shape
        report = ParamValidator().validate(dict(zip(names, values, strict=True)), shape)
        assert not report.has_errors(), report.generate_report()


def test_nobody_is_sent_to_a_repository_that_is_made_up_without_being_told() -> None:
    assert 'example.org/workshop.git}" # put here where git finds the workshop' in STUDIO.read_text()


# Colab


def test_colab_s_cells_set_up_run_a_lesson_and_show_it(machine: Machine) -> None:
    first, second = re.findall(r"^\*\*Colab\.\*\*.*?```sh\n%%bash\n(.*?)```.*?```python\n(.*?)```",
                               README, flags=re.MULTILINE | re.DOTALL)[0]  # fmt: skip
    machine.may_go_on.touch()
    answer = machine.run(first.replace("/content", str(machine.root)))
    assert answer.returncode == 0, answer.stderr
    run = machine.calls()[-1]
    notebook = re.search(r"NOTEBOOKS=(\S+)", run)
    assert run.startswith("make run SIZE=small")
    assert notebook is not None
    assert (ROOT / notebook[1]).is_file()
    compile(second, "cell", "exec")
    assert f"/content/workshop/build/{Path(notebook[1]).stem}.html" in second


@pytest.mark.parametrize("script", [ROOT / "postBuild", STUDIO], ids=lambda path: path.name)
def test_scripts_can_be_executed_and_stop_at_the_first_failure(script: Path) -> None:
    assert os.access(script, os.X_OK)
    assert subprocess.run(["bash", "-n", str(script)], check=False).returncode == 0
    assert "\nset -eu\n" in script.read_text()
