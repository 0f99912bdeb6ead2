"""The GPT jobs train between real processes, equal to one process to 1e-5, gradients included."""

import pytest
from launching import launched

from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.parallel.gpt import GPTSizes
from workshop_utils.parallel.schedule import bubble, bubble_fraction, timeline_of
from workshop_utils.parallel.tensor import block_bytes_sent, ends_bytes_sent

SIZES, BATCH = GPTSizes(), 8
TOKENS = BATCH * SIZES.sequence
STEPS = 3

pytestmark = pytest.mark.slow


def trained(name, workers, **arguments):
    """A finished run whose every rank has held its loss and gradients against the whole model's, step by step."""
    arguments = {"check": 1, "steps": STEPS, "batch_size": BATCH, **arguments}
    run = launched(name, workers=workers, arguments=arguments)
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
    run = trained("gpt_tensor_parallel", workers, sequence_parallel=sequence_parallel)
    nbytes, cut = TOKENS * SIZES.width * 4, bool(sequence_parallel)
    expected = SIZES.layers * block_bytes_sent(workers, nbytes, cut)
    expected += ends_bytes_sent(workers, nbytes, TOKENS, cut)
    if sequence_parallel:  # gradients of what every rank has whole: norms, positions, biases behind sums
        numbers = (6 * SIZES.layers + 2 + SIZES.sequence) * SIZES.width
        expected += ring_bytes_sent(workers, 4 * numbers)
    assert bytes_of_a_step(run) == [expected] * workers


@pytest.mark.parametrize(("workers", "schedule", "chunks"), [(2, "interleaved", 2), (3, "one_f_one_b", 1)])
def test_pipeline_training_equals_one_process(workers, schedule, chunks):
    run = trained("gpt_pipeline", workers, schedule=schedule, chunks=chunks, microbatches=4, timeline=1)
    nbytes = TOKENS // 4 * SIZES.width * 4
    messages = [2 * chunks - (rank == 0) - (rank == workers - 1) for rank in range(workers)]
    expected = [4 * nbytes * count for count in messages]
    assert bytes_of_a_step(run) == expected
    assert len(timeline_of(run.records)) == 2 * 4 * workers * chunks


@pytest.mark.parametrize(
    ("data", "tensor", "pipeline", "more"),
    [
        (1, 3, 1, {"sequence_parallel": 1}),
        (1, 2, 2, {"sequence_parallel": 1, "schedule": "interleaved", "chunks": 2}),
        (2, 2, 2, {}),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else "",
)
def test_three_directions_together_equal_one_process(data, tensor, pipeline, more):
    run = trained("gpt_3d", data * tensor * pipeline, data=data, tensor=tensor, pipeline=pipeline, **more)
    sent = run.metrics.dropna(subset=["bytes_sent"])
    by_direction = sent[["data_bytes", "tensor_bytes", "pipeline_bytes"]]
    assert (by_direction.sum(axis=1) == sent["bytes_sent"]).all()
    assert [bool(total) for total in by_direction.sum()] == [data > 1, tensor > 1, pipeline > 1]


@pytest.mark.parametrize(("workers", "schedule", "chunks"), [(3, "one_f_one_b", 1), (4, "interleaved", 2)])
def test_the_measured_bubble_is_at_least_that_of_the_formula(workers, schedule, chunks):
    arguments = {"schedule": schedule, "chunks": chunks, "microbatches": 4}
    arguments |= {"forward_seconds": 0.03, "backward_seconds": 0.06}
    timeline = timeline_of(launched("measure_pipeline", workers=workers, arguments=arguments).records)
    assert len(timeline) == 2 * 4 * workers * chunks
    # As the machine is: a process that is woken late, and that others wait for, makes the bubble larger.
    assert 0.9 * bubble_fraction(workers, 4, chunks) < bubble(timeline) < 0.7
