"""Jobs on a Slurm cluster of this machine, and the script that is rendered for one."""

import os
import signal
from pathlib import Path

import pytest
import slurm_cluster
from conftest import eventually, failure_of, with_horovod
from slurm_cluster import SlurmCluster

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.slurm import Slurm, SlurmJob
from workshop_utils.runs import RunState
from workshop_utils.strategies import STRATEGIES

pytestmark = pytest.mark.processes

JOBS = Path(__file__).parents[2] / "jobs"
PATIENCE_SECONDS = 240.0  # frameworks start cold, on a busy machine

needs_slurm = pytest.mark.skipif(not slurm_cluster.is_installed(), reason="Slurm's daemons are not here")

# Jobs that train with the strategies whose ranks find each other through the workshop's own code, or a driver's.
JOB_OF = {
    "ring": ("digits_ring", {"epochs": 1}),
    "workshop_parameter_server": ("digits_ring/parameter_server.yaml", {"epochs": 1}),
    "horovod_elastic": ("digits_horovod_elastic", {"step-seconds": 0}),
    "mpi": ("digits_ring/mpi.yaml", {"epochs": 1}),
}
# Of the others, scripts in which the framework, or what its variables say, joins all ranks; nothing is trained.
IN_TF_CLUSTER = """
    import json, os, socket, time

    config = json.loads(os.environ["TF_CONFIG"])
    own = config["cluster"][config["task"]["type"]][config["task"]["index"]]
    everybody = [address.split(":") for addresses in config["cluster"].values() for address in addresses]
    server = socket.create_server(("", int(own.split(":")[1])))
    for host, port in everybody:
        while True:
            try:
                socket.create_connection((host, int(port))).close()
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
    joined = sum(1 for _ in everybody if server.accept())
"""
JOINED = 'print(f"joined {joined}\\n", end="", flush=True)'
JOINING = {
    "torch_ddp": """
        import torch
        import torch.distributed as dist

        dist.init_process_group("gloo")
        ones = torch.ones(1)
        dist.all_reduce(ones)
        joined = int(ones)
        dist.destroy_process_group()
    """,
    "horovod": """
        import torch
        import horovod.torch as hvd

        hvd.init()
        joined = int(hvd.allreduce(torch.ones(1), op=hvd.Sum))
    """,
    "multi_worker_mirrored": IN_TF_CLUSTER,
    "parameter_server": IN_TF_CLUSTER,
}


@pytest.fixture(scope="module")
def cluster():
    with SlurmCluster() as started, pytest.MonkeyPatch.context() as patch:
        patch.setenv("SLURM_CONF", str(started.conf))
        patch.setenv("PATH", slurm_cluster.SEARCHED)
        yield started


@pytest.fixture
def target(cluster, tmp_path):
    """After the test nothing runs, no node was drained, and of each run log and model are left alone."""
    target = Slurm(folder=tmp_path / "shared", interface="lo")
    yield target
    assert cluster.ask("squeue", "-h") == ""
    assert eventually(lambda: not cluster.processes()), cluster.processes()
    assert set(cluster.ask("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"}
    for folder in target.folder.iterdir() if target.folder.exists() else ():
        assert {path.name for path in folder.iterdir()} <= {"log", "model"}


@needs_slurm
@pytest.mark.parametrize("strategy", [*map(with_horovod, JOB_OF)])
def test_strategies_of_the_workshop_and_of_drivers_train(strategy, target):
    name, arguments = JOB_OF[strategy]
    job = TrainingJob.load(JOBS / name).replace(workers=2, arguments=arguments, timeout="5min")
    with target.launch(job) as run:
        run.wait(PATIENCE_SECONDS)
    assert {start["worker"] for start in run.starts} == set(run.workers)
    assert run.metrics["accuracy"].max() > 0.5  # chance is 0.1


@needs_slurm
@pytest.mark.parametrize("strategy", [*map(with_horovod, JOINING)])
def test_the_ranks_of_a_framework_s_strategy_join(strategy, make_job, target):
    job = make_job(JOINING[strategy], JOINED, strategy=strategy, workers=2, timeout="5min")
    with target.launch(job) as run:
        run.wait(PATIENCE_SECONDS)
    last = [line for worker in run.workers for line in lines_of(run, worker)[-1:]]
    assert last == [f"joined {len(run.workers)}"] * len(run.workers)


def test_every_strategy_of_several_workers_has_a_job_here():
    assert {*JOB_OF, *JOINING, "single"} == set(STRATEGIES)


def lines_of(run, worker):
    return [line.text for line in run.logs(worker=worker)]


FAILING = """
    import sys, time
    from workshop_utils import place

    if place.here().rank == 1:
        sys.exit("no more batches")
    time.sleep(600)
"""
FAILING_IN_MPI = """
    from mpi4py import MPI

    if MPI.COMM_WORLD.rank == 1:
        raise SystemError("no more batches")
    MPI.COMM_WORLD.barrier()
"""


@needs_slurm
@pytest.mark.parametrize(
    ("script", "strategy", "how"),
    [
        (FAILING, "torch_ddp", "worker-1 on 127.0.0.2: Exited with exit code 1"),
        (FAILING_IN_MPI, "mpi", "job-1 failed: worker-1 ended with exit code 1"),
    ],
)
def test_the_rank_that_failed_first_is_named_with_its_last_lines(script, strategy, how, make_job, target):
    with target.launch(make_job(script, strategy=strategy, workers=2)) as run:
        said = failure_of(run, PATIENCE_SECONDS)
    assert how in said
    assert "no more batches" in said


@needs_slurm
def test_a_job_whose_mpirun_lost_a_node_has_failed(make_job, target, cluster):
    script = """
        from mpi4py import MPI
        import os, time

        parent = os.getppid()
        MPI.COMM_WORLD.barrier()
        print("ready", flush=True)
        while os.getppid() == parent:  # this cluster has no cgroups, which would end an orphan
            time.sleep(0.1)
    """
    with target.launch(make_job(script, strategy="mpi", workers=2)) as run:
        assert eventually(lambda: lines_of(run, "worker-0") + lines_of(run, "worker-1") == ["ready"] * 2)
        for pid, command in cluster.processes().items():
            if "prted" in command.split()[0]:
                os.kill(pid, signal.SIGKILL)
        assert "mpirun lost a node" in failure_of(run, PATIENCE_SECONDS)


@needs_slurm
def test_a_stopped_job_leaves_no_process_not_even_one_of_another_session(make_job, target, cluster):
    job = make_job(
        """
        import subprocess, time

        subprocess.run("setsid sleep 600 &", shell=True)  # an orphan, since its shell has ended
        print("ready", flush=True)
        time.sleep(600)
        """,
        strategy="ring",
        nodes=1,
        processes_per_node=2,
    )
    with target.launch(job) as run:
        assert eventually(lambda: lines_of(run, "worker-0") + lines_of(run, "worker-1") == ["ready"] * 2)
        assert sum(command == "sleep 600" for command in cluster.processes().values()) == 2
    assert run.state is RunState.STOPPED  # and the fixture looks for what is left


@needs_slurm
def test_a_job_that_waits_in_the_queue_says_why_until_it_is_stopped(make_job, target, cluster):
    later = target.model_copy(update={"options": ("--begin=now+1hour",)})
    with later.launch(make_job("")) as run:
        assert eventually(lambda: "pending: BeginTime" in run.waits_for), run.waits_for
        assert run.state is RunState.RUNNING
    assert run.state is RunState.STOPPED


@needs_slurm
def test_a_requeued_job_goes_on_from_its_checkpoint(make_job, target, cluster, tmp_path):
    job = make_job(
        """
        import time
        from workshop_utils import place

        place.report(1, life=place.restart_count())
        saved = place.checkpoint_folder() / "saved"
        while not saved.exists():
            saved.touch()
            print("saved", flush=True)
            time.sleep(600)
        """,
        checkpoints=str(tmp_path / "checkpoints"),
    )
    with target.launch(job) as run:
        assert eventually(lambda: lines_of(run, "worker-0") == ["saved"])
        cluster.ask("scontrol", "requeue", cluster.ask("squeue", "-h", "-o", "%A").strip())
        run.wait(PATIENCE_SECONDS)
    assert list(run.metrics["life"]) == [0, 1]


@needs_slurm
def test_a_job_that_is_refused_leaves_nothing(make_job, target, cluster):
    with pytest.raises(JobError, match=r"the job cannot be submitted: .*invalid partition"):
        target.model_copy(update={"options": ("--partition=gpu",)}).launch(make_job(""))
    assert not list(target.folder.iterdir())


@needs_slurm
def test_data_that_a_node_does_not_see_is_named(make_job, target, tmp_path):
    for name in ("here", "gone"):
        (tmp_path / name).mkdir()
    job = make_job("", data={"train": str(tmp_path / "here"), "test": str(tmp_path / "gone")})
    apart = target.model_copy(update={"setup": (f"rmdir {tmp_path / 'gone'}",)})
    with apart.launch(job) as run:
        assert f"sees no {tmp_path / 'gone'}; it" in failure_of(run, PATIENCE_SECONDS)


# Rendering needs no cluster.


def test_requirements_are_those_of_the_nodes_python(make_job, tmp_path):
    job = make_job("")
    (job.folder / "requirements.txt").write_text("num_py>=2\ntomli; python_version < '3.11'\n")
    python = tmp_path / "python"
    python.touch(0o700)
    for text, says in (
        ("#!/bin/sh\necho Num.Py 2.1\n", None),
        (
            "#!/bin/sh\necho Loading the modules of this site\necho Num.Py 2.1\necho Num.Py 1.0\necho None None\n",
            None,
        ),
        ("#!/bin/sh\necho Num.Py 2.1\necho python_version=3.9\n", rf"tomli; .*, which {python} lacks: "),
        ("#!/bin/sh\necho Other 2.1\n", rf"{python} lacks: `uv pip install --python {python} .num_py"),
        ("#!/bin/sh\nexit 1\n", f"{python} does not run here, to list its packages"),
    ):
        python.write_text(text)
        if says is None:
            assert Slurm(python=python).render(job)
        else:
            with pytest.raises(JobError, match=says):
                Slurm(python=python).render(job)
    assert Slurm(python=python).render(job.replace(requirements=False))


def test_a_folder_of_runs_within_the_job_s_own_is_refused(make_job):
    job = make_job("")
    with pytest.raises(JobError, match="lies in the job's folder"):
        Slurm(folder=job.folder / "runs").launch(job)
    assert [path.name for path in job.folder.iterdir()] == ["train.py"]


@needs_slurm
def test_a_rank_finds_its_arguments_and_linked_files_and_ends_with_all_it_started(make_job, target):
    arguments = {"text": 'it\'s "$HOME"\n`x`'}
    job = make_job(
        """
        import subprocess, sys
        from common.util import ANSWER
        from one import ANSWER

        print([ANSWER, *sys.argv[1:]])
        subprocess.Popen(["sleep", "600"], start_new_session=True)
        """,
        arguments=arguments,
    )
    (job.folder / "shared").mkdir()
    (job.folder / "shared" / "util.py").write_text("ANSWER = 42")
    (job.folder / "common").symlink_to("shared")
    (job.folder / "one.py").symlink_to(job.folder / "shared" / "util.py")
    (job.folder / ".#train.py").symlink_to("me@here")  # an editor's, which leads nowhere
    with target.launch(job) as run:
        run.wait(PATIENCE_SECONDS)
    assert lines_of(run, "worker-0") == [str([42, "--text", arguments["text"]])]


def test_secrets_are_neither_in_the_script_nor_readable_by_others(make_job, tmp_path):
    job = make_job(
        "", strategy="ring", workers=2, environment={"HF_TOKEN": "hf_123", "TEXT": "{node0} {port1}"}
    )
    request = Slurm().render(job)
    assert "export TEXT='{node0} {port1}'" in str(request)
    assert request.secrets.keys() == {"HF_TOKEN", "WORKSHOP_SECRET"}
    for value in request.secrets.values():
        assert value not in f"{request!s}{request!r}"


def test_memory_that_the_options_name_is_left_to_them_and_data_is_looked_for_where_there_is_some(
    make_job, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "digits").mkdir()
    plain = str(Slurm().render(make_job("", data=None)))
    assert "--mem=" in plain
    assert "for path in" not in plain
    own = str(Slurm(options=("--mem-per-cpu=2G",)).render(make_job("", data="digits")))
    assert "--mem=" not in own
    assert "/digits; do" in own
    assert f"{tmp_path}/digits" not in own
    bound = str(Slurm(options=("--mem-bind=local",)).render(make_job("", data=str(tmp_path))))
    assert "--mem=" in bound
    assert f"for path in {tmp_path}; do" in bound


# A submitted job, as Slurm's commands and the log show it; the commands are scripts that answer.


@pytest.fixture
def submitted(tmp_path, monkeypatch):
    """`submitted(state, log)` is job 7, of two ranks that srun or mpirun starts, in that state; `scancel` refuses."""

    def submitted(state, log, by_mpirun=False):
        scontrol = f"#!/bin/sh\necho 'JobId=7 Reason=None {state}'\n"
        for name, text in {"scontrol": scontrol, "scancel": "#!/bin/sh\necho no >&2; exit 1\n"}.items():
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o700)
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        (tmp_path / "log").write_text(log)
        return SlurmJob("train", "7", tmp_path, {} if by_mpirun else {0: "worker-0", 1: "worker-1"})

    return submitted


STARTS = "job 7 starts on a\n"
KILLED = "srun: error: b: task {}: Killed\n"
BY_MPIRUN = "mpirun noticed that process rank 1 with PID 12 on node b exited on signal 9 (Killed).\n"
LOST = (
    "srun returned non-zero exit status (9) from launching\n",
    "PRTE has lost communication with a remote daemon.\n",
)


@pytest.mark.parametrize(
    ("state", "log", "by_mpirun", "reason"),
    [
        ("FAILED ExitCode=0:9", "", False, "the script was killed by SIGKILL"),
        ("FAILED ExitCode=137:0", STARTS + KILLED.format(3), False, "a task on b: Killed"),
        # What srun says of mpirun's daemons is not about a rank.
        ("FAILED ExitCode=137:0", STARTS + KILLED.format(0) + BY_MPIRUN, True, "worker-1 was killed by SIGKILL"),
        *(("COMPLETED ExitCode=0:0", STARTS + line, True, "mpirun lost a node") for line in LOST),
        *(("COMPLETED ExitCode=0:0", STARTS + line + STARTS, True, "") for line in LOST),
        ("COMPLETED ExitCode=0:0", STARTS + LOST[0], False, ""),  # no mpirun has printed it
        # What its first life printed is not why a requeued job failed.
        ("FAILED ExitCode=2:0", STARTS + KILLED.format(1) + STARTS, False, "the script ended with exit code 2"),
    ],
)  # fmt: skip
def test_how_a_job_ended_follows_from_its_state_and_what_its_last_life_printed(
    state, log, by_mpirun, reason, submitted
):
    end = (RunState.FAILED, f"train failed: {reason}") if reason else (RunState.SUCCEEDED, "")
    assert submitted(f"JobState={state}", log, by_mpirun).poll() == end
