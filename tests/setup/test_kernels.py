"""The kernels of Colab and Kaggle keep the packages that they have: the workshop installs beside them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
KERNELS = yaml.safe_load((Path(__file__).parent / "kernels.yaml").read_text())


@pytest.mark.processes
@pytest.mark.parametrize("name", KERNELS)
def test_what_runs_the_lessons_asks_no_kernel_for_another_version(name, tmp_path):
    kernel, given = KERNELS[name], tmp_path / "versions.txt"
    versions = kernel["versions"].split()
    given.write_text("\n".join(versions))
    words = [
        "pip",
        "compile",
        "pyproject.toml",
        "--extra",
        "torch",
        "--extra",
        "lessons",
        "--constraint",
        str(given),
    ]
    words += ["--python-version", kernel["python"], "--python-platform", "x86_64-manylinux_2_28"]
    environment = {key: value for key, value in os.environ.items() if not key.startswith("UV_")}
    resolved = subprocess.run(
        [sys.executable, "-m", "uv", *words, "--only-binary", ":all:", "--no-header", "--no-annotate"],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert resolved.returncode == 0, resolved.stderr
    assert versions[0] in resolved.stdout.split()  # PyTorch's
