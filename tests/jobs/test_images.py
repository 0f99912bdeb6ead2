"""The images' Dockerfiles and scripts, as far as they can be tried without a Docker daemon."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement

from workshop_utils.jobs import imports

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "jobs" / "images"
BUILD, ACCOUNT = IMAGES / "build.sh", "123456789012"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
HADOLINT = Path(sys.prefix) / "bin" / "hadolint"


def requirements(name):
    lines = (IMAGES / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name: requirement for requirement in found}


def run(*command, **variables):
    return subprocess.run(
        list(map(str, command)),
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
    )


@pytest.mark.skipif(not HADOLINT.is_file(), reason="hadolint's wheel is for Linux")
def test_hadolint_finds_nothing():
    assert len(DOCKERFILES) == 3
    checked = run(HADOLINT, *DOCKERFILES)
    assert (checked.returncode, checked.stdout) == (0, "")


def test_images_take_the_versions_that_were_tested():
    text = (ROOT / "workshop_utils" / "setup" / "requirements" / "python3.11.txt").read_text()
    tested = dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, flags=re.MULTILINE))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    tested |= dict(re.findall(r"(torch)==(\S+)", " ".join(project["optional-dependencies"]["horovod"])))
    common, neuron = requirements("requirements.txt"), requirements("requirements-neuron.txt")
    cpu, gpu = requirements("requirements-cpu.txt"), requirements("requirements-gpu.txt")
    for requirement in (*common.values(), *cpu.values(), *gpu.values(), neuron["transformers"]):
        name = requirement.name
        assert name not in tested or requirement.specifier.contains(tested[name]), requirement
    assert set(common) - set(tested) == {"sagemaker-training"}
    assert {"tensorflow", "torch"} <= set(gpu)
    assert gpu["tensorflow"].extras == {"and-cuda"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_every_file_that_an_image_copies_exists(path):
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), flags=re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert names
    for name in names:
        for variant in ("cpu", "gpu"):
            assert (ROOT / name.replace("${VARIANT}", variant)).is_file(), name


def test_ranks_can_be_started_through_ssh_as_the_toolkit_asks_of_an_image():
    text = (IMAGES / "horovod.Dockerfile").read_text()
    asked = (
        "sed -i 's@session\\s*required\\s*pam_loginuid.so@session optional pam_loginuid.so@g' /etc/pam.d/sshd"
    )
    for line in (asked, "ssh-keygen -A", "StrictHostKeyChecking no", "/run/sshd", "authorized_keys"):
        assert line in text


@pytest.mark.parametrize(
    ("image", "script"),
    [("horovod", "workshop_utils/setup/horovod_build.py"), ("neuron", "jobs/bert_pretraining/train.py")],
)
def test_an_image_copies_all_that_its_script_imports_of_the_workshop(image, script):
    copied = set(re.findall(r"workshop_utils/[\w/]+\.py", (IMAGES / f"{image}.Dockerfile").read_text()))
    needed, waiting = set(), [script]
    while waiting:
        modules = imports.imported(ROOT / waiting.pop()).items()
        names = {f"{module}.{name}".strip(".") for module, taken in modules for name in ("", *taken)}
        paths = {f"{name.replace('.', '/')}.py" for name in names if name.startswith("workshop_utils.")}
        waiting += [path for path in paths - needed if (ROOT / path).is_file()]
        needed |= set(waiting)
    assert needed
    assert needed <= copied


@pytest.mark.parametrize(
    ("name", "variant", "base", "part"),
    [
        ("pytorch", "cpu", "", "VARIANT=cpu"),
        ("pytorch", "gpu", "", "--build-arg EFA_VERSION="),
        ("horovod", "gpu", "", "BASE=nvidia/cuda"),
        ("neuron", "trn1", "", "--platform linux/amd64"),
        ("neuron", "trn2", "example.com/torch:1", "--build-arg BASE=example.com/torch:1"),
    ],
)
def test_a_dry_run_prints_create_log_in_build_and_push_and_runs_none(name, variant, base, part):
    printed = run("bash", BUILD, "--dry-run", name, variant, "eu-west-1", ACCOUNT, BASE=base)
    assert printed.returncode == 0
    create, login, make, push, image = printed.stdout.splitlines()
    registry = f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com"
    address = f"{registry}/workshop-{name}:{variant}"
    assert "Key=made-by,Value=distributed-training-workshop" in create
    assert registry in login
    assert f"-f jobs/images/{name}.Dockerfile" in make
    assert part in make
    assert (push, image) == (f"docker push {address}", f"image: {address}")


def test_what_was_pushed_is_noted_with_its_digest_the_last_one_alone(tmp_path):
    images = tmp_path / "jobs" / "images"
    images.mkdir(parents=True)
    shutil.copy(BUILD, images)
    inspect = 'case $1 in inspect) echo "$OTHERS"; echo "$OURS@sha256:$DIGEST" ;; esac'
    for program, said in (("aws", "true"), ("docker", inspect)):
        (tmp_path / program).write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / program).chmod(0o755)
    name = f"{ACCOUNT}.dkr.ecr.eu-west-1.amazonaws.com/workshop-pytorch"
    told = {"OURS": name, "OTHERS": f"{name.replace('eu-west', 'us-west')}@sha256:0"}
    told["PATH"] = f"{tmp_path}:{os.environ['PATH']}"
    for variant, digest in (("cpu", "1"), ("gpu", "2"), ("cpu", "3")):
        command = ["bash", images / "build.sh", "pytorch", variant, "eu-west-1", ACCOUNT]
        assert run(*command, DIGEST=digest, **told).returncode == 0
    pushed = yaml.safe_load((images / "pushed.yaml").read_text())
    assert pushed == {f"{name}:cpu": "sha256:3", f"{name}:gpu": "sha256:2"}


@pytest.mark.parametrize(
    "words",
    ["", f"horovod trn1 eu-west-1 {ACCOUNT}", f"horovod cpu europe {ACCOUNT}", "horovod cpu eu-west-1 12345",
     f"neuron trn2 us-west-2 {ACCOUNT}"],
)  # fmt: skip
def test_wrong_words_are_answered_and_nothing_is_printed(words):
    answered = run("bash", BUILD, "--dry-run", *words.split(), BASE="")
    assert (answered.returncode, answered.stdout) == (2, "")
    without_base = "BASE is not set; for trn2 it must name AWS's image with TorchNeuron"
    assert (without_base if "trn2" in words else "usage:") in answered.stderr
