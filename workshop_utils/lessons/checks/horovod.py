"""Checks of lesson 05, Horovod; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.lessons.checks import NotYet, Wrong, compare, exercise, is_missing, mistakes, recognise
from workshop_utils.lessons.checks.open_question import OpenQuestion
from workshop_utils.lessons.checks.processes import values_on_ranks
from workshop_utils.parallel import adasum

IMAGES, BATCH, EPOCHS, RATE = 48, 8, 2, 0.1  # of the two conversions
TOLERANCE = 1e-4  # of weights, which float32 rounds; the mistakes are a hundred times as far off

Weights = Sequence[np.ndarray]  # a matrix (inputs, classes) and biases

half_a_cycle = OpenQuestion(
    "milliseconds",
    (10, 80),
    "at a random moment half a cycle is left on average, 20 ms; then come the ranks' agreement and the all-reduce, "
    "some milliseconds more. Section 5 measured a whole cycle, since its ranks begin just after one has ended: the "
    "barrier before each measurement is itself a message of Horovod's.",
)


class _Trained(NamedTuple):
    """What a rank has to show for itself."""

    uses_horovod: bool
    first: list[np.ndarray]
    last: list[np.ndarray]
    read: list[int]
    saves: int = 0
    loss: Any = None


class _Watched:
    """Horovod's module, which also knows whether anything of it was used."""

    def __init__(self, hvd: Any) -> None:
        self._hvd, self.is_used = hvd, False

    def __getattr__(self, name: str) -> Any:
        self.is_used = True
        return getattr(self._hvd, name)


class _Dataset:
    """The images with their labels; knows which were read, in which order."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __len__(self) -> int:
        return IMAGES

    def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
        if not 0 <= index < IMAGES:
            raise IndexError(f"there is no image {index}")
        self.read.append(int(index))
        images, labels = _examples()
        return images[index], int(labels[index])


def _examples() -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    images = generator.standard_normal((IMAGES, 4)).astype(np.float32)
    return images, (images @ generator.standard_normal((4, 3))).argmax(axis=1)


def _loss_and_gradients(weights: Weights, batch: Sequence[int]) -> tuple[float, list[np.ndarray]]:
    """The mean cross-entropy of `batch` in a network of one layer, and its gradients."""
    images, labels = (each[list(batch)] for each in _examples())
    scores = images @ weights[0] + weights[1]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    targets = np.eye(3)[labels]
    errors = (shares - targets) / len(batch)
    loss = float(-np.log((shares * targets).sum(axis=1)).mean())
    return loss, [images.T @ errors, errors.sum(axis=0)]


def _train(weights: Weights, read: Sequence[Sequence[int]], rate: float) -> tuple[list[np.ndarray], float]:
    """What one process gets of the mean gradient of all batches that are `read` at once, and their last mean loss."""
    weights, loss = [each.astype(float) for each in weights], 0.0
    for start in range(0, len(read[0]), BATCH):
        steps = [_loss_and_gradients(weights, each[start : start + BATCH]) for each in read]
        loss = float(np.mean([step[0] for step in steps]))
        for number, weight in enumerate(weights):
            weight -= rate * np.mean([step[1][number] for step in steps], axis=0)
    return weights, loss


def _distance(some: Weights, others: Weights) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))


@exercise
def convert_pytorch(answer: Callable[..., Any]) -> str:
    """`answer(hvd, model, dataset, rate, epochs, save)` trains on N ranks as one process on N times the batch."""
    for size in (2, 3):
        where = f"on {size} ranks"
        ranks = values_on_ranks(
            where, size, _convert_pytorch, {"answer": answer}, framework="horovod", timeout="15s"
        )
        if None in ranks:
            raise Wrong(f"{where}, rank {ranks.index(None)} ended with SystemExit.")
        differ = any(_distance(rank.last, ranks[0].last) > TOLERANCE for rank in ranks)
        if differ and not any(rank.uses_horovod for rank in ranks):  # who imports it in person may be right
            raise NotYet("this is still the script of one process, and uses nothing of `hvd`: convert it.")
        _judge_shares(where, ranks)
        _judge_weights(
            where,
            ranks,
            "Wrap the optimizer in `hvd.DistributedOptimizer`, and call `step()` on what it returns.",
            "the batch is larger and the steps are fewer, so take the rate times `hvd.size()`.",
        )
        _judge_ends(where, ranks)
    return (
        "2 and 3 ranks share each epoch, in an order that changes, and end with the weights of one process that takes "
        "all their batches at once; one saves, and all know the mean loss."
    )


def _convert_pytorch(hvd: Any, answer: Callable[..., Any]) -> _Trained:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(hvd.rank())  # as where nobody sets a seed
    model = torch.nn.Linear(4, 3)
    watched, dataset = _Watched(hvd), _Dataset()
    saves: list[Any] = []

    def weights() -> list[np.ndarray]:
        return [model.weight.detach().numpy().T.copy(), model.bias.detach().numpy().copy()]

    first = weights()
    loss = answer(watched, model, dataset, RATE, EPOCHS, saves.append)
    loss = loss.item() if getattr(loss, "numel", lambda: 0)() == 1 else loss
    return _Trained(watched.is_used, first, weights(), dataset.read, len(saves), loss)


def _judge_shares(where: str, ranks: Sequence[_Trained]) -> None:
    """Each image once in an epoch, on one rank."""
    size, share = len(ranks), IMAGES // len(ranks)
    counts = {len(rank.read) for rank in ranks}
    if counts == {EPOCHS * IMAGES}:
        raise Wrong(
            f"the data is not split: {where}, every rank reads all {IMAGES} images in each epoch, {size} times the "
            "work of one process. Give each rank its share, with a DistributedSampler."
        )
    if counts != {EPOCHS * share}:
        raise Wrong(
            f"{where}, the ranks read {sorted(len(rank.read) for rank in ranks)} images in {EPOCHS} epochs of "
            f"{IMAGES}; it must be {EPOCHS * share} each, in batches of {BATCH}."
        )
    for start in range(0, EPOCHS * share, share):
        seen = [frozenset(rank.read[start : start + share]) for rank in ranks]
        if len(set(seen)) == 1:
            raise Wrong(
                f"{where}, all ranks read the same {share} images and nobody the others: a sampler has to know "
                "`rank=hvd.rank()` (PyTorch's own process group, which it asks otherwise, is not there)."
            )
        if len(frozenset.union(*seen)) != IMAGES:
            read = len(frozenset.union(*seen))
            raise Wrong(
                f"{where}, only {read} of {IMAGES} images are read in an epoch: the ranks' shares overlap, or "
                "they do not shuffle alike."
            )
    if all(rank.read[:share] == rank.read[share : 2 * share] for rank in ranks):
        raise Wrong(
            f"{where}, every epoch has the same order: tell the sampler which one begins, by `set_epoch`."
        )


def _judge_weights(where: str, ranks: Sequence[_Trained], averaging: str, scaling: str) -> None:
    """All ranks end with what one process gets of the mean gradients, from rank 0's weights at N times the rate.

    `averaging` and `scaling` advise those who forget the one or the other.
    """
    size, read = len(ranks), [rank.read for rank in ranks]
    spread = max(_distance(rank.last, ranks[0].last) for rank in ranks)
    if spread > TOLERANCE:
        rates = (RATE, RATE * size)
        firsts = [("its own", [rank.first for rank in ranks]), ("rank 0's", [ranks[0].first] * size)]
        for whose, weights in firsts:
            for rate in rates:
                alone = [_train(first, [own], rate)[0] for first, own in zip(weights, read, strict=True)]
                if all(
                    _distance(rank.last, each) < TOLERANCE for rank, each in zip(ranks, alone, strict=True)
                ):
                    raise Wrong(
                        f"{where}, each rank trains alone, on {whose} weights: nobody averages the gradients. "
                        f"{averaging}"
                    )
        kept = [[last - first for last, first in zip(rank.last, rank.first, strict=True)] for rank in ranks]
        if all(_distance(each, kept[0]) < TOLERANCE for each in kept):
            raise Wrong(
                f"{where}, weights differ by up to {spread:.2g} at the end, just as at the start: all took the same "
                "steps, from different places. Broadcast rank 0's before the first step."
            )
        raise Wrong(
            f"{where}, weights differ by up to {spread:.2g} between the ranks at the end; all must start from rank 0's "
            "and take the same steps."
        )
    for root, rank in enumerate(ranks):
        for times, why in ((size, ""), (1, "unscaled"), (size**2, "summed")):
            if _distance(ranks[0].last, _train(rank.first, read, RATE * times)[0]) < TOLERANCE:
                _explain_start(where, size, root, why, scaling)
                return
    raise Wrong(
        f"{where}, all ranks end with the same weights, but not those of one process with all their batches at "
        f"{size} times the rate: broadcast before the first step, average the gradients, and keep one rate, "
        "without a warm-up."
    )


def _explain_start(where: str, size: int, root: int, why: str, scaling: str) -> None:
    if why == "unscaled":
        raise Wrong(f"{where}, each step is {size} times too short: {scaling}")
    if why == "summed":
        raise Wrong(
            f"{where}, each step is {size} times too long: the sum of the gradients is {size} times their mean. "
            "Average, or leave the rate as it is."
        )
    if root:
        raise Wrong(
            f"{where}, all start from rank {root}'s weights; it must be rank 0, which resumes and saves."
        )


def _judge_ends(where: str, ranks: Sequence[_Trained]) -> None:
    saves = [rank.saves for rank in ranks]
    if all(saves):
        raise Wrong(f"{where}, every rank saves, to the same file: leave that to rank 0.")
    if saves != [1] + [0] * (len(ranks) - 1):
        raise Wrong(
            f"{where}, the ranks save {saves} times; rank 0 must save once, and the others not at all."
        )
    expected = _train(ranks[0].first, [rank.read for rank in ranks], RATE * len(ranks))[1]
    losses = [rank.loss for rank in ranks]
    if any(is_missing(loss) for loss in losses):
        raise Wrong(
            f"{where}, a rank returns nothing; every rank must return the mean loss of the last batches."
        )
    try:
        wrong = not np.allclose(np.asarray(losses, dtype=float), expected, atol=TOLERANCE)
    except (TypeError, ValueError):
        raise Wrong(f"{where}, the ranks return {losses}; each must return one number.") from None
    if wrong and max(losses) - min(losses) > TOLERANCE:
        raise Wrong(
            f"{where}, the ranks return different losses, {', '.join(f'{loss:.4f}' for loss in losses)}: each knows "
            "that of its own batch alone. Average them by an `hvd.allreduce`."
        )
    if wrong:
        raise Wrong(f"{where}, the ranks return the loss {losses[0]:.4f}; the mean is {expected:.4f}.")


@exercise
def convert_keras(answer: Callable[..., tuple[Any, Any]]) -> str:
    """`answer(hvd, keras)`: an optimizer class that averages gradients, and a callback class that broadcasts."""
    for size in (2, 3):
        where = f"on {size} ranks"
        arguments = {
            "answer": answer,
            "imports": "tensorflow",
        }  # so the ranks get Horovod's part for TensorFlow
        ranks = values_on_ranks(where, size, _convert_keras, arguments, framework="horovod")
        if ranks[0] is ...:
            raise NotYet("your function gave nothing: write it, then run this again.")
        if None in ranks:
            raise Wrong(f"{where}, rank {ranks.index(None)} ended with SystemExit.")
        if isinstance(ranks[0], str):
            raise Wrong(f"{ranks[0]}; it must return the optimizer's class and the callback's.")
        unmoved = all(_distance(rank.first, rank.last) == 0 for rank in ranks)
        if unmoved and not any(rank.uses_horovod for rank in ranks):
            raise NotYet("neither class does anything yet: write both, then run this again.")
        if unmoved or all(_distance(ranks[0].first, rank.last) == 0 for rank in ranks):
            raise Wrong(
                f"{where}, `fit` changes no weight: end with `super().apply(grads, trainable_variables)`."
            )
        _judge_weights(
            where,
            ranks,
            "In `apply`, give `super().apply` what `hvd.grouped_allreduce` returns.",
            "average once, by `op=hvd.Average`; the rate that the optimizer is given is scaled already.",
        )
    return "under Keras's own `fit`, 2 and 3 ranks end with the weights of one process that takes all their batches."


def _convert_keras(hvd: Any, answer: Callable[..., tuple[Any, Any]], imports: str) -> Any:  # noqa: ARG001
    """What a rank has trained, `...` if there is no answer, or what is wrong with it."""
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    watched = _Watched(hvd)
    classes = answer(watched, keras)
    if is_missing(classes):
        return ...
    if not isinstance(classes, tuple | list) or len(classes) != 2:
        return f"your function returned {classes!r}"
    optimizer, callback = classes
    keras.utils.set_random_seed(hvd.rank())
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3)])
    model.layers[0].bias.assign(np.full(3, hvd.rank() / 10))
    first = [np.array(each) for each in model.get_weights()]
    images, labels = _examples()
    share = list(range(hvd.rank(), IMAGES, hvd.size()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer(RATE * hvd.size()), loss, jit_compile=False)
    fitting: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    model.fit(images[share], labels[share], callbacks=[callback()], **fitting)
    last = [np.array(each) for each in model.get_weights()]
    return _Trained(watched.is_used, first, last, EPOCHS * share)


def _scaled(first: np.ndarray, second: np.ndarray, by_first: float, by_second: float) -> np.ndarray:
    """Adasum's sum, with the dot product divided by these numbers, of which right ones are 2 ‖a‖² and 2 ‖b‖²."""
    both = first @ second
    return (1 - both / by_first) * first + (1 - both / by_second) * second


@exercise
def warm_up(answer: Callable[[float, int, int, int], float]) -> str:
    """`answer(learning_rate, workers, step, warmup_steps)` is the learning rate of `step`, counted from 0."""
    recognise(answer, [(0.1, 8, 0, 10), (0.2, 4, 7, 10), (0.1, 8, 99, 10)], mistakes(__name__, "warm_up"))
    later = "the learning rate of {1} workers at step {2} of {3}"
    cases = [
        ("one worker's learning rate at its first step", "one worker needs no warm-up", 0.1, 1, 0, 10),
        ("the first learning rate of 8 workers", "it begins at that of one worker", 0.1, 8, 0, 10),
        ("the learning rate of 8 workers after the warm-up", "8 times that of one", 0.1, 8, 10, 10),
        ("the learning rate half-way", "it grows by the same amount in every step", 0.1, 8, 5, 10),
        ("the learning rate long after the warm-up", "it grows no further", 0.1, 8, 99, 10),
        *((later, "", 0.2, workers, step, 10) for workers, step in ((2, 3), (4, 7), (16, 1))),
    ]
    compare(answer, lambda rate, n, step, steps: rate * (1 + (n - 1) * min(1, step / steps)), cases)
    return "from that of one worker to N times it, and no further."


@exercise
def adasum_of_two(answer: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> str:
    """`answer(first, second)` combines two gradients as Adasum does."""
    east, north = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    slanted = np.array([2.0, 1.0])
    others = mistakes(__name__, "adasum_of_two", scaled=_scaled)
    recognise(answer, [(east, 3 * north), (east, slanted), (slanted, east + north)], others)
    generator = np.random.default_rng(0)
    cases = (
        ("two orthogonal gradients", "they have nothing in common, so both count in full", east, north),
        ("two equal gradients", "they say the same, so it counts once", east, east),
        ("two opposite gradients", "they cancel", east, -east),
        ("gradients of lengths 1 and 3 in one direction", "the mean of both", east, 3 * east),
        ("gradients at 45°", "each loses half of the other's projection on it", east, east + north),
        ("two gradients of 7 numbers", "", generator.normal(size=7), generator.normal(size=7)),
    )
    compare(answer, adasum.combine, [(f"Adasum of {what}", *rest) for what, *rest in cases])
    return "what both say counts once, what only one says counts in full."
