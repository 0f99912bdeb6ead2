"""The tables of layers: compared with published counts, and with the models as libraries build them."""

import pytest

from workshop_utils.scaling.catalogue import Transformer
from workshop_utils.scaling.layers import MODELS, layers

PARAMETERS = {
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "vgg16": 138_357_544,
    "alexnet": 61_100_840,
    "inception_v3": 23_834_568,  # without the auxiliary classifier
    "bert-base": 109_482_240,  # without the head for masked-language modelling
    "gpt-1b": 1_313_626_112,
}
# Of one 224 x 224 image, 299 x 299 for Inception-v3; torchvision's documentation gives them as GFLOPS.
BILLION_MULTIPLY_ADDS = {
    "resnet50": 4.09,
    "resnet101": 7.80,
    "resnet152": 11.51,
    "vgg16": 15.47,
    "alexnet": 0.71,
    "inception_v3": 5.71,
}


def test_each_table_adds_up_to_the_published_number_of_parameters():
    assert {model: sum(layer.parameters for layer in layers(model)) for model in MODELS} == PARAMETERS


@pytest.mark.parametrize(("model", "published"), BILLION_MULTIPLY_ADDS.items())
def test_the_forward_pass_has_the_published_number_of_multiply_adds(model, published):
    assert sum(layer.flops for layer in layers(model)) / 2e9 == pytest.approx(published, rel=0.01)


def test_a_gpt_takes_three_forward_passes_of_work_to_train_on_an_example():
    flops_per_token = 3 * sum(layer.flops for layer in layers("gpt-1b")) / 1024
    shape = {"layers": 24, "width": 2048, "heads": 16, "sequence": 1024}
    sizes = Transformer(name="gpt", vocabulary=50257, positions=1024, tied=True, **shape)
    assert flops_per_token == pytest.approx(sizes.flops_per_token)
