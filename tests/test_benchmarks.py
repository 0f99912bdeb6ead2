"""The machinery of the benchmarks, on made-up numbers: medians, bars, the exit code, and what fails."""

import itertools
import json
import os
import sys
import time

import pytest

from workshop_utils import benchmarks
from workshop_utils.benchmarks import comparison as comparison_module
from workshop_utils.benchmarks import launch, throughput
from workshop_utils.benchmarks.bare import running
from workshop_utils.benchmarks.comparison import (
    Bar,
    BenchmarkError,
    Comparison,
    NotMeasured,
    Results,
    Spread,
    rounds,
)


def results(*rows):
    return Results("made up", rows, "not measured at all")


def comparison(ours, theirs, bar=None, **more):
    return Comparison("made up", tuple(ours), tuple(theirs), "s", bar, **more)


def test_a_bar_includes_its_ends_and_no_value_that_is_not_a_number():
    assert Bar(high=1.05).is_met_by(1.05)
    assert not Bar(high=1.05).is_met_by(1.051)
    assert Bar(low=30).is_met_by(30)
    assert not Bar(low=30).is_met_by(29.9)
    assert not Bar(high=1.05).is_met_by(float("nan"))
    assert not Bar.around(1.0, 0.02).is_met_by(0.97)
    assert not Bar.around(1.0, 0.02).is_met_by(1.03)


def test_a_bar_is_written_as_people_write_it():
    assert [str(bar) for bar in (Bar(high=1.05), Bar(low=30), Bar.around(1.0, 0.02))] == [
        "≤ 1.05",
        "≥ 30",
        "1.00 ± 0.02",
    ]


@pytest.mark.parametrize(
    ("values", "quartiles"),
    [([3.0], (3, 3, 3)), ([1.0, 2.0], (1.25, 1.5, 1.75)), ([5.0, 1.0, 3.0, 2.0, 4.0], (2, 3, 4))],
)
def test_a_spread_is_the_median_between_the_quartiles_in_whatever_order_values_come(values, quartiles):
    assert Spread.of(values) == Spread(*quartiles)


def test_the_ratio_is_the_median_of_the_pairs_ratios_not_the_ratio_of_the_medians():
    slow_machine_in_between = comparison(ours=[1, 10, 2], theirs=[2, 20, 5])
    assert slow_machine_in_between.ratios == (0.5, 0.5, 0.4)
    assert slow_machine_in_between.ratio.median == 0.5


def test_times_faster_is_theirs_over_ours():
    assert comparison(ours=[0.1], theirs=[5.0], bar=Bar(low=30), times_faster=True).ratio.median == 50


@pytest.mark.parametrize(("ours", "theirs"), [([], []), ([1.0], []), ([1.0, 2.0], [1.0])])
def test_a_comparison_needs_pairs(ours, theirs):
    with pytest.raises(BenchmarkError, match=f"{len(ours)} of ours and {len(theirs)} of theirs"):
        comparison(ours, theirs)


def test_the_exit_code_is_0_where_every_bar_is_met(capsys):
    code = benchmarks.run(benchmarks={"fast": lambda say: results(comparison([1], [1], Bar(high=1.05)))})
    printed = capsys.readouterr().out
    assert code == 0
    assert "≤ 1.05" in printed
    assert "1.000" in printed
    assert "Every bar was met." in printed


def test_the_exit_code_is_1_where_a_bar_is_missed_and_the_other_benchmarks_still_run(capsys):
    ran = []

    def slow(say):
        return results(comparison([2, 2, 9], [1, 1, 1], Bar(high=1.05)))

    def broken(say):
        raise BenchmarkError("there is no [tool] here")

    def fast(say):
        ran.append("fast")
        return results(comparison([1], [1], Bar(high=1.05)))

    code = benchmarks.run(benchmarks={"slow": slow, "broken": broken, "fast": fast})
    printed = capsys.readouterr().out
    assert code == 1
    assert ran == ["fast"]
    assert "there is no [tool] here" in printed
    assert "Bars missed: 2." in printed


def test_quartiles_stand_beside_the_ratio(capsys):
    benchmarks.run(benchmarks={"one": lambda say: results(comparison([1, 2, 3, 4, 5], [1, 1, 1, 1, 1]))})
    assert "3.000 (2.000 – 4.000)" in capsys.readouterr().out


def test_a_row_without_a_bar_is_never_missed():
    assert results(comparison([9], [1])).missed == 0
    assert results(NotMeasured("mpi", "there is no mpirun")).missed == 1


def test_rounds_end_when_the_time_is_up_but_not_before_there_are_enough(monkeypatch):
    clock = itertools.count(0, 10)  # each look at the clock finds it ten seconds on
    monkeypatch.setattr(comparison_module.time, "monotonic", lambda: next(clock))
    assert list(rounds(least=2, most=9, seconds=1000)) == list(range(9))
    assert list(rounds(least=2, most=9, seconds=25)) == [0, 1, 2, 3]
    assert list(rounds(least=2, most=9, seconds=0)) == [0, 1]


def test_only_the_benchmarks_named_run_and_an_unknown_name_is_refused_before_any_does():
    ran = []

    def note(name):
        def benchmark(say):
            ran.append(name)
            return results(comparison([1], [1]))

        return benchmark

    table = {"one": note("one"), "two": note("two")}
    with pytest.raises(BenchmarkError, match="'three'; it must be one of one, two"):
        benchmarks.run(["one", "three"], table)
    assert ran == []
    assert benchmarks.run(["two"], table) == 0
    assert ran == ["two"]


def test_a_launch_is_timed_up_to_its_last_rank(tmp_path, monkeypatch):
    monkeypatch.setattr(launch, "WORKERS", 3)

    def start(moments):
        now = time.monotonic()
        for rank, later in enumerate((10.0, 30.0, 20.0)):
            (moments / str(rank)).write_text(repr(now + later))

    stopwatch = launch.Stopwatch(tmp_path)
    assert [round(stopwatch.seconds(start)), round(stopwatch.seconds(start))] == [30, 30]


def test_a_launch_that_not_every_rank_joined_is_not_timed(tmp_path):
    with pytest.raises(BenchmarkError, match=f"0 of {launch.WORKERS} ranks"):
        launch.Stopwatch(tmp_path).seconds(lambda moments: None)


def test_first_steps_are_noted_once_and_the_script_sees_its_own_arguments(tmp_path):
    script, moments = tmp_path / "train.py", tmp_path / "moments"
    moments.mkdir()
    script.write_text(
        "import sys, time\n"
        "from workshop_utils import place\n"
        "assert sys.argv[1:] == ['--epochs', '1'], sys.argv\n"
        "place.report(step=1)\n"
        "time.sleep(0.5)\n"
        "place.report(step=2)\n"
    )
    own = ["--epochs", "1"]
    command = [
        sys.executable,
        str(launch.FIRST_STEP),
        *own,
        "--moments",
        str(moments),
        "--script",
        str(script),
    ]
    with running(command, os.environ):
        pass
    ended = time.monotonic()
    (moment,) = (float(file.read_text()) for file in moments.iterdir())
    assert moment < ended - 0.5


def test_a_bare_command_that_fails_is_reported_with_its_last_lines():
    command = [sys.executable, "-c", "import sys; print('what went wrong'); sys.exit(3)"]
    with (
        pytest.raises(BenchmarkError, match=r"ended with 3(.|\n)*what went wrong"),
        running(command, os.environ),
    ):
        pass


def test_a_bare_command_is_ended_when_the_block_beside_it_fails():
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    started = time.monotonic()
    with pytest.raises(RuntimeError, match="the other of the pair"), running(command, os.environ):
        raise RuntimeError("the other of the pair")
    assert time.monotonic() - started < 60


def test_speeds_are_those_of_the_faster_turns_once_settled(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "SETTLING_TURNS", 1)
    monkeypatch.setattr(throughput, "BATCH", 10)
    monkeypatch.setattr(throughput, "STEPS_A_TURN", 6)
    file = tmp_path / "times"
    file.write_text(json.dumps([[0.1, 0.1], [2.0, 1.0], [4.0, 1.5], [60.0, 1.4]]))
    assert throughput.speeds_in(file) == (20, 50)


@pytest.mark.slow
def test_a_launched_process_and_a_bare_one_take_turns_to_the_end(tmp_path, monkeypatch):
    monkeypatch.setattr(throughput, "TURNS", 6)
    monkeypatch.setattr(throughput, "SETTLING_TURNS", 2)
    for speeds in throughput.speeds_of_pair(tmp_path, launched_first=False):
        assert all(speed > 0 for speed in speeds)
