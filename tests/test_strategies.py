"""What a strategy plans: who is where, and what each process is told, whatever the target."""

import pytest

from workshop_utils.strategies import STRATEGIES, Addresses, ProcessSpec, launched, strategy_of

NODES = ("red", "blue")


def planned(job, nodes=NODES):
    names = [spec.name for spec in strategy_of(job).plan(job) if spec.listens]
    addresses = Addresses({name: f"{name}.example:{70 + at}" for at, name in enumerate(names)}, nodes)
    return {spec.name: spec for spec in strategy_of(job).plan(job, addresses)}


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_process_is_started_once_and_only_by_the_launcher_or_by_another(make_job, name):
    specs = planned(make_job("", strategy=name, workers=1 if name == "single" else 3), ("localhost",))
    started = [other for spec in specs.values() for other in spec.children]
    assert sorted([*started, *(spec.name for spec in launched(specs.values()))]) == sorted(specs)
    assert any(spec.required for spec in launched(specs.values()))
    assert all(spec.argv for spec in launched(specs.values()))


def test_words_in_braces_are_filled_and_other_braces_stay():
    spec = ProcessSpec(
        "worker", 0, argv=("{python}", "{script}", "{x}"), environment={"TF_CONFIG": '{"a": {}}'}
    )
    filled = spec.filled(python="/bin/python", script="train.py")
    assert filled.argv == ("/bin/python", "train.py", "{x}")
    assert filled.environment == {"TF_CONFIG": '{"a": {}}'}
