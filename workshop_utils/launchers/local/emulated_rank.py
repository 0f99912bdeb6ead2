"""Switches on the emulated device of a rank, then runs its script: `python emulated_rank.py SCRIPT ARGUMENT...`."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    script = sys.argv[1]
    sys.argv[:] = sys.argv[1:]
    sys.path[0] = str(Path(script).parent)  # in place of this program's own folder

    from workshop_utils.training import emulated_device

    emulated_device.switch_on()
    runpy.run_path(script, run_name="__main__")
