"""What a worker holds: beside ZeRO's table, Korthikanti's formulas, and real models, byte by byte."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from workshop_utils.comm import threads
from workshop_utils.comm.communicator import Communicator
from workshop_utils.launchers.local import Local
from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, cross_entropy, kept_for_backward, manual
from workshop_utils.parallel.schedule import held, interleaved, one_f_one_b
from workshop_utils.parallel.tensor import Region, parallelize
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.catalogue import CatalogueError, Transformer
from workshop_utils.scaling.memory import zero_memory
from workshop_utils.scaling.worker_memory import (
    RECOMPUTE,
    Layout,
    block_activation_nbytes,
    blocks_of_stages,
    stage_parameters,
    state_memory,
    worker_memory,
)

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
GPT3 = Transformer(
    name="GPT-3", layers=96, width=12288, heads=96, sequence=2048, vocabulary=51200, positions=2048, tied=True
)  # fmt: skip
SIZES = GPTSizes(layers=4, width=64, heads=4, sequence=33, vocabulary=100)


def like(sizes: GPTSizes) -> Transformer:
    """The workshop's own GPT, for the formulas; it has no dropout."""
    return Transformer(
        name="ours", layers=sizes.layers, width=sizes.width, heads=sizes.heads, sequence=sizes.sequence,
        vocabulary=sizes.vocabulary, positions=sizes.sequence, dropout=False,
    )  # fmt: skip


def numel(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


# Models of the catalogue.


def test_the_catalogue_counts_the_published_numbers_of_parameters() -> None:
    assert {name: model.parameters for name, model in catalogue.models().items()} == PUBLISHED


def test_a_configuration_of_hugging_face_is_read(tmp_path) -> None:
    llama = {
        "model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256,
        "max_position_embeddings": 131072, "tie_word_embeddings": False,
    }  # fmt: skip
    bert = {
        "model_type": "bert", "num_hidden_layers": 12, "hidden_size": 768, "num_attention_heads": 12,
        "intermediate_size": 3072, "vocab_size": 30522, "max_position_embeddings": 512,
    }  # fmt: skip
    gpt2 = {
        "model_type": "gpt2",
        "n_layer": 12,
        "n_embd": 768,
        "n_head": 12,
        "n_positions": 1024,
        "vocab_size": 50257,
    }
    for config, name in ((llama, "llama-3.1-8b"), (bert, "bert-base"), (gpt2, "gpt2")):
        file = tmp_path / "config.json"
        file.write_text(json.dumps(config))
        assert catalogue.model(file).parameters == PUBLISHED[name]
    assert catalogue.model(file).sequence == 1024


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("layers: 2\nwidth: 10\nheads: 3\nsequence: 8\nvocabulary: 5", "width is 10; it must be a multiple of heads"),
        ("layers: 2\nwidth: 12\nheads: 3\nsequence: 8\nvocabulary: 5\nlayer: 4", "model.layer: there is no such field"),
        ("layers: two\nwidth: 12\nheads: 3\nsequence: 8\nvocabulary: 5", "model.layers is 'two'"),
        ("layers: 2\nwidth: 12\nheads: 3\nvocabulary: 5", "model.sequence: it is missing"),
        ("- 1", "must have names and what belongs to them"),
        (": :", "cannot be read"),
    ],
)  # fmt: skip
def test_a_model_that_is_badly_described_is_named_with_its_field(tmp_path, content, message) -> None:
    file = tmp_path / "model.yaml"
    file.write_text(content)
    with pytest.raises(CatalogueError, match=message):
        catalogue.model(file)


def test_an_unknown_model_is_answered_with_the_nearest_name(tmp_path) -> None:
    with pytest.raises(CatalogueError, match=r"model is 'llama3-8b'; did you mean llama-3\.1-8b\?"):
        catalogue.model("llama3-8b")
    with pytest.raises(CatalogueError, match="'zzz'; known are gpt2,"):
        catalogue.model("zzz")
    with pytest.raises(CatalogueError, match=r"nowhere\.yaml cannot be read"):
        catalogue.model(tmp_path / "nowhere.yaml")
    file = tmp_path / "config.json"
    file.write_text('{"model_type": "t5"}')
    with pytest.raises(CatalogueError, match="model_type is 't5'; it must be one of gpt2, bert, llama"):
        catalogue.model(file)


# Parameters, gradients, optimizer state.


@pytest.mark.parametrize(("stage", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.9)])
def test_it_equals_the_table_of_the_zero_paper(stage: int, gigabytes: float) -> None:
    # Rajbhandari et al. (2020), figure 1: 7.5 billion parameters, 64 GPUs, Adam in mixed precision.
    assert state_memory(7.5e9, 64, stage).total / 1e9 == pytest.approx(gigabytes, abs=0.05)


@given(st.integers(1, 64), st.sampled_from([0, 1, 2, 3]), st.sampled_from(["sgd", "momentum", "adam"]))
@settings(max_examples=30)
def test_in_float32_it_equals_the_formula_of_lesson_07(data: int, stage: int, optimizer: str) -> None:
    ours, known = (
        state_memory(1e6, data, stage, "float32", optimizer),
        zero_memory(1e6, data, stage, optimizer),
    )
    assert ours.parameters == known.parameters
    assert ours.gradients == known.gradients
    assert ours.optimizer == known.optimizer


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_ends_of_a_pipeline_have_the_parameters_that_are_counted(stages: int) -> None:
    first, last = stage_parameters(like(SIZES), pipeline=stages)
    parts = GPT(SIZES).stages(stages)
    assert (numel(parts[0]), numel(parts[-1])) == (first, last)


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_tensor_parallel_worker_has_the_parameters_that_are_counted(ranks: int) -> None:
    def rank_main(communicator: Communicator) -> int:
        return numel(parallelize(GPT(SIZES), Region(communicator)))

    first, _ = stage_parameters(like(SIZES), tensor=ranks)
    assert threads.run(ranks, rank_main) == [first] * ranks


def test_blocks_that_do_not_divide_are_left_to_the_last_stage() -> None:
    llama = catalogue.model("llama-3.1-405b")  # 126 layers
    assert blocks_of_stages(llama, 16) == (8, 6)
    assert blocks_of_stages(llama, 16, 8) == (8, 6)
    assert blocks_of_stages(llama, 1) == (126, 126)


HOLDS = """
    import torch
    from workshop_utils import place
    from workshop_utils.comm import tcp
    from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, cross_entropy, manual
    from workshop_utils.parallel.tensor import Region, finish_gradients, parallelize
    from workshop_utils.parallel.tensor import vocabulary_parallel_cross_entropy

    here = place.here()
    torch.set_num_threads(1)
    sizes = GPTSizes(layers=2, width=64, heads=4, sequence=32)
    tokens, targets = batch_of(manual(), 1, 2, sizes.sequence)
    with tcp.connect(*place.rendezvous()) as communicator:
        region = Region(communicator)
        model = parallelize(GPT(sizes), region)
        optimizer = torch.optim.Adam(model.parameters())
        vocabulary_parallel_cross_entropy(model(tokens), targets, region, sizes.vocabulary).backward()
        finish_gradients(model, region)
        optimizer.step()
        kept = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v) and v.dim()]
        place.report(
            step=1,
            parameters_nbytes=sum(p.nbytes for p in model.parameters()),
            gradients_nbytes=sum(p.grad.nbytes for p in model.parameters()),
            optimizer_nbytes=sum(v.nbytes for v in kept),
        )
        communicator.barrier()
"""


def test_processes_that_train_a_gpt_tensor_parallel_hold_what_is_predicted(make_job) -> None:
    with Local(warm=True).launch(make_job(HOLDS, strategy="ring", workers=2)) as run:
        records = [record for record in run.wait().records if "optimizer_nbytes" in record]
    model = like(GPTSizes(layers=2, width=64, heads=4, sequence=32))
    expected = state_memory(stage_parameters(model, tensor=2)[0], dtype="float32")
    assert len(records) == 2
    for record in records:
        assert record["parameters_nbytes"] == expected.parameters
        assert record["gradients_nbytes"] == expected.gradients
        assert record["optimizer_nbytes"] == expected.optimizer


# Activations.

S, B, H, A = GPT3.sequence, 2, GPT3.width, GPT3.heads


@pytest.mark.parametrize("t", [1, 2, 8])
@pytest.mark.parametrize(
    ("sequence_parallel", "recompute", "formula"),
    [
        (False, "none", lambda t: S * B * H * (10 + 24 / t + 5 * A * S / (H * t))),  # equation 2
        (True, "none", lambda t: S * B * H / t * (34 + 5 * A * S / H)),  # equation 4
        (True, "selective", lambda t: S * B * H / t * 34),  # equation 6
        (False, "selective", lambda t: S * B * H * (10 + 24 / t)),
        (False, "full", lambda t: 2 * S * B * H),
    ],
)
def test_activations_of_a_block_are_those_of_korthikanti(t, sequence_parallel, recompute, formula) -> None:
    layout = Layout(tensor=t, micro_batch=B, recompute=recompute, sequence_parallel=sequence_parallel)
    assert block_activation_nbytes(GPT3, layout) == pytest.approx(formula(t))


@pytest.mark.parametrize("sizes", [SIZES, GPTSizes(layers=1, width=48, heads=12, sequence=48)])
@pytest.mark.parametrize("batch", [1, 3])
def test_activations_of_a_block_are_those_that_pytorch_keeps(sizes: GPTSizes, batch: int) -> None:
    # PyTorch's attention keeps no scores, as with "selective"; it keeps 4 bytes a head and token for their sums, and
    # norms keep 8 a token, which the formula leaves out: hence 3 %.
    x = torch.randn(batch, sizes.sequence, sizes.width, requires_grad=True)
    kept = kept_for_backward(GPT(sizes).layers[1], x)
    layout = Layout(micro_batch=batch, recompute="selective")
    assert kept == pytest.approx(block_activation_nbytes(like(sizes), layout, "float32"), rel=0.03)


def test_activations_of_a_whole_model_are_those_that_pytorch_keeps() -> None:
    batch, model = 3, GPT(SIZES)
    tokens, targets = batch_of(manual(), 1, batch, SIZES.sequence)
    tokens, targets = tokens % SIZES.vocabulary, targets % SIZES.vocabulary

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return cross_entropy(self.model(tokens), targets)

    known = 2 * tokens.nbytes + targets.nbytes  # tokens, positions and targets, which the formula leaves out
    kept = kept_for_backward(WithLoss(), tokens) - known
    expected = worker_memory(like(SIZES), Layout(micro_batch=batch, recompute="selective"), "float32")
    assert kept == pytest.approx(expected.activations, rel=0.04)


def test_the_first_stage_keeps_as_many_microbatches_as_its_schedule() -> None:
    for ranks, microbatches, chunks in ((4, 8, 1), (4, 2, 1), (4, 8, 2), (2, 4, 4)):
        schedule = (
            interleaved(ranks, microbatches, chunks) if chunks > 1 else one_f_one_b(ranks, microbatches)
        )
        one = block_activation_nbytes(GPT3, Layout(recompute="selective"))
        layout = Layout(pipeline=ranks, microbatches=microbatches, chunks=chunks, recompute="selective")
        blocks, _ = blocks_of_stages(GPT3, ranks, chunks)
        masks = S * H * min(ranks + (ranks - 1) / chunks * (chunks > 1), microbatches)
        in_flight = (worker_memory(GPT3, layout).activations - masks) / one / blocks
        assert held(schedule.passes[0]) / chunks <= in_flight + 1e-9 <= held(schedule.passes[0]) / chunks + 1


def test_each_way_of_sparing_memory_spares_some() -> None:
    model = catalogue.model("llama-2-7b")
    by_stage = [worker_memory(model, Layout(data=8, zero=stage)).state for stage in (0, 1, 2, 3)]
    assert by_stage == sorted(by_stage, reverse=True)
    by_recompute = [worker_memory(model, Layout(recompute=how)).activations for how in RECOMPUTE]
    assert by_recompute == sorted(by_recompute, reverse=True)
    assert len({*by_stage}) == 4
    assert len({*by_recompute}) == 3
    cut, whole = (
        worker_memory(model, Layout(tensor=8, sequence_parallel=how)).activations for how in (True, False)
    )
    assert cut < whole


def test_a_hundred_layouts_at_once_are_those_one_by_one() -> None:
    generator = np.random.default_rng(0)
    draw = {
        name: generator.choice([1, 2, 4, 8], 100)
        for name in ("data", "tensor", "pipeline", "micro_batch", "chunks")
    }
    draw |= {"microbatches": generator.choice([1, 8], 100), "zero": generator.integers(0, 4, 100)}
    draw |= {"recompute": generator.choice(RECOMPUTE, 100)}
    model = catalogue.model("llama-3.1-70b")
    at_once = worker_memory(model, Layout(**draw)).total
    one_by_one = [
        worker_memory(model, Layout(**{name: values[row].item() for name, values in draw.items()})).total
        for row in range(100)
    ]
    np.testing.assert_allclose(at_once, one_by_one)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"data": 0}, "data is 0; it must be at least 1"),
        ({"chunks": 0}, "chunks is 0; it must be at least 1"),
        ({"zero": 4}, "zero is 4; it must be 0, 1, 2 or 3"),
        ({"recompute": "some"}, "recompute is 'some'; it must be one of none, selective, full"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(**wrong)
