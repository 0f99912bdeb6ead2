"""Build Horovod inside an image, by the script that builds it on a learner's machine.

    python build_horovod.py --variant cpu

For GPUs, Horovod's operations go through NCCL, which the local set-up has no use for.
"""

import argparse
import sys

from workshop_utils.setup import horovod_build

SETTINGS: dict[str, dict[str, str]] = {"cpu": {}, "gpu": {"HOROVOD_GPU_OPERATIONS": "NCCL"}}


def main() -> int:
    """Build and install; the exit code of the build."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--variant", choices=SETTINGS, default="cpu")
    options = parser.parse_args()
    # They are part of the wheel's identity, so that no wheel for processors is taken for one for GPUs.
    horovod_build.BUILD_SETTINGS.update(SETTINGS[options.variant])
    return horovod_build.main()


if __name__ == "__main__":
    sys.exit(main())
