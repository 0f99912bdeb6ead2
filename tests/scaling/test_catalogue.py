"""Models and machines to plan with, as they were published."""

from workshop_utils.scaling import catalogue

# The numbers of parameters that were published, or that the models' public implementations count.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "bert-base": 109_514_298,  # with its head for masked-language modelling
    "bert-large": 335_174_458,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3.1-8b": 8_030_261_248,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.1-405b": 405_853_388_800,
}


def test_the_catalogue_counts_the_published_numbers_of_parameters():
    assert {name: model.parameters for name, model in catalogue.models().items()} == PUBLISHED
