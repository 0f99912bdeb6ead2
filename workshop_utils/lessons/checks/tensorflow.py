"""Checks of lesson 06, TensorFlow; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import contextlib
import importlib
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
Cut = Callable[[list[int], Any], Parts]
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
        case = f"with {number_of(servers, 'server')} and {variables} variables, "
        order = [name for name in right if name.startswith("variable")]
        places = {given[name] for name in order}
        slips: dict[str, object] = {
            "all variables are on the worker: they belong on servers, `/job:ps`.": places
            == {_worker(servers)},
            f"all variables are on {min(places)}: deal them out in turn, from task 0 on.": servers
            > len(places)
            == 1,
        }
        for name, device in right.items():
            what = name if name in order else f"the operation `{name}`, which makes no variable,"
            says = f"{what} is on {given[name] or 'no device'}; it must be on {device}."
            slips[says] = given[name] != device
        slips["two of your functions share what they remember: let each begin with task 0."] = again != right
        refuse_any(case, slips)
    return "variables are dealt out to the servers in turn, as `replica_device_setter` does; a worker has the rest."


def _placements(
    _: object, framework: str, answer: Callable[..., Any], settings: Sequence[tuple[int, int]]
) -> Any:
    """By name the devices of a graph's operations: by two functions of the `answer`, and by TensorFlow's own."""
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
        # Reading and initialising a variable happens beside it, whatever the function says.
        every = graph.get_operations()
        placed = [each for each in every if each.type == "VarHandleOp"]
        placed += [
            each
            for each in every
            if each.name.partition("/")[0] not in _VARIABLES and "ReadV" not in each.type
        ]
        names += [each.name for each in placed[variables:]]
        specs = [tf.DeviceSpec.from_string(each.device) for each in placed]
        places = ["" if spec.job is None else f"/job:{spec.job}/task:{spec.task}" for spec in specs]
        return dict(zip(names, places, strict=True))

    graphs = []
    for servers, variables in settings:
        worker = _worker(servers)
        own = v1.train.replica_device_setter(ps_tasks=servers, worker_device=worker)
        with _errors_in_a_sentence():
            setters = [result_of(answer, servers, worker) for _ in range(2)]
            module = str(getattr(setters[0], "__module__", ""))
            slips = {
                "return a function, which takes an operation and returns its device.": not callable(
                    setters[0]
                ),
                "that function is TensorFlow's own: write yours.": module.startswith("tensorflow"),
            }
            refuse_any("", slips)
            given, again = (place_all(lambda op, own=each: own(op) or "", variables) for each in setters)
        graphs.append((given, again, place_all(own, variables)))
    return graphs


def cut(items: Iterable[int], nbytes: Callable[[int], int], is_full: Callable[[int, int], bool]) -> Parts:
    """`items` in order; a new part begins where `is_full(bytes of the part, bytes of the next item)`."""
    parts: Parts = []
    for item in items:
        if not parts or is_full(sum(map(nbytes, parts[-1])), nbytes(item)):
            parts.append([])
        parts[-1].append(item)
    return parts


def all_parts(answer: Cut, cases: Sequence[Case], mistakes: Mapping[str, Cut]) -> list[Parts]:
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
def packs(answer: Cut) -> str:
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
