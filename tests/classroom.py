"""What a class on one server takes: a lesson in some kernels at a time, at small size.

    python tests/classroom.py notebooks/04_ring_all_reduce.ipynb --kernels 4

Memory is proportional set size (PSS), in which pages that processes share count once, of all processes below this one.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil


def memory_nbytes() -> int:
    """PSS of all that this process has started, in bytes."""
    total = 0
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("lessons", nargs="+", type=Path)
    parser.add_argument("--kernels", type=int, default=4)
    given = parser.parse_args()
    environment = {**os.environ, "WORKSHOP_SIZE": "small"}
    for lesson in given.lessons:
        for kernels in dict.fromkeys([1, given.kernels]):
            with tempfile.TemporaryDirectory() as folder:
                before, began, peak = os.times(), time.monotonic(), 0
                command = [
                    sys.executable,
                    "-m",
                    "papermill",
                    "--cwd",
                    str(lesson.parent),
                    str(lesson.absolute()),
                ]
                running = [
                    subprocess.Popen(
                        [*command, f"{folder}/{each}.ipynb"], env=environment, stderr=subprocess.DEVNULL
                    )
                    for each in range(kernels)
                ]
                while any(each.poll() is None for each in running):
                    peak = max(peak, memory_nbytes())
                    time.sleep(0.25)
                seconds, after = time.monotonic() - began, os.times()
            failed = sum(each.returncode != 0 for each in running)
            busy = after.children_user + after.children_system - before.children_user - before.children_system
            print(f"{lesson.stem}, {kernels} kernel(s): {seconds:.0f} s, {busy:.0f} core seconds, "
                  f"{peak / 2**30:.2f} GiB at most, {failed} failed", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
