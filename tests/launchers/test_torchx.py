"""TorchX for real: what it describes in its own environment, torchrun's processes, etcd."""

from collections.abc import Callable

import pytest
from conftest import failure_of

from workshop_utils.jobs import JobError, TrainingJob
from workshop_utils.launchers.torchx import TorchX, etcd
from workshop_utils.runs import RunState

pytestmark = pytest.mark.usefixtures("nothing_is_left")

REPORTS = 1500  # many more bytes than TorchX reads at once
ALL_REDUCE = """
    import sys
    import torch
    import torch.distributed as dist
    from workshop_utils import place

    here = place.here()
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + 1)])
    dist.all_reduce(total)
    print("hello from", here.name, "of", here.world_size)
    for step in range(int(sys.argv[2])):
        place.report(step=step, loss=total.item())
        print("a warning", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()
"""
# What each rank does is on its command line: "1:fail" makes rank 1 fail.
PLAIN = """
    import os, sys, time
    from workshop_utils import place

    here = place.here()
    rank, what = sys.argv[2].split(":")
    first = place.restart_count() == 0
    print("ready", os.environ.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0"), flush=True)
    print("path", os.environ["PATH"], flush=True)
    if what != "nothing" and here.rank == int(rank) and first:
        print("disk full", file=sys.stderr, flush=True)
        if what == "fail":
            sys.exit(3)
        if what == "kill":
            os.kill(os.getpid(), 9)
    if what != "nothing" and first:
        time.sleep(1000)
    place.report(step=1, loss=here.rank + 0.5)
    if what == "kill":  # until it is stopped
        time.sleep(1000)
"""
Make = Callable[..., TrainingJob]


@pytest.fixture
def make(make_job):
    def make(script=PLAIN, what="0:nothing", **fields):
        values = {"strategy": "torch_ddp", "workers": 2, "timeout": "4min", "arguments": {"what": what}}
        return make_job(script, **{**values, **fields})

    return make


# Rendering


def test_what_torchx_s_own_notation_cannot_write_reaches_the_application(make):
    awkward = {"a": "it's", "b": -1, "c": -1}  # a quote, the same word twice; below, an equals sign, a comma
    (role,) = TorchX().render(make(arguments=awkward, environment={"FLAGS": "x=1,y=2"})).application["roles"]
    assert role["env"]["FLAGS"] == "x=1,y=2"
    assert role["args"][1].split()[-6:] == ["--a", """'it'"'"'s'""", "--b", "-1", "--c", "-1"]


def test_a_name_that_is_too_long_for_a_cluster_is_refused(make):
    with pytest.raises(JobError, match="it may have at most 37 characters"):
        TorchX(scheduler="kubernetes").render(make(name="b" * 38))


# Real processes


def test_two_nodes_meet_by_c10d_and_every_line_of_a_burst_arrives(make, nothing_is_left):
    with TorchX().launch(make(ALL_REDUCE, arguments={"reports": REPORTS})) as run:
        run.wait(240)
    assert run.state is RunState.SUCCEEDED
    assert run.handle.startswith(f"{run.name}-")
    assert set(run.metrics["loss"]) == {3}
    for rank in range(2):
        assert list(run.metrics[run.metrics["rank"] == rank]["step"]) == list(range(REPORTS))
        lines = [(line.stream, line.text) for line in run.logs(worker=f"worker-{rank}")]
        assert ("stdout", f"hello from worker-{rank} of 2") in lines
        assert lines.count(("stderr", "a warning")) == REPORTS
    assert list(nothing_is_left.iterdir()) == []  # neither torchrun's folders nor TorchX's


@pytest.mark.skipif(not etcd.is_installed(), reason="there is no etcd on this machine (Debian: etcd-server)")
def test_two_nodes_meet_by_etcd_which_is_gone_afterwards(make, watch):
    with etcd.server() as endpoint:
        assert any("etcd" in command for command in watch.marked_processes().values())
        settings = TorchX(rendezvous="etcd-v2", rendezvous_endpoint=endpoint)
        run = settings.launch(make()).wait(240)
    assert sorted(run.metrics["rank"]) == [0, 1]
    assert not any("etcd" in command for command in watch.marked_processes().values())


def test_a_worker_that_fails_is_named_with_its_last_lines_though_its_peer_would_wait_for_ever(make):
    run = TorchX().launch(make(what="1:fail"))
    said = failure_of(run, 240)
    assert "worker-1 (rank 1) ended with exit code 3; the others were stopped" in said
    # Standard output and standard error are two pipes: which line came first, they do not tell.
    last = said.partition("Its last lines:\n")[2].splitlines()
    assert {line.strip() for line in last} >= {"ready 0", "disk full"}


def test_a_killed_worker_is_restarted_with_all_others_and_stopping_leaves_nothing(make, watch, tmp_path):
    output = str(tmp_path / "out")
    job = make(
        what="1:kill",
        processes_per_node=2,
        outputs=output,
        environment={"HF_TOKEN": "hf_123", "PATH": "/mine"},
    )
    with TorchX(max_restarts=1).launch(job) as run:
        watch.eventually(lambda: len(run.records) == 2 or run.state is not RunState.RUNNING, 240)
        commands = list(watch.marked_processes().values())
    assert any("torchrun" in command for command in commands)
    assert "ready 1" in {line.text for line in run.logs()}  # restarted ranks meet in a store of their own
    assert not any("hf_123" in command for command in commands)
    assert all("/mine:" in line.text for line in run.logs() if line.text.startswith("path "))
    assert run.state is RunState.STOPPED, run.reason
    assert sorted(run.metrics["loss"]) == [0.5, 1.5]
    assert len(run.starts) >= 3  # worker-0 of the first start may have been ended before it could say so
    assert {line.worker for line in run.logs() if "exitcode: -9" in line.text} == {"node-0"}
    assert (tmp_path / "out").is_dir()
