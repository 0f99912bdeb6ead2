"""The benchmarks run, and say what they find; how fast things are is for `make bench`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.processes

BENCHMARKS = Path(__file__).with_name("benchmarks")


def bench(*words):
    command = [sys.executable, str(BENCHMARKS), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)


def test_each_measurement_is_a_row_with_its_ratio_and_bar_and_the_exit_code_says_whether_all_were_met():
    done = bench("all_reduce", "--quick")
    rows = [line for line in done.stdout.splitlines() if line.startswith("all-reduce of ")]
    assert len(rows) == 2, done.stdout + done.stderr
    for row in rows:
        assert re.search(r"beside gloo .*, 3 to inf: (met|MISSED)$", row)
    assert done.returncode == any(row.endswith("MISSED") for row in rows)
