"""Checks of lesson 06, TensorFlow and JAX; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import importlib
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from workshop_utils import optional
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

SECONDS = [0.04, 0.04, 0.04, 0.16]  # that a gradient takes, by worker, in the open question
_PARTS = ((4, 4), (8, 3), (6, 6, 1), (12,))  # of a global batch, by replica
_SHAPES = ((64, 3), (3,), (3, 10), (10,))  # of the weights
_TIMEOUT = "60s"  # on a busy machine, importing a framework alone has taken 30


@measured
def slow_staleness(results: Any) -> float:
    """How many updates came between the slowest worker's reads and its pushes, on average.

    `results` are runs of `between_graph` on a server and four workers; of a step, the staleness is in second place. A
    worker's first step, which prepares its graph, does not count.
    """
    ages: list[float] = []
    for run in runs_of(results, "between_graph", ranks=5):
        asked = {"synchronous": True, "compute_seconds": (), "cluster": {}, **run.arguments}
        because = "in a synchronous one no gradient is stale"
        refuse(asked["synchronous"], f"`results` has a run without `synchronous=False`; {because}.")
        tasks = {role: len(members) for role, members in asked["cluster"].items()}
        refuse(tasks != {"ps": 1, "worker": 4}, f"`cluster` has {tasks}; it must have 1 ps and 4 workers.")
        seconds = np.round(np.asarray(asked["compute_seconds"], float), 6).tolist()
        refuse(sorted(seconds) != SECONDS, f"`compute_seconds` is {seconds}; it must be {SECONDS}.")
        logs = [value[2] for value in run.values if value is not None]  # of the workers, in their order
        for steps in logs[seconds.index(SECONDS[-1])]:
            ages += [age for _, age, *_ in steps[1:]]
    refuse(len(ages) < 8, f"`results` has {number_of(len(ages), 'slow step')} that count; make 200 updates.")
    return float(np.mean(ages))


@exercise
def replica(answer: Callable[..., Any]) -> str:
    """`answer(weights, images, labels, global_batch)` is the gradient of a global batch's mean loss, on each replica.

    `global_batch` is the number of images of all replicas together; each has a part of them.
    """
    _needs("tensorflow")
    cases = []
    for each in _PARTS:
        # That name lets `on_ranks` choose the server that has imported it already.
        arguments = {"framework": "tensorflow", "answer": answer, "parts": each}
        cases += values_on_ranks("on replicas", 1, _on_replicas, arguments, timeout=_TIMEOUT)
    _explain_scaling(cases)
    for parts, (given, sums) in zip(_PARTS, cases, strict=True):
        right = sum(sums) / sum(parts)
        for index, gradient in enumerate(given):
            if not np.allclose(gradient, right, rtol=1e-4, atol=1e-5):
                times = float(gradient @ right / (right @ right))
                raise Wrong(
                    f"with parts of {listed(parts)} images, replica {index}'s gradient is not that of one process "
                    f"with all {sum(parts)}: along that one it is {times:.4g} times as long."
                )
    return (
        "with equal parts, uneven ones and a single replica, every replica has the gradient that one process gets from "
        "the whole batch."
    )


def _needs(module: str) -> None:
    """Raise NotYet without `module`, which the extra `tensorflow` brings."""
    if not optional.is_installed(module):
        raise NotYet(f"{optional.sentence('tensorflow')}.")


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
    # Such bright images give gradients that clipping to ±3 would change.
    images = [4 * random.random((count, 64)).astype(np.float32) for count in parts]
    labels = [random.integers(0, 10, count) for count in parts]
    with strategy.scope():
        weights = [tf.Variable(value) for value in values]

    def distributed(arrays: list[np.ndarray]) -> Any:
        return strategy.experimental_distribute_values_from_function(
            lambda context: tf.constant(arrays[context.replica_id_in_sync_group])
        )

    replicas = weights, distributed(images), distributed(labels), sum(parts)
    try:
        given = result_of(strategy.run, answer, replicas)
    except (Wrong, NotYet):
        raise
    except Exception as error:  # TensorFlow's tracebacks are long
        lines = str(error).strip().splitlines() or [""]
        line = lines[-1] if lines[0].startswith("in user code") else lines[0]
        said = f"it stopped with {type(error).__name__}: {line.strip().removesuffix('.')}."
        raise Wrong(said) from None
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


# Of each array the shape and the right spec: the hidden layer is cut by columns, then by rows.
_SPECS: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
    "w1": ((64, 32), (None, "model")),
    "b1": ((32,), ("model",)),
    "w2": ((32, 10), ("model",)),
    "b2": ((10,), ()),
    "batch": ((64,), ("data",)),
    "hidden": ((64, 32), ("data", "model")),
}
_AXES = ("data", "model")  # of two devices each


@exercise
def shardings(answer: Mapping[str, Any]) -> str:
    """`answer` has for each of `_SPECS` a PartitionSpec, or a tuple like one, on a mesh of 2 × 2 devices."""
    _needs("jax")
    names = [*answer] if isinstance(answer, Mapping) else []
    others = "".join(f"; there is no array {name!r}" for name in names if name not in _SPECS)
    refuse({*names} != {*_SPECS}, f"give a dictionary with a spec for each of {listed(_SPECS)}{others}.")
    if missing := [name for name in _SPECS if answer[name] is ...]:
        raise NotYet(f"put a spec in place of the dots for {listed(missing)}, then run this again.")
    cuts = {name: _cut_by(name, answer[name], shape) for name, (shape, _) in _SPECS.items()}
    wrong, added = values_on_ranks("on four devices", 1, _compiled, {"cuts": cuts}, timeout=_TIMEOUT)[0]
    costs = f" With these six specs the compiler adds {listed(added)}." if added else ""
    for name in wrong:
        given = ",".join("+".join(axes) for axes in cuts[name]).rstrip(",")
        for sentence, is_made in mistakes(__name__, "shardings").items():
            refuse(is_made(name, given), f"`{name}` {sentence}{costs}")
    return (
        "a device has half of the hidden layer and half of the batch, and a step has only two all-reduces: of the "
        "scores over `model`, and of the gradients over `data`."
    )


def _cut_by(name: str, spec: Any, shape: tuple[int, ...]) -> list[tuple[str, ...]]:
    """The axes of each dimension in `spec`."""
    refuse(hasattr(spec, "mesh"), f"`{name}` is a {type(spec).__name__}; give its spec alone, jax.P(…).")
    free = f"`{name}` leaves a cut to the compiler: say over which axis it goes, or None."
    refuse("UNCONSTRAINED" in str(spec) or "reduced" in str(spec), free)
    entries: Any = None if isinstance(spec, str) else () if spec is None else spec
    try:
        cut = [() if each is None else (each,) if isinstance(each, str) else (*each,) for each in entries[:]]
    except (TypeError, KeyError):
        raise Wrong(f"`{name}` is {spec!r}, which is no spec: write jax.P(…).") from None
    has = f"{'labels have' if name == 'batch' else 'it has'} {number_of(len(shape), 'dimension')}"
    refuse(len(cut) > len(shape), f"`{name}` has a spec for {len(cut)} dimensions, and {has}.")
    axes = [axis for entry in cut for axis in entry]
    for axis in axes:
        refuse(axis not in _AXES, f"`{name}` names {axis!r}; the mesh has the axes {listed(_AXES)}.")
        refuse(axes.count(axis) > 1, f"`{name}` names `{axis}` twice; an axis cuts one dimension.")
    for size, parts in zip(shape, (2 ** len(entry) for entry in cut), strict=False):
        refuse(size % parts, f"`{name}` has {size} numbers, which {parts} devices cannot share equally.")
    return cut


def _compiled(_: object, cuts: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The arrays of which devices hold the wrong parts, and the collectives that the right specs do not need."""
    import jax

    os.environ["PJRT_NPROC"] = "32"  # threads: with few, devices may wait for each other for ever
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 4)
    mesh = jax.make_mesh((2, 2), _AXES, (jax.sharding.AxisType.Auto,) * 2)
    *weights, _, _ = (jax.numpy.zeros(shape) for shape, _ in _SPECS.values())

    def compiled(specs: Iterable[Any]) -> tuple[list[Any], set[str]]:
        *of_weights, batch, hidden = (jax.NamedSharding(mesh, jax.P(*each)) for each in specs)

        def loss(weights: Any, images: Any, labels: Any) -> Any:
            w1, b1, w2, b2 = weights
            units = jax.lax.with_sharding_constraint(jax.nn.relu(images @ w1 + b1), hidden)
            return -(jax.nn.one_hot(labels, 10) * jax.nn.log_softmax(units @ w2 + b2)).sum(axis=1).mean()

        def update(weights: Any, *batch: Any) -> Any:
            return jax.tree.map(jax.numpy.subtract, weights, jax.grad(loss)(weights, *batch))

        step = jax.jit(update, in_shardings=(of_weights, batch, batch), out_shardings=of_weights)
        program = step.lower(weights, jax.numpy.zeros((64, 64)), jax.numpy.zeros(64, int)).compile()
        held, _, held_labels = program.input_shardings[0]
        kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
        every = re.findall(rf"= (.+) ({kinds})(?:-start)?\(", program.as_text())
        found = {
            f"{kind} of {each}" for arrays, kind in every for each in re.findall(r"\w+\[[\d,]+\]", arrays)
        }
        parts = zip([*held, held_labels, hidden], _SPECS.values(), strict=True)
        return [sharding.devices_indices_map(shape) for sharding, (shape, _) in parts], found

    (given, found), (right, needed) = map(compiled, (cuts.values(), [spec for _, spec in _SPECS.values()]))
    wrong = [name for name, one, other in zip(_SPECS, given, right, strict=True) if one != other]
    return wrong, sorted(found - needed)


def cut(sizes: Sequence[int], is_full: Callable[[int, int], bool]) -> Parts:
    """`sizes` in order; a new part begins where `is_full(bytes of the part, bytes of the next tensor)`."""
    parts: Parts = []
    for size in sizes:
        if not parts or is_full(sum(parts[-1]), size):
            parts.append([])
        parts[-1].append(size)
    return parts


def tensorflow_packs(sizes: Sequence[int], bytes_per_pack: int) -> Parts:
    """`sizes` in order, cut into packs as TensorFlow 2.21 cuts gradients for one collective each.

    A pack takes tensors until it holds more than `bytes_per_pack`; 0 puts all into one (TensorFlow,
    `tensorflow/python/distribute/cross_device_utils.py`, `group_by_size`).
    """
    return cut(sizes, lambda total, _: 0 < bytes_per_pack < total)


_CASES = (
    ([4, 4, 4], 0, "0 means all in one"),
    ([4, 4, 4], 1, "each tensor alone is more than 1 byte, so it fills a pack"),
    ([4, 4, 4, 4], 5, "one tensor of 4 is not more than 5, two are"),
    ([4, 4, 4, 4], 8, "two of 4 are 8, which is not more than 8: a third goes in"),
    ([100, 4, 4, 100], 10, "a tensor is never cut, so one of 100 fills a pack alone"),
    ([3, 9, 2, 7, 7], 12, "they stay in order"),
    ([4] * 20, 50, "13 tensors of 4 are the first to be more than 50"),
    ([4] * 40, 100, "26 tensors of 4 are the first to be more than 100"),
    ([0, 0, 4, 4], 1, "bytes count, not tensors"),
    ([4, 4, 0], 5, "a tensor of no bytes is in a pack, too"),
)


@exercise
def packs(answer: Callable[[list[int], int], Parts]) -> str:
    """`answer(sizes, bytes_per_pack)` is `tensorflow_packs(sizes, bytes_per_pack)`."""
    given = [result_of(answer, list(sizes), hint) for sizes, hint, _ in _CASES]
    for got, (sizes, hint, _) in zip(given, _CASES, strict=True):
        are_lists = isinstance(got, list | tuple) and all(isinstance(pack, list | tuple) for pack in got)
        order = "it must be a list of lists: [[…], …]."
        refuse(not are_lists, f"with {sizes} and {hint} it gave {got!r}; {order}")
    others = mistakes(__name__, "packs", cut=cut, packs=tensorflow_packs)
    recognise(answer, [(sizes, hint) for sizes, hint, _ in _CASES], others)
    for got, (sizes, hint, because) in zip(given, _CASES, strict=True):
        pairs = zip_longest(map(list, got), tensorflow_packs(sizes, hint))
        unlike = [(number, *pair) for number, pair in enumerate(pairs, 1) if pair[0] != pair[1]]
        number, pack, right = (unlike or [(0, [], [])])[0]
        together = [size for pack in got for size in pack]
        slips = {
            "; every tensor must be in one pack, once.": sorted(together) != sorted(sizes),
            "; they must stay in order, since a pack waits for all that is in it.": together != sizes,
            f": pack {number} is {pack}, and must be {right or 'left out'}: {because}.": unlike,
        }
        refuse_any(f"sizes {sizes} with bytes_per_pack {hint} gave {[*map(list, got)]}", slips)
    return "each pack is one collective."
