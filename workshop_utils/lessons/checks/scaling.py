"""Checks of lesson 15, from a few workers to a thousand; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from workshop_utils.comm.topology import Link
from workshop_utils.lessons.checks import Wrong, exercise, expect, result_of
from workshop_utils.lessons.checks.open_question import question
from workshop_utils.scaling.cost import all_reduce_seconds, data_parallel_step_seconds

PATHS = Link(2e-3, 12e6), Link(40e-6, 2e9), Link(10e-3, 1e6)
FIT_TOLERANCE = 0.01  # a fit of logarithms is right too, and a little elsewhere
ALGORITHMS = ("ring", "double_tree", "halving_doubling")
NCCLS = ("ring", "double_tree")  # what NCCL has of these
MOST_BUCKETS = 64
WHOLE_BYTES = 1e-5  # a bucket of nbytes // m is right too
CLUSTER = Link(20e-6, 12.5e9)
PLANNED = (  # seconds of computing, workers, bytes, link, algorithms to choose from
    (0.03, 1024, 1e8, CLUSTER, ALGORITHMS),  # the network is busy, so which part overlaps shows
    (0.1, 8, 1e8, CLUSTER, ALGORITHMS),
    (0.1, 1000, 1e8, CLUSTER, ALGORITHMS),
    (0.1, 48, 4e7, Link(1e-3, 12.5e9), ALGORITHMS),
    (0.5, 8, 1e8, Link(1e-5, 1e9), ALGORITHMS),
    (0.1, 31, 4e8, CLUSTER, ALGORITHMS),  # a ring
    (0.1, 768, 4e8, CLUSTER, NCCLS),  # a double tree
    (0.02, 1000, 1e9, CLUSTER, NCCLS),  # a double tree, in one bucket
    # Halving-doubling in buckets, where a ring is faster with the whole array.
    (0.01, 31, 4e7, CLUSTER, ALGORITHMS),
    (0.003, 15, 1e7, CLUSTER, ALGORITHMS),
)
EIGHT = {"parameters": 8.03e9, "tokens_a_second": 8 * 6667, "devices": 8, "peak": 989e12}
MANY = {"parameters": 7e9, "tokens_a_second": 3e5, "devices": 64, "peak": 312e12}


def _things(answer: Callable[..., Any], names: str, *arguments: Any) -> Any:
    """What `answer` gives: as many things as `names` has."""
    got = result_of(answer, *copy.deepcopy(arguments))
    if np.shape(got) != (names.count(",") + 1,):
        raise Wrong(f"it gave {got!r}; it must be {names}.")
    return got


@exercise
def fitted_path(answer: Callable[..., Any]) -> str:
    """`answer(workers, nbytes, seconds)` is α and B of a ring, by least squares of relative errors."""
    names = "two finite numbers: α, B"
    workers, nbytes = np.repeat([2, 3, 4], 5), np.tile([1e3, 1e4, 1e5, 1e6, 1e7], 3)
    for path in PATHS:
        latency, bandwidth = path.latency_seconds, path.bandwidth_bytes_per_second
        got = _things(answer, names, workers, nbytes, all_reduce_seconds("ring", workers, nbytes, path))
        case = f"from exact times of a ring with α = {latency:g} s and B = {bandwidth:g} B/s, for"
        slips = {
            "the numbers are right, but not their order: return α, then B": bandwidth,
            "a ring has 2 (N − 1) messages, and this has N − 1": 2 * latency,
        }
        expect(got[0], latency, f"{case} α it", tolerance=1e-3, slips=slips)
        slips = {
            "a message has K/N bytes, and this has B for half of them": bandwidth / 2,
            "that is 1/B, seconds a byte": 1 / bandwidth,
        }
        expect(got[1], bandwidth, f"{case} B it", tolerance=1e-3, slips=slips)
    columns = np.stack([2 * (workers - 1), 2 * (workers - 1) * nbytes / workers], axis=1)
    exact, generator, away = columns @ [2e-3, 1 / 12e6], np.random.default_rng(3), []
    for _ in range(20):
        seconds = exact * np.exp(0.05 * generator.standard_normal(exact.size))
        latency, seconds_a_byte = np.linalg.lstsq(columns / seconds[:, None], np.ones(exact.size))[0]
        away.append(
            np.array(_things(answer, names, workers, nbytes, seconds)) * [1 / latency, seconds_a_byte]
        )
    latency, bandwidth = np.sqrt(np.mean((np.array(away) - 1) ** 2, axis=0))
    if not max(latency, bandwidth) <= FIT_TOLERANCE:
        raise Wrong(
            f"with 5 % of noise in every time, its α and B are {latency:.1%} and {bandwidth:.1%} away from what the "
            "least squares of relative errors, over all measurements, give. Divide each equation by its time, so that "
            "relative errors count, and leave no measurement out."
        )
    return "exact times give α and B back, and noisy ones what least squares of relative errors give."


@exercise
def best_step(answer: Callable[..., Any]) -> str:
    """`answer(compute, workers, nbytes, all_reduces)` is the best algorithm, number of buckets, and its step."""
    for compute, workers, nbytes, link, algorithms in PLANNED:
        forward, backward = compute / 3, compute * 2 / 3
        given = {each: functools.partial(all_reduce_seconds, each, path=link) for each in algorithms}
        name, m, seconds = _things(
            answer, "three things: name, buckets, seconds", compute, workers, nbytes, given
        )
        took = {
            (each, buckets): given[each](workers, nbytes / buckets)
            for each in algorithms
            for buckets in range(1, MOST_BUCKETS + 1)
        }
        steps = {
            choice: data_parallel_step_seconds(forward, backward, one, choice[1])
            for choice, one in took.items()
        }
        case = (
            f"computing {compute:g} s, {workers} workers, {nbytes:g} bytes, α = {link.latency_seconds:g} s: "
        )
        if (name, m) not in steps:
            raise Wrong(
                f"{case}it gave {name!r} in {m!r} buckets; known are {algorithms}, 1 to {MOST_BUCKETS}."
            )
        one, whole = took[name, m], took[name, 1]
        slips = {
            "two thirds of computing are the backward pass, one is the forward pass": (
                data_parallel_step_seconds(backward, forward, one, m)
            ),
            "the forward pass is missing": steps[name, m] - forward,
            "the last bucket is never hidden": forward + max(backward, backward / m + m * one),
            "the first bucket must be computed before it is sent": forward + max(backward + one, m * one),
            "m buckets pay m times the latencies; one all-reduce of everything, divided by m, does not": (
                data_parallel_step_seconds(forward, backward, whole / m, m)
            ),
        }
        expect(seconds, steps[name, m], f"{case}{name} in {m} buckets", tolerance=WHOLE_BYTES, slips=slips)
        best = min(steps, key=steps.__getitem__)
        if steps[name, m] > steps[best] * (1 + WHOLE_BYTES):
            better = f"{best[0]} in {best[1]} takes {steps[best]:.5g} s"
            if best[0] != name == min(algorithms, key=lambda each: took[each, 1]):
                better += "; what is fastest with the whole array need not be with a bucket"
            raise Wrong(f"{case}it chose {name} in {m} buckets, {seconds:.5g} s; {better}.")
    return "the best of those given, in 1 to 64 buckets: more of them hide more, and pay more latencies."


@exercise
def days_of(answer: Callable[..., Any]) -> str:
    """`answer(published, parameters, tokens, devices)` is the MFU of a published run, and a run's days at it."""
    for published, parameters, tokens, devices in ((EIGHT, 8.03e9, 100e9, 16), (MANY, 70e9, 1.4e12, 2048)):
        theirs, peak, own = (published[name] for name in ("devices", "peak", "parameters"))
        got = _things(answer, "two numbers: MFU, days", published, parameters, tokens, devices)
        mfu = 6 * own * published["tokens_a_second"] / (theirs * peak)
        slips = {
            "6 for each parameter, not 2: the backward pass is twice the forward pass": mfu / 3,
            "tokens_a_second is of all devices, and so must the peak be": mfu * theirs,
            "the MFU is a fraction: 0.33, not 33": 100 * mfu,
            "upside down": 1 / mfu,
        }
        expect(got[0], mfu, f"the MFU of the run of {theirs} devices", slips=slips)
        days = 6 * parameters * tokens / (devices * peak * mfu) / 86_400
        slips = {
            "those are hours": 24 * days,
            "those are seconds": 86_400 * days,
            "that is the peak, which nobody reaches: divide by the MFU": days * mfu,
            "the model's own parameters count, not those of the published run": days * own / parameters,
            "the devices are those of the plan": days * devices / theirs,
            "one device alone": days * devices,
        }
        plan = (
            f"{parameters / 1e9:g} billion parameters, {tokens / 1e9:g} billion tokens and {devices} devices"
        )
        expect(got[1], days, f"the days for {plan}", slips=slips)
    return "6 · P · D operations, at the part of the peak that somebody has reached on such devices."


def _state_nbytes(parameters: float, devices: int, *sharded: bool) -> float:
    """The bytes on a device where of parameters, gradients and optimizer some are sharded."""
    return parameters * sum(np.array([2, 2, 12]) / np.where(sharded, devices, 1))


@exercise
def state_nbytes(answer: Callable[[float, int, int], float]) -> str:
    """`answer(parameters, devices, stage)`: bytes of a model's state on one device, mixed-precision Adam and ZeRO."""
    for parameters, devices, stage in itertools.product((7.5e9, 8.03e9, 1e6), (1, 16, 64), range(4)):
        state = functools.partial(_state_nbytes, parameters, devices)
        slips = {
            "gradients and optimizer are sharded in the wrong order: the optimizer comes first": (
                state(stage >= 3, stage >= 1, stage >= 2)
            ),
            "stage 1 shards the optimizer, not the parameters": state(stage >= 1, stage >= 2, stage >= 3),
            "a stage keeps what the one before has sharded": state(stage == 3, stage == 2, stage == 1),
        }
        of = f"{parameters / 1e9:g} billion parameters of 2 + 2 + 12 bytes, {devices} devices, stage {stage}: it"
        got = result_of(answer, parameters, devices, stage)
        expect(got, state(stage >= 3, stage >= 2, stage >= 1), of, slips=slips)
    return "120, 31.4, 16.6 and 1.9 GB for 7.5 billion parameters on 64 devices, as in figure 1 of the ZeRO paper."


faster_links = question(__name__, "faster_links")
