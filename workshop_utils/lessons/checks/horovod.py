"""Checks of lesson 05, Horovod; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.lessons.checks import (
    Check,
    NotYet,
    exercise,
    is_missing,
    listed,
    mistakes,
    refuse,
    refuse_any,
)
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import values_on_ranks
from workshop_utils.lessons.without_horovod import HOW, call, has_horovod

IMAGES, BATCH, EPOCHS, RATE = 48, 8, 2, 0.1
STEPS = 4  # of clip_and_accumulate
LIMITS = {2: 100.0, 3: 0.95}  # by ranks: no gradient is longer; those of the second and last step are
TOLERANCE = 1e-4  # of weights, which float32 rounds; the mistakes are a hundred times as far off
ROUGH = 2e-3  # of gradients, which fp16 may round
CLOSE = 1.01  # between a scale that is finite and one that is not


class _Pass(NamedTuple):
    """A forward pass that trains."""

    images: list[int]
    weights: np.ndarray  # with which it begins


class _Trained(NamedTuple):
    """What one rank's training did; weights are a vector."""

    first: np.ndarray
    passes: list[_Pass]
    last: np.ndarray
    uses_horovod: bool = True
    read: frozenset[int] = frozenset()
    saved: Sequence[Any] = ()
    loss: Any = None
    broadcasts: int = 0  # after the first pass began
    sent: int = 0  # numbers
    is_torn: bool = False  # gradients changed while they were under way

    @property
    def used(self) -> list[int]:
        return [image for each in self.passes for image in each.images]

    @property
    def changes(self) -> np.ndarray:
        """Of the weights, from each pass to the next."""
        return np.diff([*(each.weights for each in self.passes), self.last], axis=0)

    def gradients(self) -> np.ndarray:
        """Of each pass, those of its own images and weights."""
        return np.array([_loss_and_gradient(each)[1] for each in self.passes])


class _Watched:
    """Horovod's module; records what of it is used. It is as on N hosts with one process each."""

    def __init__(self, hvd: Any, passes: Sequence[_Pass]) -> None:
        self._hvd, self._passes, self.is_used, self.broadcasts = hvd, passes, False, 0

    def __getattr__(self, name: str) -> Any:
        self.is_used = True
        self.broadcasts += name.startswith("broadcast") and bool(self._passes)
        return getattr(self._hvd, name)

    def local_rank(self) -> int:
        return 0

    def local_size(self) -> int:
        return 1


class _Dataset:
    """The images with their labels; knows which were read."""

    def __init__(self) -> None:
        self.read: set[int] = set()

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if not 0 <= index < IMAGES:
            raise IndexError(f"there is no image {index}")
        self.read.add(int(index))
        images, labels = _examples()
        return images[index], int(labels[index])


def _examples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    images = generator.standard_normal((IMAGES, 4)).astype(np.float32)
    return images, (images @ generator.standard_normal((4, 3))).argmax(axis=1)


def _loss_and_gradient(one: _Pass) -> tuple[float, np.ndarray]:
    """The mean cross-entropy in a network of one layer (a matrix, then biases), and its gradient."""
    images, labels = (each[one.images] for each in _examples())
    scores = images @ one.weights[:12].reshape(4, 3) + one.weights[12:]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    targets = np.eye(3)[labels]
    errors = (shares - targets) / len(images)
    loss = float(-np.log((shares * targets).sum(axis=1)).mean())
    return loss, np.concatenate([(images.T @ errors).ravel(), errors.sum(axis=0)])


def _weights(model: Any) -> np.ndarray:
    return np.concatenate([model.weight.detach().numpy().T.ravel(), model.bias.detach().numpy()])


def _passes(model: Any) -> list[_Pass]:
    """A list that grows with each forward pass that trains `model`."""
    import torch

    known, passes = torch.tensor(_examples()[0]), list[_Pass]()

    def note(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():  # else it only looks how good it is
            images = torch.cdist(torch.atleast_2d(inputs[0]), known).argmin(dim=1).tolist()
            passes.append(_Pass(images, _weights(model)))

    model.register_forward_pre_hook(note)
    return passes


def _distance(some: np.ndarray, others: np.ndarray) -> float:
    return float(np.abs(some - others).max())


@exercise
def convert_pytorch(answer: Callable[..., Any]) -> str:
    """`answer(hvd, model, dataset, rate, epochs, save)` trains on N ranks as one process on N times the batch."""
    for size in (2, 3):
        where = f"on {size} ranks"
        ranks = values_on_ranks(where, size, **call(_convert_pytorch, {"answer": answer}), timeout="15s")
        differ = any(_distance(rank.last, ranks[0].last) > TOLERANCE for rank in ranks)
        if differ and not any(
            rank.uses_horovod for rank in ranks
        ):  # an answer that imports Horovod itself may be right
            raise NotYet("this is still the script of one process, and uses nothing of `hvd`: convert it.")
        _judge_shares(where, ranks)
        _judge_weights(where, ranks)
        _judge_ends(where, ranks)
    return (
        "2 and 3 ranks share each epoch, in an order that changes, and end with the weights of one process that takes "
        "all their batches at once; one saves, and all know the mean loss."
    )


def _convert_pytorch(hvd: Any, answer: Callable[..., Any]) -> _Trained:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # as where nobody sets a seed
    model, dataset, saved = torch.nn.Linear(4, 3), _Dataset(), list[Any]()
    first, passes = _weights(model), _passes(model)
    watched = _Watched(hvd, passes)
    save = lambda given: saved.append(_weights(given) if given is model else repr(given))  # noqa: E731
    loss = answer(watched, model, dataset, RATE, EPOCHS, save)
    loss = loss.item() if math.prod(getattr(loss, "shape", [0])) == 1 else loss
    seen = (watched.is_used, frozenset(dataset.read), saved, loss, watched.broadcasts)
    return _Trained(first, passes, _weights(model), *seen)


def _judge_shares(where: str, ranks: Sequence[_Trained]) -> None:
    """Each image once in an epoch, on one rank."""
    size, share = len(ranks), IMAGES // len(ranks)
    counts = sorted(len(rank.used) for rank in ranks)
    sizes = {len(each.images) for rank in ranks for each in rank.passes}
    starts = range(0, EPOCHS * share, share)
    seen = [[frozenset(rank.used[start : start + share]) for rank in ranks] for start in starts]
    read = min(len(frozenset.union(*each)) for each in seen)
    mistakes_with_data = {
        f"every rank trains on all {IMAGES} images in each epoch, {size} times the work of one process: the data is "
        "not split. Give each rank its share, with a DistributedSampler.": {*counts} == {EPOCHS * IMAGES},
        f"the ranks train on {counts} images in {EPOCHS} epochs of {IMAGES}; it must be {EPOCHS * share} each, in "
        f"batches of {BATCH}.": {*counts} != {EPOCHS * share} or sizes != {BATCH},
        f"all ranks read the same {share} images and nobody the others: a sampler has to know `rank=hvd.rank()` "
        "(PyTorch's own process group, which it asks otherwise, is not there).": any(
            len({*each}) == 1 for each in seen
        ),
        f"only {read} of {IMAGES} images are used in an epoch: the ranks' shares overlap, or they do not shuffle "
        "alike.": read != IMAGES,
        "a rank reads images on which it does not train: let it read only its own.": any(
            rank.read - {*rank.used} for rank in ranks
        ),
        "every epoch has the same order: tell the sampler which one begins, by `set_epoch`.": all(
            rank.used[:share] == rank.used[share : 2 * share] for rank in ranks
        ),
    }
    refuse_any(f"{where}, ", mistakes_with_data)


def _judge_weights(where: str, ranks: Sequence[_Trained]) -> None:
    """All ranks begin with rank 0's weights, and each step is along the mean gradient at N times the rate."""
    size, own = len(ranks), np.array([rank.gradients() for rank in ranks])
    used = np.array([rank.changes for rank in ranks]) / (-RATE * size)
    is_right = _recognise(where, convert_pytorch, used, own, own.mean(axis=0), n=size)
    starts = [rank.passes[0].weights for rank in ranks]
    roots = [rank for rank in range(size) if _distance(np.array(starts), ranks[rank].first) < TOLERANCE]
    apart = f"{max(_distance(rank.last, ranks[0].last) for rank in ranks):.2g}"
    slips = {
        f"all start from rank {listed(roots)}'s weights; it must be rank 0, which resumes and saves.": roots
        and 0 not in roots,
        f"a rank does not begin with rank 0's weights, and weights differ by up to {apart} at the end. Broadcast rank "
        "0's weights before the first step.": not roots,
        "a step is not that of one process with all batches: average the gradients once, and keep one rate, "
        f"{size} times the given one, without a warm-up.": not is_right,
        "ranks broadcast again while they train. Averaged gradients keep equal weights equal, so broadcast once, "
        "before the first step.": any(rank.broadcasts for rank in ranks),
    }
    refuse_any(f"{where}, ", slips)


def _recognise(
    where: str, check: Check, used: np.ndarray, own: np.ndarray, right: np.ndarray, **names: Any
) -> bool:
    """Whether the gradients `used` are the right ones. Raises Wrong where a mistake makes them of the ranks' `own`."""
    if is_right := np.allclose(used, right, rtol=0, atol=ROUGH):
        return is_right
    for sentence, mistake in mistakes(__name__, check.__name__, **names).items():
        refuse(np.allclose(used, mistake(own), rtol=0, atol=ROUGH), f"{where}, {sentence}")
    return False


def _judge_ends(where: str, ranks: Sequence[_Trained]) -> None:
    saves, losses = [len(rank.saved) for rank in ranks], [rank.loss for rank in ranks]
    saved = [*ranks[0].saved, None][0]
    expected = np.mean([_loss_and_gradient(rank.passes[-1])[0] for rank in ranks])
    slips = {
        "every rank saves, to the same file: leave that to rank 0.": all(saves),
        f"the ranks save {saves} times; rank 0 must save once, and the others not at all.": saves
        != [1] + [0] * (len(ranks) - 1),
        f"rank 0 calls `save({saved})`; it must save the model.": isinstance(saved, str),
        "rank 0 saves other weights than those at the end: save after the last step.": lambda: (
            _distance(saved, ranks[0].last) > TOLERANCE
        ),
        "a rank returns nothing; every rank must return the mean loss of the last batches.": any(
            is_missing(loss) for loss in losses
        ),
        f"the ranks return {losses}; each must return one number.": not all(
            isinstance(loss, Real) for loss in losses
        ),
        f"the ranks return different losses, {losses}: each knows that of its own batch alone. Average them by an "
        "`hvd.allreduce`.": lambda: max(losses) - min(losses) > TOLERANCE,
        f"the ranks return the loss {losses[0]}; the mean is {expected:.4f}.": lambda: (
            abs(losses[0] - expected) > TOLERANCE
        ),
    }
    refuse_any(f"{where}, ", slips)


@exercise
def clip_and_accumulate(answer: Callable[..., object]) -> str:
    """`answer(hvd, model, steps, rate, limit)` takes the steps of one process with the batches of all ranks."""
    if not has_horovod():
        raise NotYet(f"this check trains with Horovod, which is not installed: {HOW}.")
    for size in (2, 3):
        batches = 5 - size  # of a step: never as many as ranks
        where = f"on {size} ranks, with {batches} batches a step and the limit {LIMITS[size]:g}"
        arguments = {"answer": answer, "batches": batches}
        ranks = values_on_ranks(where, size, _accumulate, arguments, framework="horovod")
        _judge_steps(where, ranks, batches)
    return (
        "each step is that of one process with all batches, clipped where their mean is too long; gradients travel "
        "once a step."
    )


def _share(rank: int, size: int, batches: int) -> list[list[int]]:
    """The images of each of a rank's batches, in order."""
    each = np.arange(STEPS * batches * size * 4) % IMAGES
    return each.reshape(-1, size, 4)[:, rank].tolist()


def _accumulate(hvd: Any, answer: Callable[..., object], batches: int) -> _Trained:
    import torch
    from horovod.torch import mpi_ops, optimizer

    torch.set_num_threads(1)
    model, sent, flying, torn = torch.nn.Linear(4, 3), list[int](), list[tuple[Any, int]](), list[bool]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape))

    def noted(send: Callable[..., Any]) -> Callable[..., Any]:
        def send_noted(tensors: Any, *rest: Any, **options: Any) -> Any:
            handle = send(tensors, *rest, **options)
            each = [tensors] if torch.is_tensor(tensors) else tensors
            flying.extend((tensor, tensor._version) for tensor in each)
            sent.append(sum(tensor.numel() for tensor in each))
            return handle

        return send_noted

    def synchronize(self: Any, by_horovod: Any = optimizer._DistributedOptimizer.synchronize) -> None:
        torn.append(any(tensor._version != version for tensor, version in flying))
        by_horovod(self)
        flying.clear()

    for name in ("_allreduce_async", "_grouped_allreduce_async"):
        setattr(mpi_ops, name, noted(getattr(mpi_ops, name)))
    optimizer._DistributedOptimizer.synchronize = synchronize
    images, labels = map(torch.tensor, _examples())
    parts = [(images[each], labels[each]) for each in _share(hvd.rank(), hvd.size(), batches)]
    steps = [parts[start : start + batches] for start in range(0, len(parts), batches)]
    first, passes = _weights(model), _passes(model)
    answer(hvd, model, steps, RATE, LIMITS[hvd.size()])
    return _Trained(first, passes, _weights(model), sent=sum(sent), is_torn=any(torn))


def _judge_steps(where: str, ranks: Sequence[_Trained], batches: int) -> None:
    """Each rank passes once over each batch; a step is along the mean gradient, clipped."""
    size, seen = len(ranks), [[each.images for each in rank.passes] for rank in ranks]
    if not any(seen):
        raise NotYet("it trains nothing: write the function, then run this again.")
    slips = {
        "gradients are changed while they travel: the last backward pass has begun the all-reduce. Call "
        "`optimizer.synchronize()`, then clip.": any(rank.is_torn for rank in ranks),
        f"the ranks make {[*map(len, seen)]} forward passes; it must be {STEPS * batches} each, one for each batch, in "
        "order.": seen != [_share(rank, size, batches) for rank in range(size)],
    }
    refuse_any(f"{where}, ", slips)
    # By rank, number of the batch in its step, and step.
    changes, own = (
        np.array(each).reshape(size, STEPS, batches, -1).swapaxes(1, 2)
        for each in ([rank.changes for rank in ranks], [rank.gradients() for rank in ranks])
    )
    within = "weights change between the batches of a step: call `step()` once, after the last"
    refuse(np.abs(changes[:, :-1]).max() > TOLERANCE, f"{where}, {within}.")

    def clipped(gradients: np.ndarray) -> np.ndarray:
        lengths = np.linalg.norm(gradients, axis=-1, keepdims=True)
        return gradients * np.minimum(1, LIMITS[size] / lengths)

    used, right = changes[:, -1] / -RATE, clipped(own.mean(axis=(0, 1)))
    sent = max(rank.sent for rank in ranks) / (STEPS * ranks[0].last.size)
    if not sent and np.allclose(used, clipped(own.mean(axis=1)), rtol=0, atol=ROUGH):
        raise NotYet("this is still the script of one process, and sends nothing: convert it.")
    is_right = _recognise(where, clip_and_accumulate, used, own, right, clipped=clipped)
    rank, step = np.unravel_index(np.abs(used - right).max(axis=2).argmax(), used.shape[:2])
    apart = f"{max(_distance(rank.last, ranks[0].last) for rank in ranks):.2g}"
    slips = {
        f"rank {rank}'s step {step + 1} is not along the clipped mean of all batches' gradients, but up to "
        f"{_distance(used[rank, step], right[step]):.2g} off, and weights end up to {apart} apart.": not is_right,
        f"each gradient travels {sent:.0f} times in a step; once is enough. `step()` sends again what `synchronize()` "
        "has sent, unless it stands in `with optimizer.skip_synchronize():`.": sent >= 2,
    }
    refuse_any(f"{where}, ", slips)


@measured
def largest_loss_scale(results: Any) -> float:
    """The largest scale at which a mean of four ranks is finite; `results` are runs of `scaled`."""
    runs = runs_of(results, "scaled", ranks=4)
    means = [pair for run in runs for pair in zip(run.arguments["scales"], run.values[0], strict=True)]
    finite = max((float(scale) for scale, mean in means if math.isfinite(mean)), default=0.0)
    infinite = min((float(scale) for scale, mean in means if not math.isfinite(mean)), default=math.inf)
    if not finite or infinite > CLOSE * finite:
        found = f"`results` has finite means up to scale {finite:,g} and infinite ones from {infinite:,g} on"
        raise NotYet(f"{found}: try scales between these, at most 1 % apart.")
    return finite
