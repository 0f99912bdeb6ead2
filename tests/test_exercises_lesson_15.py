"""The checks of lesson 15: what is right is right, and each mistake is called by its name."""

import numpy as np
import pytest

from workshop_utils.exercises import scaling as checks


def right_efficiency(seconds):
    return {count: seconds[min(seconds)] / each for count, each in seconds.items()}


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (right_efficiency, "the step of the fewest"),
        (
            lambda s: {n: 1 / e for n, e in right_efficiency(s).items()},
            "upside down: with 2 workers it gave 1.25",
        ),
        (lambda s: {n: e * n / min(s) for n, e in right_efficiency(s).items()}, "that is the speed-up"),
        (lambda s: {n: e / n * min(s) for n, e in right_efficiency(s).items()}, "that is strong scaling"),
        (lambda s: {n: s[next(iter(s))] / t for n, t in s.items()}, "measured against 8 workers"),
        (lambda s: [1.0], "as a dict"),
        (lambda s: None, "gave nothing"),
        (lambda s: dict.fromkeys(s, 0.123), r"it must be 1, the step with 1"),
    ],
)
def test_weak_efficiency(answer, says):
    verdict = checks.weak_efficiency(answer)
    assert says in verdict.text
    assert (verdict.state == "right") == (answer is right_efficiency)


def ring(compute, nbytes, path, least, halves=2, latency=1.0, of="step", past=0):
    workers = np.arange(1, 100_001)
    each = latency * path.latency_seconds + nbytes / workers / path.bandwidth_bytes_per_second
    seconds = halves * (workers - 1) * each
    met = compute / (compute + seconds) >= least if of == "step" else seconds <= (1 - least) * compute
    return int(workers[met].max()) + past


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({}, "each worker more costs two latencies"),
        ({"past": 1}, "one too many"),
        ({"latency": 0.0}, "latency left out"),
        ({"halves": 1}, "half a ring"),
        ({"of": "computing"}, "a share of computing"),
        ({"past": 7}, "the largest N with"),
    ],
)
def test_largest_ring(how, says):
    verdict = checks.largest_ring(lambda *case: ring(*case, **how))
    assert says in verdict.text
    assert (verdict.state == "right") == (not how)


@pytest.mark.parametrize(
    ("answer", "state", "says"),
    [
        (147.5, "right", "lesson 07's overlap"),
        (147.5 / 8, "wrong", "a byte has 8 bits"),
        (147.5 / 2, "wrong", "each worker sends every byte twice"),
        (163.8, "wrong", "a ninth of the computing"),
        (16.4, "wrong", "half of the step would be computing"),
    ],
)
def test_the_bandwidth_for_resnet(answer, state, says):
    verdict = checks.bandwidth_for_resnet(answer)
    assert verdict.state == state
    assert says in verdict.text
