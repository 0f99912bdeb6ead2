"""Checks of lesson 05, Horovod; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.lessons.checks import NotYet, exercise, listed, mistakes, refuse, refuse_any
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import values_on_ranks
from workshop_utils.lessons.without_horovod import HOW, MISSING, call, has_horovod

IMAGES, BATCH, EPOCHS, RATE = 48, 8, 3, 0.1
STEPS = 4  # of clip_and_accumulate
CASES = ((2, 100.0), (2, 0.85), (3, 0.85))  # ranks, limit: clips no step, then the second and the last
TOLERANCE = 1e-4  # of weights, which float32 rounds; the mistakes are a hundred times as far off
ROUGH = 2e-3  # of a gradient's numbers, which fp16 may round
CLOSE = 1.01  # between a scale that is finite and one that is not, or a mean and what it must be
AGAIN = "ranks broadcast while they train. Equal weights stay equal: broadcast only before the first step."


class _Pass(NamedTuple):
    """A forward pass that a backward pass followed."""

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
    broadcasts: Sequence[int] = ()  # how many passes were before each
    sent: int = 0  # numbers
    is_torn: bool = False  # gradients changed while they were under way

    @property
    def used(self) -> list[int]:
        return [image for each in self.passes for image in each.images]

    @property
    def broadcasts_while_training(self) -> bool:
        return any(0 < before < len(self.passes) for before in self.broadcasts)

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
        self._hvd, self._passes, self.is_used, self.broadcasts = hvd, passes, False, list[int]()

    def __getattr__(self, name: str) -> Any:
        self.is_used = True
        if name in ("broadcast_parameters", "broadcast_optimizer_state"):
            self.broadcasts.append(len(self._passes))
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
        images, labels = _examples()
        example = images[index], int(labels[index])
        self.read.add(int(index) % IMAGES)
        return example


@cache
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
    """A list that grows with each backward pass through `model`."""
    import torch

    known, passes = torch.tensor(_examples()[0]), list[_Pass]()

    def note(_: Any, inputs: tuple[torch.Tensor, ...], scores: torch.Tensor) -> None:
        if scores.requires_grad:
            images = torch.cdist(torch.atleast_2d(inputs[0]), known).argmin(dim=1).tolist()
            this = _Pass(images, _weights(model))
            scores.register_hook(lambda _: passes.append(this))

    model.register_forward_hook(note)
    return passes


def _distance(some: np.ndarray, others: np.ndarray) -> float:
    return float(np.abs(some - others).max())


@exercise
def convert_pytorch(answer: Callable[..., Any]) -> str:
    """`answer(hvd, model, dataset, rate, epochs, save)` trains on N ranks as one process on N times the batch."""
    for size in (2, 3):
        where = f"on {size} ranks"
        ranks = values_on_ranks(where, size, **call(_convert_pytorch, {"answer": answer}))
        differ = any(_distance(rank.last, ranks[0].last) > TOLERANCE for rank in ranks)
        # An answer that imports Horovod itself may be right.
        if differ and not any(rank.uses_horovod for rank in ranks):
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
    torch.manual_seed(7919 + hvd.rank())  # an answer shall not draw the same weights by a seed of its own
    model, dataset, saved = torch.nn.Linear(4, 3), _Dataset(), list[Any]()
    torch.manual_seed(hvd.rank())  # as where nobody sets a seed
    first, passes = _weights(model), _passes(model)
    watched = _Watched(hvd, passes)

    def save(given: Any) -> None:
        saved.append(_weights(given) if isinstance(given, torch.nn.Linear) else repr(given))

    try:
        loss = answer(watched, model, dataset, RATE, EPOCHS, save)
    except AttributeError as error:
        raise (NotYet(f"{error}.") if MISSING in str(error) else error) from None
    except ModuleNotFoundError as error:
        refuse(not str(error.name).startswith("horovod"), f"{error}.")
        raise NotYet(f"{error}: use the `hvd` that is passed.") from None
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
        f"the ranks train on {counts} images in {EPOCHS} epochs; it must be {EPOCHS * share} each.": (
            {*counts} != {EPOCHS * share}
        ),
        f"batches have {listed(sorted(sizes))} images; it must be {BATCH}.": sizes != {BATCH},
        f"all ranks read the same {share} images and nobody the others: a sampler has to know `rank=hvd.rank()` "
        "(PyTorch's own process group, which it asks otherwise, is not there).": any(
            len({*each}) == 1 for each in seen
        ),
        f"only {read} of {IMAGES} images are used in an epoch: the ranks' shares overlap, or they do not shuffle "
        "alike.": read != IMAGES,
        "a rank reads images on which it does not train: let it read only its own.": any(
            rank.read - {*rank.used} for rank in ranks
        ),
        "epochs have the same order: tell the sampler which one begins, by `set_epoch`.": any(
            len({tuple(rank.used[start : start + share]) for start in starts}) < EPOCHS for rank in ranks
        ),
    }
    refuse_any(f"{where}, ", mistakes_with_data)


def _judge_weights(where: str, ranks: Sequence[_Trained]) -> None:
    """All ranks begin with rank 0's weights, and each step is along the mean gradient at N times the rate."""
    size, own = len(ranks), np.array([rank.gradients() for rank in ranks])
    used = np.array([rank.changes for rank in ranks]) / (-RATE * size)
    is_right = _recognise(where, "convert_pytorch", used, own, own.mean(axis=0), n=size)
    starts = np.array([rank.passes[0].weights for rank in ranks])
    slips = {
        "a rank does not begin with the weights of rank 0, which resumes and saves: broadcast these before the first "
        "step.": _distance(starts, ranks[0].first) > TOLERANCE,
        "a step is not that of one process with all batches: average the gradients once, and keep one rate, "
        f"{size} times the given one, without warm-up, momentum or weight decay.": not is_right,
        AGAIN: any(rank.broadcasts_while_training for rank in ranks),
    }
    refuse_any(f"{where}, ", slips)


def _recognise(
    where: str, check: str, used: np.ndarray, own: np.ndarray, right: np.ndarray, **by: Any
) -> bool:
    """Whether the gradients `used` are the right ones. Raises Wrong where a mistake makes them of the ranks' `own`."""
    error = 1e-5 + ROUGH * np.abs(own).reshape(-1, *right.shape).max(axis=0)
    is_right = _distance(used / error, right / error) < 1
    for sentence, mistake in mistakes(__name__, check, **by).items():
        refuse(not is_right and _distance(used / error, mistake(own) / error) < 1, f"{where}, {sentence}")
    return is_right


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
        f"the ranks return {losses}; each must return a number, the last batches' mean loss.": not all(
            isinstance(loss, Real) and math.isfinite(loss) for loss in losses
        ),
        f"the ranks return different losses, {losses}: each knows only that of its own batch. Average them by an "
        "`hvd.allreduce`.": lambda: max(losses) - min(losses) > TOLERANCE,
        f"the ranks return the loss {losses[0]}; the mean is {expected:.4f}.": lambda: (
            abs(losses[0] - expected) > TOLERANCE
        ),
    }
    refuse_any(f"{where}, ", slips)


@exercise
def clip_and_accumulate(answer: Callable[..., object]) -> str:
    """`answer(hvd, model, steps, rate, limit)` takes the steps of one process with the batches of all ranks.

    `steps` are lists of batches, each of images and labels; `limit` is the longest norm of a step's gradient.
    """
    if not has_horovod():
        raise NotYet(f"this check trains with Horovod, which is not installed: {HOW}.")
    for size, limit in CASES:
        batches = 5 - size  # of a step: never as many as ranks
        where = f"on {size} ranks, with {batches} batches a step and the limit {limit:g}"
        arguments = {"answer": answer, "batches": batches, "limit": limit}
        ranks = values_on_ranks(where, size, _accumulate, arguments, framework="horovod")
        _judge_steps(where, ranks, batches, limit)
    return (
        "each step is that of one process with all batches, clipped where their mean is too long; gradients travel "
        "once a step."
    )


def _share(rank: int, size: int, batches: int) -> list[list[int]]:
    """The images of each of a rank's batches, in order."""
    each = np.arange(STEPS * batches * size * 4) % IMAGES
    return each.reshape(-1, size, 4)[:, rank].tolist()


def _accumulate(hvd: Any, answer: Callable[..., object], batches: int, limit: float) -> _Trained:
    import torch
    from horovod.torch import mpi_ops, optimizer

    torch.set_num_threads(1)
    model, sent, broadcasts, torn = torch.nn.Linear(4, 3), list[int](), list[int](), list[bool]()
    on_their_way = dict[int, list[tuple[Any, int]]]()  # by handle: tensors, and how often they had changed
    for parameter in model.parameters():
        parameter.data = torch.linspace(-1, 1, parameter.numel()).reshape(parameter.shape)

    def noted(send: Callable[..., Any], tensors: Any, *rest: Any, **options: Any) -> Any:
        handle = send(tensors, *rest, **options)
        each = [tensors] if torch.is_tensor(tensors) else tensors
        if "broadcast" in send.__name__:
            is_weight = any(tensors.data_ptr() == each.data_ptr() for each in model.parameters())
            broadcasts.extend([len(passes)] * is_weight)
        else:
            sent.append(sum(tensor.numel() for tensor in each if tensor.numel() >= 3))  # else no gradient
            on_their_way[handle] = [(tensor, tensor._version) for tensor in each]
        return handle

    def synchronize(handle: int, by_horovod: Callable[[int], Any] = mpi_ops.synchronize) -> Any:
        torn.append(any(tensor._version != version for tensor, version in on_their_way.pop(handle, ())))
        return by_horovod(handle)

    for name in [name for name in vars(mpi_ops) if name.startswith("_") and name.endswith("_async")]:
        setattr(mpi_ops, name, partial(noted, getattr(mpi_ops, name)))
    for module in (hvd, mpi_ops, optimizer):
        module.synchronize = synchronize
    images, labels = map(torch.tensor, _examples())
    parts = [(images[each], labels[each]) for each in _share(hvd.rank(), hvd.size(), batches)]
    steps = [parts[start : start + batches] for start in range(0, len(parts), batches)]
    first, passes = _weights(model), _passes(model)
    answer(hvd, model, steps, RATE, limit)
    seen: dict[str, Any] = {"broadcasts": broadcasts, "sent": sum(sent), "is_torn": any(torn)}
    return _Trained(first, passes, _weights(model), **seen)


def _judge_steps(where: str, ranks: Sequence[_Trained], batches: int, limit: float) -> None:
    """Each rank passes once over each batch; a step is along the mean gradient, clipped.

    `right` has a gradient of 15 numbers for each step, and `used` what each rank took.
    """
    size, count = len(ranks), 4 * batches  # of a step's images
    shares = [_share(rank, size, batches) for rank in range(size)]
    taken, given = [rank.used for rank in ranks], np.reshape(shares, (size, STEPS, count))
    slips = {
        "gradients are changed while they travel: the last backward pass has begun the all-reduce. Call "
        "`optimizer.synchronize()`, then clip.": any(rank.is_torn for rank in ranks),
        f"the ranks train on {[*map(len, taken)]} images; it must be {STEPS * count} each, each batch once, step after "
        "step.": {*map(len, taken)} != {STEPS * count}
        or (lambda: bool((np.sort(np.reshape(taken, given.shape)) != np.sort(given)).any())),
    }
    refuse_any(f"{where}, ", slips)
    weights = np.array([[each.weights for each in rank.passes for _ in each.images] for rank in ranks])
    weights = weights.reshape(*given.shape, -1)  # before each image
    within = "weights change between the batches of a step: call `step()` once, after the last"
    refuse(np.ptp(weights, axis=2).max() > TOLERANCE, f"{where}, {within}.")
    weights = np.concatenate([weights[:, :, 0], [[rank.last] for rank in ranks]], axis=1)
    before = weights[:, :-1].repeat(batches, axis=1)
    pairs = [zip(*each, strict=True) for each in zip(shares, before, strict=True)]
    each = [[_loss_and_gradient(_Pass(*pair))[1] for pair in of_rank] for of_rank in pairs]
    # By rank, number of the batch in its step, and step.
    own = np.reshape(each, (size, STEPS, batches, -1)).swapaxes(1, 2)

    def clipped(gradients: np.ndarray) -> np.ndarray:
        lengths = np.linalg.norm(gradients, axis=-1, keepdims=True)
        return gradients * np.minimum(1, limit / lengths)

    used, right = np.diff(weights, axis=1) / -RATE, clipped(own.mean(axis=(0, 1)))
    # A reduce-scatter and an all-gather are an all-reduce.
    sent = max(rank.sent for rank in ranks) / (STEPS * ranks[0].last.size)
    if not sent and np.allclose(used, clipped(own.mean(axis=1)), rtol=0, atol=ROUGH):
        raise NotYet("this is still the script of one process, and sends nothing: convert it.")
    is_right = _recognise(where, "clip_and_accumulate", used, own, right, clipped=clipped)
    slips = {
        f"a step is not along the clipped mean of all gradients: {_distance(used, right):.2g} off.": not is_right,
        f"each gradient travels {sent:.2g} times in a step; once is enough. `step()` sends again what `synchronize()` "
        "has sent, unless it stands in `with optimizer.skip_synchronize():`.": sent > 1.75,
        AGAIN: any(rank.broadcasts_while_training for rank in ranks),
    }
    refuse_any(f"{where}, ", slips)


@measured
def largest_loss_scale(results: Any) -> float:
    """The largest scale at which a mean of four ranks is finite; `results` are runs of `scaled`."""
    runs = runs_of(results, "scaled", ranks=4)
    means = [pair for run in runs for pair in zip(run.arguments["scales"], run.values[0], strict=True)]
    factors = {float(scale): mean / scale for scale, mean in means if scale > 0}
    fitting = {scale: factor for scale, factor in factors.items() if math.isfinite(factor)}
    finite, infinite = max(fitting, default=0.0), min(factors.keys() - fitting, default=math.inf)
    if not finite or infinite > CLOSE * finite:
        found = f"`results` has finite means up to scale {finite:,g} and infinite ones from {infinite:,g} on"
        raise NotYet(f"{found}: try scales between these, at most 1 % apart.")
    # Gloo adds a few wrong, and small ones are zero in 16 bits.
    usual = np.median([factor for scale, factor in fitting.items() if scale > finite / 1000])
    said = f"the mean of four numbers s is s, and yours are typically {usual:.3g} times s"
    refuse(not 1 / CLOSE < usual < CLOSE, f"`results` are not means: {said}. Run `scaled`.")
    return finite
