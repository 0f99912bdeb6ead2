"""`workshop scaling` from the command line: measure, fit, predict, report."""

import re

import pandas as pd
import pytest
from conftest import save
from test_sweep_experiment import SCRIPT
from test_sweep_extrapolate import sweep
from typer.testing import CliRunner

from workshop_utils import cli


def run(*words):
    result = CliRunner().invoke(cli.app, ["scaling", *map(str, words)], catch_exceptions=False)
    assert result.exit_code == 0
    return result.output


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "table.parquet"
    sweep().to_parquet(path)
    return path


def test_measure_writes_a_table_and_says_what_was_measured_before(make_job, monkeypatch, tmp_path):
    monkeypatch.setenv("WORKSHOP_CACHE", str(tmp_path / "cache"))
    job, output = make_job(SCRIPT), tmp_path / "t.parquet"
    save(job)
    words = f"measure {job.folder} --workers 1 -a width=1,2 --repeats 2 --output {output}".split()
    planned = run(*words, "--dry-run")
    assert planned.startswith("4 runs, 0 of them measured before")
    assert len(re.findall(r"strategy=single .* width=", planned)) == 4
    assert not output.exists()
    run(*words)
    measured = pd.read_parquet(output)
    assert sorted(measured["width"]) == [1, 1, 2, 2]
    assert measured.groupby("width")["bytes_sent"].first().tolist() == [100, 200]
    assert run(*words).startswith("4 runs, 4 of them measured before")


def test_fit_and_predict_print_what_was_found(table):
    assert re.search(r"^ring, 160Mbit\n.*\nlatency +0\.001 ", run("fit", table))
    predicted = run("predict", table, "--workers", "64,1000")
    assert len(re.findall(r"^ *ring .* (64|1000) ", predicted, flags=re.MULTILINE)) == 4


def test_the_report_has_figures_that_are_described_in_words(table, tmp_path):
    pd.concat([sweep(), sweep()]).to_parquet(table)  # two repeats, which differ in nothing
    run("report", table, "--output", tmp_path / "page")
    page = (tmp_path / "page" / "scaling.html").read_text()
    words = re.findall(r'<img [^>]*alt="([^"]*)" src="data:image/png', page)
    assert len(words) == page.count("data:image/png;base64,") >= 2
    assert all(" against " in each for each in words)
    assert str(tmp_path) not in page
