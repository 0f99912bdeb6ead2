"""What `workshop trace` makes of the ranks' traces: one picture on one clock, and how much communication is exposed."""

import gzip
import json
import math

import pytest
from typer.testing import CliRunner

from workshop_utils.cli import app
from workshop_utils.jobs import TrainingJob
from workshop_utils.launchers.local import Local
from workshop_utils.network import Network, availability
from workshop_utils.scaling.traces import TraceError, merge, read_traces, step_times, write_merged

BASE = 1790857026000000000  # nanoseconds, as PyTorch 2.13 writes it
PARAMETERS = 784 * 128 + 128 + 128 * 10 + 10

TRAINING = """
import torch
import torch.distributed as dist
import torch.distributed.nn  # before the group is made, whose threads its functions would keep alive
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from workshop_utils.training.profiler import profile

dist.init_process_group("gloo")
model = nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10))
parallel = DistributedDataParallel(model)
with profile(steps=5) as profiler:
    for _ in range(8):
        parallel(torch.ones(16, 784)).sum().backward()
        dist.barrier()
        profiler.step()
dist.barrier()
del parallel
dist.destroy_process_group()
"""


def event(category, name, start, duration, pid=100, tid=100, **args):
    """A complete event, with times in microseconds."""
    times = {"ts": start, "dur": duration}
    return {"ph": "X", "cat": category, "name": name, "pid": pid, "tid": tid, **times, "args": args}


def kernel(name, start, duration, stream=7, **args):
    return event("kernel", name, start, duration, pid=0, tid=stream, stream=stream, device=0, **args)


def nccl(
    start, duration, name="ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", **args
):
    known = {"Collective name": "allreduce", "In msg nelems": 250_000, "dtype": "Float", "Group size": 2}
    return kernel(name, start, duration, stream=20, **{**known, **args})


def gloo(name, shape, dtype):
    return event("user_annotation", f"gloo:{name}", 0, 1, **{"Input Dims": [shape], "Input type": [dtype]})


def step(number, start, duration):
    return event("user_annotation", f"ProfilerStep#{number}", start, duration)


# A GPU computes from 100 to 400 and from 450 to 500; NCCL has 300 of its 500 microseconds under it.
ON_A_GPU = [
    step(3, 0, 1000),
    event("cpu_op", "aten::mm", 0, 900),  # the CPU only launches kernels
    event("cpu_op", "record_param_comms", 200, 5),
    event("user_annotation", "nccl:all_reduce", 190, 20),
    event("gpu_user_annotation", "ProfilerStep#3", 100, 800, pid=0, tid=7),
    event("gpu_memcpy", "Memcpy HtoD", 20, 50, pid=0, tid=7),
    kernel("ampere_sgemm_128x64_nn", 100, 200),
    kernel("void at::native::vectorized_elementwise_kernel<4>()", 250, 150),
    kernel("ampere_sgemm_128x64_tn", 450, 50),
    nccl(200, 300),
    nccl(600, 200),
]


def write(folder, rank=0, size=1, events=(), base=BASE, name=None, **more):
    folder.mkdir(parents=True, exist_ok=True)
    place = {"rank": rank, "world_size": size}
    document = {
        "baseTimeNanoseconds": base,
        "workshop": place,
        "traceEvents": list(events) or ON_A_GPU,
        **more,
    }
    path = folder / (name or f"trace-rank-{rank:04d}.json.gz")
    path.write_bytes(gzip.compress(json.dumps(document).encode()))
    return path


def only_row(folder, events):
    write(folder, events=events)
    table = step_times(read_traces(folder))
    assert len(table) == 1
    return table.iloc[0]


def test_exposed_communication_on_a_gpu_is_what_no_other_kernel_runs_beside(tmp_path):
    row = only_row(tmp_path, ON_A_GPU)
    assert (row.step, row["rank"], row.step_ms) == (3, 0, 1.0)
    assert row.communication_ms == pytest.approx(0.5)
    assert row.exposed_ms == pytest.approx(0.05 + 0.2)  # from 400 to 450, and from 600 to 800


def test_without_kernels_operators_of_any_thread_are_the_computation(tmp_path):
    row = only_row(
        tmp_path,
        [
            step(3, 0, 1000),
            event("cpu_op", "aten::mm", 0, 300),
            event("cpu_op", "aten::mm", 400, 100, tid=101),
            event("cpu_op", "c10d::allreduce_", 550, 100),  # hands the work over
            event("user_annotation", "DistributedDataParallel.forward", 0, 1000),
            event("user_annotation", "gloo:all_reduce", 200, 500, tid=102),
        ],
    )
    assert row.communication_ms == pytest.approx(0.5)
    assert row.exposed_ms == pytest.approx(0.5 - 0.1 - 0.1)


@pytest.mark.parametrize(
    ("events", "milliseconds"),
    [
        ([step(3, 1000, 100), nccl(900, 150), nccl(1090, 500)], 0.06),
        ([step(3, 0, 10), step(4, 10, 1)], 0),  # the other one was not completed
    ],
)
def test_a_step_has_the_communication_within_it(tmp_path, events, milliseconds):
    write(tmp_path, events=events, complete_steps=1)
    ((step, *_, communication, exposed),) = step_times(read_traces(tmp_path)).to_numpy().tolist()
    assert (step, communication, exposed) == (3, pytest.approx(milliseconds), pytest.approx(milliseconds))


@pytest.mark.parametrize(
    ("message", "name"),
    [
        (nccl(0, 1), "all_reduce 1 MB"),
        (nccl(0, 1, dtype="BFloat16"), "all_reduce 500 kB"),
        (nccl(0, 1, "ncclKernel_AllReduce_RING_LL_Sum_float(ncclWorkElem)"), "all_reduce 1 MB"),
        (nccl(0, 1, "ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(...)"), "reduce_scatter 1 MB"),
        (nccl(0, 1, "ncclDevKernel_AllGather_RING_LL(...)", **{"In msg nelems": 3}), "all_gather 12 B"),
        (nccl(0, 1, "ncclDevKernel_SendRecv(...)", dtype="unheard of"), "send_recv"),
        (nccl(0, 1, "ncclDevKernel_Generic(...)"), "allreduce 1 MB"),
        (kernel("ncclDevKernel_Broadcast_RING_LL(...)", 0, 1), "broadcast"),
        (event("user_annotation", "gloo:barrier", 0, 1), "barrier"),
        (gloo("all_reduce", [10, 30], "c10::Half"), "all_reduce 600 B"),
        (gloo("gather", [[2], [3]], "TensorList"), "gather"),
    ],
)
def test_a_collective_has_its_name_and_its_bytes_and_a_category_of_its_own(tmp_path, message, name):
    write(tmp_path, events=[message])
    (event,) = [each for each in merge(read_traces(tmp_path))["traceEvents"] if each["ph"] == "X"]
    assert (event["name"], event["cat"], event["args"]["event"]) == (name, "communication", message["name"])


def test_merged_ranks_are_processes_with_one_clock_and_arrows_of_their_own(tmp_path):
    named = {"ph": "M", "name": "process_name"}

    def of_rank(moment):
        return [
            step(3, moment, 1000.001),
            {"ph": "s", "id": 5, "cat": "fwdbwd", "name": "fwdbwd", "pid": 100, "tid": 100, "ts": moment},
            {**named, "pid": 100, "tid": 0, "ts": moment, "args": {"name": "python"}},
            {"ph": "i", "s": "g", "name": "Record Window End", "pid": "", "tid": "", "ts": moment},
        ]

    # Rank 1 counts from one second later, and begins half a millisecond after rank 0.
    write(tmp_path, 0, 2, of_rank(4_568_476_018_147.402))
    write(tmp_path, 1, 2, of_rank(4_568_475_018_647.402), BASE + 10**9)
    write_merged(read_traces(tmp_path), tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    names = [each["args"]["name"] for each in events if each["name"] == "process_name"]
    assert names == ["rank 0 of 2", "rank 1 of 2"]
    steps = [each for each in events if each["ph"] == "X"]
    times = [(each["pid"], each["ts"], each["dur"]) for each in steps]
    assert times == [(0, 0, 1000.001), (1, 500, 1000.001)]
    assert len({each["id"] for each in events if each["ph"] == "s"}) == 2
    assert not [each for each in events if each["name"] == "Record Window End"]


NO_TRACE = r"trace-rank-0000\.json\.gz is cut short, or is not a trace that training\.profiler"


def test_a_file_that_is_no_trace_is_named(tmp_path):
    for content in (gzip.compress(b"{}")[:-4], gzip.compress(b"[1, 2]"), gzip.compress(b"{}")):
        (tmp_path / "trace-rank-0000.json.gz").write_bytes(content)
        with pytest.raises(TraceError, match=NO_TRACE):
            read_traces(tmp_path)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            {"rank": 1, "size": 4},
            r"trace-rank-0001\.json\.gz is of a run of 4 ranks, trace-rank-0000\.json\.gz of 2",
        ),
        ({"rank": 0, "size": 2, "name": "trace-rank-1.json.gz"}, "are both of rank 0"),
        ({"rank": 1, "size": 2, "base": BASE + 10**9}, "has traces of several runs, of different times"),
    ],
)
def test_traces_that_are_not_of_one_run_are_refused(tmp_path, other, message):
    write(tmp_path, 0, 2)
    write(tmp_path, **other)
    with pytest.raises(TraceError, match=message):
        read_traces(tmp_path)


def test_the_merged_file_is_replaced_and_never_taken_for_a_rank(tmp_path):
    write(tmp_path)
    for _ in range(2):
        result = CliRunner().invoke(app, ["trace", str(tmp_path)])
        assert result.exit_code == 0, result.output
        assert "merged.json.gz has 1 of 1 ranks" in result.output
        assert result.output.splitlines()[-2].split() == ["median", "1.0", "0.5", "0.2"]
    with pytest.raises(
        TraceError, match=r"output is .*trace-rank-0001\.json\.gz, the name of a rank's trace"
    ):
        write_merged(read_traces(tmp_path), tmp_path / "trace-rank-0001.json.gz")


def test_traces_without_communication_say_why(tmp_path):
    write(tmp_path, events=[step(3, 0, 10)])
    assert "no communication is in these traces" in CliRunner().invoke(app, ["trace", str(tmp_path)]).output


@pytest.mark.processes
def test_two_ranks_of_ddp_leave_traces_that_agree_about_clock_bytes_and_the_time_they_need(tmp_path):
    (tmp_path / "train.py").write_text(TRAINING)
    job = TrainingJob(
        name="traced", folder=tmp_path, strategy="torch_ddp", workers=2, outputs=str(tmp_path / "outputs"),
        timeout="2min",
    )  # fmt: skip
    network = None if availability() == "none" else Network.parse("50Mbit")
    Local(network).launch(job).wait()
    traces = read_traces(tmp_path / "outputs" / "traces")
    assert [trace.rank for trace in traces] == [0, 1]
    table = step_times(traces)
    assert table["step"].tolist() == [3, 3, 4, 4, 5, 5, 6, 6, 7, 7]
    assert (table["exposed_ms"] > 0).all()
    assert (table["exposed_ms"] <= table["communication_ms"] + 1e-6).all()  # sums of floats
    assert (table["communication_ms"] < table["step_ms"]).all()
    if network:
        # Of two ranks each sends 2 · (2 − 1)/2 of the array: 407 kB, in 65 ms. Waiting for the other rank comes on top.
        assert table["communication_ms"].median() > 0.9 * 4 * PARAMETERS * 8 / 50e6 * 1000
    merged = [each for each in merge(traces)["traceEvents"] if each.get("cat") == "communication"]
    reduced = [each for each in merged if each["name"] == "all_reduce 407 kB"]
    assert len(reduced) == 5 * 2
    assert {math.prod(each["args"]["Input Dims"][0]) for each in reduced} == {PARAMETERS}
    # A collective ends nowhere before it has begun everywhere: with clocks that differ by more than it lasts, it would.
    spans = [sorted((e["ts"], e["ts"] + e["dur"]) for e in merged if e["pid"] == rank) for rank in (0, 1)]
    assert len(spans[0]) == 5 * 2  # an all-reduce and a barrier a step
    for (first_start, first_end), (second_start, second_end) in zip(*spans, strict=True):
        assert first_start < second_end + 500
        assert second_start < first_end + 500
