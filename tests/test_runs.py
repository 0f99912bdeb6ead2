import json
import shutil
import sys
import threading
import time

import pytest
from conftest import RunByHand

from workshop_utils import logs
from workshop_utils.runs import METRIC_COLUMNS, Run, RunFailed, RunState


def metric(worker, step, **values):
    whose = {"workshop": "metric", "worker": f"worker-{worker}", "rank": worker}
    return json.dumps({**whose, "time": time.time(), "step": step, **values})


def interrupted(run, waiting):
    """Let Ctrl-C come while this thread waits for `run`."""
    wait, main = run._changed.wait, threading.current_thread()

    def wait_or_be_interrupted(timeout=None):
        if threading.current_thread() is main and run.state is RunState.RUNNING:
            raise KeyboardInterrupt
        return wait(timeout)

    run._changed.wait = wait_or_be_interrupted
    waiting(run)


def test_a_run_runs_until_it_ends_and_then_its_state_and_time_stand_still():
    run = RunByHand()
    assert run.state == "running"
    run.end(RunState.SUCCEEDED)
    seconds = run.seconds
    time.sleep(0.02)
    run.end(RunState.FAILED, "too late")
    assert (run.state, run.reason, run.seconds) == ("succeeded", "", seconds)
    assert run.wait() is run


def test_waiting_for_a_run_that_fails_raises_its_reason():
    run = RunByHand()
    threading.Timer(0.05, run.end, (RunState.FAILED, "worker-1 (rank 1) ended with exit code 3")).start()
    with pytest.raises(RunFailed, match=r"^worker-1 \(rank 1\) ended with exit code 3$"):
        run.wait()


@pytest.mark.parametrize("waiting", [Run.wait, lambda run: list(run.logs(follow=True))])
def test_an_interrupt_while_waiting_or_following_the_log_stops_the_run(waiting):
    run = RunByHand()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        interrupted(run, waiting)
    assert (run.state, run.stops) == (RunState.STOPPED, 1)
    shown = interrupt.value._render_traceback_()  # by a notebook
    assert shown == ["KeyboardInterrupt: job: stopped, nothing is left running"]


def test_following_the_log_gives_every_line_once_as_it_comes_and_ends_with_the_run():
    run = RunByHand()
    heard = []
    listener = threading.Thread(target=lambda: heard.extend(line.text for line in run.logs(follow=True)))
    listener.start()
    for number in range(100):
        run.print(f"worker-{number % 2}", str(number))
    assert listener.is_alive()
    run.end(RunState.SUCCEEDED)
    listener.join(10)
    assert not listener.is_alive()
    assert heard == [str(number) for number in range(100)]


def test_metrics_are_a_table_with_a_row_a_report_and_no_lines_of_the_log():
    run = RunByHand()
    start = {"workshop": "start", "worker": "worker-0", "rank": 0, "time": 1.0, "pid": 7}
    run.print("worker-0", json.dumps(start))
    run.print("worker-0", metric(0, 1, loss=0.5))
    run.print("worker-1", metric(1, 1, loss=None, staleness=2))
    run.print("worker-0", metric(0, 2, accuracy=0.9))
    table = run.metrics
    assert list(table.columns) == [*METRIC_COLUMNS, "staleness"]
    assert list(table["worker"]) == ["worker-0", "worker-1", "worker-0"]
    assert list(table["step"]) == [1, 1, 2]
    assert table["loss"].iloc[0] == 0.5
    assert table["loss"].isna().tolist() == [False, True, True]
    assert table["staleness"].iloc[1] == 2
    assert table["seconds"].between(0, 60).all()
    assert list(run.logs()) == []
    assert run.starts == [start]


def almost_records():
    yield '{"workshop": "metric"}'
    yield '{"workshop": "start", "worker": "worker-0"}'
    yield '{"workshop": ["metric"], "worker": "worker-0"}'
    whole = '{"workshop": "metric", "worker": "worker-0", "rank": 0, "time": 1.0, "step": 1'
    yield whole.replace('"worker-0"', "0") + "}"
    yield whole.replace('"rank": 0', '"rank": "0"') + "}"
    yield whole.replace("1.0", '"noon"') + "}"
    for step in ('"one"', "[1]", "NaN", "1" + "0" * 400):
        yield f'{whole}, "step": {step}}}'
    yield '{"workshop": "metric", "worker": '
    yield '{"workshop": ' + "[" * 100_000
    yield '{"workshop": ' + "9" * 10_000 + "}"


@pytest.mark.parametrize("text", list(almost_records()), ids=lambda text: text[:60])
def test_what_only_looks_like_a_record_is_a_line_of_the_log(text):
    run = RunByHand()
    run.print("worker-0", text)
    assert [line.text for line in run.logs()] == [text]
    assert run.metrics.empty
    assert run.starts == []


# Log files


@pytest.fixture
def state(tmp_path, monkeypatch):
    monkeypatch.setenv("WORKSHOP_STATE", str(tmp_path / "state"))
    return tmp_path / "state" / "runs"


def printed(line="hello", **fields):
    """A run, going on, of which worker-0 has printed one line."""
    run = RunByHand(**fields)
    run.print("worker-0", line)
    return run


def test_each_process_s_log_is_a_file_of_what_it_printed_records_too(state):
    run = RunByHand()
    assert run.log_folder is None
    record = metric(1, 1, loss=0.5)
    for text in (
        "[1,0]<stdout>: caf\u00e9\ud800",
        f"[1,1]<stdout>: {record}",
        "[1,1]<stderr>: 10%\r20%\r",
        "mpirun's own",
    ):
        run.print("mpirun", text)
    run.end(RunState.SUCCEEDED)
    run.print("worker-0", "too late")
    assert run.log_folder.parent == state
    assert {file.name: file.read_text() for file in run.log_folder.iterdir()} == {
        "worker-0.log": "caf\u00e9?\n",
        "worker-1.log": f"{record}\n20%\n",
        "mpirun.log": "mpirun's own\n",
    }


@pytest.mark.parametrize("has_locks", [True, False])  # Windows has none
def test_with_outputs_a_copy_of_the_logs_is_left_there_at_the_end(state, tmp_path, monkeypatch, has_locks):
    if not has_locks:
        monkeypatch.setitem(sys.modules, "fcntl", None)
    run, meanwhile, copy_tree = printed(outputs=str(tmp_path / "outputs")), [], shutil.copytree

    def copy_slowly(*arguments):
        reader = threading.Thread(target=lambda: meanwhile.extend([run.state, *map(str, run.logs())]))
        reader.start()
        reader.join(10)
        copy_tree(*arguments)

    monkeypatch.setattr(shutil, "copytree", copy_slowly)
    assert not (tmp_path / "outputs").exists()
    run.end(RunState.SUCCEEDED)
    assert meanwhile == ["running", "[worker-0] hello"]
    (copy,) = (tmp_path / "outputs" / "logs").iterdir()
    assert copy.name == run.log_folder.name
    assert (copy / "worker-0.log").read_text() == "hello\n"
    assert run.log_folder.stat().st_mode & 0o777 == 0o700


def test_the_last_twenty_runs_are_kept_and_one_that_still_goes_on_though_they_begin_in_one_second(state):
    (state / "mine").mkdir(parents=True)
    going_on = printed()
    ended = [printed() for _ in range(2 * logs.KEPT)]
    for run in ended:
        run.end(RunState.SUCCEEDED)
    last = printed()
    assert [*logs.runs()] == [run.log_folder for run in (last, *ended[: -logs.KEPT : -1], going_on)]
    assert (state / "mine").is_dir()


@pytest.mark.parametrize(
    ("called", "folder"),
    [
        (None, "b-20261129-080310-2"),
        ("a", "a-20261129080246-65d4-20261129-080255"),
        ("a-20261129080246-65d4", "a-20261129080246-65d4-20261129-080255"),
        ("a-20261129-080200", "a-20261129-080200"),
        ("b-1", "b-1-20261128-080200"),
        ("c" * 41, f"{'c' * 41}-20261129080100-0a1b-20261129-080101"),
        (f"{'c' * 41}-long", None),  # of several jobs, which SageMaker calls so, it may be another's
        ("a-2026", None),
    ],
)
def test_a_run_is_found_by_its_job_also_one_of_sagemaker_s_and_the_latest_is_so_by_its_name(
    state, called, folder
):
    names = ["b-20261129-080310-2", "b-20261129-080310", "a-20261129080246-65d4-20261129-080255"]
    names += ["a-20261129-080200", f"{'c' * 41}-20261129080100-0a1b-20261129-080101", "b-1-20261128-080200"]
    for name in names:  # the oldest is written to last
        (state / name).mkdir(parents=True)
    assert [path.name for path in logs.runs()] == names
    assert (
        next((each.name for each in logs.runs() if called is None or logs.is_of(called, each)), None)
        == folder
    )


def test_a_run_whose_log_cannot_be_kept_goes_on_and_says_so_once(state):
    state.parent.mkdir()
    state.touch()
    run = printed()
    run.print("worker-0", "world")
    first, problem, last = (str(line) for line in run.logs())
    assert (first, last) == ("[worker-0] hello", "[worker-0] world")
    assert problem.startswith(f"[job] no more of its log is kept: {state}")
