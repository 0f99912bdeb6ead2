"""What a process may use of its machine."""

import os
import subprocess
import sys

from workshop_utils.setup import machine


def test_a_process_that_is_bound_to_one_core_has_one():
    code = (
        "import os\nfrom workshop_utils.setup.machine import cores\n"
        "os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\nprint(cores())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"
    assert machine.cores() == len(os.sched_getaffinity(0))
