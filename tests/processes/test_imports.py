"""What a script imports, read from its text."""

from __future__ import annotations

from pathlib import Path

import pytest

from workshop_utils.processes import imports


@pytest.mark.parametrize(
    ("script", "found"),
    [
        ("import numpy as np, os.path", {"numpy": set(), "os.path": set()}),
        ("from horovod import torch, tensorflow as tf", {"horovod": {"torch", "tensorflow"}}),
        (
            "import horovod.torch\nfrom horovod.torch import init",
            {"horovod.torch": {"init"}},
        ),
        ("def train():\n    if True:\n        import torch.nn", {"torch.nn": set()}),
        ("from .near import name\nfrom . import numpy", {"near": {"name"}}),
        ("print('import numpy')", {}),
        ("import numpy ???", {}),
        ("", {}),
    ],
)
def test_imports_are_found_anywhere_in_a_script(
    script: str, found: dict[str, set[str]], tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(script)
    assert imports.imported(tmp_path / "train.py") == found


def test_a_module_belongs_to_its_outermost_package() -> None:
    assert imports.packages(["horovod.torch.elastic", "horovod", "numpy"]) == {"horovod", "numpy"}
    assert imports.packages({}) == set()
