"""What a launch goes through in this package, from its call to the first metric."""

import sys
import threading
import tomllib
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import workshop_utils
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network.ports import PortReservation
from workshop_utils.ranks import on_ranks
from workshop_utils.strategies import Strategy
from workshop_utils.training import data

pytestmark = pytest.mark.processes

PACKAGE = Path(workshop_utils.__file__).parent

# Its first rank reports a metric.
SCRIPT = """
from workshop_utils import place
from workshop_utils.comm import tcp
with tcp.connect(*place.rendezvous()) as communicator:
    communicator.barrier()
    place.report(step=1, loss=0.5)
"""


def layers():
    """The number of each module or sub-package, counted from the lowest, by its name."""
    contract = tomllib.loads((PACKAGE.parent / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
    (contract,) = contract["importlinter"]["contracts"]
    numbered = enumerate(reversed(contract["layers"]))
    return {name.strip(): number for number, names in numbered for name in names.split("|")}


@pytest.fixture
def calls():
    """Counts calls, in all threads, from one module of the package into another, until it is told to stop."""
    counted = Counter()

    def module_of(frame):
        file = Path(frame.f_code.co_filename) if frame is not None else Path()
        return file.relative_to(PACKAGE).with_suffix("").as_posix() if PACKAGE in file.parents else None

    def profile(frame, event, _):
        if event != "call" or frame.f_code.co_name == "<module>" or (callee := module_of(frame)) is None:
            return
        caller = frame.f_back
        while caller is not None and module_of(caller) is None:  # such as a library's, or a property's
            caller = caller.f_back
        if (name := module_of(caller)) != callee:
            counted[name, callee] += 1

    counted.start = lambda: (threading.setprofile(profile), sys.setprofile(profile))
    counted.stop = lambda: (threading.setprofile(None), sys.setprofile(None))
    yield counted
    counted.stop()


@pytest.mark.parametrize(("source", "most_modules"), [(None, 12), ("digits", 14)])
def test_from_a_launch_to_its_first_metric_few_modules_are_entered_each_from_above(
    source, most_modules, tmp_path, calls
):
    (tmp_path / "train.py").write_text(SCRIPT)
    job = TrainingJob(name="traced", folder=tmp_path, strategy="ring", workers=2, data=source)
    data.prepare("digits")
    launcher = Local()
    calls.start()
    run = launcher.launch(job)
    with run:
        while not run.records and run.state == "running":
            threading.Event().wait(0.01)
        calls.stop()
        run.wait(60)
    assert run.records
    modules = {module for pair in calls for module in pair if module}
    assert len(modules) <= most_modules, sorted(modules)
    number = layers()
    for caller, callee in calls:
        if caller is not None:
            assert number[callee.split("/")[0]] <= number[caller.split("/")[0]], f"{caller} is above {callee}"
    TopologicalSorter(
        {caller: {callee} for caller, callee in calls}
    ).prepare()  # raises where there is a cycle


@pytest.fixture
def planned(monkeypatch):
    """How often processes were listed and connected, ports reserved and data prepared."""
    counted = Counter()

    def count(owner, name):
        real = getattr(owner, name)

        def counting(*arguments):
            counted[name] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, counting)

    count(Strategy, "connect")
    count(PortReservation, "__init__")
    count(data, "prepare")
    return counted


def test_a_launch_and_a_call_on_ranks_plan_and_reserve_once_and_prepare_what_data_they_name(
    tmp_path, planned
):
    assert on_ranks(2, lambda communicator: communicator.rank).values == [0, 1]
    assert planned == {"connect": 1, "__init__": 1}
    (tmp_path / "train.py").write_text(SCRIPT)
    job = TrainingJob(name="traced", folder=tmp_path, strategy="ring", workers=2, data="digits")
    with Local().launch(job) as run:
        run.wait(60)
    assert planned == {"connect": 2, "__init__": 2, "prepare": 1}
