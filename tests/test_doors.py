"""The doors into the workshop: each script is run, with programs that only record how they are called."""

import base64
import datetime
import io
import json
import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import botocore.session
import pytest
import yaml
from botocore.validate import ParamValidator
from conftest import Lenient, eventually

ROOT = Path(__file__).parents[1]
SAGEMAKER = ROOT / "jobs" / "clusters" / "sagemaker"
SET_UP = (ROOT / "docs" / "setup.md").read_text()
STUDIO = (SAGEMAKER / "lifecycle" / "studio.sh").read_text()
MOST_CHARACTERS = 16_384  # of a lifecycle configuration, in base64: CreateStudioLifecycleConfig
SECONDS = 60.0
RECORD = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n'


class Machine:
    """A folder that stands for a machine: programs that record their calls in `calls`; `make` ends when it may."""

    def __init__(self, root):
        self.root = root
        (root / "bin").mkdir()
        (root / "calls").touch()
        self.may_go_on = root / "go-on"
        for name in ("apt-get", "dnf", "python3", "systemd-run"):
            self.program(name)
        # A clone has programs of its own.
        copies = 'for name in python workshop; do cp "$(dirname "$0")/apt-get" "$3/.venv/bin/$name"; done\n'
        self.program("git", f'mkdir -p "$3/.venv/bin"\n{copies}')
        self.program(
            "make", f'for i in $(seq 1200); do test -e "{self.may_go_on}" && exit 0; sleep 0.05; done\n'
        )
        as_user = 'while [ "$1" = -u ] || [ "$1" = ec2-user ] || [ "$1" = --login ]; do shift; done\n"$@"\n'
        self.program("sudo", as_user)

    def program(self, name, then=""):
        file = self.root / "bin" / name
        file.write_text(RECORD + then)
        file.chmod(0o755)

    def run(self, script, **added):
        folders = {"CALLS": self.root / "calls", "HOME": self.root, "TMPDIR": self.root}
        environment = {
            "PATH": f"{self.root / 'bin'}:/usr/bin:/bin",
            **{k: str(v) for k, v in folders.items()},
        }
        answer = subprocess.run(
            ["bash", "-c", script], env=environment | added, cwd=self.root, stdin=subprocess.DEVNULL,
            timeout=SECONDS, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        return answer.returncode

    def has_called(self, beginning):
        return f"\n{beginning}" in "\n" + (self.root / "calls").read_text()


@pytest.fixture
def machine(tmp_path):
    return Machine(tmp_path)


def notebook_instance(machine):
    """What a notebook instance runs at its start, as CloudFormation fills it in, with the machine's folders."""
    template = yaml.load((SAGEMAKER / "templates" / "notebook.yaml").read_text(), Loader=Lenient)
    script = template["Resources"]["SetUp"]["Properties"]["OnStart"][0]["Content"]["Fn::Base64"]
    filled = {"Repository": "https://example.org/w.git", "IdleMinutes": "60", "AWS::Region": "eu-west-1"}
    for name, value in {**filled, "Name": "n"}.items():
        script = script.replace(f"${{{name}}}", value)
    assert len(base64.b64encode(script.encode())) <= MOST_CHARACTERS
    for name, place in {"/home/ec2-user/SageMaker": "", "/usr/local/bin": "/bin"}.items():
        script = script.replace(name, f"{machine.root}{place}")
    return script


@pytest.mark.processes
@pytest.mark.parametrize("door", ["studio", "notebook instance"])
def test_sagemaker_starts_at_once_and_sets_the_workshop_up_behind_it(door, machine):
    assert len(base64.b64encode(STUDIO.encode())) <= MOST_CHARACTERS
    script = STUDIO if door == "studio" else notebook_instance(machine)
    assert machine.run(script, REPOSITORY="https://example.org/w.git") == 0
    assert eventually(lambda: machine.has_called("make setup"), SECONDS)
    assert not machine.has_called("python ")  # the script is back, make is not
    machine.may_go_on.touch()
    log = machine.root / "workshop-set-up.log"
    assert eventually(lambda: "choose the kernel Workshop" in log.read_text(), SECONDS), log.read_text()
    assert machine.has_called("workshop copy-lessons my_lessons")
    assert machine.has_called("python -m ipykernel install --user --name workshop")
    if door == "notebook instance":  # which costs money until it stops
        assert machine.has_called("systemd-run --unit=stop-when-idle --on-calendar=*:0/5 ")


@pytest.mark.parametrize(
    ("kernels", "terminals", "is_stopped"),
    [
        ([], [], True),  # since the server's start
        ([("idle", 70)], [], True),
        ([("idle", 70), ("busy", 70)], [], False),  # a cell that runs for long, and prints nothing
        ([("starting", 70)], [70], True),
        ([("idle", 70)], [50], False),
        ([("idle", 50)], [], False),
    ],
)
def test_a_notebook_instance_stops_when_no_kernel_and_no_terminal_has_worked(
    kernels, terminals, is_stopped, machine, monkeypatch
):
    def ago(minutes):
        then = datetime.datetime.now(datetime.UTC) - datetime.timedelta(minutes=minutes)
        return then.isoformat().replace("+00:00", "Z")

    answers = {
        "kernels": [{"execution_state": state, "last_activity": ago(minutes)} for state, minutes in kernels],
        "terminals": [{"name": "1", "last_activity": ago(minutes)} for minutes in terminals],
        "status": {"started": ago(80), "last_activity": ago(0)},
    }
    stopped = []
    client = SimpleNamespace(stop_notebook_instance=lambda **name: stopped.append(name))
    monkeypatch.setattr(
        "urllib.request.urlopen",
        lambda url, context: io.StringIO(
            json.dumps(answers[url.removeprefix("https://localhost:8443/api/")])
        ),
    )
    monkeypatch.setattr("boto3.client", lambda service, region_name: client)
    monkeypatch.setattr("sys.argv", ["stop-when-idle", "60"])
    own = machine.root / "metadata"
    own.write_text('{"ResourceName": "mine", "ResourceArn": "arn:aws:sagemaker:eu-west-1:1:x"}')
    program = notebook_instance(machine).partition("<<'PROGRAM'\n")[2].partition("PROGRAM\n")[0]
    exec(program.replace("/opt/ml/metadata/resource-metadata.json", str(own)), {})
    assert stopped == ([{"NotebookInstanceName": "mine"}] if is_stopped else [])


@pytest.mark.processes
def test_by_hand_the_script_is_the_template_s():
    folder = ROOT / "jobs" / "clusters" / "sagemaker"
    (command,) = re.findall(r"```sh\n(sed .*?)```", (folder / "README.md").read_text(), re.DOTALL)
    printed = subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, check=True)
    template = yaml.load((folder / "templates" / "notebook.yaml").read_text(), Loader=Lenient)
    script = template["Resources"]["SetUp"]["Properties"]["OnStart"][0]["Content"]["Fn::Base64"]
    filled = script.replace("${Repository}", "https://example.org/workshop.git")
    assert printed.stdout.strip() == filled.replace("${IdleMinutes}", "60").strip()


def test_the_page_on_set_up_attaches_the_script_to_studio_by_requests_that_aws_would_read():
    (text,) = re.findall(r"^\*\*SageMaker Studio\.\*\*.*?```sh\n(.*?)```", SET_UP, re.MULTILINE | re.DOTALL)
    model = botocore.session.get_session().get_service_model("sagemaker")
    called = []
    for line in text.replace("\\\n", " ").splitlines():
        _, _, operation, *options = shlex.split(line, comments=True)
        called.append("".join(map(str.capitalize, operation.split("-"))))
        names = ["".join(map(str.capitalize, word[2:].split("-"))) for word in options[::2]]
        values = [json.loads(word) if word.startswith("{") else word for word in options[1::2]]
        shape = model.operation_model(called[-1]).input_shape
        report = ParamValidator().validate(dict(zip(names, values, strict=True)), shape)
        assert not report.has_errors(), report.generate_report()
    assert called == ["CreateStudioLifecycleConfig", "UpdateDomain"]
