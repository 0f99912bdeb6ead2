"""What a strategy plans: who is where, and what each process is told, whatever the target."""

import json

import pytest

from workshop_utils.strategies import STRATEGIES, Addresses, ProcessSpec, launched, strategy_of

NODES = ("red", "blue")


def planned(job, nodes=NODES):
    names = [spec.name for spec in strategy_of(job).plan(job) if spec.listens]
    addresses = Addresses({name: f"{name}.example:{70 + at}" for at, name in enumerate(names)}, nodes)
    return {spec.name: spec for spec in strategy_of(job).plan(job, addresses)}


@pytest.mark.parametrize(
    ("strategy", "layout"),
    [
        ("torch_ddp", {"worker-0": (0, 0), "worker-1": (0, 1), "worker-2": (1, 0)}),
        ("multi_worker_mirrored", {"worker-0": (0, 0), "worker-1": (0, 1), "worker-2": (1, 0)}),
        ("horovod", {"rendezvous-0": (0, 0), "worker-0": (0, 0), "worker-1": (0, 1), "worker-2": (1, 0)}),
        ("mpi", {"mpirun": (0, 0), "worker-0": (0, 0), "worker-1": (0, 1), "worker-2": (1, 0)}),
        (
            "parameter_server",
            {"chief-0": (0, 0), "ps-0": (0, 1), "worker-0": (0, 2), "worker-1": (0, 3), "worker-2": (1, 0)},
        ),
        ("workshop_parameter_server", {"server-0": (0, 0), "worker-0": (0, 1), "worker-1": (0, 2), "worker-2": (1, 0)}),
    ],
)  # fmt: skip
def test_ranks_fill_one_node_after_the_other_and_helpers_are_on_the_first(make_job, strategy, layout):
    specs = planned(make_job("", strategy=strategy, workers=3))
    assert {name: (spec.node, spec.local_rank) for name, spec in specs.items()} == layout


def test_the_variables_of_a_rank_tell_its_node_and_who_shares_it(make_job):
    torch = planned(make_job("", strategy="torch_ddp", workers=4))["worker-3"].environment
    assert (torch["RANK"], torch["LOCAL_RANK"], torch["LOCAL_WORLD_SIZE"]) == ("3", "1", "2")
    assert (torch["MASTER_ADDR"], torch["MASTER_PORT"]) == ("worker-0.example", "70")
    horovod = planned(make_job("", strategy="horovod", workers=4))["worker-2"].environment
    assert (horovod["HOROVOD_CROSS_RANK"], horovod["HOROVOD_CROSS_SIZE"]) == ("1", "2")
    assert (horovod["HOROVOD_LOCAL_RANK"], horovod["HOROVOD_HOSTNAME"]) == ("0", "blue")
    tensorflow = planned(make_job("", strategy="multi_worker_mirrored", workers=2))["worker-1"]
    assert json.loads(tensorflow.environment["TF_CONFIG"]) == {
        "cluster": {"worker": ["worker-0.example:70", "worker-1.example:71"]},
        "task": {"type": "worker", "index": 1},
    }


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_every_process_is_started_once_and_only_by_the_launcher_or_by_another(make_job, name):
    specs = planned(make_job("", strategy=name, workers=1 if name == "single" else 3), ("localhost",))
    started = [other for spec in specs.values() for other in spec.starts]
    assert sorted([*started, *(spec.name for spec in launched(specs.values()))]) == sorted(specs)
    assert any(spec.awaited for spec in launched(specs.values()))
    assert all(spec.argv for spec in launched(specs.values()))


def test_a_rendezvous_may_bind_to_another_address_than_the_one_it_is_reached_at(make_job):
    job = make_job("", strategy="horovod", workers=2)
    at = Addresses({"rendezvous-0": "red:7000"}, NODES, bind="0.0.0.0")
    server, worker, _ = strategy_of(job).plan(job, at)
    assert server.argv[-2:] == ("0.0.0.0", "7000")
    assert worker.environment["HOROVOD_GLOO_RENDEZVOUS_ADDR"] == "red"


def test_words_in_braces_are_filled_and_other_braces_stay():
    spec = ProcessSpec(
        "worker", 0, argv=("{python}", "{script}", "{x}"), environment={"TF_CONFIG": '{"a": {}}'}
    )
    filled = spec.filled(python="/bin/python", script="train.py")
    assert filled.argv == ("/bin/python", "train.py", "{x}")
    assert filled.environment == {"TF_CONFIG": '{"a": {}}'}
