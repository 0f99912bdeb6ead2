"""Run a training script, and note in a file when this process reports for the first time.

    python first_step.py --moments FOLDER --script jobs/mnist_torch_ddp/train.py --epochs 1

Run in the script's place, by any launcher. Besides `place` it needs the standard library alone.
"""

import argparse
import os
import runpy
import sys
import time
from pathlib import Path

from workshop_utils import place


def main() -> None:
    """Run the script that the command line names, with the arguments that are not for this one."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--moments", type=Path, required=True)
    parser.add_argument("--script", required=True)
    options, arguments = parser.parse_known_args()
    report = place.report

    def report_and_note(step: int, **values: float) -> None:
        report(step, **values)
        place.report = report
        # A clock that all processes of a machine share, and that nobody sets.
        (options.moments / str(os.getpid())).write_text(repr(time.monotonic()))

    place.report = report_and_note
    sys.argv = [options.script, *arguments]
    runpy.run_path(options.script, run_name="__main__")


if __name__ == "__main__":
    main()
