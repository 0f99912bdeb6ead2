"""`workshop scaling` from the command line: measure, fit, predict, report, and what it says of mistakes."""

import html
import re

import pandas as pd
import pytest
from test_sweep_extrapolate import sweep
from typer.testing import CliRunner

from workshop_utils import cli
from workshop_utils.jobs import JobError
from workshop_utils.scaling import validation

SCRIPT = """
import argparse
from workshop_utils import place

parser = argparse.ArgumentParser()
parser.add_argument("--width", type=int, default=1)
options = parser.parse_args()
place.here()
for step in (1, 2):
    place.report(step=step, loss=1.0, step_seconds=0.1 * options.width)
"""


def run(*words):
    result = CliRunner().invoke(cli.app, ["scaling", *map(str, words)], catch_exceptions=False)
    return result.exit_code, result.output


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.parquet"
    sweep().to_parquet(path)
    return path


@pytest.fixture
def job(make_job, monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))
    made = make_job(SCRIPT)
    made.save(made.folder)
    return made.folder


def test_measure_writes_a_table_and_says_what_was_measured_before(job, tmp_path):
    words = (
        "measure",
        job,
        "--workers",
        "1",
        "-a",
        "width=1,2",
        "--repeats",
        2,
        "--output",
        tmp_path / "t.parquet",
    )
    code, said = run(*words, "--dry-run")
    assert code == 0
    assert said.startswith("4 runs, 0 of them measured before")
    assert len(re.findall(r"strategy=single .* width=", said)) == 4
    assert not (tmp_path / "t.parquet").exists()
    code, said = run(*words)
    assert code == 0
    table = pd.read_parquet(tmp_path / "t.parquet")
    assert sorted(table["width"]) == [1, 1, 2, 2]
    assert table.groupby("width")["step_seconds"].first().tolist() == pytest.approx([0.1, 0.2])
    assert run(*words)[1].startswith("4 runs, 4 of them measured before")


def test_fit_and_predict_print_what_was_found(table):
    code, said = run("fit", table, "--hold-out", "8")
    assert code == 0
    assert re.search(r"latency +0\.001 ", said)
    assert "held out:" in said
    code, said = run("predict", table, "--workers", "64,1000")
    assert code == 0
    assert len(re.findall(r"^ *ring +(64|1000) ", said, flags=re.MULTILINE)) == 4


def test_the_report_has_the_errors_and_a_sentence_on_each(table, tmp_path):
    code, _ = run("report", table, "--output", tmp_path / "page")
    page = html.unescape((tmp_path / "page" / "scaling.html").read_text())
    assert code == 0
    sentences = [
        validation.reason(str(system)) for system in validation.published_predictions()["system"].unique()
    ]
    assert all(sentences)
    for words in ("How far predictions are off", "AmoebaNet-D", "Noise", "shown, not scored", *sentences):
        assert words in page
    assert page.count("data:image/png;base64,") >= 3
    words = re.findall(r'<img [^>]*alt="([^"]*)" src="data:image/png', page)
    assert len(words) == page.count("data:image/png;base64,")
    assert any("efficiency against workers" in each for each in words)
    assert all(" against " in each for each in words)
    assert str(tmp_path) not in page


def test_a_strategy_or_network_that_the_table_lacks_is_named(table):
    with pytest.raises(JobError, match="strategy is 'horovod'; the table has ring"):
        run("fit", table, "--strategies", "horovod")
    with pytest.raises(JobError, match="network is '1Gbit'; the table has 160Mbit"):
        run("predict", table, "--network", "1Gbit")
