import json
from pathlib import Path

import pytest

from workshop_utils import place
from workshop_utils.jobs import StrategyName, TrainingJob
from workshop_utils.strategies import STRATEGIES, Addresses, strategy_of


def job_of(strategy: StrategyName, workers: int, folder: Path, parameter_servers: int = 1) -> TrainingJob:
    (folder / "train.py").touch()
    return TrainingJob(
        name="job",
        folder=folder,
        strategy=strategy,
        workers=workers,
        parameter_servers=parameter_servers,
    )


def environments(job: TrainingJob) -> dict[str, dict[str, str]]:
    """What each member is told, with a made-up port for each that listens."""
    strategy = strategy_of(job)
    members = strategy.members(job)
    listening = [member.name for member in members if member.listens]
    addresses = Addresses({name: f"127.0.0.1:{10_000 + port}" for port, name in enumerate(listening)})
    return {member.name: strategy.environment(job, member, addresses) for member in members}


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("name", ["torch_ddp", "horovod", "multi_worker_mirrored"])
def test_every_member_finds_in_its_environment_the_rank_that_the_strategy_meant(
    name: StrategyName, workers: int, tmp_path: Path
) -> None:
    job = job_of(name, workers, tmp_path)
    told = environments(job)
    training = [member for member in STRATEGIES[name].members(job) if member.rank is not None]
    assert [member.rank for member in training] == list(range(workers))
    for member in training:
        found = place.from_environment(told[member.name])
        assert (found.name, found.rank, found.world_size) == (member.name, member.rank, workers)


@pytest.mark.parametrize(("workers", "servers"), [(2, 1), (3, 2), (4, 3)])
def test_a_parameter_server_cluster_has_a_chief_servers_and_workers_with_addresses_of_their_own(
    workers: int, servers: int, tmp_path: Path
) -> None:
    job = job_of("parameter_server", workers, tmp_path, servers)
    told = environments(job)
    cluster = json.loads(told["chief-0"]["TF_CONFIG"])["cluster"]
    assert {role: len(hosts) for role, hosts in cluster.items()} == {
        "chief": 1,
        "ps": servers,
        "worker": workers,
    }
    assert len({host for hosts in cluster.values() for host in hosts}) == 1 + servers + workers
    ranks = {name: place.from_environment(environment).rank for name, environment in told.items()}
    assert ranks["chief-0"] == 0
    assert [ranks[f"ps-{index}"] for index in range(servers)] == [None] * servers
    assert [ranks[f"worker-{index}"] for index in range(workers)] == list(range(1, workers + 1))
