"""Open questions: what is asked for is there and could be measured; a person judges the rest."""

from fractions import Fraction

import numpy as np
import pytest

from workshop_utils.comm.halving_doubling import halving_doubling_all_reduce
from workshop_utils.lessons.checks import Wrong, model_parallel, pytorch, refuse, ring, tensorflow
from workshop_utils.lessons.checks.open_question import OpenQuestion, Simulated, runs_of
from workshop_utils.network import Network
from workshop_utils.parallel.schedule import Pass, Timed
from workshop_utils.ranks.results import RankResult, Results

ASKED = OpenQuestion("workers", "The link is full.", (2, 64), whole=True)
WHY = "each worker waits for its pull behind all of the others"


def test_numbers_and_words_are_answered_with_an_explanation_to_compare():
    verdict = ASKED(8, 10, WHY)
    assert verdict.state == "answered"
    for part in ("predicted 8 workers", "measured 10, 1.25 times", WHY, "The link is full."):
        assert part in verdict.text


def test_a_prediction_keeps_to_what_the_unit_allows():
    share = OpenQuestion("percent", "The sum is usually right.", (85, 95), predictable=(1, 100))
    assert "from 1 to 100 percent" in share(5000, 91, WHY).text
    assert "from 1 to 100 percent" in share(0.9, 91, WHY).text
    assert share(100, 91, WHY).state == "answered"


@pytest.mark.parametrize(
    ("answer", "state", "says"),
    [
        ((...,), "not yet", "predict a number first"),
        ((8, ..., WHY), "not yet", "predict"),
        ((8, 10, ...), "not yet", "write"),
        (("8", 10, WHY), "wrong", "`predicted` is '8'"),
        ((True, 10, WHY), "wrong", "`predicted` is True"),
        ((8, float("nan"), WHY), "wrong", "`measured` is nan"),
        ((10**400, 10, WHY), "wrong", "positive number"),
        ((10**5000, 10, WHY), "wrong", "`predicted` is too large"),
        ((Fraction(8), np.array([10]), WHY), "answered", "predicted 8 workers and measured 10"),
        ((-8, 10, WHY), "wrong", "positive number of workers"),
        ((8, 100, WHY), "wrong", "between 2 and 64 workers"),
        ((8, 10.5, WHY), "wrong", "`measured` is 10.5; it counts workers, so it is a whole number"),
        ((8.5, 10, WHY), "wrong", "`predicted` is 8.5; it counts workers, so it is a whole number"),
        (
            (0.1, 10, WHY),
            "wrong",
            "`predicted` is 0.1; a prediction worth measuring is from 0.2 to 640 workers",
        ),
        ((1000, 10, WHY), "wrong", "`predicted` is 1,000"),
        ((1, 10, WHY), "answered", "10 times what you predicted"),
        ((640, 64, WHY), "answered", "0.1 times"),
        ((40, 42, WHY), "answered", "measured 42, 1.05 times what you predicted"),
        ((37, 20, WHY), "answered", "measured 20, 0.54 times what you predicted"),
        ((8, 8, WHY), "answered", "you predicted 8 workers and measured 8, as predicted."),
        ((8, 10, "a b c d e f g h"), "wrong", "at least 24 letters"),
        ((8, 10, "1 2 3 4 5 6 7 8 9 10"), "wrong", "no explanation yet"),
        ((8, 10, "because " * 10), "wrong", "not always the same ones"),
        ((8, 10, "a" * 30), "wrong", "not always the same ones"),
        ((8, 10, 5), "wrong", "no explanation yet"),
        ((8, 10, "the link is full and every pull waits"), "answered", "the link is full"),
        ((8, 10, "链路已经饱和，每个工作进程都要等待其他所有进程取完参数。"), "answered", "链路"),
        ((8, 10, "链路已满"), "wrong", "no explanation yet"),
    ],
)
def test_what_is_missing_or_impossible_is_named(answer, state, says):
    verdict = ASKED(*answer)
    assert (verdict.state, says in verdict.text) == (state, True)


def test_a_measurement_that_counts_nothing_may_be_any_number():
    assert OpenQuestion("times", "Racks share one way.", (1, 20))(2, 2.7, WHY).state == "answered"


def run(*values, program="step", network=None, device=None, **arguments):
    """What `on_ranks` would have returned, a value a rank."""
    ranks = [RankResult(rank, (), value, 1, 8, 0.25) for rank, value in enumerate(values)]
    links = Network.parse(network) if network else None
    return Results(
        tuple(ranks), None, True, 0.5, device=device, program=program, arguments=arguments, links=links
    )


def shortest(results):
    """The number of ranks with the shortest step."""
    runs = runs_of(results, "step", network="100Mbit")
    refuse(len(runs) < 2, "`results` has one run; compare at least two.")
    return len(min(runs, key=lambda each: max(each.values)))


MEASURED = OpenQuestion("workers", "The link is full.", predictable=(1, 16), whole=True, measure=shortest)
STEPS = [run(0.9, network="100Mbit"), run(0.5, 0.6, network="0.1Gbit"), run(0.7, 0.7, 0.8, network="100Mbit")]


@pytest.mark.parametrize("results", [STEPS, {"a": STEPS[:1], "b": tuple(STEPS[1:])}])
def test_what_was_measured_is_computed_from_the_learner_s_runs(results):
    verdict = MEASURED(3, results, WHY)
    assert (verdict.state, "predicted 3 workers and measured 2, 0.67 times" in verdict.text) == (
        "answered",
        True,
    )


@pytest.mark.parametrize(
    ("results", "state", "says"),
    [
        (..., "not yet", "predict a number first"),
        ([], "not yet", "`results` is empty"),
        (2, "wrong", "`results` holds int; give what `on_ranks` returned"),
        ([STEPS, 2], "wrong", "`results` holds int"),
        (STEPS[:1], "wrong", "one run; compare"),
        (STEPS[0].ranks[0], "wrong", "`results` holds RankResult"),
        ([*STEPS, run(0.1, program="", network="100Mbit")], "wrong", "a run of a cell; it must be of `step`"),
        ([*STEPS, run(0.1, program="leap", network="100Mbit")], "wrong", "a run of `leap`"),
        ([run(None, network="100Mbit")] * 2, "wrong", "`results` cannot be read: TypeError"),
        ([*STEPS, run(0.1)], "wrong", "a run at full speed; it must be at 100Mbit each way"),
        ([*STEPS, run(0.1, network="100Mbit,latency=1ms")], "wrong", "1ms of latency; it must be at 100Mbit"),
    ],
)
def test_runs_of_another_experiment_are_refused_by_name(results, state, says):
    verdict = MEASURED(3, results, WHY)
    assert (verdict.state, says in verdict.text) == (state, True), verdict


def test_a_number_of_ranks_can_be_asked_for():
    assert len(runs_of(STEPS[1], "step", ranks=2, network="100Mbit")) == 1
    with pytest.raises(Wrong, match="a run on 1 rank; it must be on 2"):
        runs_of(STEPS, "step", ranks=2, network="100Mbit")


def test_runs_may_be_on_several_networks():
    assert len(runs_of(STEPS, "step", network=("100Mbit", "10Mbit"))) == 3
    with pytest.raises(Wrong, match="it must be at 10Mbit each way for each process or 20Mbit each way"):
        runs_of(STEPS, "step", network=("10Mbit", "20Mbit"))


def test_full_speed_may_be_one_of_several_networks():
    assert len(runs_of([*STEPS, run(0.1)], "step", network=("100Mbit", None))) == 4
    with pytest.raises(Wrong, match="it must be at 10Mbit each way for each process or full speed"):
        runs_of(STEPS, "step", network=("10Mbit", None))


def test_a_simulated_number_is_not_called_measured():
    asked = OpenQuestion("times", "Racks share one way.", (1, 20), measure=Simulated)
    assert "you predicted 2 times and simulated 2.714, 1.36 times what" in asked(2, 2.714, WHY).text


def test_a_measurement_of_what_cannot_be_is_refused():
    asked = OpenQuestion("workers", "The link is full.", (3, 9), (1, 16), measure=shortest)
    assert (
        "`results` measures 2; the lesson's own runs give something between 3 and 9"
        in asked(3, STEPS, WHY).text
    )


def test_our_answer_is_not_shown_before_something_was_measured():
    assert "The link is full" not in MEASURED(3, STEPS[:1], WHY).text


def test_large_numbers_are_written_out():
    asked = OpenQuestion("examples", "The ridge moves.", (1, 1e6))
    assert "you predicted 64,000 examples and measured 3,737, 0.058" in asked(64000, 3736.8, WHY).text


def test_racks_are_simulated_where_the_machine_has_none(monkeypatch):
    """Halving-doubling of 8 ranks, whose two largest messages take four times as long: 4.75 / 1.75."""
    slowest = [[0.14] * 3] * 8
    arguments = {"all_reduce": halving_doubling_all_reduce, "nbytes": 1_000_000}
    results = run(*slowest, program="timed", network="100Mbit", **arguments)
    for has_racks, state, says in (
        (True, "not yet", "no run in two racks"),
        (False, "answered", "simulated 2.714"),
    ):
        monkeypatch.setattr(Network, "in_namespaces", has_racks)
        verdict = ring.across_racks(2, results, WHY)
        assert (verdict.state, says in verdict.text) == (state, True), verdict


@pytest.mark.parametrize("network", ["100Mbit", None])
def test_what_no_sync_gains_is_the_ratio_of_the_fastest_steps_of_the_slowest_rank(network, monkeypatch):
    monkeypatch.setattr(pytorch, "availability", lambda: "none")
    asked = {"program": "ddp_steps", "network": network, "device": "emulated devices, 150ms a step"}
    asked |= {"bucket_bytes": 600_000, "width": 256, "parts": 4}

    def steps(times, *seconds):
        return [(1.0, 1.5, 1.6, 1 + each, [(1.5, 1.6, 3_158_016 // 4)] * 4 * times) for each in seconds]

    once = run(steps(1, 0.9, 0.8), steps(1, 0.88, 0.9), steps(1, 0.7, 0.7), **asked)
    each_part = run(steps(4, 1.6, 1.9), steps(4, 1.7, 1.6), steps(4, 1.8, 1.5), **asked)
    verdict = pytorch.no_sync_gain(1.95, [once, each_part], WHY)
    assert "predicted 1.95 times and measured 2, 1.03 times what you predicted" in verdict.text
    for alone, missing in ((once, False), (each_part, True)):
        verdict = pytorch.no_sync_gain(1.95, alone, WHY)
        assert (verdict.state, f"no run with `no_sync={missing}`" in verdict.text) == ("not yet", True)


def test_what_prefetch_gains_is_that_of_a_run_whose_largest_batch_lasts_the_device_s_time(monkeypatch):
    monkeypatch.setattr(pytorch, "availability", lambda: "root")

    def steps(without, fetched):
        pairs = ((False, without), (True, fetched))
        small = {(16, way): [(0.7, [])] for way, _ in pairs}
        return small | {(32, way): [(each, []) for each in seconds] for way, seconds in pairs}

    ranks = steps((1.5, 1.6), (1.1, 1.2)), steps((1.7, 1.6), (1.0, 1.3)), steps((1.6, 1.65), (1.05, 1.0))
    asked = {"program": "unit_steps", "network": "100Mbit", "device": "emulated devices, 600ms a step"}
    verdict = pytorch.prefetch_gain(1.5, [run(*ranks, tokens=(16, 32), width=512, **asked)], WHY)
    assert "predicted 1.5 times and measured 1.5, as predicted" in verdict.text


def test_what_a_slow_stage_costs_is_the_ratio_of_the_shortest_steps_of_all_ranks():
    def steps(slow, *seconds):
        of = {"name": "one_f_one_b", "microbatches": 8, "chunks": 1, "slow": slow}
        ranks = [
            [
                [
                    Timed(rank, Pass(kind, 0, rank), end - 0.1, end)
                    for kind, end in (("forward", rank + 0.1), ("backward", rank + each))
                ]
                for each in seconds
            ]
            for rank in range(4)
        ]
        return run(*ranks, program="emulated", **of)

    verdict = model_parallel.slow_stage(
        1.5, [steps(None, 2, 1), steps(None, 3), {"slow": steps({2: 2}, 5, 4)}], WHY
    )
    assert "predicted 1.5 times and measured 1.75, 1.17 times what you predicted" in verdict.text
    for given, missing in ((None, "{2: 2}"), ({2: 2}, "None")):
        verdict = model_parallel.slow_stage(1.5, steps(given, 2), WHY)
        assert (verdict.state, f"no run with `slow={missing}`" in verdict.text) == ("not yet", True)


def test_full_speed_is_refused_where_links_can_be_slow(monkeypatch):
    monkeypatch.setattr(pytorch, "availability", lambda: "root")
    verdict = pytorch.no_sync_gain(2, run(1, 2, 3, program="ddp_steps"), WHY)
    assert "a run at full speed; it must be at 100Mbit" in verdict.text


@pytest.mark.parametrize("first", ["ps", "worker"])
def test_staleness_is_that_of_the_slowest_worker_after_its_first_step(first):
    def steps(first, *ages):
        return [], [], [[(number, age, 0.1, True) for number, age in enumerate((first, *ages), 1)]]

    fast = steps(*[2] * 20)
    values = {"ps": [None], "worker": [fast, steps(40, *[10, 11] * 4), fast, fast]}
    values = {role: values[role] for role in sorted(values, reverse=first == "worker")}
    asked = {"program": "between_graph", "synchronous": False, "cluster": values}
    asked["compute_seconds"] = np.float32([0.04, 0.16, 0.04, 0.04])
    ranks = [value for role in values for value in values[role]]
    verdict = tensorflow.slow_staleness(12, run(*ranks, **asked), WHY)
    assert "predicted 12 updates and measured 10.5" in verdict.text
