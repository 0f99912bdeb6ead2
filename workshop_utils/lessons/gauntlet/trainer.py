"""A small GPT trained under any composition of data, tensor, pipeline, context and expert parallelism.

    options = {"layers": 4, "microbatches": 2, "tied": True}
    model = whole_model(**options)                                      # the same on every rank
    training = Training(model, mesh_of(communicator, data=2, pipeline=2), **options)
    for step in range(10):
        loss = training.step(ragged(batch_of(manual(), step, 8, 16)))   # every rank hands over the whole batch
        norm = training.update()

Whatever the mesh, loss, gradients, norm, weights and evaluation are those of one process. Each place where people get
this wrong is a short method of its own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from workshop_utils.comm.communicator import as_array
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.comm.subset import Subset
from workshop_utils.lessons.gauntlet.model import Batch, Options, is_tied
from workshop_utils.parallel import context, experts, gpt, pipeline, tensor
from workshop_utils.parallel.data import OverlappedDataParallel
from workshop_utils.parallel.fully_sharded import FullySharded
from workshop_utils.parallel.mesh import Mesh, clip_gradients, synchronise
from workshop_utils.parallel.schedule import schedule_of
from workshop_utils.parallel.sharded import ShardedOptimizer


class Training:
    """One rank's part in the training of `model`, which is the same on all ranks, and stays as it is.

    Attributes:
        module: this rank's stages of the pipeline, a ModuleList.
        batches: how many steps were taken; the next batch is this number of the data.

    Raises:
        ValueError: if the model cannot be cut so.
    """

    def __init__(self, model: gpt.GPT, mesh: Mesh, **options: Any) -> None:
        self.options, self.mesh, self.sizes = Options(**options), mesh, model.sizes
        self.seed, self.batches = self.options.seed, 0
        self.region = tensor.Region(mesh.tensor, self.options.sequence_parallel)
        chunks = 2 if self.options.schedule == "interleaved" else 1
        self.plan = schedule_of(self.options.schedule, mesh.pipeline.size, self.options.microbatches, chunks)
        self.last, whole = self.plan.stages - 1, copy.deepcopy(model)
        self.dtype, self.is_tied = as_array(next(whole.parameters())).dtype, is_tied(whole)
        if self.options.initialise:
            self.draw_weights(whole)
        self.parts = self.cut(whole)
        self.module = nn.ModuleList(self.parts.values())
        self.stages = {number: self.stage(number) for number in self.parts}
        self.optimizer, self.own_optimizer = self.make_optimizer()
        self.average = self.copies() if self.options.average else {}

    # What this rank has of the model.

    def draw_weights(self, whole: gpt.GPT) -> None:
        """Give every parameter its first value: all ranks draw the whole from one seed, and keep their parts."""
        for parameter, value in whole.initial_values(self.seed):
            parameter.data.copy_(value)

    def cut(self, whole: gpt.GPT) -> dict[int, nn.Module]:
        """This rank's stages by number: some blocks, of each matrix a part, for some tokens, with some experts."""
        self.places = context.cut_context(whole, self.mesh.context, self.sizes.sequence, self.options.how)
        if self.is_tied:  # from here on in two copies
            head: Any = whole.layers[-1]
            head.vocabulary.weight = nn.Parameter(head.vocabulary.weight.detach().clone())
        if self.sizes.experts:
            experts.cut_experts(whole, self.mesh.experts)
        for layer in whole.modules():
            if isinstance(layer, experts.Experts):
                layer.balance /= self.options.microbatches
        stages, own = whole.stages(self.plan.stages), self.plan.stages_of(self.mesh.pipeline.rank)
        parts: dict[int, Any] = {each: tensor.parallelize(stages[each], self.region) for each in own}
        if self.options.data_parallel == "overlapped":
            return {each: OverlappedDataParallel(part, self.mesh.replicas) for each, part in parts.items()}
        if self.options.data_parallel == "fully_sharded":
            return {each: FullySharded(part, self.mesh.replicas) for each, part in parts.items()}
        return parts

    def stage(self, number: int) -> pipeline.ModuleStage:
        """Stage `number` as the pipeline runs it."""
        loss = self.weighted_loss if number == self.last else None
        inputs = None if number else self.inputs
        return pipeline.ModuleStage(self.parts[number], inputs, loss, self.plan.is_split)

    def make_optimizer(self) -> tuple[Any, torch.optim.Optimizer]:
        """The optimizer, and the one in it that keeps this rank's state."""
        kinds: dict[str, Callable[..., torch.optim.Optimizer]]
        kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}
        kind, parameters = kinds[self.options.optimizer], [*self.module.parameters()]
        arguments = {"lr": self.options.learning_rate}
        if self.options.optimizer == "sgd":
            arguments["momentum"] = 0.9
        if self.options.data_parallel == "zero1":
            sharded = ShardedOptimizer(parameters, self.mesh.replicas, kind, **arguments)  # type: ignore[arg-type]
            return sharded, sharded.own
        plain = kind(parameters, **arguments)
        return plain, plain

    # A step: forward, backward, and gradients that are those of one process.

    def step(self, batch: Batch) -> float | None:
        """Make `.grad` the gradient of the mean loss over the whole `batch`; returns the loss where the last stage is.

        PyTorch's random state is set, from the seed, the rank's place and the number of the batch.

        Raises:
            ValueError: if replicas and microbatches do not divide the examples.
        """
        torch.manual_seed(self.random_seed())
        self.microbatches = self.own_share(batch)
        self.total = self.count_targets()
        self.module.zero_grad()
        shape = self.message_shape(len(self.microbatches[0][0]))
        pipeline.run(self.plan, self.stages, self.mesh.pipeline, shape, self.dtype)
        self.finish_gradients()
        self.batches += 1
        return self.mean_loss()

    def random_seed(self) -> int:
        """Of dropout in this step: the same for ranks with the same activations, another one for all others."""
        tensor_rank = self.mesh.tensor.rank if self.region.sequence_parallel else 0
        place = self.mesh.pipeline.rank, self.mesh.replicas.rank, tensor_rank
        return int(np.random.SeedSequence([self.seed, self.batches, *place]).generate_state(1)[0])

    def own_share(self, batch: Batch) -> list[Batch]:
        """Of each microbatch this rank's examples, and of these this rank's tokens."""
        data, count = self.mesh.data, self.options.microbatches
        if len(batch[0]) % (count * data.size):
            right = f"{count} microbatches for {data.size} replicas need a multiple of {count * data.size}"
            raise ValueError(f"the batch has {len(batch[0])} examples; {right}")
        tokens, targets = (each[:, self.places].chunk(count * data.size) for each in batch)
        return [*zip(tokens, targets, strict=True)][data.rank :: data.size]

    def count_targets(self) -> int:
        """How many targets of the whole batch count."""
        counted = np.array([sum(int((targets != tensor.IGNORED).sum()) for _, targets in self.microbatches)])
        ring_all_reduce(self.mesh.replicas, counted)
        return int(counted[0])

    def message_shape(self, examples: int) -> tuple[int, int, int]:
        """Of the activations between two stages."""
        tokens = len(self.places)
        if self.region.sequence_parallel:
            tokens //= self.mesh.tensor.size
        return examples, tokens, self.sizes.width

    def inputs(self, microbatch: int) -> Tensor:
        """The tokens of `microbatch`."""
        return self.microbatches[microbatch][0]

    def weighted_loss(self, logits: Tensor, microbatch: int) -> Tensor:
        """A microbatch's part of the mean over the batch, so that the mean over replicas, not the sum, is the whole."""
        loss = self.sum_of_losses(logits, self.microbatches[microbatch][1])
        return loss * self.mesh.replicas.size / self.total

    def sum_of_losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Over the targets that count, of which there may be none."""
        counted = (targets != tensor.IGNORED).sum()
        if not counted:
            return 0.0 * logits.sum()  # the mean over none is NaN
        vocabulary = self.sizes.vocabulary
        mean: Tensor = tensor.vocabulary_parallel_cross_entropy(logits, targets, self.region, vocabulary)
        return mean * counted

    def finish_gradients(self) -> None:
        """Turn the gradients that the backward passes left here into those of one process."""
        overlapped = [part for part in self.parts.values() if isinstance(part, OverlappedDataParallel)]
        for part in overlapped:
            part.synchronise()  # waits until they are means
        tensor.finish_gradients(self.module, self.region)
        if not overlapped:
            synchronise(self.module, self.mesh)
        if self.is_tied:
            self.sum_tied()

    def tied_copies(self) -> list[nn.Parameter]:
        """This rank's copies of the tied weight: the embedding's, the head's, or both."""
        layers: list[Any] = [*self.module.modules()]
        inputs: list[Any] = [
            each.token for each in layers if isinstance(each, tensor.VocabularyParallelEmbedding)
        ]
        return inputs + [each.vocabulary.weight for each in layers if isinstance(each, gpt.Head)]

    def sum_tied(self) -> None:
        """Give both copies of the tied weight the sum of their gradients: so they stay the same."""
        ends = [self.plan.rank_of(0), self.plan.rank_of(self.last)]
        if self.mesh.pipeline.rank not in ends:
            return
        total = torch.stack([each.grad for each in self.tied_copies() if each.grad is not None]).sum(dim=0)
        if ends[0] != ends[1]:
            ring_all_reduce(Subset(self.mesh.pipeline, ends), as_array(total))
        for each in self.tied_copies():
            each.grad = total.clone()

    def mean_loss(self) -> float | None:
        """Over the whole batch, where the last stage is."""
        if self.last not in self.stages:
            return None
        loss = np.array([sum(self.stages[self.last].losses.values())])
        ring_all_reduce(self.mesh.replicas, loss, "mean")
        return float(loss[0])

    # An update.

    def update(self) -> float:
        """Clip, and take the optimizer's step; returns the norm of the whole gradient before."""
        norm = clip_gradients(self.module, self.mesh, self.options.max_norm, self.counted_elsewhere())
        self.optimizer.step()
        if self.options.bias_rate:
            experts.update_bias(self.module, self.mesh.replicas, self.options.bias_rate)
        self.follow()
        return norm

    def counted_elsewhere(self) -> set[nn.Parameter]:
        """The head's copy of a tied weight, which the norm counts as the embedding's."""
        return {self.tied_copies()[-1]} if self.is_tied and self.last in self.parts else set()

    @torch.no_grad()
    def follow(self) -> None:
        """Move the average a little towards the weights."""
        for name, each in self.average.items():
            each.lerp_(self.module.get_parameter(name).detach(), 1 - self.options.average)

    # Evaluation.

    @torch.no_grad()
    def evaluate(self, batches: Sequence[Batch]) -> float | None:
        """The mean loss over all targets of `batches` that count, where the last stage is."""
        sums = np.zeros(2)  # losses, and how many
        self.module.eval()
        with self.averaged():
            for batch in batches:
                tokens, targets = self.own_examples(batch)
                logits = self.forward(tokens)
                if logits is not None:
                    counted = int((targets != tensor.IGNORED).sum())
                    sums += self.sum_of_losses(logits, targets).item(), counted
        self.module.train()
        ring_all_reduce(self.mesh.replicas, sums)
        return float(sums[0] / sums[1]) if self.last in self.parts else None

    def own_examples(self, batch: Batch) -> Batch:
        """Every n-th example for n replicas, equally many for each: where some are there twice, they count once."""
        data, examples = self.mesh.data, len(batch[0])
        rows = torch.arange(-(-examples // data.size)) * data.size + data.rank
        tokens, targets = (each[rows % examples][:, self.places] for each in batch)
        targets[rows >= examples] = tensor.IGNORED
        return tokens, targets

    def forward(self, tokens: Tensor) -> Tensor | None:
        """Logits from this rank's share of the sequences, where the last stage is."""
        x, rank, shape = tokens, self.mesh.pipeline.rank, self.message_shape(len(tokens))
        for number in range(self.plan.stages):
            source, here = self.plan.rank_of(max(0, number - 1)), self.plan.rank_of(number)
            if rank == source != here:
                self.mesh.pipeline.send(here, as_array(x.contiguous()))
            if rank == here != source:
                x = torch.from_numpy(np.empty(shape, self.dtype))
                self.mesh.pipeline.recv(source, as_array(x))
            if rank == here:
                x = self.parts[number](x)
        return x if self.last in self.parts else None

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The average in the place of the weights, if there is one."""
        weights = self.copies() if self.average else {}
        self.put(self.average)
        yield
        self.put(weights)

    # Save and load.

    def copies(self) -> dict[str, Tensor]:
        """Of this rank's parameters, by name."""
        return {name: each.detach().clone() for name, each in self.module.named_parameters()}

    def put(self, tensors: dict[str, Tensor]) -> None:
        """Copy `tensors` into the parameters and buffers of these names."""
        places = dict(self.module.named_parameters()) | dict(self.module.named_buffers())
        for name, each in tensors.items():
            places[name].data.copy_(each)

    def state_dict(self) -> dict[str, Any]:
        """All that this rank needs to go on, after an update, as if it had never stopped."""
        state = {
            "parameters": self.copies(),
            "buffers": dict(self.module.named_buffers()),  # routers' biases and loads
            "average": self.average,
            "optimizer": self.own_optimizer.state_dict(),
            "seed": self.seed,
            "batches": self.batches,
        }
        return copy.deepcopy(state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, which this rank has saved under the same options."""
        self.put(state["parameters"])
        self.put(state["buffers"])
        self.average = copy.deepcopy(state["average"])
        self.own_optimizer.load_state_dict(state["optimizer"])
        self.seed, self.batches = state["seed"], state["batches"]
