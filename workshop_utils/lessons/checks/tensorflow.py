"""Checks of lesson 06, TensorFlow; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import (
    NotYet,
    Wrong,
    exercise,
    explain,
    listed,
    mistakes,
    number_of,
    recognise,
    refuse,
    refuse_any,
    result_of,
)
from workshop_utils.lessons.checks.open_question import measured, runs_of
from workshop_utils.lessons.checks.processes import values_on_ranks

Parts = list[list[int]]
Cutter = Callable[[list[int], Any], Parts]
Case = tuple[list[int], Any]

SECONDS = [0.04, 0.04, 0.04, 0.16]  # that a gradient takes, by worker, in the open question
_PARTS = ((4, 4), (8, 3), (6, 6, 1), (12,))  # of a global batch, by replica
_SHAPES = ((64, 3), (3,), (3, 10), (10,))  # of the weights


@measured
def slow_staleness(results: Any) -> float:
    """How many updates came between the slowest worker's reads and its pushes, on average.

    `results` are runs of `between_graph` on a server and four workers; of a step, the staleness is in second place. A
    worker's first step, which prepares its graph, does not count.
    """
    ages: list[float] = []
    for run in runs_of(results, "between_graph", ranks=5):
        refuse(run.arguments["synchronous"], "`results` has a synchronous run: there no gradient is stale.")
        seconds = [float(each) for each in run.arguments.get("compute_seconds", ())]
        refuse(sorted(seconds) != SECONDS, f"`compute_seconds` is {seconds}; it must be {SECONDS}.")
        for steps in run.values[1 + seconds.index(SECONDS[-1])][2]:
            ages += [age for _, age, *_ in steps[1:]]
    refuse(len(ages) < 8, f"`results` has {number_of(len(ages), 'slow step')} that count; make 200 updates.")
    return float(np.mean(ages))


@exercise
def replica(answer: Callable[..., Any]) -> str:
    """`answer(weights, images, labels, global_batch)` is the gradient of a global batch's mean loss, on each replica.

    `global_batch` is the number of images of all replicas together; each has a part of them.
    """
    cases = [_on_a_rank("on replicas", _on_replicas, answer=answer, parts=parts) for parts in _PARTS]
    _explain_scaling(cases)
    for parts, (given, sums) in zip(_PARTS, cases, strict=True):
        right = sum(sums) / sum(parts)
        for index, gradient in enumerate(given):
            if not np.allclose(gradient, right, rtol=1e-4, atol=1e-6):
                times = float(gradient @ right / (right @ right))
                raise Wrong(
                    f"with parts of {listed(parts)} images, replica {index}'s gradient is not that of one process "
                    f"with all {sum(parts)}: along that one it is {times:.4g} times as long."
                )
    return (
        "with equal parts, uneven ones and a single replica, every replica has the gradient that one process gets from "
        "the whole batch."
    )


def _on_a_rank(where: str, program: Callable[..., Any], **arguments: Any) -> Any:
    """What `program` returns in a process of its own, which may change TensorFlow's devices."""
    # That name lets `on_ranks` choose the server that has imported it already.
    return values_on_ranks(where, 1, program, {"framework": "tensorflow", **arguments})[0]


@contextlib.contextmanager
def _errors_in_a_sentence() -> Iterator[None]:
    """Raise what the learner's function raises as Wrong: TensorFlow's tracebacks are long."""
    try:
        yield
    except (Wrong, NotYet):
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        line = lines[-1] if lines[0].startswith("in user code") else lines[0]
        said = f"it stopped with {type(error).__name__}: {line.strip().removesuffix('.')}."
        raise Wrong(said) from None


def _explain_scaling(cases: Sequence[tuple[list[np.ndarray], list[np.ndarray]]]) -> None:
    """Raise Wrong if the gradients of all replicas, in all cases, are those of a usual mistake."""
    largest = max(float(np.abs(each).max()) for _, sums in cases for each in sums)
    got = np.concatenate([gradient for given, _ in cases for gradient in given]) / largest
    for sentence, rule in mistakes(__name__, "replica").items():
        wrong = []
        for parts, (_, sums) in zip(_PARTS, cases, strict=True):
            means = [each / count for each, count in zip(sums, parts, strict=True)]
            one_for_all_or_each = rule(sums, means, len(parts), sum(parts))
            wrong += np.broadcast_to(one_for_all_or_each, (len(parts), sums[0].size)).ravel().tolist()
        explain(got, {sentence: np.array(wrong) / largest})


def _on_replicas(_: object, framework: str, answer: Callable[..., Any], parts: Sequence[int]) -> Any:
    """Every replica's gradient as one vector, and the gradients of the parts' summed losses."""
    tf = importlib.import_module(framework)

    tf.config.set_visible_devices([], "GPU")
    (processor,) = tf.config.list_physical_devices("CPU")
    logical = [tf.config.LogicalDeviceConfiguration() for _ in parts]
    tf.config.set_logical_device_configuration(processor, logical)
    strategy = tf.distribute.MirroredStrategy([f"CPU:{index}" for index in range(len(parts))])
    random = np.random.default_rng(6)
    values = [random.normal(0, 0.5, shape).astype(np.float32) for shape in _SHAPES]
    images = [random.random((count, 64)).astype(np.float32) for count in parts]
    labels = [random.integers(0, 10, count) for count in parts]
    with strategy.scope():
        weights = [tf.Variable(value) for value in values]

    def distributed(arrays: list[np.ndarray]) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(arrays[context.replica_id_in_sync_group])
        )

    with _errors_in_a_sentence():
        replicas = weights, distributed(images), distributed(labels), sum(parts)
        given = result_of(strategy.run, answer, replicas)
    changed = any(not np.array_equal(weight, value) for weight, value in zip(weights, values, strict=True))
    refuse(changed, "it changes `weights`: return the gradients only, and leave the update to others.")
    vectors = []
    for index in range(len(parts)):
        try:
            own = [strategy.experimental_local_results(each)[index] for each in given]
            gradient = [np.asarray(tf.convert_to_tensor(each)) for each in own]
        except (TypeError, ValueError, IndexError):
            gradient = []
        order = f"return a list of {len(_SHAPES)} gradients, one for each of `weights`, in their order."
        refuse([each.shape for each in gradient] != list(_SHAPES), order)
        vectors.append(np.concatenate([each.ravel() for each in gradient]))
    return vectors, [_summed(values, *each) for each in zip(images, labels, strict=True)]


def _summed(values: list[np.ndarray], images: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The gradient of the losses' sum, by hand: a network with one hidden layer, and cross-entropy."""
    w1, b1, w2, b2 = (each.astype(float) for each in values)
    hidden = np.maximum(images @ w1 + b1, 0)
    scores = hidden @ w2 + b2
    shares = np.exp(scores - scores.max(axis=1, keepdims=True))
    errors = shares / shares.sum(axis=1, keepdims=True) - np.eye(10)[labels]
    behind = errors @ w2.T * (hidden > 0)
    gradients = (images.T @ behind, behind.sum(axis=0), hidden.T @ errors, errors.sum(axis=0))
    return np.concatenate([each.ravel() for each in gradients])


# Of each array, by dimension, the axes over which it is cut: the hidden layer by columns, then by rows.
_SPECS = {"w1": ",model", "b1": "model", "w2": "model", "b2": "", "batch": "data", "hidden": "data,model"}
_ALL_REDUCED = {f"all-reduce of f32[{shape}]" for shape in ("32,10", "16,64", "16", "10,16", "10")}
Cut = list[tuple[str, ...]]


@exercise
def shardings(answer: Mapping[str, Any]) -> str:
    """`answer` has for each of `_SPECS` a PartitionSpec, or a tuple like one, on a mesh of 2 × 2 devices."""
    names = [*answer] if isinstance(answer, Mapping) else []
    refuse(sorted(names) != sorted(_SPECS), f"give a dictionary with a spec for each of {listed(_SPECS)}.")
    if missing := [name for name in names if answer[name] is ...]:
        raise NotYet(f"put a spec in place of the dots for {listed(missing)}, then run this again.")
    cuts = {name: _cut_by(name, answer[name]) for name in _SPECS}
    (added,) = values_on_ranks("on four devices", 1, _added, {"cuts": cuts})
    costs = f" The compiler adds {listed(added)}." if added else ""
    for name, right in _SPECS.items():
        given = ",".join("+".join(axes) for axes in cuts[name])
        for sentence, is_made in mistakes(__name__, "shardings").items():
            refuse(given != right and is_made(name, given), f"`{name}` {sentence}{costs}")
    return (
        "a device has half of the hidden layer and half of the batch, and a step has two all-reduces alone: of the "
        "scores over `model`, and of the gradients over `data`. It computes the weights of one process."
    )


def _cut_by(name: str, spec: Any) -> Cut:
    """The axes of each dimension in `spec`, without the last ones that have none."""
    entries: Any = None if isinstance(spec, str) else () if spec is None else spec
    try:
        cut = [() if each is None else (each,) if isinstance(each, str) else (*each,) for each in entries[:]]
    except TypeError:
        raise Wrong(f"`{name}` is {spec!r}, which is no spec: write jax.P(…).") from None
    while cut and not cut[-1]:
        cut.pop()
    return cut


def _added(_: object, cuts: Mapping[str, Cut]) -> list[str]:
    """The collectives that a compiled step has, and the right one has not."""
    import jax

    os.environ["PJRT_NPROC"] = "32"  # threads: with few, devices may wait for each other for ever
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    jax.set_mesh(jax.make_mesh((2, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2))
    *of_weights, batch, hidden = (jax.P(*(axes or None for axes in cuts[name])) for name in _SPECS)
    random = np.random.default_rng(6)
    values = [random.normal(0, 0.5, shape).astype(np.float32) for shape in ((64, 32), 32, (32, 10), 10)]
    images, labels = random.random((64, 64)).astype(np.float32), random.integers(0, 10, 64)

    def loss(weights: Any, images: Any, labels: Any) -> Any:
        w1, b1, w2, b2 = weights
        units = jax.lax.with_sharding_constraint(jax.nn.relu(images @ w1 + b1), hidden)
        return -(jax.nn.one_hot(labels, 10) * jax.nn.log_softmax(units @ w2 + b2)).sum(axis=1).mean()

    def update(weights: Any, *batch: Any) -> Any:
        return jax.tree.map(jax.numpy.subtract, weights, jax.grad(loss)(weights, *batch))

    with _errors_in_a_sentence():
        step = jax.jit(update, in_shardings=(of_weights, batch, batch), out_shardings=of_weights)
        program = step.lower(values, images, labels).compile().as_text()
        moved = np.concatenate(
            [(old - new).ravel() for old, new in zip(values, step(values, images, labels), strict=True)]
        )
    wrong = not np.allclose(moved, _summed(values, images, labels) / 64, rtol=1e-3, atol=1e-5)
    refuse(wrong, "a step does not compute the weights of one process.")
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    every = re.findall(rf"= (.+) ({kinds})(?:-start)?\(", program)
    found = {f"{kind} of {array}" for arrays, kind in every for array in re.findall(r"\w+\[[\d,]+\]", arrays)}
    return sorted(found - _ALL_REDUCED)


def cut(items: Iterable[int], nbytes: Callable[[int], int], is_full: Callable[[int, int], bool]) -> Parts:
    """`items` in order; a new part begins where `is_full(bytes of the part, bytes of the next item)`."""
    parts: Parts = []
    for item in items:
        if not parts or is_full(sum(map(nbytes, parts[-1])), nbytes(item)):
            parts.append([])
        parts[-1].append(item)
    return parts


def all_parts(answer: Cutter, cases: Sequence[Case], mistakes: Mapping[str, Cutter]) -> list[Parts]:
    """What `answer` gives in each of `cases`.

    Raises:
        NotYet: if it gives nothing.
        Wrong: if it gives anything but lists in a list, or makes one of the typical `mistakes`.
    """
    given = []
    for sizes, limit in cases:
        parts = result_of(answer, list(sizes), limit)
        lists = (list, tuple)
        if not isinstance(parts, lists) or not all(isinstance(part, lists) for part in parts):
            raise Wrong(f"with {sizes} and {limit} it gave {parts!r}; it must be a list of lists: [[…], …].")
        given.append([list(part) for part in parts])
    recognise(answer, cases, mistakes)
    return given


def first_difference(parts: Parts, expected: Parts, name: str) -> str:
    """The first of `parts` that is not as `expected`, in words; `name` says what a part is called."""
    for number, (part, right) in enumerate(zip_longest(parts, expected), 1):
        if part is None:
            return f"{name} {number}, {right}, is missing"
        if right is None:
            return f"there must be no {name} {number}, and yours is {part}"
        if part != right:
            return f"{name} {number} is {part}, and must be {right}"
    return ""


def tensorflow_packs(sizes: Sequence[int], bytes_per_pack: int) -> Parts:
    """`sizes` in order, cut into packs as TensorFlow 2.21 cuts gradients for one collective each.

    A pack takes tensors until it holds more than `bytes_per_pack`; 0 puts all into one (TensorFlow,
    `tensorflow/python/distribute/cross_device_utils.py`, `group_by_size`).
    """
    if bytes_per_pack == 0:
        return [list(sizes)]
    return cut(sizes, int, lambda total, _: total > bytes_per_pack)


_CASES = (
    ([4, 4, 4], 0, "0 means all in one"),
    ([4, 4, 4], 1, "each tensor alone is more than 1 byte, so it fills a pack"),
    ([4, 4, 4, 4], 5, "one tensor of 4 is not more than 5, two are"),
    ([4, 4, 4, 4], 8, "two of 4 are 8, which is not more than 8: a third goes in"),
    ([100, 4, 4, 100], 10, "a tensor is never cut, so one of 100 fills a pack alone"),
    ([3, 9, 2, 7, 7], 12, "they stay in order"),
    ([4] * 20, 50, "13 tensors of 4 are the first to be more than 50"),
    ([0, 0, 4, 4], 1, "bytes count, not tensors"),
)


@exercise
def packs(answer: Cutter) -> str:
    """`answer(sizes, bytes_per_pack)` is `tensorflow_packs(sizes, bytes_per_pack)`."""
    others = mistakes(__name__, "packs", cut=cut, packs=tensorflow_packs)
    given = all_parts(answer, [(sizes, hint) for sizes, hint, _ in _CASES], others)
    for got, (sizes, hint, because) in zip(given, _CASES, strict=True):
        expected, together = tensorflow_packs(sizes, hint), [size for pack in got for size in pack]
        slips = {
            "; every tensor must be in one pack, once.": sorted(together) != sorted(sizes),
            "; they must stay in order, since a pack waits for all that is in it.": together != sizes,
            f": {first_difference(got, expected, 'pack')}: {because}.": got != expected,
        }
        refuse_any(f"sizes {sizes} with bytes_per_pack {hint} gave {got}", slips)
    return "each pack is one collective."
