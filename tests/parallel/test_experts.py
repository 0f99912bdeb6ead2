"""Experts on several ranks: equal to one process with any tokens, and counted bytes."""

import copy
import math

import pytest
import torch
from torch import nn

from workshop_utils.comm import threads
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.subset import Subset
from workshop_utils.parallel.experts import (
    Experts,
    Router,
    balance_loss,
    capacity,
    cut_experts,
    dropped_share,
    expert_bytes_sent,
    expert_parameters,
    update_bias,
)
from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, cross_entropy, gradient_error
from workshop_utils.parallel.tensor import Region, parallelize, vocabulary_parallel_cross_entropy

pytestmark = pytest.mark.processes

WIDTH, EXPERTS = 5, 12


def layer_of(k, capacity_factor=None, balance=0.0):
    torch.manual_seed(k)
    mlps = [nn.Sequential(nn.Linear(WIDTH, 7), nn.GELU(), nn.Linear(7, WIDTH)) for _ in range(EXPERTS)]
    layer = Experts(WIDTH, mlps, k, capacity_factor).double()
    layer.router.bias[3] = -9  # no token chooses it
    layer.balance = balance
    return layer


def tokens_of(ranks):
    """13 tokens between the ranks: the last of four or more has none."""
    counts = {1: [13], 2: [6, 7], 3: [9, 1, 3], 4: [5, 1, 7, 0]}[ranks]
    torch.manual_seed(ranks)
    return torch.randn(13, WIDTH, dtype=torch.float64).split(counts)


def apart(results, expected):
    """The largest difference, as a share of the largest entry."""
    return ((results - expected).abs().max() / expected.abs().max()).item()


def sum_the_rest(module, communicator):
    """Sum the gradients of all that is whole on every rank."""
    own = {id(parameter) for parameter in expert_parameters(module)}
    for parameter in module.parameters():
        if id(parameter) not in own:
            ring_all_reduce(communicator, parameter.grad.numpy())


def run_cut(layer, shares):
    """Results, gradients and counted bytes of the layer cut between as many ranks as there are shares of tokens."""

    def rank_main(communicator):
        part, x = cut_experts(copy.deepcopy(layer), communicator), shares[communicator.rank].clone()
        part.balance /= len(shares)  # it is for a mean over ranks; here gradients are summed
        result = part(x.requires_grad_())
        (result.sin().sum()).backward()
        sent = int(communicator.traffic.bytes_sent.sum())
        sum_the_rest(part, communicator)
        return result.detach(), x.grad, part, sent

    return threads.run(len(shares), rank_main)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("k", "balance"), [(1, 0.0), (3, 0.5), (EXPERTS, 0.5)])
def test_a_layer_equals_one_process_forward_and_backward_with_empty_ranks_and_experts(ranks, k, balance):
    shares, whole = tokens_of(ranks), layer_of(k, balance=balance)
    x = torch.cat(shares).requires_grad_()
    expected = whole(x)
    expected.sin().sum().backward()
    results = run_cut(layer_of(k, balance=balance), shares)
    assert apart(torch.cat([result for result, *_ in results]), expected) < 1e-12
    assert apart(torch.cat([gradient for _, gradient, *_ in results]), x.grad) < 1e-12
    for rank, (_, _, part, _) in enumerate(results):
        share = EXPERTS // ranks
        assert [*part.experts] == [str(each) for each in range(rank * share, (rank + 1) * share)]
        for number, mine in part.experts.items():
            for own, other in zip(mine.parameters(), whole.experts[number].parameters(), strict=True):
                assert apart(own.grad, other.grad) < 1e-12 or not (own.grad.any() or other.grad.any())
        assert apart(part.router.scores.weight.grad, whole.router.scores.weight.grad) < 1e-12


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("capacity_factor", [None, 0.5])
def test_a_rank_sends_the_bytes_of_the_formula(ranks, capacity_factor):
    shares, whole = tokens_of(ranks), layer_of(2, capacity_factor)
    loads = [torch.bincount(whole.router(x).chosen.flatten(), minlength=EXPERTS) for x in shares]
    loads = torch.stack(loads)
    kept = loads if capacity_factor is None else loads.minimum(capacity(loads, capacity_factor))
    sent = [nbytes for *_, nbytes in run_cut(whole, shares)]
    assert sent == expert_bytes_sent(kept, WIDTH * 8).tolist()


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.5])
def test_each_expert_takes_a_groups_first_choices_up_to_its_capacity_and_drops_the_rest(factor):
    shares, layer = tokens_of(3), layer_of(2, factor)
    results = run_cut(layer, shares)
    for x, (result, *_) in zip(shares, results, strict=True):
        chosen, weights, _ = layer.router(x)
        most = -(-2 * len(x) * factor // EXPERTS)
        expected, taken = torch.zeros_like(x), [0] * EXPERTS
        for choice in range(2):
            for token, expert in enumerate(chosen[:, choice].tolist()):
                if taken[expert] < most:
                    taken[expert] += 1
                    expected[token] += weights[token, choice] * layer.experts[str(expert)](x[token])
        assert torch.allclose(result, expected, rtol=1e-12, atol=1e-14)


def test_weights_are_probabilities_of_the_chosen_and_sum_to_one_above_one_choice():
    x = tokens_of(1)[0]
    for k in (1, 2, EXPERTS):
        chosen, weights, probabilities = layer_of(k).router(x)
        expected = probabilities.gather(1, chosen)
        expected = expected if k == 1 else expected / expected.sum(1, keepdim=True)
        torch.testing.assert_close(weights, expected)
        assert k == EXPERTS or 3 not in chosen  # whose bias keeps tokens away
    router = Router(1, 3, 2)
    router.scores.weight.data[:], router.bias[:] = torch.tensor([[0.0], [1], [2]]), torch.tensor([2, 3, 0])
    weights = router(torch.full((1, 1), 200.0)).weights  # probabilities of the two chosen underflow
    torch.testing.assert_close(weights, torch.tensor([[1.0, 0.0]]))


def test_the_balance_loss_is_one_where_all_are_used_alike_and_as_many_as_experts_where_one_is():
    alike = torch.full((6, 3), 1 / 3)
    assert balance_loss(alike, torch.tensor([4, 4, 4]), 2).item() == pytest.approx(1)
    one = torch.tensor([[1.0, 0.0, 0.0]]).repeat(6, 1)
    assert balance_loss(one, torch.tensor([6, 0, 0]), 1).item() == pytest.approx(3)
    assert balance_loss(one[:0], torch.tensor([0, 0, 0]), 1).item() == 0


@pytest.mark.parametrize(
    ("loads", "factor", "most", "dropped"),
    [([[50, 0]], 1.2, [30], 0.4), ([[10], [20]], 1.1, [11, 22], 0), ([[0, 0]], 1.5, [0], 0)],
)
def test_capacity_is_rounded_up_where_the_exact_product_is_no_whole_number(loads, factor, most, dropped):
    assert capacity(torch.tensor(loads), factor).flatten().tolist() == most
    assert dropped_share(torch.tensor(loads), factor) == dropped


def test_loads_count_what_tokens_ask_for_in_training_of_any_number_of_dimensions():
    layer, x = layer_of(2, capacity_factor=0.1), tokens_of(1)[0]
    expected = torch.bincount(layer.router(x).chosen.flatten(), minlength=EXPERTS)
    results = layer(x)
    with torch.no_grad():
        layer(x)
    x.requires_grad_()
    gradients = []
    for layer.balance in (0.0, 1.0):
        gradients += torch.autograd.grad(layer.eval()(x).sum(), x)
    assert torch.equal(*gradients)  # nor is balanced what is not trained
    assert layer.load.tolist() == expected.tolist()
    layer.capacity_factor = 100
    torch.testing.assert_close(layer(x[0]), layer(x)[0])
    assert layer(x.view(1, 13, 1, WIDTH)).shape == (1, 13, 1, WIDTH) != results.shape


def test_a_model_that_was_made_without_memory_has_no_bias_and_no_load():
    with torch.device("meta"):
        model = GPT(GPTSizes(layers=1, experts=2))
    model.to_empty(device="cpu")
    layer = model.layers[1].mlp
    layer.router.bias[:], layer.load[:] = 7, 7
    for parameter, value in model.initial_values(0):
        parameter.data.copy_(value)
    assert not layer.router.bias.any()
    assert not layer.load.any()
    expected = GPT(GPTSizes(layers=1, experts=2)).state_dict()
    torch.testing.assert_close(model.state_dict(), expected, rtol=0, atol=0)


@pytest.mark.parametrize("balance", [0.0, 0.5])
def test_results_may_be_changed_in_place(balance):
    layer, (x,) = layer_of(2, balance=balance), tokens_of(1)
    (layer(x) + x).sum().backward()
    expected = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    y = layer(x)
    y += x
    y.sum().backward()
    torch.testing.assert_close([parameter.grad for parameter in layer.parameters()], expected)


def test_autocast_and_copies_of_cut_layers_work_and_second_derivatives_are_refused():
    def rank_main(communicator):
        part = copy.deepcopy(cut_experts(layer_of(2).float(), communicator))
        x = torch.randn(3, WIDTH, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16):
            assert part(x).dtype == torch.float32
        (gradient,) = torch.autograd.grad(part(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            gradient.sum().backward()

    threads.run(2, rank_main)


def test_a_bias_falls_for_busy_experts_and_rises_for_idle_ones_by_the_loads_of_all_ranks():
    def rank_main(communicator):
        layers = nn.ModuleList([layer_of(1), Experts(4, [nn.Linear(4, 4) for _ in range(2)], 1)])
        layer, two = layers
        layer.router.bias.zero_()
        layer.load[communicator.rank], layer.load[2] = (
            10,
            20 + 20 * communicator.rank,
        )  # sum: 10, 10, 60, 0, …
        two.load[0], two.router.bias = 9, torch.tensor([0.5, 0.5], dtype=torch.bfloat16)
        update_bias(layers, communicator, rate=0.001)
        assert not layer.load.any()
        return layer.router.bias.tolist() + two.router.bias.tolist()

    mean = 80 / EXPERTS
    signs = [-1 if load > mean else 1 for load in (10, 10, 60, 0)] + [1] * (EXPERTS - 4)
    expected = [0.001 * sign for sign in signs] + [0.499, 0.501]
    assert threads.run(2, rank_main) == [pytest.approx(expected)] * 2


@pytest.mark.parametrize("tensor_ranks", [1, 2])
def test_a_gpt_of_experts_equals_one_process_also_where_each_expert_is_cut_by_tensor_ranks(tensor_ranks):
    sizes = GPTSizes(layers=2, width=28, heads=7, sequence=9, experts=4, k=2)
    tokens, targets = batch_of(bytes(range(256)) * 3, 1, 4, sizes.sequence)
    whole = GPT(sizes, dtype=torch.float64)
    expected = cross_entropy(whole(tokens), targets)
    expected.backward()

    def rank_main(communicator):
        group, rank = communicator.rank // tensor_ranks, communicator.rank % tensor_ranks
        others = Subset(communicator, [rank, rank + tensor_ranks])
        region = Region(Subset(communicator, [group * tensor_ranks + each for each in range(tensor_ranks)]))

        def cut(model):
            return parallelize(cut_experts(model, others), region)

        model, own = cut(GPT(sizes, dtype=torch.float64)), slice(2 * group, 2 * group + 2)
        loss = vocabulary_parallel_cross_entropy(model(tokens[own]), targets[own], region, sizes.vocabulary)
        (loss / 2).backward()
        sum_the_rest(model, others)
        assert gradient_error(model, cut(whole.gradients())) < 1e-12
        return loss.item()

    losses = threads.run(2 * tensor_ranks, rank_main)
    assert sum(losses) / len(losses) == pytest.approx(expected.item(), rel=1e-12)


def linears(count, width=4):
    return [nn.Linear(4, width) for _ in range(count)]


def tied(width=4):
    one, other = (nn.Linear(width, width) for _ in range(2))
    other.weight = one.weight
    return one, other


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda two: cut_experts(Experts(4, linears(3), 1), two), "experts is 3; 2 ranks .* a multiple of 2"),
        (lambda two: cut_experts(cut_experts(Experts(4, linears(2), 1), two), two), "were cut before"),
        (lambda two: cut_experts(nn.Linear(4, 4), two), "the Linear has no layer of parallel.experts"),
        (lambda two: update_bias(nn.Linear(4, 4), two), "the Linear has no layer of parallel.experts"),
        (lambda two: update_bias(cut_experts(layer_of(1), two)), "has 1 ranks, and 2 share the experts"),
        (
            lambda two: update_bias(cut_experts(layer_of(1), two), Subset(two, [two.rank])),
            "has 1 ranks, and 2 share the experts",
        ),
        (lambda two: Experts(4, [], 1), "experts is empty"),
        (
            lambda two: GPTSizes(experts=2, k=3),
            "k is 3; a token .* at least 1 and at most all of the 2 experts",
        ),
        (lambda two: GPTSizes(experts=-1), "experts is -1; it must be at least 0"),
        (lambda two: Router(4, 2, 0), "k is 0"),
        (lambda two: layer_of(1, capacity_factor=0), "capacity_factor is 0; it must be above 0"),
        (lambda two: layer_of(1, capacity_factor=math.inf), "capacity_factor is inf"),
        (lambda two: cut_experts(Experts(4, linears(1) * 4, 1), two), "experts share a trained parameter"),
        (lambda two: cut_experts(Experts(4, tied(), 1), two), "experts share a trained parameter"),
        (lambda two: Experts(4, linears(2, width=3), 1)(torch.zeros(5, 4)), r"\(5, 3\) of rows \(5, 4\)"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_sent(call, said):
    def rank_main(communicator):
        with pytest.raises(ValueError, match=said):
            call(communicator)
        assert not communicator.traffic.bytes_sent.any()

    threads.run(2, rank_main)


def test_experts_share_frozen_parameters_and_uncut_also_trained_ones():
    whole, shares = Experts(WIDTH, tied(WIDTH), 1).double(), tokens_of(2)
    whole(shares[0]).sum().backward()
    assert whole.experts["0"].weight.grad.any()
    whole.experts["0"].weight.requires_grad_(False)
    results = [result for result, *_ in run_cut(whole, shares)]
    torch.testing.assert_close(torch.cat(results), whole(torch.cat(shares)))


def test_what_is_refused_is_not_cut_in_part():
    def rank_main(communicator):
        model = GPT(GPTSizes(layers=2, sequence=4, experts=2))
        names = [*model.state_dict()]
        with pytest.raises(ValueError, match="sequence_parallel is True; experts are cut without it"):
            parallelize(model, Region(communicator, sequence_parallel=True))
        model.layers[2].mlp = Experts(48, linears(3), 1)
        with pytest.raises(ValueError, match="experts is 3"):
            cut_experts(model, communicator)
        model.layers[2].mlp = Experts(48, [nn.Linear(48, 48)] * 2, 1)
        with pytest.raises(ValueError, match="experts share"):
            cut_experts(model, communicator)
        assert [*model.state_dict()][:10] == names[:10]
        assert model.layers[1].mlp.communicator is None

    threads.run(2, rank_main)
