"""Measure the steps of a small GPT on one device, and what the same device does in a large matrix product.

Reports for each step `step_seconds`; on a CPU also `step_processor_seconds`, which other work on the machine hardly
touches; and `product_flops_per_second`, of one product of square matrices that was timed just before it, by the same
clock. With the first step come `parameters`, `matrix_parameters` (those that are multiplied by: no embeddings),
`threads` and `on_gpu`.
On a GPU (`--device cuda`) steps run in `--dtype bfloat16` by autocast, as large models are trained.
"""

import argparse
import sys
import time
from collections.abc import Callable

import torch

from workshop_utils import place
from workshop_utils.parallel.gpt import GPT, GPTSizes, cross_entropy

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=4, help="sequences in a step")
    parser.add_argument("--steps", type=int, default=8, help="the first two are left out: they warm up")
    parser.add_argument(
        "--device", choices=("cpu", "cuda", "auto"), default="auto", help="auto: a GPU if there is one"
    )
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="float32")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU")
    parser.add_argument("--product-size", type=int, default=1024, help="rows of the square matrices")
    return parser.parse_args()


def timed(device: torch.device, work: Callable[[], object]) -> tuple[float, float]:
    """Seconds, and this process's processor seconds, of `work` until the device has done it."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    wait()
    wall, processor = time.perf_counter(), time.process_time()
    work()
    wait()
    return time.perf_counter() - wall, time.process_time() - processor


def main() -> None:
    place.here()
    options = arguments()
    available = torch.cuda.is_available()
    if options.device == "cuda" and not available:
        sys.exit("device is cuda, and PyTorch finds no GPU here; it must be cpu or auto")
    device = torch.device("cuda" if options.device != "cpu" and available else "cpu")
    dtype = DTYPES[options.dtype]
    torch.set_num_threads(options.threads)
    try:
        sizes = GPTSizes(options.layers, options.width, options.heads, options.sequence)
    except ValueError as error:
        sys.exit(str(error))

    model = GPT(sizes).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    generator = torch.Generator().manual_seed(0)
    shape = options.batch_size, options.sequence + 1
    text = torch.randint(sizes.vocabulary, shape, generator=generator).to(device)
    left = torch.randn(options.product_size, options.product_size, device=device, dtype=dtype)
    right = torch.randn_like(left)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype, enabled=dtype is not torch.float32):
            loss = cross_entropy(model(text[:, :-1]), text[:, 1:])
        loss.backward()
        optimizer.step()

    parameters = sum(parameter.numel() for parameter in model.parameters())
    looked_up = (sizes.vocabulary + sizes.sequence) * sizes.width
    constants = {
        "parameters": parameters,
        "matrix_parameters": parameters - looked_up,
        "threads": torch.get_num_threads(),
        "on_gpu": int(device.type == "cuda"),
    }
    for number in range(options.steps):
        # In turn, so that what else the machine does falls on both.
        product = timed(device, lambda: left @ right)
        seconds, processor_seconds = timed(device, step)
        if number < 2:
            continue
        clock = 0 if device.type == "cuda" else 1  # a GPU works while the processor waits
        values = {
            "step_seconds": seconds,
            "product_flops_per_second": 2 * options.product_size**3 / product[clock],
        }
        if device.type == "cpu":
            values["step_processor_seconds"] = processor_seconds
        place.report(step=number, **values, **(constants if number == 2 else {}))


if __name__ == "__main__":
    main()
