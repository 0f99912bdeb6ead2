"""What lesson 02 shows: cuts of a batch and of a network that equal one process, and the bytes that they send."""

import functools
import json

import numpy as np
import pytest
import torch
from one_process import MLP

from workshop_utils.comm import threads

pytestmark = pytest.mark.processes

CELLS = ("network", "collectives", "data-parallel", "layer-cut", "column-cut", "row-cut")
ONLY = {"layer": (2,)}  # the others cut for any number of ranks
CUTS = {
    "data": ("keep_all", "data_parallel"),
    "layer": ("keep_layer", "layer_parallel"),
    "column": ("keep_columns", "column_parallel"),
    "row": ("keep_rows", "row_parallel"),
}


@pytest.fixture(scope="module")
def lesson(request):
    """The names that the lesson's cells define."""
    path = request.config.rootpath / "notebooks" / "02_data_and_model_parallelism.ipynb"
    sources = {cell["id"]: "".join(cell["source"]) for cell in json.loads(path.read_text("utf-8"))["cells"]}
    names = {"np": np}
    missing = [cell for cell in CELLS if cell not in sources]
    assert not missing, (
        f"{path.name} has no cells {missing}; CELLS of this file names those that define the cuts"
    )
    for cell in CELLS:
        exec(sources[cell], names)
    return names


def batch_of(count):
    draw = np.random.default_rng(1)
    return draw.normal(size=(count, 64)), draw.integers(10, size=count)


def step(communicator, lesson, cut, images, labels):
    """The largest error of a rank's gradient, and the bytes that it sent."""
    keep, gradient = (lesson[name] for name in CUTS[cut])
    start, place = lesson["initialise"](), (communicator.rank, communicator.size)
    mine = gradient(communicator, keep(start, *place), images, labels)
    expected = keep(lesson["gradients"](start, images, labels)[1], *place)
    errors = [np.abs(own - one).max(initial=0) for own, one in zip(mine, expected, strict=True)]
    return max(errors), communicator.traffic.bytes_sent.sum()


@pytest.mark.parametrize(
    ("cut", "ranks"),
    [(cut, ranks) for cut in CUTS for ranks in ONLY.get(cut, (1, 2, 3, 4, 11))],
)
def test_every_cut_has_the_gradient_of_one_process(lesson, cut, ranks):
    images, labels = batch_of(17)
    outcomes = threads.run(
        ranks, functools.partial(step, lesson=lesson, cut=cut, images=images, labels=labels)
    )
    assert max(error for error, _ in outcomes) < 1e-12


def test_the_lessons_gradient_and_the_tests_own_are_those_of_torch(lesson):
    (images, labels), start = batch_of(9), lesson["initialise"]()
    arrays = [torch.tensor(array, requires_grad=True) for array in start]
    logits = torch.relu(torch.tensor(images) @ arrays[0] + arrays[1]) @ arrays[2] + arrays[3]
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(labels))
    loss.backward()
    for own, gradient in (lesson["gradients"](start, images, labels), MLP(*start).gradients(images, labels)):
        assert own == pytest.approx(loss.item())
        for mine, array in zip(gradient, arrays, strict=True):
            np.testing.assert_allclose(mine, array.grad.numpy(), atol=1e-13)
