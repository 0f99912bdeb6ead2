"""Checks of lesson 05, Horovod; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from numbers import Real
from typing import Any, NamedTuple

import numpy as np

from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    compare,
    exercise,
    is_missing,
    mistakes,
    recognise,
    refuse,
    refuse_any,
    result_of,
)
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.lessons.checks.processes import values_on_ranks
from workshop_utils.lessons.without_horovod import HOW, call, has_horovod
from workshop_utils.parallel import adasum

# Of the two conversions; momentum is Keras's alone.
IMAGES, BATCH, EPOCHS, RATE, MOMENTUM = 48, 8, 2, 0.1, 0.5
STEPS_BEFORE = 7  # that rank 0's optimizer has counted when it resumes
TOLERANCE = 1e-4  # of weights, which float32 rounds; the mistakes are a hundred times as far off

fp16_on_slow_links = question(__name__, "fp16_on_slow_links")


class _Trained(NamedTuple):
    """What one rank's training did."""

    uses_horovod: bool
    first: list[np.ndarray]
    last: list[np.ndarray]
    used: list[int]  # images, in the order of training
    read: frozenset[int] = frozenset()
    saved: Sequence[Any] = ()
    loss: Any = None
    momentum: float = 0.0
    velocity: Sequence[Any] = (0.0, 0.0)  # what momentum begins with
    broadcasts: int = 0  # after the first step began
    steps: int = 0  # that the optimizer has counted
    untrained: float = 0.0  # a variable of the model that no gradient changes; rank r begins with r


class _Watched:
    """Horovod's module; records what of it is used. It is as on N hosts with one process each."""

    def __init__(self, hvd: Any) -> None:
        self._hvd, self.is_used, self.broadcasts = hvd, False, 0

    def __getattr__(self, name: str) -> Any:
        self.is_used = True
        self.broadcasts += name.startswith("broadcast")
        return getattr(self._hvd, name)

    def local_rank(self) -> int:
        return 0

    def local_size(self) -> int:
        return 1

    def broadcast_variables(self, variables: Any, *arguments: Any, **options: Any) -> Any:
        """Horovod's, which would wait for ever where ranks broadcast different numbers of variables."""
        variables = list(variables)
        counts = self._hvd.allgather_object(len(variables))
        if len(set(counts)) > 1:
            raise Wrong(
                f"the ranks broadcast {counts} variables, and would wait for each other for ever: an optimizer has "
                "variables only once it is built, so build it first, on all ranks."
            )
        self.is_used, self.broadcasts = True, self.broadcasts + 1
        return self._hvd.broadcast_variables(variables, *arguments, **options)


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


def _loss_and_gradients(
    weights: Sequence[np.ndarray], batch: Sequence[int]
) -> tuple[float, list[np.ndarray]]:
    """The mean cross-entropy of `batch` in a network of one layer (a matrix and biases), and its gradients."""
    images, labels = (each[list(batch)] for each in _examples())
    scores = images @ weights[0] + weights[1]
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    targets = np.eye(3)[labels]
    errors = (shares - targets) / len(batch)
    loss = float(-np.log((shares * targets).sum(axis=1)).mean())
    return loss, [images.T @ errors, errors.sum(axis=0)]


def _train(
    ranks: Sequence[_Trained],
    rate: float,
    start: int | None = 0,
    state: int | None = 0,
    averaged: bool = True,
) -> tuple[list[list[np.ndarray]], float]:
    """The weights with which the ranks end, and their last mean loss.

    All begin with the weights of the rank `start` and the momentum of the rank `state`, or each with its own (None).
    """
    weights = [list(rank.first if start is None else ranks[start].first) for rank in ranks]
    velocities = [list(rank.velocity if state is None else ranks[state].velocity) for rank in ranks]
    loss = 0.0
    for at in range(0, len(ranks[0].used), BATCH):
        steps = [
            _loss_and_gradients(each, rank.used[at : at + BATCH])
            for each, rank in zip(weights, ranks, strict=True)
        ]
        loss = float(np.mean([step[0] for step in steps]))
        means = [np.mean(each, axis=0) for each in zip(*(step[1] for step in steps), strict=True)]
        for rank, (_, own) in enumerate(steps):
            for number, gradient in enumerate(means if averaged else own):
                velocities[rank][number] = ranks[rank].momentum * velocities[rank][number] - rate * gradient
                weights[rank][number] = weights[rank][number] + velocities[rank][number]
    return weights, loss


def _distance(some: Sequence[np.ndarray], others: Sequence[np.ndarray]) -> float:
    return max(float(np.abs(one - other).max()) for one, other in zip(some, others, strict=True))


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
    known, used, saved = torch.tensor(_examples()[0]), list[int](), list[Any]()

    def note_images(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        if torch.is_grad_enabled():  # else it only looks how good it is
            watched.broadcasts = watched.broadcasts if used else 0
            used.extend(torch.cdist(torch.atleast_2d(inputs[0]), known).argmin(dim=1).tolist())

    def weights() -> list[np.ndarray]:
        return [model.weight.detach().numpy().T.copy(), model.bias.detach().numpy().copy()]

    model.register_forward_pre_hook(note_images)
    first = weights()
    save = lambda given: saved.append(weights() if given is model else repr(given))  # noqa: E731
    loss = answer(watched, model, dataset, RATE, EPOCHS, save)
    loss = loss.item() if math.prod(getattr(loss, "shape", [0])) == 1 else loss
    trained = _Trained(watched.is_used, first, weights(), used, frozenset(dataset.read), saved, loss)
    return trained._replace(broadcasts=watched.broadcasts)


def _judge_shares(where: str, ranks: Sequence[_Trained]) -> None:
    """Each image once in an epoch, on one rank."""
    size, share = len(ranks), IMAGES // len(ranks)
    counts = sorted(len(rank.used) for rank in ranks)
    starts = range(0, EPOCHS * share, share)
    seen = [[frozenset(rank.used[start : start + share]) for rank in ranks] for start in starts]
    read = min(len(frozenset.union(*each)) for each in seen)
    mistakes_with_data = {
        f"every rank trains on all {IMAGES} images in each epoch, {size} times the work of one process: the data is "
        "not split. Give each rank its share, with a DistributedSampler.": {*counts} == {EPOCHS * IMAGES},
        f"the ranks train on {counts} images in {EPOCHS} epochs of {IMAGES}; it must be {EPOCHS * share} each, in "
        f"batches of {BATCH}.": {*counts} != {EPOCHS * share},
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


def _judge_weights(where: str, ranks: Sequence[_Trained], averaging: str, scaling: str) -> None:
    """All ranks end with what one process gets of the mean gradients, from rank 0's state at N times the rate.

    What ends with other weights is compared with what each mistake gives. `averaging` and `scaling` advise those who
    forget the one or the other.
    """
    size = len(ranks)
    apart = f"{max(_distance(rank.last, ranks[0].last) for rank in ranks):.2g}"
    begins = [(root, state) for root in (*range(size), None) for state in dict.fromkeys((root, None, 0))]
    for averaged, times, (start, state) in itertools.product((True, False), (size, 1, size**2), begins):
        weights, _ = _train(ranks, RATE * times, start, state, averaged)
        if all(_distance(rank.last, each) < TOLERANCE for rank, each in zip(ranks, weights, strict=True)):
            break
    else:
        ends = {
            f"weights differ by up to {apart} between the ranks at the end; all must start from rank 0's and take the "
            "same steps.": float(apart) > TOLERANCE,
            "all ranks end with the same weights, but not those of one process with all their batches at "
            f"{size} times the rate: broadcast before the first step, average the gradients, and keep one rate, "
            "without a warm-up.": True,
        }
        refuse_any(f"{where}, ", ends)
    whose = "its own" if start is None else f"rank {start}'s"
    slips = {
        f"each rank trains alone, on {whose} weights: nobody averages the gradients. {averaging}": not averaged,
        f"weights differ by up to {apart} at the end: all took steps by the same mean gradients, from different "
        "places. Broadcast rank 0's weights before the first step.": start is None,
        f"each rank begins with its own optimizer's momentum, so weights end up to {apart} apart: broadcast the "
        "optimizer's variables, too.": state is None,
        f"all start from {whose} weights; it must be rank 0, which resumes and saves.": start,
        f"each step is {size} times too short: {scaling}": times == 1,
        f"each step is {size} times too long: the sum of the gradients is {size} times their mean. Average, or leave "
        "the rate as it is.": times == size**2,
        "ranks broadcast again while they train. Averaged gradients keep equal weights equal, so broadcast once, "
        "before the first step.": any(rank.broadcasts for rank in ranks),
    }
    refuse_any(f"{where}, ", slips)


def _judge_ends(where: str, ranks: Sequence[_Trained]) -> None:
    saves, losses = [len(rank.saved) for rank in ranks], [rank.loss for rank in ranks]
    saved = [*ranks[0].saved, None][0]
    _, expected = _train(ranks, RATE * len(ranks))
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
def convert_keras(answer: Callable[..., tuple[Any, Any]]) -> str:
    """`answer(hvd, keras)`: an optimizer class that averages gradients, and a callback class that broadcasts."""
    if not has_horovod():
        raise NotYet(f"this check trains with Horovod, which is not installed: {HOW}.")
    for size in (2, 3):
        where = f"on {size} ranks"
        arguments = {"answer": answer, "imports": "tensorflow"}  # Horovod's part for TensorFlow
        ranks = values_on_ranks(where, size, _convert_keras, arguments, framework="horovod")
        unmoved = all(_distance(rank.first, rank.last) == 0 for rank in ranks)
        if unmoved and not any(rank.uses_horovod for rank in ranks):
            raise NotYet("neither class does anything yet: write both, then run this again.")
        same = unmoved or all(_distance(ranks[0].first, rank.last) == 0 for rank in ranks)
        frozen = f"{where}, `fit` changes no weight: end with `super().apply(grads, trainable_variables)`"
        refuse(same, f"{frozen}.")
        _judge_weights(
            where,
            ranks,
            "In `apply`, give `super().apply` what `hvd.grouped_allreduce` returns.",
            "average once, by `op=hvd.Average`; the rate that the optimizer is given is scaled already.",
        )
        steps = sorted({rank.steps for rank in ranks})
        state = "broadcast all of their variables, the count of steps and the rate, too"
        refuse(len(steps) > 1, f"{where}, the ranks' optimizers count {steps} steps in the end: {state}.")
        means = "variables without a gradient (moving means) differ: broadcast all of `self.model.variables`"
        refuse(any(rank.untrained for rank in ranks), f"{where}, {means}.")
    return "under Keras's own `fit`, 2 and 3 ranks end with the weights of one process that takes all their batches."


def _convert_keras(hvd: Any, answer: Callable[..., tuple[Any, Any]], imports: str) -> _Trained:  # noqa: ARG001
    """What a rank has trained."""
    import keras
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    watched = _Watched(hvd)
    classes = result_of(answer, watched, keras)
    two = isinstance(classes, tuple | list) and len(classes) == 2
    pair = f"your function returned {classes!r}; it must return the optimizer's class and the callback's"
    refuse(not two, f"{pair}.")
    make_optimizer, make_callback = classes
    keras.utils.set_random_seed(hvd.rank())
    frozen = keras.layers.BatchNormalization(epsilon=0, trainable=False)  # adds a number to all scores
    model = keras.Sequential([keras.Input([4]), keras.layers.Dense(3), frozen])
    model.layers[0].bias.assign(np.full(3, hvd.rank() / 10))
    frozen.moving_mean.assign(np.full(3, hvd.rank()))
    first = [np.array(each) for each in model.get_weights()[:2]]
    optimizer = make_optimizer(RATE * hvd.size(), momentum=MOMENTUM)
    velocity = [np.zeros((4, 3)), np.zeros(3)]
    if hvd.rank() == 0:  # as from a checkpoint; the others' optimizers are not built yet
        velocity = [np.full((4, 3), 0.1) * np.arange(3), np.array([0.1, 0.0, -0.1])]
        optimizer.build(model.trainable_variables)
        for variable, value in zip(optimizer.momentums, velocity, strict=True):
            variable.assign(value)
        optimizer.iterations.assign(STEPS_BEFORE)
    images, labels = _examples()
    share = list(range(hvd.rank(), IMAGES, hvd.size()))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer, loss, jit_compile=False)
    fitting: dict[str, Any] = {"batch_size": BATCH, "epochs": EPOCHS, "shuffle": False, "verbose": 0}
    before: list[int] = []  # broadcasts before each batch, after the learner's callback
    count = lambda batch, logs: before.append(watched.broadcasts)  # noqa: ARG005, E731
    counter = keras.callbacks.LambdaCallback(on_train_batch_begin=count)
    model.fit(images[share], labels[share], callbacks=[make_callback(), counter], **fitting)
    last = [np.array(each) for each in model.get_weights()[:2]]
    steps, untrained = int(optimizer.iterations.numpy()), float(frozen.moving_mean[0])
    state = (MOMENTUM, velocity, watched.broadcasts - before[0], steps, untrained)
    return _Trained(watched.is_used, first, last, EPOCHS * share, frozenset(), (), None, *state)


def _scaled(first: np.ndarray, second: np.ndarray, by_first: float, by_second: float) -> np.ndarray:
    """Adasum's sum, with the dot product divided by these numbers, of which right ones are 2 ‖a‖² and 2 ‖b‖²."""
    both = first @ second
    return (1 - both / by_first) * first + (1 - both / by_second) * second


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
        ("two equal gradients", "they say the same, so it counts once", east, east.copy()),
        ("two opposite gradients", "they cancel", east, -east),
        ("gradients of lengths 1 and 3 in one direction", "the mean of both", east, 3 * east),
        ("gradients at 45°", "each loses half of the other's projection on it", east, east + north),
        ("two gradients of 7 numbers", "", generator.normal(size=7), generator.normal(size=7)),
    )
    compare(answer, adasum.combine, [(f"Adasum of {what}", *rest) for what, *rest in cases])
    return "what both say counts once, what only one says counts in full."
