"""Models and machines to plan with: as they were published, or as files describe them."""

import json

import pytest

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
LLAMA = {
    "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
    "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
    "max_position_embeddings": 131072, "tie_word_embeddings": False,
}  # fmt: skip
BERT = {
    "model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
    "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512,
}  # fmt: skip


def test_the_catalogue_counts_the_published_numbers_of_parameters():
    assert {name: model.parameters for name, model in catalogue.models().items()} == PUBLISHED


@pytest.mark.parametrize(
    ("config", "name", "sequence"), [(LLAMA, "llama-3.1-8b", 8192), (BERT, "bert-base", 512)]
)
def test_a_configuration_of_hugging_face_is_read(tmp_path, config, name, sequence):
    file = tmp_path / "config.json"
    file.write_text(json.dumps(config))
    model = catalogue.model(file)
    assert (model.parameters, model.sequence) == (PUBLISHED[name], sequence)
