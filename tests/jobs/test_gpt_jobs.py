"""The GPT job trains between real processes: loss, clipped gradients and norm are those of one process, to 1e-12."""

import math

import pytest
from launching import launched

from workshop_utils.comm.ring import ring_bytes_sent
from workshop_utils.parallel.gpt import GPTSizes
from workshop_utils.parallel.tensor import block_bytes_sent, ends_bytes_sent

SIZES, BATCH = GPTSizes(), 8
TOKENS = BATCH * SIZES.sequence
STEPS = 2  # a bias is zero in the first

pytestmark = pytest.mark.processes


def trained(workers, **arguments):
    """A finished run whose every rank has held its loss and gradients against the whole model's, step by step."""
    whole = {"data": 1, "tensor": 1, "pipeline": 1}
    arguments = {**whole, "check": 1, "steps": STEPS, "batch_size": BATCH, **arguments}
    run = launched("gpt_5d", workers=workers, arguments=arguments)
    metrics = run.metrics
    assert set(metrics["rank"]) == set(range(workers))
    assert metrics.groupby("rank")["gradient_error"].count().tolist() == [STEPS] * workers
    assert metrics["gradient_error"].max() < 1e-12  # of the largest entry
    (said,) = (line.text for line in run.logs(worker="worker-0"))
    assert f"those of one process, to {metrics['gradient_error'].max():.0e} of the largest" in said
    assert metrics["loss_error"].count() >= STEPS
    assert metrics["loss_error"].max() < 1e-12
    return run


def bytes_of_a_step(run):
    """Bytes that each rank has sent in the last step."""
    return run.metrics.dropna(subset=["bytes_sent"]).groupby("rank")["bytes_sent"].last().tolist()


@pytest.mark.parametrize(("workers", "sequence_parallel"), [(3, 0), (2, 1)])
def test_tensor_parallel_training_equals_one_process(workers, sequence_parallel):
    run = trained(workers, tensor=workers, microbatches=1, clip_norm=0, sequence_parallel=sequence_parallel)
    nbytes, cut = TOKENS * SIZES.width * 8, bool(sequence_parallel)
    expected = SIZES.layers * block_bytes_sent(workers, nbytes, cut)
    expected += ends_bytes_sent(workers, nbytes, 2 * TOKENS, cut)  # float64 is two float32
    if sequence_parallel:  # gradients of what every rank has whole: norms, positions, biases behind sums
        numbers = (6 * SIZES.layers + 2 + SIZES.sequence) * SIZES.width
        expected += ring_bytes_sent(workers, 8 * numbers)
    assert bytes_of_a_step(run) == [expected] * workers


@pytest.mark.parametrize(("workers", "schedule", "chunks"), [(2, "interleaved", 2), (3, "one_f_one_b", 1)])
def test_pipeline_training_equals_one_process(workers, schedule, chunks):
    run = trained(workers, pipeline=workers, schedule=schedule, chunks=chunks, microbatches=4, clip_norm=0)
    nbytes = TOKENS // 4 * SIZES.width * 8
    messages = [2 * chunks - (rank == 0) - (rank == workers - 1) for rank in range(workers)]
    expected = [4 * nbytes * count for count in messages]
    assert bytes_of_a_step(run) == expected


@pytest.mark.parametrize(
    "shape",
    [
        {"tensor": 2, "pipeline": 2, "sequence_parallel": 1, "schedule": "interleaved", "chunks": 2},
        {"tensor": 2, "pipeline": 2, "context": 2, "experts": 4, "expert_parallel": 2},
        {"data": 2, "pipeline": 2, "context": 2, "experts": 4, "expert_parallel": 4, "schedule": "zbv"},
        {"data": 2, "tensor": 2, "pipeline": 2, "context": 2, "experts": 4, "expert_parallel": 2},
        {"data": 1, "tensor": 3, "context": 2, "attention": "ulysses", "experts": 6, "expert_parallel": 2},
    ],
    ids=str,
)
def test_directions_together_equal_one_process(shape):
    directions = {name: shape.get(name, 1) for name in ("data", "tensor", "pipeline", "context")}
    run = trained(math.prod(directions.values()), **shape)
    assert run.metrics["norm_error"].count() == run.metrics["gradient_error"].count()
    assert run.metrics["norm_error"].max() < 1e-12
    assert run.metrics["gradient_norm"].min() > 1  # so all gradients were clipped
    sent = run.metrics.dropna(subset=["bytes_sent"])
    groups = [name for name in sent.columns if name.endswith("_bytes")]
    assert (sent[groups].sum(axis=1) == sent["bytes_sent"]).all()
    for name, size in (*directions.items(), ("experts", shape.get("expert_parallel", 1))):
        assert name == "data" or bool(sent[f"{name}_bytes"].sum()) == (size > 1)
