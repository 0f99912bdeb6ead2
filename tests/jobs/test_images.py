"""The images' Dockerfiles and scripts, as far as they can be tried without a Docker daemon."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "jobs" / "images"
DOCKERFILES = sorted(IMAGES.glob("*.Dockerfile"))
HADOLINT = Path(sys.prefix) / "bin" / "hadolint"


def requirements(name: str) -> dict[str, Requirement]:
    lines = (IMAGES / name).read_text().splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {requirement.name: requirement for requirement in found}


def build(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", str(IMAGES / "build.sh"), *words], capture_output=True, text=True, check=False, cwd="/"
    )


@pytest.mark.skipif(not HADOLINT.is_file(), reason="hadolint's wheel is for Linux")
def test_hadolint_finds_nothing() -> None:
    assert len(DOCKERFILES) == 3
    checked = subprocess.run(
        [str(HADOLINT), *map(str, DOCKERFILES)], capture_output=True, text=True, check=False
    )
    assert (checked.returncode, checked.stdout) == (0, "")


def test_versions_are_those_of_the_workshop_s_own_environment() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    ours = {Requirement(line).name: Requirement(line) for line in project["dependencies"]}
    common = requirements("requirements.txt")
    for name, requirement in {**common, **requirements("requirements-cpu.txt")}.items():
        if name in ours:
            assert requirement.specifier == ours[name].specifier, name
    assert set(common) - set(ours) == {"sagemaker-training"}
    neuron = requirements("requirements-neuron.txt")
    assert neuron["transformers"].specifier == ours["transformers"].specifier
    gpu = requirements("requirements-gpu.txt")
    assert gpu["tensorflow"].extras == {"and-cuda"}
    assert gpu["tensorflow"].specifier == ours["tensorflow"].specifier
    assert gpu["torch"].specifier == ours["torch"].specifier


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_every_file_that_an_image_copies_exists(path: Path) -> None:
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", path.read_text(), flags=re.MULTILINE)
    names = [name for line in copied for name in line.split()]
    assert names
    for name in names:
        for variant in ("cpu", "gpu"):
            assert (ROOT / name.replace("${VARIANT}", variant)).is_file(), name


def test_the_horovod_image_copies_all_that_the_build_imports_of_the_package() -> None:
    copied = re.findall(r"workshop_utils/(\w+)\.py", (IMAGES / "horovod.Dockerfile").read_text())
    needed, found = ["horovod_build"], {"__init__", "horovod_build"}
    while needed:
        text = (ROOT / "workshop_utils" / f"{needed.pop()}.py").read_text()
        names = re.findall(r"^from workshop_utils\.(\w+) import", text, flags=re.MULTILINE)
        for line in re.findall(r"^from workshop_utils import (.+)$", text, flags=re.MULTILINE):
            names += line.split(", ")
        needed += set(names) - found
        found |= set(names)
    assert set(copied) == found


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (("horovod", "cpu"), ["-f jobs/images/horovod.Dockerfile", "VARIANT=cpu"]),
        (("horovod", "gpu"), ["BASE=nvidia/cuda", "VARIANT=gpu"]),
        (("pytorch", "gpu"), ["-f jobs/images/pytorch.Dockerfile", "VARIANT=gpu"]),
        (("neuron", "trn1"), ["-f jobs/images/neuron.Dockerfile", "--platform linux/amd64"]),
    ],
)
def test_a_dry_run_prints_create_log_in_build_and_push_and_runs_none(
    words: tuple[str, ...], parts: list[str]
) -> None:
    name, variant = words
    printed = build("--dry-run", *words, "eu-west-1", "123456789012")
    assert printed.returncode == 0
    create, login, make, push, image = printed.stdout.splitlines()
    address = f"123456789012.dkr.ecr.eu-west-1.amazonaws.com/workshop-{name}:{variant}"
    assert create.startswith(
        f"aws ecr create-repository --region eu-west-1 --repository-name workshop-{name} "
    )
    assert "Key=made-by,Value=distributed-training-workshop" in create
    assert (
        "docker login --username AWS --password-stdin 123456789012.dkr.ecr.eu-west-1.amazonaws.com" in login
    )
    assert make.startswith("docker build ")
    assert all(part in make for part in parts)
    assert push == f"docker push {address}"
    assert image == f"image: {address}"


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("horovod", "cpu", "eu-west-1"),
        ("mxnet", "cpu", "eu-west-1", "123456789012"),
        ("horovod", "tpu", "eu-west-1", "123456789012"),
        ("horovod", "trn1", "eu-west-1", "123456789012"),
        ("neuron", "gpu", "eu-west-1", "123456789012"),
        ("horovod", "cpu", "europe", "123456789012"),
        ("horovod", "cpu", "eu-west-1", "12345"),
    ],
)
def test_wrong_words_are_answered_with_the_usage(words: tuple[str, ...]) -> None:
    answered = build("--dry-run", *words)
    assert answered.returncode == 2
    assert "usage:" in answered.stderr
    assert answered.stdout == ""


def test_the_image_for_trainium_2_needs_a_base_and_is_built_on_it(monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("--dry-run", "neuron", "trn2", "us-west-2", "123456789012")
    monkeypatch.delenv("BASE", raising=False)
    refused = build(*words)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "BASE is not set; for trn2 it must name AWS's image with TorchNeuron" in refused.stderr
    monkeypatch.setenv("BASE", "registry.example/torch-neuron:1")
    assert "--build-arg BASE=registry.example/torch-neuron:1" in build(*words).stdout


def test_the_image_for_trainium_holds_the_script_with_all_that_it_imports_of_the_workshop() -> None:
    text = (IMAGES / "neuron.Dockerfile").read_text()
    imported = re.findall(
        r"^from workshop_utils import (.+)$", (ROOT / "jobs/bert_pretraining/train.py").read_text(), re.M
    )
    assert imported == ["checkpoints, place"]
    for module in imported[0].split(", "):
        assert f"workshop_utils/{module}.py" in text


def test_the_images_build_horovod_by_the_workshop_s_own_script_and_for_gpus_through_nccl(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from workshop_utils import horovod_build

    specification = importlib.util.spec_from_file_location("build_horovod", IMAGES / "build_horovod.py")
    assert specification is not None
    assert specification.loader is not None
    program = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(program)
    called = []
    monkeypatch.setattr(horovod_build, "main", lambda arguments: called.append(list(arguments)) or 0)
    monkeypatch.setattr(horovod_build, "BUILD_SETTINGS", dict(horovod_build.BUILD_SETTINGS))
    ours = horovod_build.build_digest()
    for variant in ("cpu", "gpu"):
        monkeypatch.setattr(sys, "argv", ["build_horovod.py", "--variant", variant])
        assert program.main() == 0
        # A wheel for GPUs has another identity than one for processors.
        assert (horovod_build.build_digest() == ours) is (variant == "cpu")
    assert horovod_build.BUILD_SETTINGS["HOROVOD_GPU_OPERATIONS"] == "NCCL"
    assert called == [[], []]


def test_the_build_script_of_the_image_runs_here() -> None:
    from workshop_utils import horovod_build

    if horovod_build.installed_recipe() != horovod_build.this_recipe(horovod_build.find_mpi()):
        pytest.skip("this environment's Horovod is of another build, and building takes minutes")
    command = [sys.executable, str(IMAGES / "build_horovod.py"), "--variant", "cpu"]
    built = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert (built.returncode, "is installed" in built.stderr) == (0, True)
