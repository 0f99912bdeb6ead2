"""Tensor parallelism: equal to one process with any number of ranks, odd sizes, and counted bytes."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from workshop_utils.comm import threads
from workshop_utils.parallel.gpt import (
    GPT,
    Block,
    GPTSizes,
    batch_of,
    cross_entropy,
    gradient_error,
    kept_for_backward,
)
from workshop_utils.parallel.tensor import (
    Region,
    VocabularyParallelEmbedding,
    block_bytes_sent,
    ends_bytes_sent,
    finish_gradients,
    parallelize,
    vocabulary_parallel_cross_entropy,
)

pytestmark = pytest.mark.processes

# 7 heads, 28 hidden units to a quarter of 112, and 256 tokens: few of them divide by 2, 3, 4 or 5.
ODD = GPTSizes(layers=2, width=28, heads=7, sequence=9)
EVEN = GPTSizes(layers=2, width=24, heads=12, sequence=12)
TEXT = bytes(range(256)) * 3


def check_against_one_process(sizes, ranks, sequence_parallel, batch):
    """Loss and every gradient to 1e-6, on every rank; returns the bytes that each has sent for the passes."""
    tokens, targets = batch_of(TEXT, 1, batch, sizes.sequence)
    whole = GPT(sizes)
    whole_loss = cross_entropy(whole(tokens), targets)
    whole_loss.backward()

    def rank_main(communicator):
        region = Region(communicator, sequence_parallel)
        model = parallelize(GPT(sizes), region)
        communicator.traffic.reset()
        loss = vocabulary_parallel_cross_entropy(model(tokens), targets, region, sizes.vocabulary)
        loss.backward()
        sent = int(communicator.traffic.bytes_sent.sum())
        finish_gradients(model, region)
        assert loss.item() == pytest.approx(whole_loss.item(), abs=1e-6)
        assert gradient_error(model, parallelize(whole.gradients(), region)) < 1e-6
        return sent

    return threads.run(ranks, rank_main)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7])
def test_a_gpt_equals_one_process_where_heads_units_and_tokens_do_not_divide(ranks):
    check_against_one_process(ODD, ranks, sequence_parallel=False, batch=1)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_both_forms_equal_one_process_and_send_the_bytes_of_the_formula(ranks, sequence_parallel):
    sent = check_against_one_process(EVEN, ranks, sequence_parallel, batch=2)
    tokens = 2 * EVEN.sequence
    nbytes = tokens * EVEN.width * 4
    expected = EVEN.layers * block_bytes_sent(ranks, nbytes, sequence_parallel)
    expected += ends_bytes_sent(ranks, nbytes, tokens, sequence_parallel)
    assert sent == [round(expected)] * ranks


@pytest.mark.parametrize("scale", [1.0, 1e4])
def test_the_loss_over_a_cut_vocabulary_is_stable_for_large_logits(scale):
    torch.manual_seed(1)
    logits, targets = scale * torch.randn(2, 3, 10), torch.randint(10, (2, 3))
    leaf = logits.clone().requires_grad_()
    expected = cross_entropy(leaf, targets)
    expected.backward()

    def rank_main(communicator):
        region = Region(communicator)
        own = logits[..., region.own(10)].clone().requires_grad_()
        loss = vocabulary_parallel_cross_entropy(own, targets, region, 10)
        (2 * loss).backward()
        assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
        assert torch.allclose(own.grad, 2 * leaf.grad[..., region.own(10)], atol=1e-6)

    threads.run(3, rank_main)


def test_sequence_parallelism_keeps_a_share_of_all_activations_tensor_parallelism_of_some():
    ranks, shape = 4, (2, EVEN.sequence, EVEN.width)
    whole = kept_for_backward(Block(EVEN), torch.randn(shape, requires_grad=True))

    def rank_main(communicator):
        kept = []
        for sequence_parallel in (False, True):
            region = Region(communicator, sequence_parallel)
            block = parallelize(Block(EVEN), region)
            own = region.own(EVEN.sequence) if sequence_parallel else slice(None)
            kept.append(kept_for_backward(block, torch.randn(shape)[:, own].clone().requires_grad_()))
        return [nbytes / whole for nbytes in kept]

    for plain, cut in threads.run(ranks, rank_main):
        assert cut == pytest.approx(1 / ranks, rel=0.02)
        assert 1.5 / ranks < plain < 0.9


def test_a_sequence_without_equal_shares_and_more_ranks_than_heads_are_refused():
    tokens, _ = batch_of(TEXT, 1, 1, ODD.sequence)

    def rank_main(communicator):
        region = Region(communicator, sequence_parallel=True)
        with pytest.raises(ValueError, match=r"the sequence has 9 tokens; .* choose a multiple of 2"):
            parallelize(GPT(ODD), region)(tokens)
        with pytest.raises(ValueError, match="2 ranks cannot share 1 units of 24 features"):
            parallelize(GPT(GPTSizes(layers=1, width=8, heads=1, sequence=4)), region)

    threads.run(2, rank_main)


def test_parts_of_frozen_layers_are_frozen():
    def rank_main(communicator):
        model = GPT(EVEN)
        model.layers[:2].requires_grad_(False)
        parallelize(model, Region(communicator))
        flags = [{each.requires_grad for each in layer.parameters()} for layer in model.layers]
        assert flags == [{False}, {False}, {True}, {True}]

    threads.run(2, rank_main)


def tied(model):
    model.layers[-1].vocabulary.weight = model.layers[0].token.weight
    return model


def without_up(model):
    model.layers[2].mlp = nn.Sequential(nn.Linear(24, 24))
    return model


def of_two_tokens(_):
    embedding, *blocks, _ = GPT(replace(EVEN, vocabulary=2)).layers
    return nn.Sequential(*blocks, embedding)  # the blocks, which come first, could be cut


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (tied, "layers.0 shares a parameter with another layer"),
        (without_up, "mlp is a Sequential; to be cut it needs layers up and down"),
        (of_two_tokens, "3 ranks cannot share 2 units of 1 features"),
    ],
)
def test_a_model_that_cannot_be_cut_is_refused_before_any_of_it_is(change, message):
    def rank_main(communicator):
        model = change(GPT(EVEN))
        before = list(model.modules())
        with pytest.raises(ValueError, match=message):
            parallelize(model, Region(communicator))
        assert list(model.modules()) == before

    threads.run(3, rank_main)


def test_a_layer_in_two_places_is_cut_once():
    def rank_main(communicator):
        model = GPT(EVEN)
        model.layers.insert(0, model.layers[0])
        model.layers.insert(3, model.layers[2])
        layers = parallelize(model, Region(communicator)).layers
        assert layers[0] is layers[1]
        assert isinstance(layers[0], VocabularyParallelEmbedding)
        assert layers[2] is layers[3]

    threads.run(2, rank_main)


def test_the_cut_loss_leaves_out_the_targets_that_the_whole_one_does():
    targets = torch.tensor([[3, -100], [0, 9]])
    logits = torch.randn(2, 2, 10, dtype=torch.float64, requires_grad=True)
    expected = cross_entropy(logits, targets)
    (gradient,) = torch.autograd.grad(expected, logits)

    def rank_main(communicator):
        region = Region(communicator)
        own = logits.detach()[..., region.own(10)].requires_grad_()
        loss = vocabulary_parallel_cross_entropy(own, targets, region, 10)
        loss.backward()
        return torch.isclose(loss, expected), torch.allclose(own.grad, gradient[..., region.own(10)])

    assert threads.run(3, rank_main) == [(True, True)] * 3


@pytest.mark.parametrize("token", [-1, 10])
def test_tokens_outside_the_vocabulary_and_logits_of_another_one_are_refused(token):
    def rank_main(communicator):
        region, tokens = Region(communicator), torch.tensor([[9, token]])
        message = f" has {token}; each must be at least 0 and below 10"
        embedding = parallelize(GPT(GPTSizes(vocabulary=10)).layers[0], region)
        with pytest.raises(ValueError, match=f"tokens{message}"):
            embedding(tokens)
        with pytest.raises(ValueError, match=f"targets{message}"):
            vocabulary_parallel_cross_entropy(torch.zeros(1, 2, 5), tokens, region, 10)
        right = "of a vocabulary of 12 this rank's part is 6"
        with pytest.raises(ValueError, match=f"logits are for 5 tokens; {right}"):
            vocabulary_parallel_cross_entropy(torch.zeros(1, 2, 5), tokens.clamp(0, 9), region, 12)

    threads.run(2, rank_main)
