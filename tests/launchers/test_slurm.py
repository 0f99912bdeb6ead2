"""Jobs on a Slurm cluster of this machine, and the script that is rendered for one."""

import os
import shlex
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import slurm_cluster
from conftest import MakeJob, eventually
from slurm_cluster import SlurmCluster

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers import slurm
from workshop_utils.launchers.followed import FollowedRun
from workshop_utils.launchers.slurm import Slurm
from workshop_utils.runs import RunFailed, RunState
from workshop_utils.strategies import STRATEGIES

JOBS = Path(__file__).parents[2] / "jobs"
PATIENCE_SECONDS = 120.0  # frameworks start cold, on a busy machine

needs_slurm = pytest.mark.skipif(not slurm_cluster.is_installed(), reason="Slurm's daemons are not here")

# Each script adds up the ranks' numbers from 1, and reports the sum.
WORKSHOP = """
    import numpy as np
    from workshop_utils import place
    from workshop_utils.comm import tcp
    from workshop_utils.comm.ring import ring_all_reduce

    communicator = tcp.connect(*place.rendezvous())
    numbers = np.full(3, communicator.rank + 1.0)
    ring_all_reduce(communicator, numbers, "sum")
    place.report(1, total=numbers[0])
    communicator.barrier()
    communicator.close()
"""
HOROVOD = """
    from workshop_utils import place
    import horovod.torch as hvd
    import torch

    hvd.init()
    place.report(1, total=hvd.allreduce(torch.tensor([hvd.rank() + 1.0]), op=hvd.Sum).item())
"""
SCRIPTS = {
    "single": """
        from workshop_utils import place

        place.report(1, total=place.here().rank + 1)
    """,
    "ring": WORKSHOP,
    "workshop_parameter_server": WORKSHOP,
    "torch_ddp": """
        from workshop_utils import place
        import torch
        from torch import distributed

        distributed.init_process_group("gloo")
        total = torch.tensor([distributed.get_rank() + 1.0])
        distributed.all_reduce(total)
        place.report(1, total=total.item())
        distributed.destroy_process_group()
    """,
    "horovod": HOROVOD,
    "horovod_elastic": HOROVOD,
    "mpi": """
        from mpi4py import MPI
        from workshop_utils import place

        place.report(1, total=MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1))
    """,
    "multi_worker_mirrored": """
        from workshop_utils import place
        here = place.here()
        import tensorflow as tf

        strategy = tf.distribute.MultiWorkerMirroredStrategy()
        numbers = strategy.run(lambda: tf.constant(here.rank + 1.0))
        place.report(1, total=float(strategy.reduce("sum", numbers, axis=None)))
        place.leave_last()
    """,
    # Every process but the chief answers at its own address, with its rank or none: TF_CONFIG is right everywhere.
    "parameter_server": """
        import socket, time
        from workshop_utils import place

        here, config = place.here(), place.tf_config()
        own = config["cluster"][here.role][here.index].split(":")
        if here.role != "chief":
            with socket.create_server((own[0], int(own[1]))) as server:
                server.accept()[0].sendall(str((here.rank or -1) + 1).encode())
        else:
            total = here.rank + 1
            for role in ("ps", "worker"):
                for host, port in (address.split(":") for address in config["cluster"][role]):
                    while True:
                        try:
                            link = socket.create_connection((host, int(port)))
                            break
                        except OSError:
                            time.sleep(0.05)
                    total += int(link.recv(10))
            place.report(1, total=total)
    """,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    with SlurmCluster() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(started.conf))
        patch.setenv("PATH", slurm_cluster.SEARCHED)
        yield started


@pytest.fixture
def launch(cluster: SlurmCluster, tmp_path: Path) -> Iterator[Callable[[TrainingJob], FollowedRun]]:
    """Launches jobs; after the test nothing runs, and of each run log and model are left alone."""
    target = Slurm(folder=tmp_path / "shared", interface="lo")

    yield target.launch
    assert cluster.ask("squeue", "-h") == ""
    assert eventually(lambda: not cluster.processes()), cluster.processes()
    for folder in target.folder.iterdir():
        assert {path.name for path in folder.iterdir()} <= {"log", "model"}
    states = cluster.ask("sinfo", "-h", "-N", "-o", "%T").split()
    assert set(states) == {"idle"}  # no node was drained, because a process could not be ended


@needs_slurm
@pytest.mark.slow
@pytest.mark.parametrize("strategy", [name for name, each in STRATEGIES.items() if each.only_on is None])
def test_every_strategy_runs(strategy: str, make_job: MakeJob, launch) -> None:
    workers = 1 if strategy == "single" else 2
    with launch(make_job(SCRIPTS[strategy], strategy=strategy, workers=workers, timeout="5min")) as run:
        run.wait(PATIENCE_SECONDS)
    count = sum(name.startswith(("chief", "worker", "server")) for name in run.workers)
    assert set(run.metrics["total"]) == {count * (count + 1) / 2}
    assert set(run.metrics["worker"]) <= set(run.workers)
