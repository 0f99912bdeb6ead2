"""What travels with a job's script, and that each launcher can be imported by itself."""

import subprocess
import sys

import pytest

from workshop_utils.launchers.source import shipped

EACH_ALONE = """
import importlib, sys
from workshop_utils.launchers.targets import TARGETS

for name in TARGETS:
    for loaded in [each for each in sys.modules if each.startswith("workshop_utils")]:
        del sys.modules[loaded]
    targets = importlib.import_module("workshop_utils.launchers.targets")
    try:
        targets.launcher_for(name)
    except targets.JobError as error:  # of a target that wants a place.yaml
        assert "--config is missing" in str(error)
"""


@pytest.mark.processes
def test_a_target_is_the_first_that_a_process_imports():
    subprocess.run([sys.executable, "-c", EACH_ALONE], check=True, timeout=120)


@pytest.mark.parametrize(
    ("script", "folders"),
    [
        ("from workshop_utils import place", {"training"}),
        ("from workshop_utils.comm import tcp", {"training", "comm"}),
        ("import workshop_utils.comm.process_group", {"training", "comm"}),
        ("def f():\n    from workshop_utils import parallel", {"training", "comm", "parallel"}),  # needs comm
        ("from workshop_utils.parallel.data import average", {"training", "comm", "parallel"}),
    ],
)
def test_the_message_passing_travels_where_a_script_imports_it(make_job, script, folders):
    files = shipped(make_job(script, strategy="torch_ddp"))
    assert {name.split("/")[1] for name in files if name.count("/") == 2} == folders
    assert "workshop_utils/place.py" in files
