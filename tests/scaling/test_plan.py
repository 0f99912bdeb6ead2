"""A planned run: the best that is allowed, a true reason for all else, and steps like published ones."""

import base64
import html
import json
import math
import re

import pytest
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.parallel.schedule import bubble_fraction
from workshop_utils.plots.planner import WIDGET_VIEW, planner
from workshop_utils.scaling import catalogue
from workshop_utils.scaling.catalogue import CatalogueError, instance, model
from workshop_utils.scaling.layouts import REASONS, USABLE_MEMORY, layout_of, search
from workshop_utils.scaling.plan import EFFECTIVE_TIME, PlanError, plan_run
from workshop_utils.scaling.price import PriceError
from workshop_utils.scaling.published_layouts import against_published, geometric_mean_error
from workshop_utils.scaling.step_time import step_time
from workshop_utils.scaling.worker_memory import Layout, worker_memory

TWO = ("p5.48xlarge", "trn1.32xlarge")
ENDLESS = {
    "inner_bytes_per_second": math.inf, "network_bytes_per_second": math.inf,
    "inner_latency_seconds": 0.0, "network_latency_seconds": 0.0,
}  # fmt: skip


@pytest.fixture(scope="module")
def plan():
    return plan_run("llama-3.1-8b", 100e9, "14d", 30_000, TWO)


# A step's time.


def test_one_worker_computes_and_does_nothing_else() -> None:
    time = step_time(model("gpt2"), instance("p5.48xlarge"), Layout(microbatches=4, recompute="selective"))
    assert time.tensor == time.bubble == time.data == 0
    assert time.seconds == time.compute
    assert 0 < time.mfu < instance("p5.48xlarge").kernel_efficiency


def test_with_endless_memory_bandwidth_the_mfu_is_the_kernels_efficiency() -> None:
    fast = instance("p5.48xlarge").model_copy(
        update={"memory_bytes_per_second": math.inf, "kernel_efficiency": 0.5}
    )
    time = step_time(model("gpt2"), fast, Layout(recompute="none"))
    assert time.mfu == pytest.approx(0.5)
    # Full recomputation repeats the forward pass of the blocks, a third of their work, which is not useful.
    assert 0.5 * 3 / 4 < step_time(model("gpt2"), fast, Layout(recompute="full")).mfu < 0.5


def test_with_endless_links_only_the_bubble_is_left() -> None:
    fast = instance("p5.48xlarge").model_copy(update=ENDLESS)
    layout = Layout(data=4, tensor=4, pipeline=4, zero=1, microbatches=8, recompute="selective")
    time = step_time(model("llama-2-7b"), fast, layout)
    assert time.tensor == 0
    assert time.data == pytest.approx(0, abs=1e-12)
    assert time.bubble / time.seconds == pytest.approx(bubble_fraction(4, 8))


def test_interleaving_makes_the_bubble_smaller() -> None:
    bubbles = [
        step_time(
            model("llama-2-7b"), instance("p5.48xlarge"), Layout(pipeline=4, microbatches=8, chunks=chunks)
        ).bubble
        for chunks in (1, 2, 4)
    ]
    assert bubbles == sorted(bubbles, reverse=True)


def test_communication_that_is_slow_enough_stands_out() -> None:
    slow = instance("p5.48xlarge").model_copy(update={"network_bytes_per_second": 1e9})
    for stage in (0, 1, 2, 3):
        layout = Layout(data=16, zero=stage, microbatches=2, recompute="selective")
        fast_time = step_time(model("llama-2-7b"), instance("p5.48xlarge"), layout)
        slow_time = step_time(model("llama-2-7b"), slow, layout)
        assert slow_time.data > 10 * fast_time.data
        # At the least what one NIC's ring carries, less what hides behind two micro-batches.
        ring = 2 * 15 / 16 * 2 * model("llama-2-7b").parameters / (0.78 * 1e9)
        assert slow_time.data > ring - slow_time.compute


def test_an_unknown_dtype_is_answered_with_the_known_ones() -> None:
    machine = instance("p5.48xlarge").model_copy(update={"flops_per_second": {"bfloat16": 1e15}})
    with pytest.raises(
        ValueError, match=r"dtype is 'float32'; of p5\.48xlarge the peak is known for bfloat16"
    ):
        step_time(model("gpt2"), machine, Layout(), "float32")


def test_steps_of_published_runs_are_predicted() -> None:
    table = against_published()
    scored = table[table["scored"]]
    assert len(scored) >= 15
    assert scored["ratio"].between(0.85, 1.15).all()
    assert geometric_mean_error(scored["ratio"]) < 0.05
    unfitted = scored[scored["source"].str.contains("torchtitan")]
    assert len(unfitted) == 3
    assert unfitted["ratio"].between(0.9, 1.1).all()


def test_device_hours_of_published_runs_are_within_half_as_much_again() -> None:
    # What they took, with the code of their time and all that went wrong: Touvron et al. (2023), table 15 and section
    # 2.4, for 2,048 A100; Grattafiori et al. (2024), for 16,384 H100. The plan has today's kernels.
    llama = model("llama-2-70b").model_copy(update={"kv_heads": 64, "mlp_width": 22016, "sequence": 2048})
    assert llama.parameters == pytest.approx(65.2e9, rel=0.01)
    for transformer, tokens, kind, devices, device_hours in (
        (llama, 1.4e12, "p4de.24xlarge", 2_048, 1_022_362),
        (model("llama-3.1-405b"), 15.6e12, "p5.48xlarge", 16_384, 30.84e6),
    ):
        found = plan_run(transformer, tokens, instances=[kind], machines=[devices // 8], objective="hours")
        assert found.best is not None
        assert 1 / 1.5 < found.best.hours * devices / device_hours < 1.5


# The search.


def test_more_than_a_hundred_thousand_layouts_are_looked_at(plan) -> None:
    assert len(plan.table) > 100_000
    assert plan.rejected.sum() + len(plan.usable) == len(plan.table)
    assert not plan.table["reason"].isna().any()


def test_the_best_plan_keeps_the_limits_and_nothing_allowed_is_cheaper(plan) -> None:
    best = plan.best
    assert best.hours <= 14 * 24
    assert best.dollars <= 30_000
    assert best.memory_nbytes <= USABLE_MEMORY * 80e9
    within = plan.timed[(plan.timed["hours"] <= 14 * 24) & (plan.timed["dollars"] <= 30_000)]
    assert best.dollars == within["dollars"].min()
    fastest = plan_run("llama-3.1-8b", 100e9, "14d", 30_000, TWO, objective="hours").best
    assert fastest.hours == within["hours"].min() < best.hours


def test_the_numbers_of_a_plan_follow_from_its_layout(plan) -> None:
    best = plan.best
    time = step_time(plan.model, plan.instances[best.instance], best.layout)
    assert best.step_seconds == pytest.approx(time.seconds)
    assert best.mfu == pytest.approx(time.mfu)
    assert best.memory_nbytes == pytest.approx(worker_memory(plan.model, best.layout).total)
    assert best.layout.sequences * plan.model.sequence == plan.batch_tokens
    assert best.workers == best.machines * 8
    assert best.hours == pytest.approx(plan.steps * best.step_seconds / 3600 / EFFECTIVE_TIME)
    assert best.dollars == pytest.approx(best.hours * best.machines * 55.04)


def test_any_row_of_the_search_is_what_its_layout_gives_by_itself() -> None:
    machine, transformer = instance("p4d.24xlarge"), model("gpt2-xl")
    found = search(transformer, machine, 512, (1, 2, 4))
    fits = found[found["reason"] == "fits"]
    for _, row in fits.sample(20, random_state=0).iterrows():
        layout = layout_of(row)
        assert row["step_seconds"] == pytest.approx(step_time(transformer, machine, layout).seconds)
        assert row["memory_nbytes"] == pytest.approx(worker_memory(transformer, layout).total)
        assert layout.workers == row["machines"] * 8
        assert layout.sequences == 512


def test_every_reason_is_true_and_what_fits_has_none(plan) -> None:
    heads = plan_run("gpt2-xl", 1e9, "1min", 0.5, ["p5.48xlarge"])  # 25 heads
    seen = set()
    for each in (plan, heads):
        for name, rows in each.table.groupby("reason", observed=True):
            seen.add(name)
            for _, row in rows.sample(min(30, len(rows)), random_state=1).iterrows():
                assert broken(each, row) == {name} or name in broken(each, row), each.why(row)
                if name == "fits":
                    assert broken(each, row) == {"fits"}
                assert re.search(r"\(.*\d.*\)$", each.why(row))
    assert seen == {*REASONS, "deadline", "budget"}


def broken(plan, row) -> set[str]:
    """The rules that a row breaks, written down a second time, for one layout."""
    kind, transformer = plan.instances[row["instance"]], plan.model
    workers, parts = int(row["machines"]) * kind.accelerators, int(row["tensor"] * row["pipeline"])
    share = int(row["data"] * row["micro_batch"])
    stages = int(row["pipeline"] * row["chunks"])
    a_worker = math.ceil(transformer.layers / stages) * int(row["chunks"])
    rules = {
        "workers": workers % parts != 0,
        "heads": transformer.heads % row["tensor"] != 0 or transformer.kv_heads % row["tensor"] != 0,
        "layers": transformer.layers - a_worker * (row["pipeline"] - 1) < 1,
        "batch": plan.sequences % share != 0,
        "rounds": row["chunks"] > 1 and row["microbatches"] % row["pipeline"] != 0,
        "alone": row["data"] == 1 and row["zero"] > 0,
        "regather": row["pipeline"] > 1 and row["zero"] > 1,
        "memory": row["memory_nbytes"] > USABLE_MEMORY * kind.memory_nbytes,
        "deadline": row["hours"] > plan.deadline,
        "budget": row["dollars"] > plan.budget,
    }
    return {name for name, is_broken in rules.items() if is_broken} or {"fits"}


def test_the_pareto_front_has_what_nothing_beats(plan) -> None:
    front, timed = plan.pareto, plan.timed
    assert front["hours"].is_monotonic_increasing
    assert front["dollars"].is_monotonic_decreasing
    for _, row in front.iterrows():
        beats = (timed["hours"] <= row["hours"]) & (timed["dollars"] < row["dollars"])
        assert not beats.any()


def test_runners_up_are_other_machines_and_come_in_order(plan) -> None:
    others = plan.runner_ups(4)
    assert len({(each.instance, each.machines) for each in [plan.best, *others]}) == 5
    prices = [plan.best.dollars, *(each.dollars for each in others)]
    assert prices == sorted(prices)


def test_the_text_has_the_plan_its_runners_up_the_reasons_and_the_date_of_the_prices(plan) -> None:
    text = str(plan)
    assert f"Best: {plan.best}" in text
    assert "Runners-up on other machines:" in text
    assert f"{plan.rejected.sum():,} of {len(plan.table):,} layouts are out:" in text
    assert re.search(r"\d  it would cost more than the budget", text)
    assert "not checked against AWS's own page" in text
    assert "How fast trn1.32xlarge computes is a guess" in text
    assert "a guess" not in str(plan_run("gpt2", 1e9, instances=["p5.48xlarge"]))


# What cannot be.


def test_an_impossible_deadline_is_told_with_what_would_be_enough() -> None:
    found = plan_run("llama-3.1-70b", 1e12, "1d", 100e6, ["p5.48xlarge"])
    assert found.best is None
    assert "No layout meets the deadline of 24.0 h and the budget of $100,000,000." in found.verdict
    assert "The deadline alone is too tight: at the least it takes" in found.verdict
    assert "Within the budget, enough would be" in found.verdict
    days, machines = re.search(
        r"enough would be ([\d.]+) days and \$[\d,]+ on (\d+) ×", found.verdict
    ).groups()
    relaxed = plan_run("llama-3.1-70b", 1e12, f"{float(days) + 0.1}d", 100e6, ["p5.48xlarge"]).best
    assert relaxed is not None
    assert relaxed.machines <= int(machines)


def test_two_limits_that_only_together_are_too_tight_are_told_apart() -> None:
    loose = plan_run("llama-3.1-8b", 100e9, None, None, ["p5.48xlarge"])
    fast, cheap = loose.pareto.iloc[0], loose.pareto.iloc[-1]
    found = plan_run("llama-3.1-8b", 100e9, fast["hours"] * 3600 + 1, cheap["dollars"] + 1, ["p5.48xlarge"])
    assert found.best is None
    assert "alone is too tight" not in found.verdict
    assert "Within the deadline, enough would be" in found.verdict
    assert "Within the budget, enough would be" in found.verdict


def test_a_model_that_fits_nowhere_is_told_with_the_closest() -> None:
    found = plan_run("llama-3.1-405b", 1e12, instances=["g5.xlarge"])
    assert found.best is None
    assert re.search(
        r"fits into no worker's memory. Closest is 2048 × g5.xlarge, .* GB, of 22 GB", found.verdict
    )
    assert "fits into no" in str(found)


def test_a_batch_that_nothing_divides_is_told() -> None:
    found = plan_run("gpt2", 1e9, instances=["p5.48xlarge"], batch_tokens=1021 * 1024, machines=[4])
    assert "No layout divides gpt2 and its batch of 1021 sequences evenly" in found.verdict


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"model": "llama-3.1-8"}, CatalogueError, r"model is 'llama-3\.1-8'; did you mean llama-3\.1-8b\?"),
        (
            {"instances": ["p5.48xlarg"]},
            CatalogueError,
            r"instance is 'p5\.48xlarg'; did you mean p5\.48xlarge\?",
        ),
        ({"instances": []}, PlanError, "instances is empty; name at least one"),
        ({"instances": ["trn2.48xlarge"]}, PriceError, "no price to rely on is known"),
        ({"instances": ["no/such.yaml"]}, CatalogueError, r"no/such\.yaml cannot be read"),
        ({"tokens": 0}, PlanError, "tokens is 0; it must be more than 0"),
        ({"tokens": float("nan")}, PlanError, "tokens is nan; it must be more than 0"),
        ({"budget": -1}, PlanError, "budget is -1; it must be more than 0"),
        ({"deadline": "soon"}, PlanError, "deadline is 'soon'; it must be a duration"),
        ({"deadline": 0}, PlanError, "deadline is 0; it must be more than 0"),
        ({"machines": [0]}, PlanError, "machines is"),
        ({"objective": "fun"}, PlanError, "objective is 'fun'; it must be 'dollars' or 'hours'"),
        ({"discount": 2}, PriceError, "discount is 2"),
    ],
)
def test_what_cannot_be_planned_is_told_in_a_sentence(arguments, error, message) -> None:
    with pytest.raises(error, match=message):
        plan_run(**{"model": "gpt2", "tokens": 1e9, "instances": ["g5.xlarge"], **arguments})


def test_a_file_of_instances_replaces_prices_and_is_what_is_looked_at(tmp_path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text("p5.48xlarge: {dollars_an_hour: 30}\n")
    found = plan_run("gpt2", 1e9, instances=[file])
    assert list(found.instances) == ["p5.48xlarge"]
    assert found.best.dollars == pytest.approx(
        plan_run("gpt2", 1e9, instances=TWO[:1]).best.dollars * 30 / 55.04
    )
    both = plan_run("gpt2", 1e9, instances=[str(file), "p5.48xlarge", "g5.xlarge"])
    assert both.instances["p5.48xlarge"].dollars_an_hour == 30
    assert list(both.instances) == ["p5.48xlarge", "g5.xlarge"]


def test_without_a_choice_all_machines_with_a_price_are_looked_at() -> None:
    found = plan_run("gpt2", 1e9, machines=[1, 2])
    assert set(found.instances) == set(catalogue.instances()) - {"trn2.48xlarge"}
    assert "Left out, as no price to rely on is known: trn2.48xlarge." in str(found)


# The command, and the planner in a notebook.


def test_the_command_prints_the_plan_and_says_by_its_exit_code_whether_there_is_one() -> None:
    command = [
        "plan",
        "llama-3.1-8b",
        "--tokens",
        "100e9",
        "--deadline",
        "14d",
        "--instances",
        "p5.48xlarge,g6.48xlarge",
    ]
    done = CliRunner().invoke(cli.app, [*command, "--budget", "30000"])
    assert done.exit_code == 0
    assert "Best: 2 × p5.48xlarge (16 workers)" in done.output
    done = CliRunner().invoke(cli.app, [*command, "--budget", "10"])
    assert done.exit_code == 1
    assert "The budget alone is too tight" in done.output


def test_the_command_prints_json_for_programs() -> None:
    command = [
        "plan",
        "gpt2",
        "--tokens",
        "1e9",
        "--instances",
        "p5.48xlarge, g5.xlarge",
        "--fastest",
        "--json",
    ]
    done = CliRunner().invoke(cli.app, [*command, "--batch", "262144"])
    assert done.exit_code == 0
    found = json.loads(done.output)
    assert found["steps"] == math.ceil(1e9 / 262144)
    assert found["best"]["instance"] == "p5.48xlarge"
    assert found["best"]["layout"]["data"] >= 1
    assert sum(found["rejected"].values()) < found["layouts"]


def test_the_planner_shows_a_picture_where_widgets_do_not_run_and_plans_anew_where_they_do() -> None:
    made = planner("gpt2", 10e9, "7d", 1_000, ["g5.xlarge", "g6.xlarge"])
    shown, _ = made._repr_mimebundle_()
    assert base64.b64decode(shown["image/png"]).startswith(b"\x89PNG")
    assert shown["text/plain"] == str(made.plan)
    assert WIDGET_VIEW in shown
    before, picture = made.plan.best.dollars, made._image.value
    made._tokens.value = 20e9
    assert made.plan.best.dollars == pytest.approx(2 * before, rel=0.01)
    assert made._image.value != picture
    assert made._text.value == str(made.plan)


def test_the_planner_s_picture_says_in_words_what_it_shows_with_and_without_sliders() -> None:
    made = planner("gpt2", 10e9, "7d", 1_000, ["g5.xlarge", "g6.xlarge"])
    _, metadata = made._repr_mimebundle_()
    words = metadata["image/png"]["alt"]
    best = made.plan.best
    assert words.startswith(f"{best.machines} × {best.instance}: ")
    assert "price on demand against days of training" in words
    assert "g6.xlarge" in words
    assert f'<img alt="{html.escape(words)}" src="data:image/png;base64,' in made._image.value
    made._tokens.value = 20e9
    assert made.picture()[1]["alt"] != words
    assert f'alt="{html.escape(made.picture()[1]["alt"])}"' in made._image.value


def test_the_planner_keeps_a_model_and_a_machine_that_files_describe(tmp_path) -> None:
    mine = tmp_path / "tiny.yaml"
    mine.write_text("layers: 2\nwidth: 64\nheads: 4\nsequence: 64\nvocabulary: 256\nbatch_tokens: 8192\n")
    machines = tmp_path / "mine.yaml"
    machines.write_text("g5.xlarge: {dollars_an_hour: 0.1}\n")
    made = planner(str(mine), 1e9, instances=[str(machines)])
    made.widgets()
    made._model.value = "gpt2"
    assert made.plan.model.name == "gpt2"
    made._model.value = "tiny"
    assert made.problem == ""
    assert made.plan.model.width == 64
    assert made.plan.instances["g5.xlarge"].dollars_an_hour == 0.1


def test_the_planner_says_what_it_cannot_plan_and_keeps_its_last_plan() -> None:
    made = planner("gpt2", 10e9, instances=["g5.xlarge"])
    made.widgets()
    plan = made.plan
    made._instances.value = ()
    assert made._text.value == "instances is empty; name at least one, such as p5.48xlarge"
    assert made.plan is plan
    made._instances.value = ("g5.xlarge",)
    made._model.value = "llama-3.1-405b"
    assert "fits into no worker's memory" in made._text.value
    assert made._image.value.startswith('<img alt="llama-3.1-405b fits into none of these machines.')
