"""Train a GPT by FSDP2: the script to copy for a transformer that does not fit into one GPU with its optimizer.

    torchrun --standalone --nproc-per-node 8 train.py --steps 1000 --checkpoints /shared/run-1

`workshop launch jobs/gpt_fsdp` starts it on any target. It has run on CPUs alone: NCCL between GPUs, blocks compiled
for them, and asynchronous checkpoints of them are untried.

- `build`: parameters are made on the meta device, split block by block, and only then given memory and values. With
  `--replicas` (HSDP) neighbouring ranks share a copy of the model: parameters stay within a machine, gradients alone
  cross.
- `take_step`: accumulation, clipping, AdamW. The weights that are kept are float32; in bfloat16, the default on a GPU
  that has it, they travel and layers compute. Gradients are added up in float32.
- `validate`: the loss of text that no step has seen, each window of it counted once.
- `Checkpoints`: each rank writes its shards while the next steps are taken (torch.distributed.checkpoint). A run that
  was killed goes on from the newest checkpoint that is whole: on as many CPUs to the very bits; up to rounding on any
  other number of ranks that divides the batch, since a step's batch, `--batch-size` sequences of all ranks together,
  depends on the step alone. `--steps` must stay as it was, since the learning rate depends on it. So must the dtype: a
  run that `--dtype auto` began on CPUs goes on with `--dtype float32` on GPUs. All ranks must reach the folder, so it
  is refused unless the machines share it. Several instances of SageMaker do not: there, `--checkpoint-steps 0`.

For your own, replace:

- the model: `GPT`, and `GPTSizes` in `options` and `main`; in `build` its blocks and its initial values. Where a model
  returns an object, `take_step` and `validate` take its `.logits`.
- the text, here Python's manual byte by byte: `manual`, `batch_of`, and `held_out` and the checksum in `train`.
- `workshop_utils`, where it does not come along: torchrun's RANK, WORLD_SIZE and LOCAL_RANK for `place.here`, your
  logger for `place.report`, a comparison of dictionaries for `refuse_other_run`; `profile` and `count_bytes` can go.
"""

import argparse
import dataclasses
import functools
import json
import math
import os
import shutil
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

# What mnist_torch_ddp says of this import holds here too: later, it would keep the group's threads alive.
import torch.distributed.nn
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict as states
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.checkpoint import checkpoint

from workshop_utils import place
from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, cross_entropy, manual
from workshop_utils.training.checkpoints import OtherRun, Settings, refuse_other_run
from workshop_utils.training.profiler import profile
from workshop_utils.training.tcp_bytes import count_bytes

KEPT = 2  # checkpoints in the folder
HELD_OUT = 0.1  # of the text, at its end
# Options that change no step, or its rounding alone.
TECHNICAL = {"replicas", "accumulate", "compile", "recompute", "profile_steps", "export"}
TECHNICAL |= {"validation_steps", "validation_windows", "checkpoint_steps", "checkpoints"}


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    add = functools.partial(parser.add_argument, type=int)
    add("--steps", default=200)
    add("--batch-size", default=32, help="sequences in a step, of all ranks together")
    add("--accumulate", default=1, help="forward passes of a rank that share a step")
    add("--replicas", default=1, help="copies of the model, each split among its part of the ranks (HSDP)")
    for name in ("layers", "width", "heads", "sequence"):
        add(f"--{name}", default=getattr(GPTSizes(), name))
    add("--learning-rate", type=float, default=3e-3, help="at its highest")
    add("--warmup-steps", default=20, help="in which it rises; then it falls to 0, as half a cosine")
    add("--weight-decay", type=float, default=0.1, help="of matrices")
    add("--clip-norm", type=float, default=1.0, help="limit of the gradient's norm; 0: none")
    add("--dtype", type=str, choices=["auto", "float32", "bfloat16"], default="auto")
    add("--compile", choices=(0, 1), default=0, help="compile each block (torch.compile)")
    add("--recompute", choices=(0, 1), default=0, help="compute blocks' activations again, to keep none")
    add("--validation-steps", default=50, help="between two validations")
    add("--validation-windows", default=1024, help="of the held-out text, from its beginning, at most")
    add("--checkpoints", type=str, default="", help="their folder, in place of the launcher's")
    add("--checkpoint-steps", default=50, help="between two checkpoints; 0: none")
    add("--profile-steps", default=0, help="steps in a trace; 0: no trace")
    add("--export", choices=(0, 1), default=1, help="write model.pt, from rank 0's memory, at the end")
    add("--seed", default=0)
    given = parser.parse_args()
    names = ("steps", "batch_size", "accumulate", "replicas", "validation_steps", "validation_windows")
    minimums = dict.fromkeys(names, 1)
    for name, value in vars(given).items():
        if not isinstance(value, str) and not minimums.get(name, 0) <= value < math.inf:
            least = f"it must be finite and at least {minimums.get(name, 0)}"
            parser.error(f"{name.replace('_', '-')} is {value}; {least}")
    compilers = any(map(shutil.which, ("c++", "g++", "clang++")))
    if given.compile and not torch.cuda.is_available() and not compilers:
        parser.error("compile is 1, and no C++ compiler was found: install g++ or clang++, or leave it out")
    return given


def join(here: place.Place) -> torch.device:
    """Meet the other ranks; returns the device of this one."""
    if "MASTER_ADDR" not in os.environ:
        sys.exit("MASTER_ADDR is not set; start this with torchrun, or with `workshop launch`")
    device, backend, gpu = torch.device(here.device), "gloo", None
    if device.type == "cuda":
        torch.cuda.set_device(device)
        backend, gpu = "cpu:gloo,cuda:nccl", device
    dist.init_process_group(backend, device_id=gpu)
    return device


def on_meta(_module: nn.Module, _name: str, parameter: nn.Parameter) -> None:
    """Take the memory of a parameter that a module registers. Buffers do not pass here, and keep their values."""
    torch.utils.swap_tensors(parameter, nn.Parameter(parameter.to("meta"), parameter.requires_grad))


def give_memory(model: nn.Module, device: torch.device) -> None:
    """Move `model` to `device`: buffers with their values, parameters without.

    `to_empty` alone, like a model made under torch.device("meta"), would leave in a buffer what its memory held before.
    """
    buffers = dict(model.named_buffers(remove_duplicate=False))
    if lost := [name for name, buffer in buffers.items() if buffer.is_meta]:
        sys.exit(f"{', '.join(lost)}: buffers on the meta device have no values to keep")
    model.to_empty(device=device)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        buffer.copy_(buffers[name])


def build(given: argparse.Namespace, device: torch.device) -> Any:
    """The model, of which this rank holds shards: with the weights of one process, and never whole on any rank.

    To start from pretrained weights, put this in the place of everything after `give_memory`; `whole` is {} on all
    ranks but the first. A file holds tied weights once, so where they are tied, name them twice:

        whole = {}
        if dist.get_rank() == 0:
            whole = safetensors.torch.load_file(path)
            whole["lm_head.weight"] = whole["model.embed_tokens.weight"]  # if tied
        how = states.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        states.set_model_state_dict(model, whole, options=how)
        return model
    """
    with register_module_parameter_registration_hook(on_meta):
        model = GPT(GPTSizes(given.layers, given.width, given.heads, given.sequence))
    shape = (given.replicas, dist.get_world_size() // given.replicas)
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
    if given.replicas == 1:
        mesh = mesh["shard"]
    policy = MixedPrecisionPolicy(getattr(torch, given.dtype), reduce_dtype=torch.float32)
    for block in list(model.layers)[1:-1]:
        if given.recompute:
            block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
        if given.compile:
            block.compile()
        fully_shard(block, mesh=mesh, mp_policy=policy)
    # What is in no block, embedding and head, even where their weights are tied; their output, the logits, is float32.
    # A parameter that is a single number cannot be split: make it a vector of one.
    fully_shard(model, mesh=mesh, mp_policy=dataclasses.replace(policy, output_dtype=torch.float32))
    give_memory(model, device)
    missing = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, value in model.initial_values(given.seed):
        assert isinstance(parameter, DTensor)
        # Each rank draws the same values, and keeps its shard: nothing is sent.
        parameter.data.copy_(distribute_tensor(value, mesh, parameter.placements, src_data_rank=None))
        missing.pop(parameter, None)
    if missing:
        sys.exit(f"{', '.join(missing.values())}: parameters without initial values")
    return model


def optimizer_of(model: nn.Module, given: argparse.Namespace) -> torch.optim.Optimizer:
    """AdamW, made after the model was split. Matrices decay; biases and norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": given.weight_decay}, {"params": others}]
    return torch.optim.AdamW(groups, given.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)


def rate(step: int, given: argparse.Namespace) -> float:
    """The learning rate of a step, from 1: a rise, then half a cosine (Loshchilov and Hutter 2017, equation 5)."""
    if step <= given.warmup_steps:
        return given.learning_rate * step / given.warmup_steps
    part = (step - given.warmup_steps) / (given.steps - given.warmup_steps + 1)
    return given.learning_rate * 0.5 * (1 + math.cos(math.pi * part))


def take_step(
    model: Any, optimizer: Any, batch: list[Tensor], given: argparse.Namespace
) -> tuple[Tensor, Any]:
    """Update the model; the loss of `batch`, this rank's share, and the norm of all ranks' mean gradient."""
    total = torch.zeros((), device=batch[0].device)
    parts = zip(*(each.chunk(given.accumulate) for each in batch), strict=True)
    for number, (tokens, targets) in enumerate(parts, 1):
        # Each part's gradients are reduced within a copy of the model, so a rank keeps its shard's, and between copies
        # with the last part. `set_requires_gradient_sync` would save the former, but keep 4 bytes of each parameter.
        model.set_requires_all_reduce(number == given.accumulate)
        loss = cross_entropy(model(tokens), targets) / given.accumulate
        loss.backward()
        total += loss.detach()
    norm = nn.utils.clip_grad_norm_(model.parameters(), given.clip_norm or math.inf)
    optimizer.step()
    optimizer.zero_grad()
    return total, norm


def mean(loss: Tensor) -> float:
    """The mean over all ranks. It waits for them and for the device, so not every step asks for it."""
    dist.all_reduce(loss)
    return loss.item() / dist.get_world_size()


@torch.no_grad()
def validate(model: Any, text: Tensor, given: argparse.Namespace) -> float:
    """Mean loss of `text`, a row of tokens: of its first `--validation-windows` windows, which the ranks share out.

    A pass takes as many as one of `take_step`, and so fits into memory. Ranks make equally many passes, since each pass
    gathers parameters. A rank that has no window left joins in with one that does not count; a sampler would pad, and
    count it twice.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    most = given.batch_size // size // given.accumulate
    windows = text.unfold(0, given.sequence + 1, given.sequence)  # so each target is asked for once
    windows = windows[: given.validation_windows]
    total = torch.zeros(2, dtype=torch.float64, device=text.device)  # of losses; how many they are
    model.eval()
    for start in range(0, math.ceil(len(windows) / size), most):
        own = windows[rank::size][start : start + most]
        rows = own if len(own) else windows[:1]
        loss = cross_entropy(model(rows[:, :-1]), rows[:, 1:]).double()
        total += len(own) * torch.stack([loss, torch.ones_like(loss)])
    model.train()
    model.reshard()  # the root, which a forward pass leaves gathered
    dist.all_reduce(total)
    return (total[0] / total[1]).item()


def state_of(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """This rank's shards of all that a step changes, by the parameters' names; `set_state_dict` takes it."""
    of_model, of_optimizer = states.get_state_dict(model, optimizer)
    return {"model_state_dict": of_model, "optim_state_dict": of_optimizer}


class Checkpoints:
    """A folder of checkpoints, `step-00000050` and so on, that all ranks write together; one save may be under way.

    A checkpoint is whole once it has its `.metadata`, which is written last; what a killed save leaves has none.
    """

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings, self.is_first = folder, settings, dist.get_rank() == 0
        self.group = dist.new_group(backend="gloo")  # of its own: saves talk while steps do
        self.saving: Any = None
        probe = [f".probe-{time.time_ns()}"]
        if self.is_first:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                (folder / probe[0]).touch()
            except OSError as error:
                sys.exit(f"cannot save checkpoints: {error}")
        dist.broadcast_object_list(probe)
        if not (folder / probe[0]).exists():
            missing = f"rank {dist.get_rank()} does not see what rank 0 writes into {folder}"
            sys.exit(f"{missing}: give a folder that all machines share, or --checkpoint-steps 0")
        dist.barrier()
        if self.is_first:
            (folder / probe[0]).unlink()

    def whole(self) -> list[Path]:
        """The checkpoints that can be read, the oldest first."""
        return sorted(path.parent for path in self.folder.glob("step-????????/.metadata"))

    def save(self, step: int, model: nn.Module, optimizer: Any) -> None:
        """Copy this rank's shards in memory; they are written while training goes on."""
        self.wait()
        path = self.folder / f"step-{step:08d}"
        if self.is_first:
            path.mkdir(exist_ok=True)
            (path / "settings.json").write_text(json.dumps(dict(self.settings)))
        state = {"step": step, **state_of(model, optimizer)}
        self.saving = dcp.async_save(state, checkpoint_id=path, process_group=self.group)

    def wait(self) -> list[Path]:
        """Wait for the save under way, remove all but the newest KEPT and what killed saves left; returns `whole()`."""
        if self.saving is not None:
            self.saving.result()
            self.saving = None
            if self.is_first:
                for old in {*self.folder.glob("step-????????")} - {*self.whole()[-KEPT:]}:
                    (old / ".metadata").unlink(missing_ok=True)  # first: what is left of it is no checkpoint
                    shutil.rmtree(old)
        return self.whole()

    def resume(self, model: nn.Module, optimizer: Any) -> int:
        """Load the newest whole checkpoint, however many ranks wrote it; returns how many steps were made."""
        newest: list[Any] = [None]
        if self.is_first and (whole := self.whole()):
            newest = [whole[-1].name]
            try:
                written = json.loads((whole[-1] / "settings.json").read_text())
                refuse_other_run(self.folder, written, self.settings)
            except (OSError, OtherRun) as error:
                sys.exit(f"cannot resume: {error}")
        dist.broadcast_object_list(newest)
        if newest[0] is None:
            return 0
        state = {"step": 0, **state_of(model, optimizer)}
        dcp.load(state, checkpoint_id=self.folder / newest[0], process_group=self.group)
        step = state.pop("step")
        states.set_state_dict(model, optimizer, **state)
        if self.is_first:
            print(f"resumed after step {step}")
        return int(step)


def train(given: argparse.Namespace, device: torch.device) -> Any:
    """The trained model, of which this rank holds shards."""
    rank, size, text = dist.get_rank(), dist.get_world_size(), manual()
    end = len(text) - int(HELD_OUT * len(text))
    held_out = torch.frombuffer(bytearray(text[end:]), dtype=torch.uint8).long().to(device)
    if len(held_out) <= given.sequence:
        sys.exit(f"sequence is {given.sequence}; it must be below {len(held_out)}, the held-out tokens")
    model = build(given, device)
    optimizer = optimizer_of(model, given)
    folder = Path(given.checkpoints) if given.checkpoints else place.checkpoint_folder()
    checkpoints, begun = None, 0
    if rank == 0 and given.checkpoint_steps and not folder:
        print("no checkpoints: a run that is killed starts anew, unless you give it --checkpoints FOLDER")
    if folder and given.checkpoint_steps:
        # A checkpoint belongs to another run if its next step would differ.
        settings = {name: value for name, value in vars(given).items() if name not in TECHNICAL}
        checkpoints = Checkpoints(folder, {**settings, "text": zlib.crc32(text)})
        begun = checkpoints.resume(model, optimizer)

    def is_due(every: int) -> bool:
        return step % every == 0 or step == given.steps

    done, since = begun, time.perf_counter()  # where the report before this one stood
    with profile(given.profile_steps) as profiler, count_bytes() as counted:
        for step in range(begun + 1, given.steps + 1):
            batch = batch_of(text[:end], step, given.batch_size, given.sequence)
            for group in optimizer.param_groups:
                group["lr"] = rate(step, given)
            own = [each.chunk(size)[rank].to(device) for each in batch]
            loss, norm = take_step(model, optimizer, own, given)
            profiler.step()
            saves = checkpoints and is_due(given.checkpoint_steps)
            if saves or step == begun + 1 or is_due(max(1, given.steps // 20)):
                values = {"loss": mean(loss), "grad_norm": norm.full_tensor().item()}
                samples = given.batch_size * (step - done) / (time.perf_counter() - since)
                values |= {"samples_per_second": samples, "tokens_per_second": samples * given.sequence}
                if device.type == "cpu":  # what NCCL sends inside a machine passes through no socket
                    values["bytes_sent"] = counted.sent
                if rank == 0:  # bytes are its own; the rest is the same on all ranks, or of all together
                    place.report(step, **values, learning_rate=rate(step, given), device=str(device))
                # A gradient that is not finite has spoilt the weights already; the loss is from before the update.
                if not math.isfinite(values["loss"] + values["grad_norm"]):
                    saved = checkpoints.wait() if checkpoints else []
                    remedy = f"; if a restart fails here again, remove {saved[-1]}" if saved else ""
                    sys.exit(f"the loss or the gradient's norm is NaN or infinite at step {step}{remedy}")
                done, since = step, time.perf_counter()
            if checkpoints and saves:
                checkpoints.save(step, model, optimizer)
            if is_due(given.validation_steps):
                paused = time.perf_counter()
                value = validate(model, held_out, given)
                if rank == 0:
                    place.report(step, validation_loss=value)
                    print(f"validation loss after step {step}: {value:.3f}")
                since += time.perf_counter() - paused
    if checkpoints:
        checkpoints.wait()
    return model


def main() -> None:
    given, here = options(), place.here()
    device = join(here)
    size, shares = here.world_size, here.world_size * given.accumulate
    if given.dtype == "auto":
        has_it = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        given.dtype = "bfloat16" if has_it else "float32"
    if size % given.replicas:
        sys.exit(f"replicas is {given.replicas}; it must divide the number of ranks, {size}")
    if given.batch_size % shares:
        sys.exit(f"batch-size is {given.batch_size}; ranks × accumulate, {shares}, must divide it")
    try:
        GPTSizes(given.layers, given.width, given.heads, given.sequence)
    except ValueError as error:
        sys.exit(str(error))
    model = train(given, device)
    if given.export:
        # Where it does not fit, `dcp_to_torch_save` makes one file of a checkpoint, where there is memory.
        on_rank_0 = states.StateDictOptions(full_state_dict=True, cpu_offload=True)
        whole = states.get_model_state_dict(model, options=on_rank_0)
        if here.rank == 0:
            here.model_folder.mkdir(parents=True, exist_ok=True)
            torch.save(whole, here.model_folder / "model.pt")
    # All ranks meet in each group before it is destroyed; the model, which holds them, goes first: see mnist_torch_ddp.
    for group in (None, *next(model.parameters()).device_mesh.get_all_groups()):
        dist.barrier(group)
    del model
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
