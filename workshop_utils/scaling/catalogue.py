"""What there is to plan with: transformers by their sizes, and instances by what they can do and cost.

    model("llama-3.1-8b").parameters                  # 8030261248, counted from its sizes
    instance("p5.48xlarge").dollars_an_hour           # on demand, dated: see data/instances.yaml

The instances' prices are EC2's. SageMaker asks others, which stand with its launcher.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import yaml
from pydantic import BeforeValidator, ConfigDict, Field, PositiveFloat, PositiveInt, model_validator

from workshop_utils.jobs import Description
from workshop_utils.jobs.quantities import bytes_of, bytes_per_second_of, seconds_of

DATA = Path(__file__).parent / "data"
AS_OF = "2026-07"  # the month of the price list that data/instances.yaml was copied from, by way of others' copies
GUESS = "a guess by likeness"


class CatalogueError(ValueError):
    """A model or an instance that is unknown; the message names it and what would be right."""


class Transformer(Description):
    """A transformer by its sizes, in the notation of a decoder; an encoder differs in `causal` and a few parameters.

    Attributes:
        layers, width, heads: l, h and a of Korthikanti et al. (2022).
        kv_heads: heads of keys and values, fewer where queries share them; by default all.
        mlp_width: units between an MLP's two linear layers; by default 4 h.
        gated: whether the MLP has a third linear layer, for a gate (SwiGLU, Shazeer 2020).
        biases: whether linear layers inside the blocks have them.
        norm: layer normalisation with weight and bias, or RMS normalisation with a weight only.
        last_norm: whether there is a norm behind the last block.
        dropout: whether training keeps dropout's masks, after attention, its output and the MLP.
        causal: whether a token sees only those before it.
        sequence: s, the tokens of a training example.
        vocabulary, positions: rows of the embeddings; 0 positions for rotary ones.
        tied: whether the output layer is the token embedding.
        extra_parameters: what all that does not count, such as BERT's head.
        batch_tokens: tokens in a step of the published run.
    """

    name: str
    source: str = ""
    layers: PositiveInt
    width: PositiveInt
    heads: PositiveInt
    sequence: PositiveInt
    vocabulary: PositiveInt
    kv_heads: PositiveInt = Field(default_factory=lambda given: given["heads"])
    mlp_width: PositiveInt = Field(default_factory=lambda given: 4 * given["width"])
    gated: bool = False
    biases: bool = True
    norm: Literal["layer", "rms"] = "layer"
    last_norm: bool = True
    dropout: bool = True
    causal: bool = True
    positions: int = Field(default=0, ge=0)
    tied: bool = False
    extra_parameters: int = Field(default=0, ge=0)
    batch_tokens: PositiveInt = 524_288

    @model_validator(mode="after")
    def _divides(self) -> Transformer:
        for name, divisor in (("width", "heads"), ("heads", "kv_heads")):
            if getattr(self, name) % getattr(self, divisor):
                raise ValueError(
                    f"{name} is {getattr(self, name)}; it must be a multiple of {divisor}, {getattr(self, divisor)}"
                )
        return self

    @property
    def kv_width(self) -> int:
        """Units of all heads' keys, and as many of their values."""
        return self.width // self.heads * self.kv_heads

    @property
    def norm_parameters(self) -> int:
        """Of one norm."""
        return self.width * (2 if self.norm == "layer" else 1)

    @property
    def block_matrix_parameters(self) -> int:
        """Of one block, what takes part in products, and is cut by tensor parallelism."""
        attention = 2 * self.width * (self.width + self.kv_width)
        return attention + (3 if self.gated else 2) * self.width * self.mlp_width

    @property
    def block_cut_biases(self) -> int:
        """Of one block, the biases of layers that are cut by columns."""
        units = self.width + 2 * self.kv_width + (2 if self.gated else 1) * self.mlp_width
        return units if self.biases else 0

    @property
    def block_whole_parameters(self) -> int:
        """Of one block, what every tensor-parallel rank has: norms, and biases of layers that are cut by rows."""
        return 2 * self.norm_parameters + (2 * self.width if self.biases else 0)

    @property
    def block_parameters(self) -> int:
        """Of one block, all."""
        return self.block_matrix_parameters + self.block_cut_biases + self.block_whole_parameters

    @property
    def parameters(self) -> int:
        """Of the whole model."""
        embeddings = (self.vocabulary * (1 if self.tied else 2) + self.positions) * self.width
        last_norm = self.norm_parameters if self.last_norm else 0
        return self.layers * self.block_parameters + embeddings + last_norm + self.extra_parameters

    @property
    def flops_per_token(self) -> float:
        """Floating-point operations to train on one token: 6 for each parameter of a product, and attention's own.

        Attention's two products are 4 s h a layer forward, three times as much with the backward pass; half of it
        where a token sees only those before it, since kernels skip the other half. Source: Chowdhery et al. (2022,
        PaLM), appendix B, which counts that half too; Dao (2023), FlashAttention-2, section 4.1, which does not.
        """
        products = self.layers * self.block_matrix_parameters + self.vocabulary * self.width
        seen = self.sequence / (2 if self.causal else 1)
        return 6 * products + 12 * self.layers * self.width * seen


Nbytes = Annotated[int, BeforeValidator(bytes_of)]
BytesPerSecond = Annotated[float, BeforeValidator(bytes_per_second_of)]
Seconds = Annotated[float, BeforeValidator(seconds_of)]


class Instance(Description):
    """A kind of machine. A link's bandwidth is one way; it is written as "400Gbit" and read as bytes per second.

    Attributes:
        accelerators: how many processes train on one machine, each with its own `memory_nbytes`.
        flops_per_second: the peak of one accelerator, by dtype.
        kernel_efficiency: the part of the peak that a transformer's matrix products reach by themselves.
        efficiency_from: where that number is from; a plan warns of guesses.
        memory_bytes_per_second: of one accelerator's own memory, written as "1555GB".
        inner_bytes_per_second: of one accelerator, to another of the same machine.
        network_bytes_per_second: of the whole machine, to others.
        dollars_an_hour: on demand; None where it is not known.
    """

    model_config = ConfigDict(validate_by_alias=True, validate_by_name=True)

    name: str
    source: str = ""
    accelerator: str
    accelerators: PositiveInt
    memory_nbytes: Nbytes = Field(alias="memory", gt=0)
    memory_bytes_per_second: Nbytes = Field(alias="memory_bandwidth", gt=0)
    flops_per_second: dict[Literal["bfloat16", "float32"], PositiveFloat]
    kernel_efficiency: float = Field(default=0.4, gt=0, le=1)
    efficiency_from: str = GUESS
    inner_bytes_per_second: BytesPerSecond = Field(alias="inner")
    inner_latency_seconds: Seconds = Field(default=5e-6, alias="inner_latency")
    network_bytes_per_second: BytesPerSecond = Field(alias="network")
    network_latency_seconds: Seconds = Field(default=20e-6, alias="network_latency")
    dollars_an_hour: PositiveFloat | None = None


E = TypeVar("E", bound=Description)


def models() -> Mapping[str, Transformer]:
    """All transformers of the catalogue, by name."""
    return load(Transformer, "models")


def model(name: str | Transformer) -> Transformer:
    """A transformer by its name. Raises CatalogueError if no transformer has that name."""
    return name if isinstance(name, Transformer) else pick("model", name, models(), Transformer)


def instances() -> Mapping[str, Instance]:
    """All instances of the catalogue, by name."""
    return load(Instance, "instances")


def instance(name: str | Instance) -> Instance:
    """An instance by its name. Raises CatalogueError if no instance has that name."""
    return name if isinstance(name, Instance) else pick("instance", name, instances(), Instance)


def pick(field: str, name: str, known: Mapping[str, E], kind: type[E]) -> E:
    """The entry of that name. Raises CatalogueError with the nearest one, or all and what describes others."""
    if name in known:
        return known[name]
    close = difflib.get_close_matches(name.lower(), known, n=1)
    others = f"known are {', '.join(known)}; in Python, {kind.__name__}(...) describes others"
    raise CatalogueError(f"{field} is {name!r}; {f'did you mean {close[0]}?' if close else others}")


def load(kind: type[E], name: str) -> dict[str, E]:
    """The entries of data/NAME.yaml."""
    entries = yaml.safe_load((DATA / f"{name}.yaml").read_text(encoding="utf-8"))
    return {name: kind(name=name, **fields) for name, fields in entries.items()}
