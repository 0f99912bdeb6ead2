"""A run drawn while it happens: what is drawn, how often, and what stays."""

import base64
import io
import json
import threading
import time

import pytest
from conftest import RunByHand
from IPython.testing.globalipapp import start_ipython
from IPython.utils.capture import capture_output
from PIL import Image

from workshop_utils.plots import live
from workshop_utils.runs import Run, RunFailed, RunState


def tell(run, worker, step, at, kind="metric", **values):
    record = {"workshop": kind, "worker": f"worker-{worker}", "rank": worker}
    record |= {"pid": 1} if kind == "start" else {"step": step}
    record["time"] = run.launched_at + at
    run.print(f"worker-{worker}", json.dumps(record | values))


@pytest.fixture
def run():
    return RunByHand()


@pytest.fixture
def screen(monkeypatch):
    """What a notebook is sent: `outputs`, each with its data, its metadata, and whether it takes another's place."""
    start_ipython()
    for name in ("JPY_SESSION_NAME", "VSCODE_PID"):
        monkeypatch.delenv(name, raising=False)
    with capture_output(stdout=False, stderr=False) as captured:
        yield captured


def words(picture):
    return picture.texts[-1].get_text()


def lanes(picture):
    """The corners of the rectangles of all lanes: left, right and height, row by row."""
    strips = picture.axes[0].collections[0].get_paths()
    boxes = [path.get_extents() for path in strips]
    return [tuple(round(value, 3) for value in (box.x0, box.x1, box.height / 0.76)) for box in boxes]


def test_between_two_reports_a_colour_is_as_high_as_its_share_of_the_time(run):
    tell(run, 0, 10, 4.0, loss=1.0, compute_seconds=1.0, send_seconds=0.5, wait_seconds=0.5)
    tell(run, 1, 10, 4.0, loss=3.0, samples_per_second=30)
    picture = live.draw(run)
    assert lanes(picture)[:4] == [(0, 4, 1), (2, 4, 0.5), (2, 4, 0.25), (2, 4, 0.25)]
    assert words(picture) == (
        "2 processes · mean loss 2 → 2 · 30 samples/s in all · compute 50% · send 25% · wait 25%"
    )


def test_a_long_run_is_drawn_in_a_bounded_number_of_strips_that_hold_all_its_seconds():
    run = RunByHand("worker-0")
    for step in range(1, 2001):
        tell(run, 0, step, float(step), compute_seconds=0.6, wait_seconds=0.4)
    picture = live.draw(run)
    assert words(picture).startswith("1 process · ")
    computed = [right - left for left, right, height in lanes(picture) if height == 0.6]
    assert len(computed) <= live.MOST_SPANS
    assert sum(computed) == pytest.approx(2000)


def test_a_thousand_reports_in_a_moment_are_a_few_pictures_and_the_last_has_them_all(
    run, screen, monkeypatch
):
    monkeypatch.setenv("VSCODE_PID", "1")

    def report():
        for step in range(1000):
            tell(run, 0, step, 0.001 * step, loss=1.0)
        time.sleep(1.2)
        tell(run, 0, 1000, 2.0, loss=0.125)
        run.end(RunState.SUCCEEDED)

    thread = threading.Thread(target=report)
    thread.start()
    assert live.watch(run) is run
    thread.join()
    assert 2 <= len(screen.outputs) <= 2 + run.seconds / live.LEAST_SECONDS
    assert "loss 1 → 0.125" in screen.outputs[-1].data["text/plain"]


def test_in_batch_the_first_and_the_last_stand_in_one_place_and_the_last_is_a_png_with_words(run, screen):
    threading.Timer(0.5, run.end, (RunState.SUCCEEDED,)).start()
    live.watch(run)
    assert [output.update for output in screen.outputs] == [False, True]
    assert len({output.transient["display_id"] for output in screen.outputs}) == 1
    assert set(screen.outputs[-1].data) == {"image/png", "text/plain"}
    assert screen.outputs[-1].metadata["image/png"]["alt"].startswith("job: succeeded after ")
    assert "no loss was reported" in screen.outputs[-1].data["text/plain"]
    assert Image.open(io.BytesIO(base64.b64decode(screen.outputs[-1].data["image/png"]))).format == "PNG"


def test_an_interrupt_stops_the_run_and_leaves_its_last_picture(run, screen, monkeypatch):
    def wait(self, seconds=None):
        tell(run, 0, 1, 0.5, loss=2.0)
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "wait", wait)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        live.watch(run)
    assert run.state is RunState.STOPPED
    shown = interrupt.value._render_traceback_()
    assert shown == ["KeyboardInterrupt: job: stopped, nothing is left running"]
    assert screen.outputs[-1].data["text/plain"].startswith("job: stopped after ")
    assert "loss 2 → 2" in screen.outputs[-1].data["text/plain"]


def test_a_run_that_fails_raises_its_reason_and_its_picture_stays(run, screen):
    run.end(RunState.FAILED, "worker-1 ended with exit code 3")
    with pytest.raises(RunFailed, match="exit code 3"):
        live.watch(run)
    assert screen.outputs[-1].data["text/plain"].startswith("job: failed after ")
