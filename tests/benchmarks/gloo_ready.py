"""Join a gloo process group, meet the other ranks at a barrier, and note in a file when that was."""

import argparse
import os
import time
from pathlib import Path

import torch.distributed as dist

from workshop_utils import place


def main() -> None:
    """Be ready, say so, leave."""
    place.here()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moments", type=Path, required=True)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    dist.barrier()
    place.report(step=0)
    (options.moments / str(os.getpid())).write_text(repr(time.monotonic()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
