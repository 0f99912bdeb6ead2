"""The GPT job trains between real processes: loss, clipped gradients and norm are those of one process, to 1e-12."""

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
    assert said.endswith(
        f"differ from those of one process by {metrics['gradient_error'].max():.0e} of the largest"
    )
    assert metrics["loss_error"].count() >= STEPS
    assert metrics["loss_error"].max() < 1e-12
    return run


@pytest.mark.parametrize(
    "shape",
    [
        {"pipeline": 3, "microbatches": 4, "clip_norm": 0},
        {"tensor": 2, "pipeline": 2, "sequence_parallel": 1, "schedule": "interleaved", "chunks": 2},
        {"tensor": 3, "context": 2, "attention": "ulysses", "experts": 6, "expert_parallel": 2},
        {"data": 2, "tensor": 2, "context": 2, "experts": 4, "expert_parallel": 2},
        {"data": 2, "pipeline": 2, "context": 2, "experts": 4, "expert_parallel": 4, "schedule": "zbv"},
    ],
    ids=str,
)
def test_directions_together_equal_one_process_and_groups_send_what_the_formula_says(shape):
    data, tensor, pipeline, context, experts = (
        shape.get(name, 1) for name in ("data", "tensor", "pipeline", "context", "expert_parallel")
    )
    run = trained(data * tensor * pipeline * context, **shape)
    if shape.get("clip_norm") != 0:
        assert run.metrics["norm_error"].count() == run.metrics["gradient_error"].count()
        assert run.metrics["norm_error"].max() < 1e-12
        assert run.metrics["gradient_norm"].min() > 1  # so all gradients were clipped
    sent = run.metrics.dropna(subset=["bytes_sent"])
    groups = {name for name in sent.columns if name.endswith("_bytes")}
    assert (sent[[*groups]].sum(axis=1) == sent["bytes_sent"]).all()
    sizes = {"tensor": tensor, "pipeline": pipeline, "context": context, "experts": experts}
    sizes |= {"replicas": data * context, "expert_replicas": data * context // experts * ("experts" in shape)}
    assert groups == {f"{name}_bytes" for name, size in sizes.items() if size > 1}
    if "experts" in shape:
        return
    # Of all ranks; three ranks of a pipeline do not clip, two times two do, by a number over each group.
    total, nbytes, clipped = sent.groupby("rank").last().sum(), TOKENS * SIZES.width * 8, tensor > 1
    links = pipeline * shape.get("chunks", 1) - 1
    assert total["pipeline_bytes"] == 2 * links * nbytes + clipped * tensor * 2 * (pipeline - 1) * 8
    if tensor > 1:  # with sequence parallelism
        expected = SIZES.layers * block_bytes_sent(tensor, nbytes, True)
        expected += ends_bytes_sent(tensor, nbytes, 2 * TOKENS, True)  # float64 is two float32
        # Gradients of what every rank has whole: norms, positions, biases behind sums.
        expected += ring_bytes_sent(tensor, 8 * (6 * SIZES.layers + 2 + SIZES.sequence) * SIZES.width)
        assert total["tensor_bytes"] == tensor * expected + pipeline * 2 * (tensor - 1) * 8
