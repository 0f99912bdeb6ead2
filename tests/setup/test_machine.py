"""What a process may use of its machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workshop_utils.setup import machine


@pytest.mark.processes
def test_a_process_that_is_bound_to_one_core_has_one():
    code = (
        "import os\nfrom workshop_utils.setup.machine import cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert machine.cores() == len(os.sched_getaffinity(0))


def test_where_no_process_can_be_bound_to_cores_all_of_them_count(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity")  # as on macOS
    assert machine.cores() == os.cpu_count()


@pytest.mark.parametrize(
    ("listed", "visible"),
    [(None, "01"), ("1, 0", "10"), ("0,5,1", "0"), ("0,1,0", ""), ("-1", ""), ("", ""), ("MIG-7", ["MIG-7"])],
)
def test_cuda_visible_devices_limits_the_gpus(listed, visible, monkeypatch):
    monkeypatch.setattr(machine, "nvidia_gpus", lambda: 2)
    if listed is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", listed)
    assert machine.visible_gpus() == list(visible)


@pytest.mark.processes
def test_where_there_are_no_device_files_nvidia_s_tool_lists_the_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "glob", lambda *_: iter(()))
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        "#!/bin/sh\necho 'GPU 0: A (UUID: GPU-1)'\necho '  MIG 1g: (UUID: MIG-1)'\necho 'GPU 1: A'\n"
    )
    tool.chmod(0o755)
    assert machine.nvidia_gpus() == 2
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'; exit 9\n")
    assert machine.nvidia_gpus() == 0
    tool.unlink()
    assert machine.nvidia_gpus() == 0
