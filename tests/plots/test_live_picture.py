"""A run drawn while it happens: what is drawn, how often, and what stays."""

import base64
import io
import json
import threading
import time

import matplotlib
import pytest
from IPython.testing.globalipapp import start_ipython
from PIL import Image

from workshop_utils.plots import live, style
from workshop_utils.runs import Run, RunFailed, RunState

matplotlib.use("Agg")


class RunByHand(Run):
    """A run in which the test plays the place."""

    def __init__(self, workers=("worker-0", "worker-1")):
        super().__init__("job", workers)
        self.stops = 0

    def _request_stop(self):
        self.stops += 1
        self._finish(RunState.STOPPED)

    end = Run._finish

    def tell(self, worker, step, at, kind="metric", **values):
        record = {
            "workshop": kind,
            "worker": f"worker-{worker}",
            "rank": worker,
            "time": self.launched_at + at,
        }
        record |= {"pid": 1} if kind == "start" else {"step": step}
        self._receive_line(f"worker-{worker}", json.dumps(record | values))


@pytest.fixture
def screen(monkeypatch):
    """What a notebook has been sent: (function, data, metadata, display_id) each time."""
    start_ipython()
    import IPython.display

    sent = []
    for name in ("display", "update_display"):

        def send(data, raw, metadata, display_id, name=name):
            assert raw
            sent.append((name, data, metadata, display_id))

        monkeypatch.setattr(IPython.display, name, send)
    for name in ("JPY_SESSION_NAME", "VSCODE_PID"):
        monkeypatch.delenv(name, raising=False)
    return sent


def three_parts(compute, send, wait):
    return {"compute_seconds": compute, "send_seconds": send, "wait_seconds": wait}


def test_a_strip_is_as_high_as_its_share_and_as_wide_as_the_time_that_was_reported():
    run = RunByHand()
    run.tell(0, 10, 4.0, loss=1.0, **three_parts(1.0, 0.5, 0.5))
    picture = live.Picture(run)
    picture.update()
    strips = picture.lanes["worker-0"].strips()
    assert [(s.left, s.right, s.low, s.high) for s in strips] == [
        (pytest.approx(2.0, abs=1e-3), pytest.approx(4.0, abs=1e-3), low, high)
        for low, high in ((0, 0.5), (0.5, 0.75), (0.75, 1))
    ]
    assert [s.colour for s in strips] == ["compute", "send", "wait"]
    assert "compute 50% · send 25% · wait 25%" in picture._detail.get_text()


def test_a_framework_that_reports_no_times_has_a_band_with_a_stroke_for_each_report_and_no_parts():
    run = RunByHand()
    run.tell(0, 0, 1.5, kind="start")
    for step in (1, 2, 3):
        run.tell(0, step, 1.0 + step, loss=1 / step)
    picture = live.Picture(run)
    picture.update()
    assert picture.lanes["worker-0"].strips() == []
    assert len(picture._strokes.get_segments()) == 3
    assert [text.get_text() for text in picture._top.get_legend().get_texts()] == [
        "start",
        "train (a stroke: a report)",
    ]
    assert "compute" not in picture._detail.get_text()


def test_what_came_before_is_not_taken_twice_and_each_worker_keeps_its_own_line():
    run = RunByHand()
    picture = live.Picture(run)
    for step in (1, 2):
        run.tell(0, step, step, loss=2.0 / step, samples_per_second=10)
        run.tell(1, step, step, loss=4.0 / step, samples_per_second=30)
        picture.update()
        picture.update()
    drawn = {line.get_label(): line for line in picture._loss.get_lines()}
    assert list(drawn["worker-1"].get_ydata()) == [4.0, 2.0]
    assert drawn["worker-1"].get_color() == style.colour_of("worker 1")
    assert "mean loss 3 → 1.5 · 40 samples/s in all" in picture._detail.get_text()


def test_a_long_run_keeps_a_bounded_number_of_strips_whose_seconds_are_all_there():
    lane = live.Lane()
    for step in range(5000):
        lane.take({"time": float(step), "step": step, "loss": 1.0, **three_parts(0.5, 0.25, 0.25)}, 0.0)
    assert len(lane.spans) <= live.MOST_SPANS
    assert sum(sum(parts.values()) for _, parts in lane.spans) == pytest.approx(5000)
    assert len(lane.loss) <= live.MOST_POINTS
    assert lane.loss[-1][0] == 4999


def test_no_more_than_sixteen_lanes_are_drawn_and_the_picture_says_so():
    run = RunByHand(tuple(f"worker-{index}" for index in range(40)))
    picture = live.Picture(run)
    picture.update()
    assert len(picture._top.get_yticks()) == 16
    assert "40 processes, 16 drawn" in picture._detail.get_text()


@pytest.mark.parametrize(("core_seconds", "at_most"), [(0.001, 120), (0.1, 30), (1.0, 3)])
def test_pictures_come_twice_a_second_at_most_and_take_a_twentieth_of_a_core_at_most(core_seconds, at_most):
    now = 0.0
    pace = live.Pace(clock=lambda: now)
    drawn = 0
    while now < 60:
        now += pace.seconds_left
        now += core_seconds  # the drawing itself
        drawn += 1
        pace.drawn(core_seconds)
    assert drawn <= at_most + 1
    assert (drawn - 1) * core_seconds <= 60 * live.SHARE


def test_a_thousand_reports_in_a_moment_are_a_few_pictures_and_the_last_has_them_all(screen):
    run = RunByHand()

    def report():
        for step in range(1000):
            run.tell(0, step, 0.001 * step, loss=1.0)
        time.sleep(1.2)
        run.tell(0, 1000, 2.0, loss=0.125)
        run.end(RunState.SUCCEEDED)

    thread = threading.Thread(target=report)
    thread.start()
    assert live.watch(run, live=True) is run
    thread.join()
    allowed = 2 + run.seconds / live.LEAST_SECONDS
    assert 2 <= len(screen) <= allowed
    assert "loss 1 → 0.125" in screen[-1][1]["text/plain"]


def test_in_batch_there_are_the_first_and_the_last_and_the_last_is_one_png_with_alternative_text(screen):
    run = RunByHand()
    run.tell(0, 1, 0.5, loss=2.0)
    threading.Timer(1.3, run.end, (RunState.SUCCEEDED,)).start()
    live.watch(run)
    assert [name for name, *_ in screen] == ["display", "update_display"]
    assert len({display_id for *_, display_id in screen}) == 1
    _, data, metadata, _ = screen[-1]
    assert set(data) == {"image/png", "text/plain"}
    assert metadata["image/png"]["alt"].startswith("job: succeeded after ")
    assert Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).format == "PNG"


def test_an_interrupt_stops_the_run_and_leaves_its_last_picture(screen, monkeypatch):
    run = RunByHand()
    waited = Run.wait

    def wait(self, seconds=None):
        run.tell(0, 1, 0.5, loss=2.0)
        monkeypatch.setattr(Run, "wait", waited)
        raise KeyboardInterrupt

    monkeypatch.setattr(Run, "wait", wait)
    with pytest.raises(KeyboardInterrupt):
        live.watch(run)
    assert run.stops == 1
    assert screen[-1][1]["text/plain"].startswith("job: stopped after ")
    assert "loss 2 → 2" in screen[-1][1]["text/plain"]


def test_a_run_that_fails_raises_its_reason_and_its_picture_stays(screen):
    run = RunByHand()
    run.end(RunState.FAILED, "worker-1 ended with exit code 3")
    with pytest.raises(RunFailed, match="exit code 3"):
        live.watch(run)
    assert screen[-1][1]["text/plain"].startswith("job: failed after ")


def test_where_nothing_was_reported_the_picture_says_so(screen):
    run = RunByHand()
    run.end(RunState.SUCCEEDED)
    live.watch(run)
    assert "no loss was reported" in screen[-1][1]["text/plain"]
