"""Train with the workshop's own data parallelism: gradients travel one by one, in buckets, or during the backward pass.

The batch is cut between the workers, so that any number of them takes the very same steps, up to rounding. Each rank
reports for every step: `loss` (the mean over ranks is that of the batch), `step_seconds`, `bytes_sent` and
`messages_sent`; of the last step also when it did what, in seconds since the first rank began it: `forward_start`,
`forward_end`, `backward_end`, `synchronised`, and for each all-reduce its `nbytes`, `start` and `end`.
"""

import argparse
import itertools
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel.data import (
    BucketedDataParallel,
    NaiveDataParallel,
    OverlappedDataParallel,
    UnevenInputs,
    check_even_inputs,
)

Batch = tuple[Tensor, Tensor]  # images and labels
Form = Callable[..., NaiveDataParallel]
FORMS: dict[str, Form] = {
    "naive": NaiveDataParallel,
    "bucketed": BucketedDataParallel,
    "overlapped": OverlappedDataParallel,
}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--by", choices=[*FORMS], default="overlapped")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=64, help="of all workers together")
    parser.add_argument("--accumulate", type=int, default=1, help="parts into which a worker cuts its share")
    parser.add_argument("--fewer-steps", type=int, default=0, help="that the last worker has batches for")
    parser.add_argument("--layers", type=int, default=4, help="hidden layers")
    parser.add_argument("--width", type=int, default=128, help="units of each hidden layer")
    parser.add_argument("--bucket-bytes", type=int, default=100_000)
    parser.add_argument("--learning-rate", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    for name in ("steps", "batch_size", "accumulate", "layers", "width", "bucket_bytes"):
        if getattr(given, name) < 1:
            parser.error(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    return given


def network(pixels: int, width: int, layers: int) -> nn.Sequential:
    """A perceptron with `layers` hidden layers, each followed by ReLU."""
    widths = itertools.pairwise([pixels, *[width] * layers])
    hidden = [module for sizes in widths for module in (nn.Linear(*sizes), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, 10))


def gradients(
    model: NaiveDataParallel, parts: Sequence[Batch], scale: float
) -> tuple[float, dict[str, float]]:
    """Leave the mean gradient of all ranks in the model. Returns the loss, and when what was done.

    `scale` is 1 / (size of the whole batch) · number of ranks, by which the sum over a part's images is multiplied:
    so the ranks' mean is the batch's gradient, however uneven the parts are.
    """
    marks, total = {"forward_start": time.perf_counter()}, 0.0
    for index, (images, labels) in enumerate(parts):
        with model.no_sync() if index < len(parts) - 1 else nullcontext():
            loss = cross_entropy(model(images), labels, reduction="sum") * scale
            marks["forward_end"] = time.perf_counter()
            loss.backward()
        total += loss.item()
    marks["backward_end"] = time.perf_counter()
    model.synchronise()
    return total, {**marks, "synchronised": time.perf_counter()}


def train(
    model: NaiveDataParallel, batches: Iterable[tuple[Batch, ...]], arguments: argparse.Namespace
) -> None:
    """Take the steps and report them; of the last one also the timeline."""
    communicator = model.communicator
    optimizer = torch.optim.SGD(model.parameters(), arguments.learning_rate, momentum=0.9)
    for step, parts in enumerate(batches, start=1):
        model.spans = []
        communicator.barrier()  # so that all begin together
        communicator.traffic.reset()
        optimizer.zero_grad()
        loss, marks = gradients(model, parts, communicator.size / arguments.batch_size)
        optimizer.step()
        place.report(
            step=step,
            loss=loss,
            step_seconds=time.perf_counter() - marks["forward_start"],
            bytes_sent=int(communicator.traffic.bytes_sent.sum()),
            messages_sent=int(communicator.traffic.messages_sent.sum()),
        )
    report_timeline(model, marks, arguments.steps)


def report_timeline(model: NaiveDataParallel, marks: dict[str, float], step: int) -> None:
    """Report when this rank did what, in seconds since the first rank began the step."""
    origin = torch.tensor([marks["forward_start"]], dtype=torch.float64)
    ring_all_reduce(model.communicator, origin, "min")
    place.report(step=step, **{name: moment - origin.item() for name, moment in marks.items()})
    for index, span in enumerate(model.spans or []):
        start, end = span.start - origin.item(), span.end - origin.item()
        place.report(step=step, all_reduce=index, nbytes=span.nbytes, start=start, end=end)


def main() -> None:
    arguments = options()
    here = place.here()
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    images, labels = place.load("train").tensors()
    module = network(images.shape[1], arguments.width, arguments.layers)
    with tcp.connect(*place.rendezvous()) as communicator:

        def parts_of(step: int) -> tuple[Batch, ...]:
            batch = torch.arange(step * arguments.batch_size, (step + 1) * arguments.batch_size) % len(images)
            parts = batch.tensor_split(communicator.size)[communicator.rank].tensor_split(
                arguments.accumulate
            )
            return tuple((images[part], labels[part]) for part in parts)

        is_last = communicator.rank == communicator.size - 1
        steps = arguments.steps - (arguments.fewer_steps if is_last else 0)
        try:
            check_even_inputs(communicator, steps)
        except (
            UnevenInputs
        ) as uneven:  # on every rank; so all part in peace, and nobody takes the others for dead
            communicator.barrier()
            communicator.close()
            sys.exit(str(uneven))
        options_of_form = {} if arguments.by == "naive" else {"bucket_bytes": arguments.bucket_bytes}
        with FORMS[arguments.by](module, communicator, **options_of_form) as model:
            train(model, (parts_of(step) for step in range(steps)), arguments)
        if communicator.rank == 0:
            here.model_folder.mkdir(parents=True, exist_ok=True)
            torch.save(module.state_dict(), here.model_folder / "model.pt")
        communicator.barrier()  # so that nobody closes a link that another still reads from


if __name__ == "__main__":
    main()
