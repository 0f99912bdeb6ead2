"""Let Horovod combine gradients that point in different directions, by Adasum and by the mean. Trains nothing.

Rank r has a gradient of length r + 1 at r times an angle. Reports for each of the angles, from rank 0: `angle` in
degrees, and two components of each result: `adasum_x`, `adasum_y`, `mean_x`, `mean_y`, and `zero_x`, `zero_y`, which
are Adasum where rank 0's gradient is zero.
"""

import argparse
import math
import sys

import horovod.torch as hvd
import torch

from workshop_utils import place


def main() -> None:
    place.here()
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--angles", default="0,30,60,90,120,150,180", help="in degrees, separated by commas")
    options = parser.parse_args()
    try:
        angles = [float(text) for text in options.angles.split(",")]
    except ValueError:
        sys.exit(f"angles is {options.angles!r}; it must be numbers with commas between, such as 0,90")
    hvd.init()
    if not hvd.mpi_enabled():
        sys.exit("Horovod computes Adasum over MPI alone: launch with strategy 'mpi'")
    if hvd.size() & (hvd.size() - 1):
        sys.exit(f"Adasum takes 2, 4, 8 … workers; there are {hvd.size()}")

    for step, angle in enumerate(angles):
        own = math.radians(angle * hvd.rank())
        gradient = (hvd.rank() + 1) * torch.tensor([math.cos(own), math.sin(own)])
        results = {
            "adasum": hvd.allreduce(gradient, op=hvd.Adasum, name=f"adasum {step}"),
            "mean": hvd.allreduce(gradient, op=hvd.Average, name=f"mean {step}"),
            "zero": hvd.allreduce(gradient * (hvd.rank() > 0), op=hvd.Adasum, name=f"zero {step}"),
        }
        if hvd.rank() == 0:
            pairs = {
                f"{name}_{axis}": result[at].item()
                for name, result in results.items()
                for at, axis in enumerate("xy")
            }
            place.report(step, angle=angle, **pairs)
    hvd.shutdown()


if __name__ == "__main__":
    main()
