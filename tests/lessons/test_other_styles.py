"""Checks of lessons 05 to 07 take right answers that are not written as the solutions are."""

import copy

import pytest
import torch
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from workshop_utils.lessons.checks import horovod, pytorch, tensorflow

pytestmark = pytest.mark.processes


def unit(gather, scatter):
    """A unit from `gather(dist, shard)`, which may have padding, and `scatter(dist, gradient)`, which must have it."""

    class Unit(torch.autograd.Function):
        @staticmethod
        def forward(ctx, dist, rows, shard, inputs):
            ctx.dist, ctx.shard, ctx.inputs = dist, shard, inputs
            return inputs @ gather(dist, shard)[:rows].T

        @staticmethod
        def backward(ctx, gradient):
            rows = gradient.shape[1]
            whole = gradient.T @ ctx.inputs
            padded = pad(whole, (0, 0, 0, len(ctx.shard) * ctx.dist.get_world_size() - rows))
            of_inputs = gradient @ gather(ctx.dist, ctx.shard)[:rows]
            return None, None, scatter(ctx.dist, padded), of_inputs

    return Unit


def gather_at_once(dist, shard):
    whole = shard.new_empty(dist.get_world_size() * len(shard), shard.shape[1])
    dist.all_gather_into_tensor(whole, shard, async_op=True).wait()
    return whole


def gather_by_broadcasts(dist, shard):
    parts = [shard.detach().clone() for _ in range(dist.get_world_size())]
    for work in [dist.broadcast(part, rank, async_op=True) for rank, part in enumerate(parts)]:
        work.wait()
    return torch.cat(parts)


def gather_round_a_ring(dist, shard):
    size, rank = dist.get_world_size(), dist.get_rank()
    parts = [shard.detach().clone() for _ in range(size)]
    for step in range(size - 1):
        sent, received = parts[(rank - step) % size], parts[(rank - step - 1) % size]
        send = dist.P2POp(dist.isend, sent, (rank + 1) % size)
        receive = dist.P2POp(dist.irecv, received, (rank - 1) % size)
        for work in dist.batch_isend_irecv([send, receive]):
            work.wait()
    return torch.cat(parts)


def scatter_the_mean(dist, gradient):
    mine = torch.empty_like(gradient.chunk(dist.get_world_size())[0])
    dist.reduce_scatter_tensor(mine, gradient, op=dist.ReduceOp.AVG)
    return mine


def scatter_by_reductions(dist, gradient):
    parts = [part.clone() for part in gradient.chunk(dist.get_world_size())]
    for rank, part in enumerate(parts):
        dist.reduce(part, rank)
    return parts[dist.get_rank()] / len(parts)


def scatter_all_to_all(dist, gradient):
    received = torch.empty_like(gradient)
    dist.all_to_all_single(received, gradient)
    return sum(received.chunk(dist.get_world_size())) / dist.get_world_size()


def recomputed(dist, rows, shard, inputs):
    """A function: the gather is an operation of autograd, and checkpointing drops what it gave."""

    class Gather(torch.autograd.Function):
        @staticmethod
        def forward(ctx, shard):
            return gather_at_once(dist, shard)[:rows]

        @staticmethod
        def backward(ctx, gradient):
            padded = pad(gradient, (0, 0, 0, len(shard) * dist.get_world_size() - rows))
            return scatter_the_mean(dist, padded)

    return checkpoint(lambda x, s: x @ Gather.apply(s).T, inputs, shard, use_reentrant=False)


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(unit(gather_at_once, scatter_the_mean), id="at once"),
        pytest.param(unit(gather_by_broadcasts, scatter_by_reductions), id="rank by rank"),
        pytest.param(unit(gather_round_a_ring, scatter_all_to_all), id="point to point"),
        pytest.param(recomputed, id="by checkpointing"),
    ],
)
def test_a_sharded_unit_may_gather_and_scatter_as_it_likes(answer):
    verdict = pytorch.sharded_unit(answer)
    assert verdict.state == "right", verdict


def by_pytorch(dist, sharded, replicated, max_norm):
    squares = torch.nn.utils.get_total_norm([each.grad for each in sharded]) ** 2
    squares += torch.nn.utils.get_total_norm([each.grad for each in replicated]) ** 2 / dist.get_world_size()
    dist.all_reduce(squares, async_op=True).wait()
    torch.nn.utils.clip_grads_with_norm_([*sharded, *replicated], max_norm, squares.sqrt())
    return squares.sqrt()


def by_gathering_squares(dist, sharded, replicated, max_norm):
    mine = torch.stack([each.grad.square().sum() for each in sharded])
    parts = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, mine)
    norm = (torch.cat(parts).sum() + sum(each.grad.square().sum() for each in replicated)).sqrt()
    for each in sharded + replicated:
        each.grad = each.grad * (max_norm / norm).clamp(max=1)
    return norm.item()


@pytest.mark.parametrize("answer", [by_pytorch, by_gathering_squares])
def test_a_norm_may_be_added_up_in_any_way_by_one_message(answer):
    verdict = pytorch.clipped_norm(answer)
    assert verdict.state == "right", verdict


def accumulated(model, batches):
    model.zero_grad()
    for images, labels in batches:
        torch.nn.functional.cross_entropy(model(images), labels).backward()


def of_the_mean_by_hooks(hvd, model, steps, rate, limit):
    passes, optimizer = len(steps[0]), torch.optim.SGD(model.parameters(), rate)
    options = {"backward_passes_per_step": passes, "gradient_predivide_factor": hvd.size(), "groups": 1}
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), **options)
    for batches in steps:
        accumulated(model, batches)
        optimizer.synchronize()
        for each in model.parameters():
            each.grad /= passes
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        with optimizer.skip_synchronize():
            optimizer.step()
        # An evaluation, whose scores nothing follows, and a loss for the log.
        hvd.allreduce(torch.nn.functional.cross_entropy(model(batches[0][0]), batches[0][1]).detach())


def of_the_mean_by_hand(hvd, model, steps, rate, limit):
    for batches in steps:
        accumulated(model, [[torch.cat(each) for each in zip(*reversed(batches), strict=True)]])
        means = hvd.grouped_allreduce([each.grad for each in model.parameters()])
        norm = torch.cat([each.flatten() for each in means]).norm()
        with torch.no_grad():
            for each, mean in zip(model.parameters(), means, strict=True):
                each -= rate * mean * (limit / norm).clamp(max=1)
    return hvd.broadcast_object(norm.item(), root_rank=0)


@pytest.mark.horovod
@pytest.mark.parametrize("answer", [of_the_mean_by_hooks, of_the_mean_by_hand])
def test_gradients_may_be_averaged_and_clipped_in_any_way(answer):
    verdict = horovod.clip_and_accumulate(answer)
    assert verdict.state == "right", verdict


def test_a_converted_script_may_broadcast_an_object_each_epoch_and_save_a_copy():
    def train(hvd, model, dataset, rate, epochs, save):
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        for epoch in range(epochs):
            order = torch.Generator().manual_seed(hvd.broadcast_object(epoch, root_rank=0))
            mine = torch.randperm(len(dataset), generator=order)[hvd.rank() :: hvd.size()]
            for batch in mine.split(8):
                images, labels = torch.utils.data.default_collate([dataset[each] for each in batch])
                loss = torch.nn.functional.cross_entropy(model(images), labels)
                for each, gradient in zip(
                    model.parameters(), torch.autograd.grad(loss, [*model.parameters()]), strict=True
                ):
                    each.data -= rate * hvd.size() * hvd.allreduce(gradient)
        if hvd.rank() == 0:
            save(copy.deepcopy(model))
        return hvd.allreduce(loss.detach()).item()

    verdict = horovod.convert_pytorch(train)
    assert verdict.state == "right", verdict


def test_specs_may_be_tuples_and_name_dimensions_that_are_not_cut():
    specs = {"w1": (None, ("model",)), "b1": ["model"], "w2": ("model", None), "b2": None}
    specs |= {"batch": (("data",),), "hidden": ("data", "model")}
    assert tensorflow.shardings(specs).state == "right"
