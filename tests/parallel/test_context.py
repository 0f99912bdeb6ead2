"""Context parallelism: equal to one process forward and backward, odd lengths, and the bytes of the formulas."""

import itertools
import sys

import pytest
import torch

from workshop_utils import count_bytes
from workshop_utils.comm import threads
from workshop_utils.parallel import context
from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, causal_attention, cross_entropy, manual
from workshop_utils.parallel.mesh import mesh_of
from workshop_utils.parallel.tensor import Region, parallelize, vocabulary_parallel_cross_entropy

pytestmark = pytest.mark.processes

SIZES = GPTSizes(layers=2, width=24, heads=12, sequence=24)
NEAR = 1e-12  # times the largest entry, in float64


def far(got, expected, own=slice(None)):
    """The largest difference from the `own` tokens' part of `expected`, in units of the largest entry of all."""
    # The first token looks at itself alone: its query's gradient is 0, and so is all of one token's.
    return ((got - expected[..., own, :]).abs().max() / expected.abs().max().clamp(min=0.001)).item()


def attend_on(ranks, attention, length, zig_zag=False, heads=6):
    """The largest error of output and gradients on `ranks`, and what each has sent; with the bytes of own keys."""
    torch.manual_seed(length)
    # Large numbers: rows that a part of the keys rules, so that a wrong weight of a part is seen.
    leaves = [(3 * torch.randn(2, heads, length, 5, dtype=torch.float64)).requires_grad_() for _ in range(3)]
    of_mixed = torch.randn(2, heads, length, 5, dtype=torch.float64)
    mixed = causal_attention(*leaves)
    right = [mixed.detach(), *torch.autograd.grad(mixed, leaves, of_mixed)]

    def rank_main(communicator):
        own = context.own_tokens(length, communicator.rank, ranks, zig_zag)
        mine = [leaf.detach()[:, :, own].requires_grad_() for leaf in leaves]
        got = attention(*mine, communicator)
        got.backward(of_mixed[:, :, own])
        values = [got.detach(), *(each.grad for each in mine)]
        errors = [far(value, whole, own) for value, whole in zip(values, right, strict=True)]
        return max(errors), int(communicator.traffic.bytes_sent.sum()), mine[1].nbytes

    errors, sent, nbytes = zip(*threads.run(ranks, rank_main), strict=True)
    return max(errors), sent, nbytes[0]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize(("zig_zag", "own"), [(False, 7), (False, 1), (True, 10), (True, 2)])
def test_a_ring_equals_whole_attention_and_sends_the_bytes_of_the_formula(ranks, zig_zag, own):
    def ring(query, key, value, communicator):
        return context.ring_attention(query, key, value, communicator, zig_zag)

    error, sent, nbytes = attend_on(ranks, ring, ranks * own, zig_zag)
    assert error <= NEAR
    assert sent == (context.ring_attention_bytes_sent(ranks, nbytes),) * ranks


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("own", [1, 7])
def test_ulysses_equals_whole_attention_and_sends_the_bytes_of_the_formula(ranks, own):
    error, sent, nbytes = attend_on(ranks, context.ulysses_attention, ranks * own, heads=12)
    assert error <= NEAR
    assert sent == (context.ulysses_bytes_sent(ranks, nbytes),) * ranks


def counted_by_the_kernel(communicator):
    """Bytes that left for one attention, forward and backward, and the formula's, of the ring and of Ulysses."""
    counts = []
    for attention, formula in (
        (context.ring_attention, context.ring_attention_bytes_sent),
        (context.ulysses_attention, context.ulysses_bytes_sent),
    ):
        mine = [torch.randn(1, 3, 50, 24, dtype=torch.float64).requires_grad_() for _ in range(3)]
        with count_bytes(communicator.barrier) as counted:
            attention(*mine, communicator).sum().backward()
        counts.append((counted.sent, formula(communicator.size, mine[1].nbytes)))
    return counts


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's counters are Linux's")
def test_the_kernel_counts_the_bytes_of_the_formulas(ranks):
    for sent, formula in itertools.chain(*ranks.run(3, counted_by_the_kernel)):
        assert formula <= sent <= 1.02 * formula


@pytest.mark.parametrize("attention", [context.ring_attention, context.ulysses_attention])
def test_where_entries_lie_in_memory_and_float32_do_not_matter(attention):
    *leaves, of_mixed = torch.randn(4, 1, 2, 7, 4).mT.contiguous().mT
    leaves = [each.requires_grad_() for each in leaves]
    mixed = causal_attention(*leaves)
    right = torch.autograd.grad(mixed, leaves, of_mixed)

    def rank_main(communicator):
        got = attention(*leaves, communicator)
        gradients = torch.autograd.grad(got, leaves, of_mixed)
        return [far(*pair) for pair in zip((got, *gradients), (mixed, *right), strict=True)]

    assert max(threads.run(1, rank_main)[0]) <= 1e-6


def test_ulysses_lets_a_head_of_keys_serve_several_queries_heads():
    query, key, value = (torch.randn(1, heads, 6, 4, dtype=torch.float64) for heads in (4, 2, 2))
    repeated = (each.repeat_interleave(2, dim=1) for each in (key, value))
    expected = causal_attention(query, *repeated)

    def rank_main(communicator):
        own = context.own_tokens(6, communicator.rank, 2, zig_zag=False)
        mine = (each[:, :, own] for each in (query, key, value))
        return far(context.ulysses_attention(*mine, communicator), expected, own)

    assert max(threads.run(2, rank_main)) <= NEAR


def test_one_rank_has_all_tokens_in_their_order_of_odd_sequences_too():
    assert context.own_tokens(49, 0, 1).tolist() == list(range(49))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_zig_zag_deals_every_token_out_once_and_all_ranks_have_as_many_keys_to_look_at(ranks):
    length = 6 * ranks
    own = [context.own_tokens(length, rank, ranks) for rank in range(ranks)]
    assert sorted(torch.cat(own).tolist()) == list(range(length))
    assert {(places + 1).sum().item() for places in own} == {length * (length + 1) / 2 / ranks}


@pytest.mark.parametrize("how", ["ring", "ulysses"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_gpt_on_parts_of_its_context_has_the_loss_and_gradients_of_one_process(how, ranks):
    length = SIZES.sequence  # 3 tokens a chunk of 8
    tokens, targets = batch_of(manual(), 1, 2, length)
    whole = GPT(SIZES, dtype=torch.float64)
    whole_loss = cross_entropy(whole(tokens), targets)
    whole_loss.backward()

    def rank_main(communicator):
        model = GPT(SIZES, dtype=torch.float64)
        own = context.cut_context(model, communicator, length, how)
        loss = cross_entropy(model(tokens[:, own]), targets[:, own]) / ranks
        loss.backward()
        return loss.item(), [parameter.grad for parameter in model.parameters()]

    losses, gradients = zip(*threads.run(ranks, rank_main), strict=True)
    assert sum(losses) == pytest.approx(whole_loss.item(), rel=1e-12)
    for parts, parameter in zip(zip(*gradients, strict=True), whole.parameters(), strict=True):
        assert far(torch.atleast_2d(sum(parts)), torch.atleast_2d(parameter.grad)) <= NEAR


def test_tensor_and_context_parallelism_are_put_together_in_either_order():
    tokens, targets = batch_of(manual(), 2, 1, SIZES.sequence)
    whole = cross_entropy(GPT(SIZES, dtype=torch.float64)(tokens), targets).item()

    def rank_main(communicator):
        losses = []
        for context_first in (True, False):
            groups = mesh_of(communicator, data=2, tensor=2)  # the ranks of `data` share a context here
            model, region = GPT(SIZES, dtype=torch.float64), Region(groups.tensor, sequence_parallel=True)
            if not context_first:
                parallelize(model, region)
            own = context.cut_context(model, groups.data, SIZES.sequence)
            if context_first:
                parallelize(model, region)
            logits = model(tokens[:, own])
            loss = vocabulary_parallel_cross_entropy(logits, targets[:, own], region, SIZES.vocabulary)
            losses.append(loss.item())
        return losses

    for first, second in zip(*threads.run(4, rank_main)[::2], strict=True):
        assert (first + second) / 2 == pytest.approx(whole, rel=1e-12)


def a_tensor(heads=4, tokens=6, batch=1, dtype=torch.float32):
    return torch.zeros(batch, heads, tokens, 2, dtype=dtype)


def cut_model(communicator, is_tensor_parallel=False):
    model = GPT(SIZES)
    context.cut_context(model, communicator, 24)
    return parallelize(model, Region(communicator)) if is_tensor_parallel else model


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda two: context.own_tokens(10, 0, 4, False), "length is 10; 4 ranks .* choose a multiple of 4"),
        (lambda two: context.own_tokens(12, 0, 4), "length is 12; 4 ranks .* two each.* a multiple of 8"),
        (lambda two: context.own_tokens(0, 0, 2), "length is 0; .* a multiple of 4"),
        (lambda two: context.own_tokens(8, 2, 2), "rank is 2; .* at most 1"),
        (lambda two: context.ring_attention(*[a_tensor()] * 3, two, is_causal=False), "is_causal is False"),
        (lambda two: context.ulysses_attention(*[a_tensor()] * 3, two, False), "is_causal is False"),
        (
            lambda two: context.ring_attention(*[a_tensor(tokens=5)] * 3, two),
            "5 tokens; a zig-zag share .* even",
        ),
        (
            lambda two: context.ring_attention(a_tensor(), a_tensor(2), a_tensor(2), two),
            "query has 4 heads and key 2; repeat",
        ),
        *(
            (lambda two, each=each, way=way: way(*each, two), said)
            for way in (context.ring_attention, context.ulysses_attention)
            for each, said in (
                (
                    [a_tensor(), a_tensor(), a_tensor(1)],
                    r"value is .* of shape \(1, 1, 6, 2\); .* \(1, 4, 6, 2\)",
                ),
                (
                    [a_tensor(), *[a_tensor(tokens=8)] * 2],
                    r"key is .* of shape \(1, 4, 8, 2\); .* \(1, 4, 6, 2\)",
                ),
                ([a_tensor(batch=3), *[a_tensor()] * 2], r"key is .* of shape .*; .* \(3, 4, 6, 2\)"),
                ([a_tensor(), *[a_tensor(dtype=torch.float64)] * 2], "key is torch.float64 .* torch.float32"),
                ([a_tensor(tokens=0)] * 3, r"query has the shape \(1, 4, 0, 2\); .* at least 1"),
                ([a_tensor()[0]] * 3, r"query has the shape \(4, 6, 2\)"),
            )
        ),
        (
            lambda two: context.ring_attention(*[a_tensor(dtype=torch.bfloat16)] * 3, two),
            "query is torch.bfloat16; the ring needs float32 or float64",
        ),
        (
            lambda two: context.ulysses_attention(a_tensor(4), a_tensor(6), a_tensor(6), two),
            "query has 4 heads and key 6; each",
        ),
        (lambda two: context.ulysses_attention(*[a_tensor(3)] * 3, two), "query has 3 heads; .* 2 ranks"),
        (
            lambda two: context.ulysses_attention(a_tensor(), a_tensor(1), a_tensor(1), two),
            "key has 1 heads; .* or the ring",
        ),
        (lambda two: context.cut_context(GPT(SIZES), two, 48), "length is 48; .* positions for 24 tokens"),
        (
            lambda two: context.cut_context(GPT(SIZES), two, 24, "Ring"),
            "how is 'Ring'; .* one of ring, ulysses",
        ),
        (lambda two: context.cut_context(torch.nn.Linear(1, 1), two, 24), "no parallel.gpt.Attention"),
        (lambda two: cut_model(two)(torch.zeros(1, 1, dtype=int)), "has 1 tokens; after cut_context .* 12"),
        (
            lambda two: cut_model(two, True)(torch.zeros(1, 24, dtype=int)),
            "has 24 tokens; after cut_context .* 12",
        ),
    ],
)
def test_what_cannot_be_cut_is_named_before_anything_is_sent(call, said):
    def rank_main(communicator):
        with pytest.raises(ValueError, match=said):
            call(communicator)
        return int(communicator.traffic.bytes_sent.sum())

    assert threads.run(2, rank_main) == [0, 0]
