"""Checks of lesson 15, from a few workers to a thousand; see `workshop_utils.lessons.checks` for how a check speaks."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from workshop_utils.comm.topology import Link
from workshop_utils.lessons.checks import Wrong, exercise, expect, result_of
from workshop_utils.lessons.checks.open_question import OpenQuestion
from workshop_utils.scaling.cost import all_reduce_seconds, data_parallel_step_seconds

PATHS = Link(2e-3, 12e6), Link(40e-6, 2e9), Link(10e-3, 1e6)
MOST_BUCKETS = 64
FIT_TOLERANCE = 0.01  # a fit of logarithms is right too, and a little elsewhere

Seconds = Callable[[int, Any], Any]


@exercise
def fitted_path(answer: Callable[..., Any]) -> str:
    """`answer(workers, nbytes, seconds)` is α and B of a ring, by least squares of relative errors."""
    workers, nbytes = np.repeat([2, 3, 4], 5), np.tile([1e3, 1e4, 1e5, 1e6, 1e7], 3)
    for path in PATHS:
        seconds = np.asarray(all_reduce_seconds("ring", workers, nbytes, path))
        latency, bandwidth = _two_numbers(answer, workers, nbytes, seconds)
        true = path.latency_seconds, path.bandwidth_bytes_per_second
        if np.allclose((bandwidth, latency), true, rtol=1e-3):
            raise Wrong("the numbers are right, but not their order: return α, then B.")
        case = f"from exact times of a ring with α = {true[0]:g} s and B = {true[1]:g} B/s it gave"
        for slip, factors in _SLIPS.items():
            if np.allclose((latency, bandwidth), np.multiply(true, factors), rtol=1e-3):
                raise Wrong(f"{case} {latency:.4g} and {bandwidth:.4g}: {slip}.")
        if np.isclose(bandwidth, 1 / true[1], rtol=1e-3):
            raise Wrong(f"{case} {bandwidth:.4g} for B: that is 1/B, seconds a byte.")
        if not np.allclose((latency, bandwidth), true, rtol=1e-3):
            raise Wrong(f"{case} {latency:.4g} and {bandwidth:.4g}.")
    path, generator = PATHS[0], np.random.default_rng(3)
    exact = np.asarray(all_reduce_seconds("ring", workers, nbytes, path))
    away = []
    for _ in range(20):
        seconds = exact * np.exp(0.05 * generator.standard_normal(exact.size))
        best = np.linalg.lstsq(_columns(workers, nbytes) / seconds[:, None], np.ones(exact.size), rcond=None)[
            0
        ]
        away.append(np.array(_two_numbers(answer, workers, nbytes, seconds)) * [1 / best[0], best[1]] - 1)
    latency, bandwidth = np.sqrt(np.mean(np.square(away), axis=0))
    if max(latency, bandwidth) > FIT_TOLERANCE:
        raise Wrong(
            f"with 5 % of noise in every time, its α and B are {latency:.1%} and {bandwidth:.1%} away from what the "
            "least squares of relative errors, over all measurements, give. Divide each equation by its time, so that "
            "relative errors count, and leave no measurement out."
        )
    return "exact times give α and B back, and noisy ones what least squares of relative errors give."


def _columns(workers: Any, nbytes: Any) -> Any:
    return np.stack([2 * (workers - 1), 2 * (workers - 1) * nbytes / workers], axis=1)


_SLIPS: Mapping[str, tuple[float, float]] = {
    "a ring has 2 (N − 1) messages, and this has N − 1": (2, 0.5),
    "a message has K/N bytes, and this has B for half of them": (1, 0.5),
    "a message has K/N bytes, and this has B for twice as many": (1, 2),
}


def _two_numbers(answer: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    got = np.asarray(result_of(answer, *(np.array(each) for each in arguments)), dtype=float)
    if got.shape != (2,) or not np.isfinite(got).all():
        raise Wrong(f"it gave {got.tolist()}; it must be two finite numbers, α and B.")
    return float(got[0]), float(got[1])


@exercise
def best_step(answer: Callable[..., Any]) -> str:
    """`answer(compute, workers, nbytes, all_reduces)` is the best algorithm, number of buckets, and its step."""
    path, late, slow = Link(20e-6, 12.5e9), Link(1e-3, 12.5e9), Link(1e-5, 1e4)
    cases = (
        (0.1, 8, 1e8, path),
        (0.1, 1000, 1e8, path),
        (0.03, 1024, 4e8, path),
        (0.1, 48, 4e7, late),
        (0.5, 8, 1001.0, slow),
        (0.1, 48, 4e8, path),  # a ring
        (0.1, 768, 4e8, path),  # a double tree
        (0.02, 1000, 1e9, path),  # a double tree, in one bucket
    )
    for compute, workers, nbytes, link in cases:
        calls: list[str] = []

        names = ("ring", "halving_doubling", "double_tree")
        got = result_of(
            answer, compute, workers, nbytes, {name: _recording(name, link, calls) for name in names}
        )
        if not isinstance(got, tuple | list | np.ndarray) or len(got) != 3:
            raise Wrong(f"it gave {got!r}; it must be three things: name, buckets, seconds.")
        steps = {
            (name, m): _step(name, compute, workers, nbytes, m, link) for name in names for m in range(1, 65)
        }
        right = min(steps.values())
        case = (
            f"computing {compute:g} s, {workers} workers, {nbytes:g} bytes, α = {link.latency_seconds:g} s: "
        )
        name, buckets, seconds = got
        if (name, buckets) not in steps:
            raise Wrong(
                f"{case}it gave {name!r} in {buckets!r} buckets; known are {names} in 1 to {MOST_BUCKETS}."
            )
        _explain_step(case, seconds, steps[name, buckets], (name, compute, workers, nbytes, buckets, link))
        if steps[name, buckets] > right * (1 + 1e-9):
            best = min(steps, key=steps.__getitem__)
            better = f"{best[0]} in {best[1]} takes {right:.5g} s"
            raise Wrong(f"{case}it chose {name} in {buckets} buckets, {seconds:.5g} s; {better}.")
        if not calls:
            raise Wrong(f"{case}it never called one of `all_reduces`; another cluster has other ones.")
    return "the best of three algorithms and 64 numbers of buckets: more of them hide more, and pay more latencies."


def _recording(name: str, link: Link, calls: list[str]) -> Seconds:
    def seconds(workers: int, nbytes: Any) -> Any:
        calls.append(name)
        return all_reduce_seconds(name, workers, nbytes, link)

    return seconds


def _step(name: str, compute: float, workers: int, nbytes: float, buckets: int, link: Link) -> float:
    each = all_reduce_seconds(name, workers, nbytes / buckets, link)
    return float(data_parallel_step_seconds(compute / 3, compute * 2 / 3, each, buckets))


def _explain_step(case: str, seconds: Any, right: float, given: tuple[Any, ...]) -> None:
    """Raise Wrong with the reason where the seconds are not those of the choice."""
    name, compute, workers, nbytes, buckets, link = given
    if isinstance(seconds, int | float | np.number) and not np.isclose(seconds, right, rtol=1e-6):
        each = float(all_reduce_seconds(name, workers, nbytes / buckets, link))
        whole, backward = float(all_reduce_seconds(name, workers, nbytes, link)), compute * 2 / 3
        slips = {
            "the forward pass is missing": right - compute / 3,
            "nothing overlaps in it": compute + buckets * each,
            "the last bucket is never hidden": compute / 3
            + max(backward, backward / buckets + buckets * each),
            "the first bucket must be computed before it is sent": compute / 3
            + max(backward + each, buckets * each),
            "m buckets pay m times the latencies; one all-reduce of everything, divided by m, does not": float(
                data_parallel_step_seconds(compute / 3, backward, whole / buckets, buckets)
            ),
            "nothing is sent during the forward pass": max(
                compute + each, compute / buckets + buckets * each
            ),
        }
        found = [slip for slip, value in slips.items() if np.isclose(seconds, value, rtol=1e-6)]
        if found:
            result = f"{case}{name} in {buckets} buckets gave {seconds:.5g} s; it must be {right:.5g}"
            raise Wrong(f"{result}: {', or '.join(found)}.")
    expect(seconds, right, f"{case}{name} in {buckets} buckets")


@exercise
def days_of(answer: Callable[..., Any]) -> str:
    """`answer(published, parameters, tokens, devices)` is the MFU of a published run, and a run's days at it."""
    cases = (
        (
            {"parameters": 8.03e9, "tokens_a_second": 8 * 6667, "devices": 8, "peak": 989e12},
            8.03e9,
            100e9,
            16,
        ),
        ({"parameters": 7e9, "tokens_a_second": 3e5, "devices": 64, "peak": 312e12}, 70e9, 1.4e12, 2048),
    )
    for published, parameters, tokens, devices in cases:
        got = np.asarray(result_of(answer, dict(published), parameters, tokens, devices), dtype=float)
        if got.shape != (2,):
            raise Wrong(f"it gave {got.tolist()}; it must be two numbers, the MFU and the days.")
        peak_of_all = published["devices"] * published["peak"]
        mfu = 6 * published["parameters"] * published["tokens_a_second"] / peak_of_all
        days = 6 * parameters * tokens / (devices * published["peak"] * mfu) / 86_400
        case = f"the run of {published['devices']} devices: MFU"
        for slip, value in {
            "6 for each parameter, not 2: the backward pass is twice the forward pass": mfu / 3,
            "tokens_a_second is of all devices, and so must the peak be": mfu * published["devices"],
            "the MFU is a fraction: 0.33, not 33": 100 * mfu,
            "upside down": 1 / mfu,
        }.items():
            if np.isclose(got[0], value, rtol=1e-6):
                raise Wrong(f"{case} {got[0]:.4g}: {slip}.")
        expect(got[0], mfu, case)
        case = f"{parameters / 1e9:g} billion parameters, {tokens / 1e9:g} billion tokens, {devices} devices: days"
        for slip, value in {
            "those are hours": 24 * days,
            "those are seconds": 86_400 * days,
            "that is the peak, which nobody reaches: divide by the MFU": days * mfu,
            "the model's own parameters count, not those of the published run": days
            * published["parameters"]
            / parameters,
            "the devices are those of the plan": days * devices / published["devices"],
            "one device alone": days * devices,
        }.items():
            if np.isclose(got[1], value, rtol=1e-6) and not np.isclose(value, days, rtol=1e-6):
                raise Wrong(f"{case} {got[1]:.4g}: {slip}.")
        expect(got[1], days, case)
    return "6 · P · D operations, at the part of the peak that somebody has reached on such devices."


@exercise
def state_nbytes(answer: Callable[[float, int, int], float]) -> str:
    """`answer(parameters, devices, stage)`: bytes of a model's state on one device, mixed-precision Adam and ZeRO."""
    for parameters, devices in ((7.5e9, 64), (8.03e9, 16), (1e6, 1)):
        for stage in (0, 1, 2, 3):
            parts = np.array([2, 2, 12]) * parameters  # parameters, gradients, optimizer
            shares = np.where(np.array([3, 2, 1]) <= stage, devices, 1)
            right = float((parts / shares).sum())
            case = f"{parameters / 1e9:g} billion parameters, {devices} devices, stage {stage}: it"
            got: Any = result_of(answer, parameters, devices, stage)
            if devices > 1:
                for slip, value in {
                    "gradients and optimizer are sharded in the wrong order: the optimizer comes first": float(
                        (parts / np.where(np.array([3, 1, 2]) <= stage, devices, 1)).sum()
                    ),
                    "stage 1 shards the optimizer, not the parameters": float(
                        (parts / np.where(np.array([1, 2, 3]) <= stage, devices, 1)).sum()
                    ),
                    "a stage keeps what the one before has sharded": float(
                        (parts / np.where(np.array([3, 2, 1]) == stage, devices, 1)).sum()
                    ),
                }.items():
                    if (
                        isinstance(got, int | float | np.number)
                        and np.isclose(float(got), value, rtol=1e-6)
                        and not np.isclose(value, right)
                    ):
                        raise Wrong(f"{case} gave {float(got) / 1e9:.4g} GB: {slip}.")
            expect(got, right, case, "16 bytes a parameter are 2 + 2 + 12")
    return "120, 31.4, 16.6 and 1.9 GB for 7.5 billion parameters on 64 devices, as in figure 1 of the ZeRO paper."


faster_links = OpenQuestion(
    "% efficiency",
    (53, 80),
    "communication takes half as long, so the efficiency rises from c / (c + t_c) to c / (c + t_c/2), by theory from "
    "about 52 to 69 %. Twice the bandwidth doubles the efficiency only where nearly the whole step is communication.",
    predictable=(5.6, 100),
)
