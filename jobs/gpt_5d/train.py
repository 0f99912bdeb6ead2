"""Train a small GPT on Python's manual in five directions at once: data × tensor × pipeline × context, and experts.

The batch is cut between data-parallel replicas, each replica's layers between the stages of a pipeline, each layer
between the ranks of a tensor-parallel group, each sequence between the ranks of a context-parallel group. With
`--experts` there are so many MLPs in a layer, which `--expert-parallel` neighbours of data × context share; no token
is dropped.

With `--check 1` all is computed in float64, every rank also trains the whole model by itself, and reports how far the
loss, the gradients (relative to their largest entry) and their norm are apart; the job fails where gradients differ by
more than 1e-9. One process sees the same microbatches, all replicas' together: what the balance loss counts, it counts
over the tokens of one microbatch and expert group.
"""

import argparse
import math
import sys
import time

import numpy as np
import torch
from torch import Tensor, nn

from workshop_utils import place
from workshop_utils.comm import tcp
from workshop_utils.comm.communicator import Communicator
from workshop_utils.comm.ring import ring_all_reduce
from workshop_utils.parallel import mesh
from workshop_utils.parallel.context import cut_context, own_tokens
from workshop_utils.parallel.experts import Experts, cut_experts
from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, cross_entropy, gradient_error, manual
from workshop_utils.parallel.pipeline import ModuleStage, run
from workshop_utils.parallel.schedule import SCHEDULES, Schedule, schedule_of
from workshop_utils.parallel.tensor import (
    Region,
    finish_gradients,
    parallelize,
    vocabulary_parallel_cross_entropy,
)

LIMIT = 1e-9  # of the difference, with float64
DIRECTIONS = ("data", "tensor", "pipeline", "context")


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    for direction in DIRECTIONS:
        add(f"--{direction}", type=int, default=1, help="ranks in this direction")
    add("--sequence-parallel", type=int, choices=(0, 1), default=0)
    add("--attention", choices=("ring", "ulysses"), default="ring", help="how context ranks meet")
    add("--experts", type=int, default=0, help="of each layer; 0: an MLP")
    add("--top-k", type=int, default=2, help="experts of a token")
    add("--expert-parallel", type=int, default=1, help="ranks of data × context that share a layer's experts")
    add("--balance", type=float, default=0.01, help="coefficient of the loss that balances experts")
    add("--schedule", choices=list(SCHEDULES), default="one_f_one_b")
    add("--microbatches", type=int, default=2, help="of each replica")
    add("--chunks", type=int, default=1)
    add("--steps", type=int, default=10)
    add("--batch-size", type=int, default=8, help="sequences in a step, all replicas together")
    add("--sequence", type=int, default=48, help="tokens of each")
    add("--layers", type=int, default=4)
    add("--learning-rate", type=float, default=0.003)
    add("--clip-norm", type=float, default=1.0, help="limit of the gradient's norm; 0: none")
    add("--check", type=int, choices=(0, 1), default=0)
    add("--seed", type=int, default=0)
    return parser


def plan(options: argparse.Namespace, workers: int) -> tuple[GPTSizes, Schedule]:
    """The model's sizes and each pipeline's schedule; ends the script where they, or the mesh, cannot be."""
    given, is_ring, default_of = options, options.attention == "ring", arguments().get_default
    for name, needed, is_there in (
        ("top_k", "experts", given.experts),
        ("expert_parallel", "experts", given.experts),
        ("balance", "experts", given.experts or not given.balance),
        ("attention", "context", given.context - 1),
    ):
        default = default_of(name)
        if getattr(given, name) != default and not is_there:
            right = f"without {needed} it must be {default}, since it does nothing"
            sys.exit(f"{name.replace('_', '-')} is {getattr(given, name)}; {right}")
    for name in ("steps", "batch_size", "top_k", "expert_parallel"):
        if getattr(given, name) < 1:
            sys.exit(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be at least 1")
    for name in ("learning_rate", "clip_norm", "balance"):
        if not 0 <= getattr(given, name) < math.inf:
            sys.exit(f"{name.replace('_', '-')} is {getattr(given, name)}; it must be finite and at least 0")
    if 0 < given.experts < given.top_k:
        right = f"a token uses at least 1 and at most all of the {given.experts} experts"
        sys.exit(f"top-k is {given.top_k}; {right}")
    try:
        mesh.check(workers, **directions(given))
        experts = {"experts": given.experts, "k": given.top_k} if given.experts else {}
        sizes = GPTSizes(layers=given.layers, sequence=given.sequence, **experts)
        schedule = schedule_of(given.schedule, given.pipeline, given.microbatches, given.chunks)
        sizes.check_cut(given.tensor, schedule.stages)
        own_tokens(given.sequence, 0, given.context, is_ring)
    except ValueError as error:
        sys.exit(str(error))
    microbatches, shares = given.data * given.microbatches, given.tensor * given.context
    sharing, dealt, cut = (
        given.expert_parallel,
        1 if is_ring else shares,
        shares if given.sequence_parallel else 1,
    )
    for name, number, divisor, who in (
        ("batch-size", given.batch_size, microbatches, f"data × microbatches, {microbatches},"),
        ("data × context", given.data * given.context, sharing, f"expert-parallel, {sharing},"),
        ("experts", given.experts, sharing, f"expert-parallel, {sharing},"),
        ("heads", sizes.heads, dealt, f"Ulysses deals them out to tensor × context, {dealt} ranks, which"),
        ("sequence", given.sequence, cut, f"tensor × context, {cut}, with sequence-parallel"),
    ):
        if number % divisor:
            sys.exit(f"{name} is {number}; {who} must divide it")
    if given.sequence >= (tokens := len(manual())):
        sys.exit(f"sequence is {given.sequence}; it must be below {tokens}, the tokens of the text")
    if given.experts and given.sequence_parallel:
        sys.exit("sequence-parallel is 1; with experts it must be 0")
    if given.experts and given.check and given.balance and given.expert_parallel % given.context:
        right = f"a multiple of context, {given.context}: one process balances over whole sequences"
        sys.exit(f"expert-parallel is {given.expert_parallel}; with check and balance it must be {right}")
    return sizes, schedule


def directions(options: argparse.Namespace) -> dict[str, int]:
    return {name: getattr(options, name) for name in DIRECTIONS}


def balance(model: nn.Module, coefficient: float) -> None:
    """Set what each layer of experts adds to the loss."""
    for layer in model.modules():
        if isinstance(layer, Experts):
            layer.balance = coefficient


def microbatches_of_all(batch: tuple[Tensor, Tensor], options: argparse.Namespace) -> list[list[Tensor]]:
    """Tokens and targets of each microbatch of one process: those of all replicas that are one expert group."""
    groups, count = expert_groups(options), options.microbatches
    cut = [each.view(groups, options.data // groups, count, -1, each.shape[1]) for each in batch]
    return [[each[g, :, m].flatten(0, 1) for each in cut] for g in range(groups) for m in range(count)]


def expert_groups(options: argparse.Namespace) -> int:
    """How many there are among the data-parallel replicas, if each holds whole sequences; 1 where none is balanced."""
    groups: int = options.data // max(1, options.expert_parallel // options.context) if options.balance else 1
    return groups


def step_of_one_process(
    model: GPT, optimizer: torch.optim.Optimizer, microbatches: list[list[Tensor]], clip_norm: float
) -> tuple[float, float, GPT]:
    """Take a step of the whole model; returns the loss before it, the norm, and clipped gradients as a model."""
    optimizer.zero_grad()
    losses = []
    for tokens, targets in microbatches:
        losses.append(cross_entropy(model(tokens), targets) / len(microbatches))
        losses[-1].backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), clip_norm or math.inf)
    gradients = model.gradients()
    optimizer.step()
    return sum(loss.item() for loss in losses), norm.item(), gradients


def train(
    communicator: Communicator, options: argparse.Namespace, sizes: GPTSizes, schedule: Schedule
) -> None:
    """Take `options.steps` steps; all ranks of `communicator` call this."""
    groups = mesh.mesh_of(communicator, **directions(options), experts=options.expert_parallel)
    region = Region(groups.tensor, bool(options.sequence_parallel))
    count, last = options.microbatches, schedule.stages - 1
    text, tokens, targets = manual(), torch.empty(0), torch.empty(0)  # tokens and targets are this rank's

    def inputs(microbatch: int) -> Tensor:
        return tokens.chunk(count)[microbatch]

    def loss_of(logits: Tensor, microbatch: int) -> Tensor:
        own = targets.chunk(count)[microbatch]
        return vocabulary_parallel_cross_entropy(logits, own, region, sizes.vocabulary) / count

    def part_of(whole: GPT) -> tuple[Tensor, dict[int, nn.Module]]:
        """This rank's tokens of each sequence, and its stages."""
        own = cut_context(whole, groups.context, sizes.sequence, options.attention)
        if sizes.experts:
            cut_experts(whole, groups.experts)
        parts = whole.stages(schedule.stages)
        mine = schedule.stages_of(groups.pipeline.rank)
        return own, {stage: parallelize(parts[stage], region) for stage in mine}

    own, parts = part_of(GPT(sizes, options.seed, torch.float64 if options.check else torch.float32))
    stages = {
        stage: ModuleStage(
            part, None if stage else inputs, loss_of if stage == last else None, schedule.is_split
        )
        for stage, part in parts.items()
    }
    model = nn.ModuleList(parts.values())
    balance(model, options.balance / count)
    optimizer = torch.optim.Adam(model.parameters(), options.learning_rate)
    share = len(own) // (options.tensor if options.sequence_parallel else 1)
    message = (options.batch_size // options.data // count, share, sizes.width)
    worst = np.zeros(1)  # difference of gradients
    if options.check:
        whole = GPT(sizes, options.seed, torch.float64)
        balance(whole, options.balance / (expert_groups(options) * count))
        optimizer_of_whole = torch.optim.Adam(whole.parameters(), options.learning_rate)

    for step in range(1, options.steps + 1):
        batch = batch_of(text, step, options.batch_size, sizes.sequence)
        tokens, targets = (each.chunk(options.data)[groups.data.rank][:, own] for each in batch)
        for each in (communicator, *groups):
            each.traffic.reset()
        start = time.perf_counter()
        optimizer.zero_grad()
        # Forward and backward: pipeline, tensor, context, experts.
        run(schedule, stages, groups.pipeline, message, np.float64 if options.check else np.float32)
        finish_gradients(model, region)  # tensor, where the sequence is cut
        mesh.synchronise(model, groups)  # data and context, experts over those with the same
        norm = mesh.clip_gradients(model, groups, options.clip_norm) if options.clip_norm else math.nan
        optimizer.step()
        values = {
            "step_seconds": time.perf_counter() - start,
            "bytes_sent": float(communicator.traffic.bytes_sent.sum()),
        }
        # By group: `replicas_bytes` are those of the mean over data × context, which is one ring.
        sent = {f"{name}_bytes": each.traffic.bytes_sent.sum() for name, each in groups._asdict().items()}
        values |= {name: float(nbytes) for name, nbytes in sent.items() if nbytes}
        if options.clip_norm:
            values["gradient_norm"] = norm
        if last in stages:
            mean = np.array([sum(stages[last].losses.values())])
            ring_all_reduce(groups.replicas, mean, "mean")
            values["loss"] = float(mean[0])
        if options.check:
            microbatches = microbatches_of_all(batch, options)
            result = step_of_one_process(whole, optimizer_of_whole, microbatches, options.clip_norm)
            largest = max(each.abs().max().item() for each in result[2].parameters())
            expected = nn.ModuleList(part_of(result[2])[1].values())
            values["gradient_error"] = gradient_error(model, expected) / largest
            worst = np.maximum(worst, values["gradient_error"])
            if options.clip_norm:
                values["norm_error"] = abs(norm / result[1] - 1)
            if last in stages:
                values["loss_error"] = abs(values["loss"] - result[0])
        place.report(step=step, **values)
    ring_all_reduce(communicator, worst, "max")  # nobody leaves before all are done
    if options.check:
        said = f"gradients differ from those of one process by {worst[0]:.0e} of the largest"
        if not worst[0] <= LIMIT:  # also for NaN
            sys.exit(f"{said}; it must be at most {LIMIT:.0e}")
        if communicator.rank == 0:
            print(said, flush=True)


def main() -> None:
    here, options = place.here(), arguments().parse_args()
    torch.set_num_threads(1)
    sizes, schedule = plan(options, here.world_size)
    with tcp.connect(*place.rendezvous()) as communicator:
        train(communicator, options, sizes, schedule)


if __name__ == "__main__":
    main()
