"""The GPT job trains between real processes, equal to one process to 1e-5, gradients included."""

import pytest
from launching import launched

from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.parallel.gpt import GPTSizes
from workshop_utils.parallel.tensor import block_bytes_sent, ends_bytes_sent

SIZES, BATCH = GPTSizes(), 8
TOKENS = BATCH * SIZES.sequence
STEPS = 3

pytestmark = pytest.mark.processes


def trained(workers, **arguments):
    """A finished run whose every rank has held its loss and gradients against the whole model's, step by step."""
    arguments = {
        "data": 1,
        "tensor": 1,
        "pipeline": 1,
        "check": 1,
        "steps": STEPS,
        "batch_size": BATCH,
        **arguments,
    }
    run = launched("gpt_3d", workers=workers, arguments=arguments)
    metrics = run.metrics
    assert set(metrics["rank"]) == set(range(workers))
    assert metrics.groupby("rank")["gradient_error"].count().tolist() == [STEPS] * workers
    assert metrics["gradient_error"].max() < 1e-5
    assert metrics["loss_error"].count() >= STEPS
    assert metrics["loss_error"].max() < 1e-5
    return run


def bytes_of_a_step(run):
    """Bytes that each rank has sent in the last step."""
    return run.metrics.dropna(subset=["bytes_sent"]).groupby("rank")["bytes_sent"].last().tolist()


@pytest.mark.parametrize(("workers", "sequence_parallel"), [(3, 0), (2, 1)])
def test_tensor_parallel_training_equals_one_process(workers, sequence_parallel):
    run = trained(workers, tensor=workers, microbatches=1, sequence_parallel=sequence_parallel)
    nbytes, cut = TOKENS * SIZES.width * 4, bool(sequence_parallel)
    expected = SIZES.layers * block_bytes_sent(workers, nbytes, cut)
    expected += ends_bytes_sent(workers, nbytes, TOKENS, cut)
    if sequence_parallel:  # gradients of what every rank has whole: norms, positions, biases behind sums
        numbers = (6 * SIZES.layers + 2 + SIZES.sequence) * SIZES.width
        expected += ring_bytes_sent(workers, 4 * numbers)
    assert bytes_of_a_step(run) == [expected] * workers


@pytest.mark.parametrize(
    ("workers", "schedule", "chunks", "messages"),
    [(2, "interleaved", 2, [3, 3]), (3, "one_f_one_b", 1, [1, 2, 1]), (2, "zbv", 1, [2, 2])],
)
def test_pipeline_training_equals_one_process(workers, schedule, chunks, messages):
    run = trained(workers, pipeline=workers, schedule=schedule, chunks=chunks, microbatches=4)
    nbytes = TOKENS // 4 * SIZES.width * 4
    expected = [4 * nbytes * count for count in messages]
    assert bytes_of_a_step(run) == expected


@pytest.mark.parametrize(
    ("data", "tensor", "pipeline", "more"),
    [
        (1, 2, 2, {"sequence_parallel": 1, "schedule": "interleaved", "chunks": 2}),
        (2, 2, 2, {}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_three_directions_together_equal_one_process(data, tensor, pipeline, more):
    run = trained(data * tensor * pipeline, data=data, tensor=tensor, pipeline=pipeline, **more)
    sent = run.metrics.dropna(subset=["bytes_sent"])
    by_direction = sent[["data_bytes", "tensor_bytes", "pipeline_bytes"]]
    assert (by_direction.sum(axis=1) == sent["bytes_sent"]).all()
    assert [bool(total) for total in by_direction.sum()] == [data > 1, tensor > 1, pipeline > 1]
