"""Checks of lesson 06, TensorFlow; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from workshop_utils.lessons.checks import NotYet, Wrong, exercise, explain, is_missing, mistakes
from workshop_utils.lessons.checks.cuts import Cut, Parts, all_parts, cut, first_difference
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.lessons.checks.processes import values_on_ranks

mean_staleness = question(__name__, "mean_staleness")

_PARTS = ((4, 4), (8, 3), (6, 6, 1), (12,))  # of a global batch, by replica
_SHAPES = ((64, 3), (3,), (3, 10), (10,))  # of the weights


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
                    f"with parts of {_listed(parts)} images, replica {index}'s gradient is not that of one process "
                    f"with all {sum(parts)}: along that one it is {times:.4g} times as long."
                )
    return (
        "with equal parts, uneven ones and a single replica, every replica has the gradient that one process gets from "
        "the whole batch."
    )


def _on_a_rank(where: str, program: Callable[..., Any], **arguments: Any) -> Any:
    """What `program` returns in a process of its own, which may change TensorFlow's devices.

    Raises:
        NotYet: if it is `...`.
        Wrong: if it is a sentence.
    """
    # That name lets `on_ranks` choose the server that has imported it already.
    (outcome,) = values_on_ranks(where, 1, program, {"framework": "tensorflow", **arguments})
    if outcome is ...:
        raise NotYet("your function gave nothing: write it, then run this again.")
    if isinstance(outcome, str):
        raise Wrong(outcome)
    return outcome


def _said(error: Exception) -> str:
    """An error in a sentence: TensorFlow's tracebacks are long."""
    lines = str(error).strip().splitlines() or [""]
    line = lines[-1] if lines[0].startswith("in user code") else lines[0]
    return f"it stopped with {type(error).__name__}: {line.strip().removesuffix('.')}."


def _listed(parts: Sequence[int]) -> str:
    *first, last = map(str, parts)
    return f"{', '.join(first)} and {last}" if first else last


def _explain_scaling(cases: Sequence[tuple[list[np.ndarray], list[np.ndarray]]]) -> None:
    """Raise Wrong if the gradients of all replicas, in all cases, are those of a usual mistake."""

    def wrong(rule: Callable[[list[np.ndarray], Sequence[int]], list[Any]]) -> np.ndarray:
        return np.concatenate(
            [np.concatenate(rule(sums, parts)) for parts, (_, sums) in zip(_PARTS, cases, strict=True)]
        )

    def everywhere(rule: Callable[[list[np.ndarray], Sequence[int]], Any]) -> np.ndarray:
        return wrong(lambda sums, parts: [rule(sums, parts)] * len(parts))

    def means(sums: list[np.ndarray], parts: Sequence[int]) -> list[np.ndarray]:
        return [each / count for each, count in zip(sums, parts, strict=True)]

    largest = max(float(np.abs(each).max()) for _, sums in cases for each in sums)
    got = np.concatenate([np.concatenate(given) for given, _ in cases]) / largest
    rules = {
        "you add up means: each replica divides by the size of its own part, so with N equal parts the gradient is N "
        "times too large. Divide by `global_batch`.": everywhere(lambda s, p: sum(means(s, p))),
        "that is the mean of the replicas' means: right for equal parts, but of 6, 6 and 1 images the single one "
        "counts six times as much as each of the others. Divide sums by `global_batch`.": everywhere(
            lambda s, p: sum(means(s, p)) / len(p)
        ),
        "you add up sums and never divide: the gradient is `global_batch` times too large.": everywhere(
            lambda s, _: sum(s)
        ),
        "you divide by `global_batch`, which is the mean already, and then by N as well: reduce with SUM, not "
        "MEAN.": everywhere(lambda s, p: sum(s) / sum(p) / len(p)),
        "you divide the sum by the number of replicas, not by that of images: divide by "
        "`global_batch`.": everywhere(lambda s, p: sum(s) / len(p)),
        "each replica divides by its own part, and then all by `global_batch`: once is enough.": everywhere(
            lambda s, p: sum(means(s, p)) / sum(p)
        ),
        "each replica has only its own part of the gradient: all_reduce is missing.": wrong(
            lambda s, p: [each / sum(p) for each in s]
        ),
        "each replica has the mean gradient of its own part: it was never reduced.": wrong(means),
        "each replica has the sum over its own part: it was neither divided nor reduced.": wrong(
            lambda s, _: s
        ),
    }
    explain(got, {sentence: values / largest for sentence, values in rules.items()})


def _on_replicas(_: object, framework: str, answer: Callable[..., Any], parts: Sequence[int]) -> Any:
    """Every replica's gradient as one vector, and the gradients of the parts' summed losses.

    Instead a sentence, if the answer gives no list of gradients, and `...` if it gives nothing.
    """
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

    try:
        given = strategy.run(answer, (weights, distributed(images), distributed(labels), sum(parts)))
    except Exception as error:  # whatever the learner's function raises
        return _said(error)
    if is_missing(given):
        return ...
    if any(not np.array_equal(weight, value) for weight, value in zip(weights, values, strict=True)):
        return "it changes `weights`: return the gradients only, and leave the update to others."
    vectors = []
    for index in range(len(parts)):
        try:
            own = [strategy.experimental_local_results(each)[index] for each in given]
            gradient = [np.asarray(tf.convert_to_tensor(each)) for each in own]
        except (TypeError, ValueError, IndexError):
            gradient = []
        if [each.shape for each in gradient] != list(_SHAPES):
            return f"return a list of {len(_SHAPES)} gradients, one for each of `weights`, in their order."
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


_SETTINGS = ((1, 3), (2, 5), (3, 4), (3, 7))  # parameter servers and variables
_VARIABLES = (
    "kernel",
    "bias",
    "scale",
    "table",
    "Variable",
    "gain",
    "shift",
)  # no numbers, which tell a task


def _worker(servers: int) -> str:
    return f"/job:worker/task:{servers % 2}"


@exercise
def device_setter(answer: Callable[[int, str], Callable[[Any], str]]) -> str:
    """`answer(servers, worker)` is a function from an operation to a device, as `replica_device_setter` makes."""
    graphs = _on_a_rank("in a graph", _placements, answer=answer, settings=_SETTINGS)
    if not any(place for given, *_ in graphs for place in given.values()):
        raise NotYet("your function gave nothing: write it, then run this again.")
    for (servers, variables), (given, again, right) in zip(_SETTINGS, graphs, strict=True):
        case = f"with {servers} server{'s' * (servers > 1)} and {variables} variables"
        order = [name for name in right if name.startswith("variable")]
        places = [given[name] for name in order]
        if all(place == _worker(servers) for place in places):
            raise Wrong(f"{case}, all variables are on the worker: they belong on servers, `/job:ps`.")
        if servers > 1 and len(set(places)) == 1:
            raise Wrong(f"{case}, all variables are on {places[0]}: deal them out in turn, from task 0 on.")
        for name, device in right.items():
            if given[name] != device:
                what = name if name in order else f"the operation `{name}`, which makes no variable,"
                raise Wrong(f"{case}, {what} is on {given[name] or 'no device'}; it must be on {device}.")
        if again != right:
            raise Wrong(
                f"{case}, two of your functions share what they remember: let each begin with task 0."
            )
    return "variables are dealt out to the servers in turn, as `replica_device_setter` does; a worker has the rest."


def _placements(
    _: object, framework: str, answer: Callable[..., Any], settings: Sequence[tuple[int, int]]
) -> Any:
    """By name the devices of a graph's operations: by two functions of the `answer`, and by TensorFlow's own.

    Instead a sentence, if the answer makes no function, and `...` if it gives nothing.
    """
    tf = importlib.import_module(framework)

    v1 = tf.compat.v1

    def place_all(setter: Any, variables: int) -> dict[str, str]:
        names = [f"variable {index}" for index in range(variables)]
        with tf.Graph().as_default() as graph, v1.device(setter):
            images = v1.placeholder(tf.float32, (None, 4), name="images")
            images += tf.constant(1.0, name="one")
            for name in _VARIABLES[:variables]:
                weight = v1.Variable(np.ones((4, 4), np.float32), name=name, use_resource=True)
                images = tf.nn.relu(tf.matmul(images, weight))
            tf.reduce_mean(images)
        handles = [each for each in graph.get_operations() if each.type == "VarHandleOp"]
        # Reading and initialising a variable happens beside it, whatever the function says.
        operations = [
            each for each in graph.get_operations() if each.name.partition("/")[0] not in _VARIABLES
        ]
        operations = [each for each in operations if "ReadVariable" not in each.type]
        parsed = {
            name: tf.DeviceSpec.from_string(each.device)
            for name, each in zip(
                [*names, *(each.name for each in operations)], handles + operations, strict=True
            )
        }
        return {
            name: "" if spec.job is None else f"/job:{spec.job}/task:{spec.task}"
            for name, spec in parsed.items()
        }

    graphs = []
    for servers, variables in settings:
        worker = _worker(servers)
        own = v1.train.replica_device_setter(ps_tasks=servers, worker_device=worker)
        try:
            setter, second = answer(servers, worker), answer(servers, worker)
            if is_missing(setter):
                return ...
            if not callable(setter):
                return "return a function, which takes an operation and returns its device."
            if str(getattr(setter, "__module__", "")).startswith("tensorflow"):
                return "that function is TensorFlow's own: write yours."
            given, again = (
                place_all(lambda operation, each=each: each(operation) or "", variables)
                for each in (setter, second)
            )
        except Exception as error:  # whatever the learner's function raises
            return _said(error)
        graphs.append((given, again, place_all(own, variables)))
    return graphs


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
def packs(answer: Cut) -> str:
    """`answer(sizes, bytes_per_pack)` is `tensorflow_packs(sizes, bytes_per_pack)`."""
    others = mistakes(__name__, "packs", cut=cut, packs=tensorflow_packs)
    given = all_parts(answer, [(sizes, hint) for sizes, hint, _ in _CASES], others)
    for got, (sizes, hint, because) in zip(given, _CASES, strict=True):
        of = f"sizes {sizes} with bytes_per_pack {hint} gave {got}"
        together = [size for pack in got for size in pack]
        if sorted(together) != sorted(sizes):
            raise Wrong(f"{of}; every tensor must be in one pack, once.")
        if together != sizes:
            raise Wrong(f"{of}; they must stay in order, since a pack waits for all that is in it.")
        expected = tensorflow_packs(sizes, hint)
        if got != expected:
            raise Wrong(f"{of}: {first_difference(got, expected, 'pack')}: {because}.")
    return "each pack is one collective."
