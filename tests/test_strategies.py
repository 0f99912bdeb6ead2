"""What a strategy plans: who is where, and what each process is told, whatever the target."""

import urllib.request

import pytest

from workshop_utils.strategies import STRATEGIES, Addresses, ProcessSpec, launched, strategy_of, without_proxy

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


@pytest.mark.parametrize(
    ("given", "for_all", "for_grpc"),
    [
        ({}, "localhost,127.0.0.1,10.77.0.1", "localhost,127.0.0.1,10.77.0.1"),
        (
            {"no_proxy": "a.org,127.0.0.1", "NO_PROXY": "b.org"},
            "a.org,127.0.0.1,b.org,localhost,10.77.0.1",
            "a.org,127.0.0.1,b.org,localhost,10.77.0.1",
        ),
        ({"NO_PROXY": "*", "no_grpc_proxy": "c"}, "*", "c,*,localhost,127.0.0.1,10.77.0.1"),
    ],
)
def test_no_proxy_is_asked_for_the_run_s_addresses_nor_for_those_that_the_user_has_excepted(
    given, for_all, for_grpc
):
    told = without_proxy({**given, "https_proxy": "http://proxy:8080"}, ["10.77.0.1"])
    assert told == {"no_proxy": for_all, "NO_PROXY": for_all, "no_grpc_proxy": for_grpc}
    assert urllib.request.proxy_bypass_environment("10.77.0.1:1234", {"no": told["no_proxy"]})
