"""The small GPT, whole and in stages."""

import math

import pytest
import torch
from torch import nn

from workshop_utils.parallel.gpt import GPT, GPTSizes, Kept, batch_of, cross_entropy, gradient_error, manual

pytestmark = pytest.mark.processes

SIZES = GPTSizes(layers=3, width=12, heads=3, sequence=8)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_the_stages_one_after_the_other_are_the_model(count):
    model, (tokens, _) = GPT(SIZES), batch_of(manual(), 1, 2, SIZES.sequence)
    stages = model.stages(count)
    assert len(stages) == count
    assert torch.equal(nn.Sequential(*stages)(tokens), model(tokens))
    own = [parameter for stage in stages for parameter in stage.parameters()]
    assert [id(parameter) for parameter in own] == [id(parameter) for parameter in model.parameters()]


def test_a_byte_is_predicted_from_those_before_it_only():
    model, (tokens, _) = GPT(SIZES), batch_of(manual(), 1, 1, SIZES.sequence)
    changed = tokens.clone()
    changed[0, -1] = (changed[0, -1] + 1) % 256
    assert torch.equal(model(tokens)[0, :-1], model(changed)[0, :-1])
    assert not torch.equal(model(tokens)[0, -1], model(changed)[0, -1])


def test_batches_are_the_same_everywhere_and_targets_are_the_next_bytes():
    text = manual()
    tokens, targets = batch_of(text, 5, 3, 20)
    assert torch.equal(tokens, batch_of(text, 5, 3, 20)[0])
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert bytes(tokens[0].tolist()) in text
    with pytest.raises(ValueError, match="the text has 20 bytes; a sequence of 20 needs 21"):
        batch_of(text[:20], 1, 1, 20)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda: GPTSizes(layers=0), "layers is 0; it must be at least 1"),
        (lambda: GPTSizes(width=50, heads=12), "width is 50; it must be a multiple of the 12 heads"),
        (lambda: SIZES.check_cut(tensor=4), "heads is 3; 4 tensor-parallel ranks need at least one each"),
        (lambda: GPT(SIZES).gradients(), "token.weight has no gradient; gradients come from a backward pass"),
        (lambda: gradient_error(GPT(SIZES), GPT(SIZES)), "token.weight has no gradient of shape"),
    ],
)
def test_what_cannot_be_is_named(call, said):
    with pytest.raises(ValueError, match=said):
        call()


def test_a_gradient_that_is_no_number_does_not_hide_behind_others():
    model, expected = GPT(SIZES), GPT(SIZES)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    model.layers[0].token.weight.grad[0, 0] = math.nan
    assert math.isnan(gradient_error(model, expected))


def test_what_is_kept_for_backward_is_counted_until_it_is_let_go_of():
    model = GPT(SIZES)
    tokens, targets = batch_of(bytes(range(256)), 1, 2, SIZES.sequence)
    kept = Kept(model)
    with kept:
        losses = [cross_entropy(model(tokens.clone()), targets.clone()) for _ in range(2)]
    two = kept.now
    losses.pop().backward()
    assert kept.now == two / 2
    losses.pop().backward()
    assert (kept.now, kept.most) == (0, two)
    held = kept.keep(tokens), kept.keep(tokens[:1])  # the same memory
    assert kept.now == tokens.untyped_storage().nbytes()
    del held
    assert kept.now == 0
