"""A mesh's groups, and the gradients that are summed, counted and clipped over them."""

import copy
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from workshop_utils.comm import threads
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel import mesh
from workshop_utils.parallel.data import NaiveDataParallel, OverlappedDataParallel
from workshop_utils.parallel.experts import Experts, cut_experts, expert_parameters
from workshop_utils.parallel.fully_sharded import FullySharded
from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, cross_entropy, gradient_error, manual
from workshop_utils.parallel.tensor import (
    ColumnParallelLinear,
    Region,
    parallelize,
    vocabulary_parallel_cross_entropy,
)

pytestmark = pytest.mark.processes

SIZES = GPTSizes(layers=3, width=12, heads=3, sequence=8, experts=12, k=2)
DIRECTIONS = ("data", "tensor", "pipeline", "context", "experts")
# data, tensor, pipeline, context, experts
SHAPES = [
    (1, 1, 1, 1, 1),
    (2, 2, 2, 2, 2),
    (3, 1, 2, 1, 3),
    (1, 3, 3, 1, 1),
    (2, 3, 1, 2, 4),
    (2, 2, 1, 3, 2),
]


def whole_gradients(sizes=SIZES):
    model = GPT(sizes, seed=1, dtype=torch.float64)
    tokens, targets = batch_of(manual(), 1, 6, sizes.sequence)
    cross_entropy(model(tokens), targets).backward()
    return model


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_the_groups_of_a_mesh_meet_in_one_rank_and_who_talk_most_are_neighbours(sizes):
    by_name = dict(zip(DIRECTIONS, sizes, strict=True))

    def groups_of(communicator):
        members = {}
        for name, group in mesh.mesh_of(communicator, **by_name)._asdict().items():
            numbers = np.zeros(group.size, np.int64)
            numbers[group.rank] = communicator.rank
            ring_all_reduce(group, numbers)
            members[name] = numbers.tolist()
        return members

    for rank, of in enumerate(threads.run(math.prod(sizes[:4]), groups_of)):
        assert {name: len(of[name]) for name in DIRECTIONS} == by_name
        lines = [{*of[name]} for name in DIRECTIONS[:4]]
        assert [one & other for one in lines for other in lines if one is not other] == [{rank}] * 12
        assert of["tensor"] == list(range(of["tensor"][0], of["tensor"][0] + sizes[1]))
        assert {*of["data"], *of["context"], *of["experts"], *of["expert_replicas"]} <= {*of["replicas"]}
        assert {*of["experts"]} & {*of["expert_replicas"]} == {rank}
        assert len(of["experts"]) * len(of["expert_replicas"]) == len(of["replicas"]) == sizes[0] * sizes[3]
        first = of["replicas"].index(of["experts"][0])
        assert of["replicas"][first : first + sizes[4]] == of["experts"]


@pytest.mark.parametrize("sizes", SHAPES, ids=str)
def test_gradients_are_clipped_as_one_process_clips_them(sizes):
    whole = whole_gradients()
    gradients = whole.gradients()
    norm = nn.utils.clip_grad_norm_(whole.parameters(), 0.1).item()
    clipped = whole.gradients()

    def program(communicator):
        groups = mesh.mesh_of(communicator, **dict(zip(DIRECTIONS, sizes, strict=True)))
        region, stage = Region(groups.tensor), groups.pipeline.rank
        wholes = (cut_experts(copy.deepcopy(each), groups.experts) for each in (gradients, clipped))
        parts = (whole.stages(groups.pipeline.size)[stage] for whole in wholes)
        part, expected = (parallelize(each, region) for each in parts)
        of_experts = {*expert_parameters(part)}
        for parameter in part.parameters():  # of its own replica, or of the tokens of its expert group
            is_expert = parameter in of_experts
            alike = groups.expert_replicas if is_expert else groups.replicas
            parameter.grad = parameter.detach() * (groups.experts.size if is_expert else 1)
            parameter.grad += alike.rank - (alike.size - 1) / 2
        mesh.synchronise(part, groups)
        norms = {mesh.clip_gradients(part, groups, longest) for longest in (1e3, math.inf, 0.1)}
        return norms, gradient_error(part, expected)

    norms, errors = zip(*threads.run(math.prod(sizes[:4]), program), strict=True)
    (got,) = set.union(*norms)  # to the last bit
    assert got == pytest.approx(norm, rel=1e-12)
    assert max(errors) <= 1e-12 * norm


@pytest.mark.parametrize("experts", [0, 12])
def test_shards_count_on_every_replica_and_what_another_stage_counts_does_not(experts):
    whole = whole_gradients(replace(SIZES, experts=experts))
    gradients, norm = whole.gradients(), nn.utils.clip_grad_norm_(whole.parameters(), math.inf).item()

    def program(communicator):
        groups = mesh.mesh_of(communicator, data=3, tensor=2)
        part = parallelize(copy.deepcopy(gradients), Region(groups.tensor))
        own = {name: parameter.detach().clone() for name, parameter in part.named_parameters()}
        with FullySharded(part, groups.replicas, units=part.layers) as model:
            for name, each in model.sharded.items():
                each.shard.grad = each.cut(own[name])
            stages, everything = nn.ModuleList([model]), {*model.parameters()}
            mesh.synchronise(stages, groups)  # shards are means already
            return mesh.gradient_norm(stages, groups), mesh.gradient_norm(stages, groups, everything)

    assert threads.run(6, program) == [(pytest.approx(norm, rel=1e-12), 0.0)] * 6


@pytest.mark.parametrize("parallel", [FullySharded, OverlappedDataParallel])
def test_tensor_parallel_layers_over_replicas_that_communicate_during_a_pass_get_the_gradients_of_one_process(
    parallel,
):
    sizes = GPTSizes(layers=3, width=96, heads=4, sequence=24)
    batch = batch_of(manual(), 1, 6, sizes.sequence)
    whole = whole_gradients(sizes)

    def program(communicator):
        groups = mesh.mesh_of(communicator, data=2, tensor=2)
        region = Region(groups.tensor)
        part = parallelize(GPT(sizes, seed=1, dtype=torch.float64), region)
        right = dict(parallelize(whole.gradients(), region).named_parameters())
        tokens, targets = (each.chunk(2)[groups.data.rank] for each in batch)
        pieces = {"units": part.layers} if parallel is FullySharded else {"bucket_bytes": 1}
        with parallel(part, groups.replicas, **pieces) as model:
            for _ in range(5):  # not every one would meet the other groups' messages
                model.zero_grad()
                logits = model(tokens)
                vocabulary_parallel_cross_entropy(logits, targets, region, sizes.vocabulary).backward()
                if parallel is OverlappedDataParallel:
                    model.synchronise()
            pairs = [(each.grad, right[name]) for name, each in part.named_parameters()]
            if parallel is FullySharded:
                pairs = [(each.shard.grad, each.cut(right[name])) for name, each in model.sharded.items()]
            return len(pairs), all(torch.allclose(*pair, rtol=1e-12, atol=1e-15) for pair in pairs)

    assert threads.run(4, program) == [(len([*whole.parameters()]), True)] * 4


def cut_among(communicator):
    return [
        cut_experts(Experts(3, [nn.Linear(3, 3), nn.Linear(3, 3)], 1), communicator),
        ColumnParallelLinear(nn.Linear(3, 2), Region(communicator)),
        sharded := FullySharded(nn.Linear(3, 2), communicator),
        sharded.module,
    ]


@pytest.mark.parametrize("kind", [NaiveDataParallel, FullySharded])
@pytest.mark.parametrize("layer", [0, 1, 2, 3])
def test_data_parallelism_refuses_layers_that_are_cut(kind, layer):
    def program(communicator):
        part = cut_among(communicator)[layer]
        before = communicator.traffic.bytes_sent.sum()
        with pytest.raises(ValueError, match=r"module is cut among 2 ranks; .*, or use mesh\.synchronise"):
            kind(part, communicator)
        assert communicator.traffic.bytes_sent.sum() == before

    threads.run(2, program)


@pytest.mark.parametrize("kind", [NaiveDataParallel, OverlappedDataParallel])
def test_shards_over_one_direction_may_have_replicas_over_another(kind):
    """Hybrid sharding."""
    torch.manual_seed(0)
    whole, inputs = nn.Linear(5, 3, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    whole(inputs).square().mean().backward()

    def program(communicator):
        groups, own = mesh.mesh_of(communicator, data=2, context=2), inputs[communicator.rank].unsqueeze(0)
        sharded = FullySharded(copy.deepcopy(whole), groups.context)
        with sharded, kind(sharded, groups.data) as model:
            model(own).square().mean().backward()
            model.synchronise()
        return [
            torch.allclose(each.shard.grad, each.cut(getattr(whole, name).grad), rtol=1e-12, atol=1e-15)
            for name, each in sharded.sharded.items()
        ]

    assert threads.run(4, program) == [[True, True]] * 4


@pytest.mark.parametrize("is_expert", [False, True])
@pytest.mark.parametrize("largest", [3.0, math.inf, math.nan])
def test_gradients_are_clipped_as_pytorch_clips_them_and_none_counts_as_zeros(largest, is_expert):
    def program(communicator):
        layers, alone = nn.Linear(2, 1), nn.Linear(2, 1)
        module = Experts(2, [layers], 1) if is_expert else layers
        layers.weight.grad = torch.tensor([[largest, 4.0]])
        alone.weight.grad, alone.bias.grad = layers.weight.grad / 2, torch.tensor([2.0])
        if communicator.rank:
            layers.weight.grad, layers.bias.grad = None, torch.tensor([4.0])
        groups = mesh.mesh_of(communicator, data=2)
        mesh.synchronise(module, groups)
        mesh.clip_gradients(module, groups, 1.0)
        nn.utils.clip_grad_norm_(alone.parameters(), 1.0)
        for ours, theirs in zip(layers.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(ours.grad, theirs.grad, equal_nan=True)
        module.zero_grad()
        layers.bias.grad = torch.tensor([1e30])  # its square is no float32
        assert mesh.gradient_norm(module, groups) == pytest.approx(1e30)

    threads.run(2, program)


def test_what_is_cut_over_other_ranks_than_the_mesh_s_is_refused():
    def program(communicator):
        groups = mesh.mesh_of(communicator, data=2, context=2, experts=2)
        layer = Experts(2, [nn.Linear(2, 2), nn.Linear(2, 2)], k=1)
        with pytest.raises(ValueError, match=r"of Experts has 1 ranks; .* mesh.experts, which has 2"):
            mesh.synchronise(layer, groups)
        others = cut_experts(copy.deepcopy(layer), groups.expert_replicas)  # as many ranks, but others
        with pytest.raises(ValueError, match=r"of Experts has 2 ranks; .* mesh.experts, which has 2"):
            mesh.synchronise(others, groups)
        with FullySharded(nn.Linear(3, 3), groups.data) as model:
            right = r"of FullySharded has 2 ranks; cut it over mesh.replicas, which has 4: \[0, 1, 2, 3\]"
            with pytest.raises(ValueError, match=right):
                mesh.gradient_norm(nn.ModuleList([model]), groups)

    threads.run(4, program)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: mesh.check(8, 2, 2, 3), "2 × 2 × 3 × 1; it must make 8, the number of workers"),
        (lambda: mesh.check(1, -1, -1), "data is -1; it must be at least 1, and whole"),
        (lambda: mesh.check(2, context=2.0), "context is 2.0; it must be at least 1, and whole"),
        (
            lambda: mesh.check(4, 2, context=2, experts=3),
            "experts is 3 ranks; it must divide data × context, 4",
        ),
        (lambda: mesh.check(1, experts=0), "experts is 0; it must be at least 1"),
        (lambda: mesh.clip_gradients(nn.Linear(1, 1), None, 0.0), "max_norm is 0.0; it must be above zero"),
        (lambda: mesh.clip_gradients(nn.Linear(1, 1), None, math.nan), "max_norm is nan; it must be above"),
        (lambda: mesh.clip_gradients(nn.Linear(1, 1), None, None), "max_norm is None; it must be above"),
    ],
)
def test_what_no_mesh_can_be_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()
