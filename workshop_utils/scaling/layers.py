"""The layers of well-known models: how many gradients each one sends, and how long it computes.

    layers("vgg16")[13]              # Layer(name='fc1', parameters=102764544, flops=205520896.0)

How much communication hides behind the backward pass depends on both, layer by layer: VGG-16 has most of its
parameters in its last layers, and does most of its work in the first ones.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Mapping
from typing import NamedTuple

import yaml

from workshop_utils.jobs import JobError
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.catalogue import Transformer

IMAGENET_CLASSES = 1000
# Tokens; nine tenths of BERT's pre-training steps have this length (Devlin et al. 2019, appendix A.2).
BERT_SEQUENCE = 128


class Layer(NamedTuple):
    """One convolution, linear layer or embedding, with its bias and the normalization next to it.

    PyTorch's DDP and Horovod get the gradient of a layer's weight as one tensor. Those of biases, normalizations
    and BERT's smaller embeddings are tensors of their own there, too small to matter.

    Attributes:
        parameters: all that are trained, so batch normalization's running averages do not count.
        flops: floating-point operations of one example's forward pass, 2 for each multiply-add of a matrix product
            or convolution; the backward pass has twice as many.
    """

    name: str
    parameters: int
    flops: float


def layers(model: str) -> list[Layer]:
    """The layers of one of `MODELS`, in the order of the forward pass.

    Raises:
        JobError: if there is no such model; the message has the nearest names.
    """
    if model not in _TABLES:
        close = difflib.get_close_matches(model.lower(), MODELS)
        advice = f"did you mean {' or '.join(close)}?" if close else f"choose from {', '.join(MODELS)}"
        raise JobError(f"model is {model!r}; {advice}")
    return _TABLES[model]()


def _convolutions(name: str, inputs: int, words: str, *, size: int = 0, norm: bool = True) -> list[Layer]:
    """Convolutions one after another, each a word "HEIGHTxWIDTHxCHANNELS@SIZE".

    HEIGHT and WIDTH are the kernel's. The output has CHANNELS channels of SIZE x SIZE values; a word without a size
    has the size of the word before it. Each channel has a scale and a shift with `norm`, else a bias.
    """
    rows = []
    for number, word in enumerate(words.split(), 1):
        shape, _, new_size = word.partition("@")
        height, width, channels = map(int, shape.split("x"))
        size = int(new_size or size)
        weights = height * width * inputs * channels
        parameters = weights + channels * (2 if norm else 1)
        rows.append(Layer(f"{name}{number}", parameters, 2.0 * weights * size**2))
        inputs = channels
    return rows


def _linear(name: str, inputs: int, outputs: int, *, norm: int = 0, examples: int = 1) -> Layer:
    """A linear layer with a bias, applied to `examples` vectors; `norm` parameters are those of a normalization."""
    return Layer(name, (inputs + 1) * outputs + norm, 2.0 * inputs * outputs * examples)


def _resnet(*blocks: int) -> list[Layer]:
    """He et al. (2016), table 1, with the stride in each block's 3x3 convolution, as PyTorch and NVIDIA train it."""
    rows, inputs = _convolutions("conv", 3, "7x7x64@112"), 64
    for stage, count in enumerate(blocks, 1):
        width, size = 32 * 2**stage, 112 // 2**stage
        for block in range(1, count + 1):
            name, first_size = f"stage{stage}.block{block}.", 2 * size if stage > 1 and block == 1 else size
            bottleneck = f"1x1x{width}@{first_size} 3x3x{width}@{size} 1x1x{4 * width}"
            rows += _convolutions(name + "conv", inputs, bottleneck)
            if block == 1:
                rows += _convolutions(name + "shortcut", inputs, f"1x1x{4 * width}@{size}")
            inputs = 4 * width
    return [*rows, _linear("fc", inputs, IMAGENET_CLASSES)]


def _of_convolutions(model: str) -> list[Layer]:
    """One of data/convolutions.yaml."""
    described = yaml.safe_load((catalogue.DATA / "convolutions.yaml").read_text(encoding="utf-8"))[model]
    blocks, norm = described.get("blocks", ()), described.get("norm", False)
    (first,) = (name for name in described if name.endswith("conv"))
    rows = _convolutions(first, 3, described[first], norm=norm)
    for number, (inputs, size, branches) in enumerate(blocks, 1):
        for branch, words in enumerate(branches.split("|"), 1):
            rows += _convolutions(f"block{number}.branch{branch}.conv", inputs, words, size=size, norm=norm)
    linear = [*itertools.pairwise(described["linear"])]
    return rows + [_linear(f"fc{n}" if len(linear) > 1 else "fc", *each) for n, each in enumerate(linear, 1)]


def _blocks(sizes: Transformer) -> list[Layer]:
    """A transformer's blocks, one row per linear layer; attention's own products stand with its output layer.

    A causal model makes queries, keys and values with one linear layer, as GPT-2 does, and skips the half of
    attention's products that its mask hides, as in `Transformer.flops_per_token`.
    """
    width, tokens, norm = sizes.width, sizes.sequence, sizes.norm_parameters
    projections = {"qkv": 3 * width} if sizes.causal else dict.fromkeys(("query", "key", "value"), width)
    attention_flops = 4.0 * width * tokens**2 / (2 if sizes.causal else 1)
    rows = []
    for number in range(1, sizes.layers + 1):
        name = f"block{number}."
        for part, outputs in projections.items():
            rows.append(_linear(name + part, width, outputs, examples=tokens))
        output = _linear(name + "attention.output", width, width, norm=norm, examples=tokens)
        rows.append(output._replace(flops=output.flops + attention_flops))
        rows.append(_linear(name + "mlp.input", width, sizes.mlp_width, examples=tokens))
        rows.append(_linear(name + "mlp.output", sizes.mlp_width, width, norm=norm, examples=tokens))
    return rows


def _bert_base() -> list[Layer]:
    """Devlin et al. (2019), section 3, at 128 tokens: embeddings, encoder and pooler, without heads of a task."""
    sizes = catalogue.model("bert-base").model_copy(update={"sequence": BERT_SEQUENCE})
    rows = (sizes.vocabulary + sizes.positions + 2) * sizes.width  # 2 for the types of tokens
    embeddings = Layer("embeddings", rows + sizes.norm_parameters, 0.0)
    return [embeddings, *_blocks(sizes), _linear("pooler", sizes.width, sizes.width)]


def _gpt_1b() -> list[Layer]:
    """Width and depth of Brown et al. (2020), table 2.1, "GPT-3 XL", with GPT-2's vocabulary and 1,024 positions.

    The output layer is the token embedding, whose gradient is complete only at the end of the backward pass; so the
    row "output" has the output layer's work and the last norm's parameters.
    """
    changes = {"layers": 24, "width": 2048, "heads": 16, "kv_heads": 16, "mlp_width": 8192}
    sizes = catalogue.model("gpt2").model_copy(update=changes)
    embeddings = Layer("embeddings", (sizes.vocabulary + sizes.positions) * sizes.width, 0.0)
    output_flops = 2.0 * sizes.width * sizes.vocabulary * sizes.sequence
    return [embeddings, *_blocks(sizes), Layer("output", sizes.norm_parameters, output_flops)]


_TABLES: Mapping[str, Callable[[], list[Layer]]] = {
    "resnet50": lambda: _resnet(3, 4, 6, 3),
    "resnet101": lambda: _resnet(3, 4, 23, 3),
    "resnet152": lambda: _resnet(3, 8, 36, 3),
    "vgg16": lambda: _of_convolutions("vgg16"),
    "inception_v3": lambda: _of_convolutions("inception_v3"),
    "alexnet": lambda: _of_convolutions("alexnet"),
    "bert-base": _bert_base,
    "gpt-1b": _gpt_1b,
}
MODELS = tuple(_TABLES)
