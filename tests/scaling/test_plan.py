"""A planned run: the best that is allowed, a reason for all else, and hours like published ones."""

import math
import re

import pytest
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.catalogue import model
from workshop_utils.scaling.plan import FAILURES_A_SECOND, SLOWDOWN, PlanError, effective_time, plan_run
from workshop_utils.scaling.search import REASONS, USABLE_MEMORY

TWO = ("p5.48xlarge", "trn1.32xlarge")


@pytest.fixture(scope="module")
def plan():
    return plan_run("llama-3.1-8b", 100e9, "14d", 45_000, TWO)


@pytest.mark.parametrize("fast", [True, False])
def test_device_hours_of_published_runs_are_within_half_as_much_again(fast):
    # What they took, with tuned code and all that went wrong: Touvron et al. (2023), table 15 and section 2.4, for
    # 2,048 A100; Grattafiori et al. (2024), for 16,384 H100.
    llama = model("llama-2-70b").model_copy(update={"kv_heads": 64, "mlp_width": 22016, "sequence": 2048})
    assert llama.parameters == pytest.approx(65.2e9, rel=0.01)
    transformer, tokens, kind, devices, device_hours = (
        (model("llama-3.1-405b"), 15.6e12, "p5.48xlarge", 16_384, 30.84e6)
        if fast
        else (llama, 1.4e12, "p4de.24xlarge", 2_048, 1_022_362)
    )
    found = plan_run(transformer, tokens, instances=[kind], machines=[devices // 8], fastest=True)
    as_modelled = found.best.hours / SLOWDOWN
    assert 1 / 1.5 < as_modelled * devices / device_hours < 1.5


def test_the_best_plan_keeps_the_limits_nothing_allowed_is_cheaper_and_all_else_has_a_reason(plan):
    best = plan.best
    within = plan.timed[(plan.timed["hours"] <= 14 * 24) & (plan.timed["dollars"] <= 45_000)]
    assert best.dollars == within["dollars"].min()
    assert best.memory_nbytes <= USABLE_MEMORY * 79.6 * 2**30
    assert best.dollars == pytest.approx(best.hours * best.machines * 55.04)
    fastest = plan_run("llama-3.1-8b", 100e9, "14d", 45_000, TWO, fastest=True).best
    assert fastest.hours == within["hours"].min() < best.hours
    assert plan.rejected.sum() + len(plan.usable) == len(plan.table) > 100_000
    assert {*plan.rejected.index} == {*REASONS}


def test_runners_up_are_other_machines_or_numbers_in_order_and_a_tie_is_called_one(plan):
    choices = [plan.best, *plan.runner_ups]
    assert len({(each.instance, each.machines) for each in choices}) == 6
    assert choices == sorted(choices, key=lambda each: each.dollars)
    ties = [each.dollars / SLOWDOWN <= plan.best.dollars for each in plan.runner_ups]
    assert ties == [plan.ties(each) for each in plan.runner_ups]
    assert str(plan).count(", a tie") == sum(ties) > 0


def test_failures_cost_hardly_anything_with_16_accelerators_and_less_than_a_tenth_with_as_many_as_llama_3_had():
    hours_between = 1 / (16_384 * FAILURES_A_SECOND) / 3600
    assert hours_between == pytest.approx(3.1, rel=0.01)
    assert effective_time(16) > 0.997
    assert 0.9 < effective_time(16_384) < 0.95


def test_a_run_is_billed_for_a_minute_at_least():
    found = plan_run("gpt2", 1e5, instances=["g5.xlarge"], batch_tokens=1e5, machines=[1])
    assert found.best.hours < 1 / 60
    assert found.best.dollars == pytest.approx(1.006 / 60)


# What cannot be.


def test_limits_that_are_too_tight_are_told_with_what_would_be_enough():
    found = plan_run("llama-3.1-70b", 1e12, "1d", 100e6, ["p5.48xlarge"])
    assert found.best is None
    assert "The deadline alone is too tight: at the least it takes" in found.verdict
    days = float(re.search(r"Within the budget, enough would be ([\d.]+) days", found.verdict).group(1))
    assert plan_run("llama-3.1-70b", 1e12, f"{days + 0.1}d", 100e6, ["p5.48xlarge"]).best is not None


def test_a_model_that_fits_nowhere_and_a_batch_that_nothing_divides_are_told():
    found = plan_run("llama-3.1-405b", 1e12, instances=["g5.xlarge"])
    assert re.search(r"fits into no worker's memory. Closest is 2048 × g5.xlarge, .* of 22 GB", str(found))
    found = plan_run("gpt2", 1e9, instances=["p5.48xlarge"], batch_tokens=1021 * 1024, machines=[4])
    assert "No layout divides gpt2 and its batch of 1021 sequences evenly" in found.verdict


def test_without_a_choice_all_machines_with_a_price_are_looked_at():
    found = plan_run("gpt2", 1e9, machines=[1, 2])
    assert set(found.instances) == set(catalogue.instances()) - {"trn2.48xlarge"}
    assert "Left out, as no price to rely on is known: trn2.48xlarge." in str(found)
    with pytest.raises(PlanError, match="no price to rely on is known"):
        plan_run("gpt2", 1e9, instances=["trn2.48xlarge"])


# The command.


def command(*words):
    line = "plan llama-3.1-8b --tokens 100e9 --deadline 14d --instances p5.48xlarge,g6.48xlarge"
    done = CliRunner().invoke(cli.app, [*line.split(), *words])
    return done.exit_code, done.output


def test_the_command_prints_the_plan_and_says_by_its_exit_code_whether_there_is_one():
    code, output = command("--budget", "30000")
    assert code == 0
    for words in (
        "Best: 2 × p5.48xlarge (16 workers)", "On other machines, or another number of them", "layouts are out:",
        "not checked against AWS's own page", "How fast g6.48xlarge computes is a guess",
    ):  # fmt: skip
        assert words in output
    code, output = command("--budget", "10")
    assert code == 1
    assert "The budget alone is too tight" in output
    code, output = command("--fastest", "--batch", "262144")
    assert code == 0
    assert f"in {math.ceil(100e9 / 262144):,} steps of" in output
    assert re.search(r"Best: \d+ × p5.48xlarge", output)
