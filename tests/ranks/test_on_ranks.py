"""A function on real processes: what comes back, what is refused, and who is blamed when something goes wrong."""

import contextlib
import ctypes
import gc
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import eventually, marked_processes, on_another_machine, with_horovod

from workshop_utils import on_ranks, place, rank_group
from workshop_utils.comm.communicator import PeerDied
from workshop_utils.comm.ring import ring_all_reduce, ring_bytes_sent
from workshop_utils.jobs import JobError
from workshop_utils.network import Network, availability
from workshop_utils.ranks import RanksFailed

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]


def ring(communicator, elements):
    array = np.full(elements, float(communicator.rank))
    ring_all_reduce(communicator, array)
    print("rank", communicator.rank)
    return array[0], os.getpid()


def rank_of(communicator):
    return communicator.rank


def failure_of(ranks, program, *arguments, **options):
    """What is said of ranks that fail; that nothing of them is left is for the fixture."""
    with pytest.raises(RanksFailed) as failure:
        on_ranks(ranks, program, *arguments, **options)
    return str(failure.value)


# What comes back


def test_each_rank_gives_its_value_its_lines_and_what_it_sent():
    results = on_ranks(4, ring, {"elements": 1000})
    assert [value for value, _ in results.values] == [6.0] * 4
    assert [each.rank for each in results] == [0, 1, 2, 3]
    assert [each.lines for each in results] == [(f"rank {rank}",) for rank in range(4)]
    assert {each.messages for each in results} == {6}
    assert {each.bytes_sent for each in results} == {ring_bytes_sent(4, 8000)}
    assert all(0 < each.seconds < results.seconds for each in results)
    sends = [event for event in results[2].trace if event.kind == "send"]
    assert len(sends) == 6
    assert {event.peer for event in sends} == {3}


def test_each_call_has_processes_of_its_own_without_what_the_last_one_changed():
    def program(communicator):
        before = os.environ.get("LEFT"), hasattr(np, "left")
        os.environ["LEFT"] = np.left = "yes"
        return os.getpid(), before

    first, second = (dict(on_ranks(2, program).values) for _ in range(2))
    assert len({os.getpid(), *first, *second}) == 5
    assert {*first.values(), *second.values()} == {(None, False)}


def sum_in_torch(dist):
    import torch

    tensor = torch.ones(1000) * dist.get_rank()
    dist.all_reduce(tensor)
    return tensor[0].item()


def sum_in_horovod(hvd):
    import torch

    return hvd.allreduce(torch.ones(1000) * hvd.rank(), op=hvd.Sum)[0].item()


def sum_in_tensorflow(strategy):
    import tensorflow as tf

    def replica():
        context = tf.distribute.get_replica_context()
        own = tf.ones(1000) * tf.cast(context.replica_id_in_sync_group, tf.float32)
        return context.all_reduce(tf.distribute.ReduceOp.SUM, own)

    return float(tf.function(lambda: strategy.run(replica))()[0])


@pytest.mark.parametrize(
    ("framework", "program"),
    [
        ("torch", sum_in_torch),
        with_horovod("horovod", sum_in_horovod),
        ("tensorflow", sum_in_tensorflow),
    ],
)
@pytest.mark.usefixtures("dead_proxy")
def test_a_framework_has_its_process_group_and_the_kernel_counts_its_bytes(framework, program):
    results = on_ranks(2, program, framework=framework)
    assert results.values == [1.0, 1.0]
    assert results.warm
    for each in results:
        assert each.messages is None
        # Horovod may close its link to the rendezvous meanwhile; the bytes are then not known.
        assert each.bytes_sent >= (0 if framework == "tensorflow" else 4000) or (
            framework == "horovod" and math.isnan(each.bytes_sent)
        )


def test_outside_a_notebook_a_line_says_that_a_figure_was_made_and_of_bars_the_last_state_stays():
    def program(communicator):
        import matplotlib.pyplot as plt
        from tqdm import tqdm

        print("a line", end=" ")
        plt.plot([1, 2])
        plt.show()
        for _ in tqdm(range(2), desc="outer"):
            for _ in tqdm(range(100), desc="inner", leave=False):
                pass
        display({"a": 1})  # noqa: F821  # which a rank has, as a cell does
        print('{"workshop": "display", "file": "worker-0-1-1.display"}')

    lines = on_ranks(1, program)[0].lines
    assert re.match(r"a line <Figure size \d+x\d+ with 1 Axes> \(a notebook shows this image\)", lines[0])
    # Output and errors have a pipe each, so the bar comes before or after what is printed later.
    assert len([line for line in lines if line.startswith("outer: 100%")]) == 1, lines
    assert not any("inner" in line for line in lines)
    assert "{'a': 1}" in lines
    assert '{"workshop": "display", "file": "worker-0-1-1.display"}' in lines, "there is no such file"


# What travels


class Point:
    def __init__(self, x):
        self.x = x


def test_arguments_of_all_kinds_arrive_as_copies():
    values = {
        "number": 3,
        "array": np.arange(5),
        "nested": {"list": [1, (2, {3})], "text": "ä"},
        "function": lambda x: 2 * x,
        "point": Point(7),
        "path": Path("here"),
    }

    def program(communicator, **received):
        received["array"] += communicator.rank
        return {**received, "function": received["function"](21)}

    for rank, value in enumerate(on_ranks(2, program, values).values):
        assert value["array"].tolist() == [rank, 1 + rank, 2 + rank, 3 + rank, 4 + rank]
        assert (value["number"], value["nested"]) == (3, values["nested"])
        assert (value["function"], value["path"]) == (42, Path("here"))
        assert (type(value["point"]), value["point"].x) == (Point, 7)
    assert values["array"].tolist() == [0, 1, 2, 3, 4]


def test_functions_of_global_generators_draw_other_numbers_on_each_rank_and_in_each_call():
    import random

    import torch

    drawing = random.random, np.random.rand, random.Random(1).random
    generator = torch.default_generator

    def program(communicator):
        return *(draw() for draw in drawing), torch.rand((), generator=generator).item()

    calls = [on_ranks(2, program).values for _ in range(2)]
    python, numpy, own, pytorch = zip(*(values for call in calls for values in call), strict=True)
    assert len({*python, *numpy, *pytorch}) == 3 * 2 * 2
    assert set(own) == {random.Random(1).random()}, "a generator of the notebook's own travels as it is"


def test_a_module_beside_the_notebook_travels_as_it_is_now(tmp_path, monkeypatch):
    (tmp_path / "beside.py").write_text(
        "FACTOR = 2\ndef twice(communicator):\n    return FACTOR * communicator.rank\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import beside

    beside.FACTOR = 5
    (tmp_path / "beside.py").unlink()
    assert on_ranks(2, beside.twice).values == [0, 5]


def test_ranks_work_in_the_notebooks_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data.txt").write_text("42")
    assert on_ranks(2, lambda communicator: Path("data.txt").read_text()).values == ["42", "42"]


def images(split):
    return place.load(split).count


def test_the_digits_come_to_a_program_that_loads_them_itself_or_by_a_module_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "own_loading.py").write_text("from workshop_utils.place import load\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def program(communicator):
        import own_loading

        return images("train"), own_loading.load("test").count

    assert on_ranks(2, program).values == [(1500, 297)] * 2


# What is refused

LOCK = threading.Lock()
LARGE = np.zeros(17 * 2**17)
OPEN = Path(os.devnull).open()  # noqa: SIM115


class Holder:
    def __init__(self):
        self.lock = LOCK

    def method(self, communicator):
        return communicator.rank


def uses_lock(communicator):
    return [LOCK for _ in range(3)]


def uses_large():
    return LARGE.sum()


def takes(communicator, value):
    return value


@pytest.mark.parametrize(
    ("program", "arguments", "words"),
    [
        (uses_lock, {}, "`LOCK` (lock) cannot be sent"),
        (lambda communicator: uses_large(), {}, "`LARGE` (ndarray) is too large"),
        (takes, {"value": LARGE}, "`value` (ndarray) is too large"),
        (takes, {"value": (each for each in [])}, "`value` (generator) cannot be sent"),
        (takes, {"value": OPEN}, "`value` (TextIOWrapper) cannot be sent to the ranks: it is an open file"),
        (lambda communicator, table=LOCK: table, {}, "`table` (lock) cannot be sent to the ranks"),
        (Holder().method, {}, "`program.__self__` (Holder) cannot be sent to the ranks"),
    ],
)
def test_what_cannot_travel_is_refused_by_name_before_anything_starts(program, arguments, words):
    before = marked_processes()
    with pytest.raises(JobError) as refused:
        on_ranks(2, program, arguments)
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert marked_processes() == before


@pytest.mark.parametrize(
    ("ranks", "options", "words"),
    [
        *(
            (ranks, {}, f"ranks is {ranks!r}; it must be a whole number")
            for ranks in (0, -1, "4", True, 2.0, 1001)
        ),
        (2, {"framework": "jax"}, "framework is 'jax'; it must be 'torch', 'horovod', 'tensorflow', or None"),
        (2, {"network": "fast"}, "bandwidth is 'fast'"),
        (2, {"network": 100}, "network is 100; it must be"),
        (2, {"timeout": "soon"}, "timeout is 'soon'"),
        (2, {"may_die": 1}, "may_die is 1; it must be a list of ranks, such as [1]"),
        (2, {"may_die": "1"}, "may_die is '1'; it must be a list of ranks"),
        (2, {"may_die": [2]}, "may_die is [2]; 2 is no rank: give some of 0 to 1"),
        (2, {"may_die": [True]}, "True is no rank"),
        (2, {"may_die": [0, 1]}, "may_die is [0, 1], so all ranks; at least one must live"),
        (2, {"may_die": [1], "framework": "torch"}, "with framework='torch' a rank that dies ends all"),
    ],
)
def test_a_wrong_value_is_named_with_what_would_be_right(ranks, options, words):
    with pytest.raises(JobError) as refused:
        on_ranks(ranks, rank_of, **options)
    assert words in str(refused.value)


def needs_cuda(communicator):
    raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (lambda communicator: (each for each in []), "it returned a generator, which cannot be sent back"),
        (lambda communicator: threading.Lock(), "it returned a lock, which cannot be sent back"),
        (lambda communicator: input("Name? "), "input('Name? ') cannot be answered on a rank; call it first"),
        (needs_cuda, "was in use in the process from which this one was forked"),
    ],
)
def test_what_a_rank_cannot_do_is_named(program, words):
    assert words in failure_of(1, program)


def test_a_slow_network_is_slow_and_results_say_what_was_asked_for():
    slow = on_ranks(2, ring, {"elements": 125_000}, network="100Mbit")
    assert (
        min(each.seconds for each in slow) > 0.05
    )  # 1 MB cannot take less than 80 ms, apart from a first burst
    assert "100Mbit" in slow.network
    assert (slow.program, slow.arguments, str(slow.links)) == (
        "ring",
        {"elements": 125_000},
        "100Mbit each way for each process",
    )
    fast = on_ranks(2, rank_of)
    assert (fast.network, fast.links, fast.program, fast.arguments) == (None, None, "rank_of", {})


# A death that is part of the experiment


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def outlive_rank_1(communicator):
    """On rank 0, what came of 1 and 2: first from either, then to and from 1 alone, then from 2 again."""
    rank, array, came = communicator.rank, np.zeros(3), []
    if rank == 1:
        communicator.send(0, array)
        die()
    if rank == 0:
        came.append(communicator.recv(1, array))
        operations = [
            lambda: communicator.recv([1, 2], array),
            lambda: communicator.recv(1, array),
            lambda: communicator.send(1, np.zeros(1_000_000)),  # more than the buffers on its way take
            lambda: communicator.send_recv(1, array, 1, array.copy()),
        ]
        for operation in operations:
            with pytest.raises(PeerDied) as death:
                operation()
            came.append(death.value.rank)
        communicator.send(2, array)
        came.append(communicator.recv([2], array))
    else:
        communicator.recv(0, array)
        communicator.send(0, array)
    return came


@pytest.mark.parametrize("links", [None, "network namespaces", "stamped links"])
def test_a_rank_that_may_die_does_and_the_others_go_on(links, monkeypatch):
    if links == "stamped links":
        monkeypatch.setattr(Network, "emulation", lambda *_: links)
    if links == "network namespaces" and availability() == "none":
        pytest.skip("this machine makes no network namespaces")
    results = on_ranks(3, outlive_rank_1, network=links and "100Mbit", may_die=[1])
    assert results.values == [[1, 1, 1, 1, 1, 2], None, []]
    assert results.died == (1,)
    assert math.isnan(results[1].seconds)
    assert "rank 1 returned: was killed" in str(results)
    assert (links or "") in (results.network or "")


def wait_for_the_dead(communicator):
    if communicator.rank == 1:
        die()
    communicator.recv(1, np.zeros(1))


def meet_the_dead(communicator):
    if communicator.rank == 1:
        time.sleep(0.1)
        die()
    communicator.barrier()


def wait_for_each_other(communicator):
    if communicator.rank == 1:
        die()
    communicator.recv(2 - communicator.rank, np.zeros(1))


def fail_instead(communicator):
    if communicator.rank == 1:
        raise ValueError("bad luck")
    communicator.recv(1, np.zeros(1))


@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            wait_for_the_dead,
            [r"rank[s 0,]* [02] of 3 raised PeerDied: rank 1 has died", "in wait_for_the_dead"],
        ),
        (meet_the_dead, ["raised PeerDied: rank 1 has died during barrier"]),
        (
            wait_for_each_other,
            ["rank 1 of 3 had been killed, which `may_die` allows", "rank 0 waits for rank 2"],
        ),
        (fail_instead, ["rank 1 of 3 raised ValueError: bad luck"]),
        (lambda communicator: communicator.rank == 1 and os._exit(3), ["rank 1 of 3 ended with exit code 3"]),
        (lambda communicator: communicator.rank == 2 and die(), ["rank 2 of 3 was killed by SIGKILL"]),
    ],
)
def test_what_the_others_do_not_outlive_is_told_of_them(program, words):
    timeout = "10s" if program is wait_for_each_other else "60s"
    text = failure_of(3, program, may_die=[1], timeout=timeout)
    assert all(re.search(word, text) for word in words), text


def test_a_rank_that_may_die_may_live():
    results = on_ranks(3, rank_of, may_die=[1, 2])
    assert (results.values, results.died) == ([0, 1, 2], ())


# Who is to blame


def test_the_rank_that_raised_is_named_with_its_traceback_and_not_those_that_failed_in_consequence():
    def fails():
        raise ValueError("bad luck")

    def program(communicator):
        print("rank", communicator.rank, "begins")
        communicator.barrier()
        if communicator.rank == 1:
            fails()
        communicator.barrier()

    with pytest.raises(RanksFailed) as failure:
        on_ranks(4, program)
    text = str(failure.value)
    assert text.startswith("rank 1 of 4 raised ValueError: bad luck; the others were stopped.\nTraceback")
    assert 'raise ValueError("bad luck")' in text
    assert "in program" in text
    assert "rank.py" not in text
    assert text.endswith("Before, rank 1 of 4 had printed:\n  rank 1 begins")
    assert [each.lines for each in failure.value.results] == [(f"rank {rank} begins",) for rank in range(4)]
    assert failure.value.results.values == [None] * 4


class Everywhere(Exception):
    """Takes its time to be told, so that no rank has ended before all have raised."""

    def __str__(self):
        time.sleep(0.5)
        return "here, too"


def test_ranks_that_fail_alike_are_named_together():
    def program(communicator):
        communicator.barrier()
        raise Everywhere

    assert failure_of(3, program).startswith("all 3 ranks raised Everywhere: here, too.\n")


class Speechless(Exception):
    def __str__(self):
        raise RuntimeError("it has no words")

    __repr__ = __reduce__ = __str__


def test_an_error_that_cannot_be_shown_is_named_all_the_same():
    def program(communicator):
        if communicator.rank == 1:
            raise Speechless
        communicator.barrier()

    text = failure_of(2, program)
    assert text.startswith(
        "rank 1 of 2 raised Speechless: <exception str() failed>; the others were stopped.\n"
    )
    assert "in program\n    raise Speechless\n" in text
    text = failure_of(1, lambda _: Speechless())
    assert text.startswith(
        "rank 0 of 1 raised TypeError: it returned a Speechless, which cannot be sent back: it has"
    )


@pytest.mark.parametrize(
    ("leave", "words"),
    [
        (lambda: sys.exit("no data"), "rank 1 of 3 raised SystemExit: no data"),
        (lambda: sys.exit(3), "rank 1 of 3 raised SystemExit: 3"),
        (lambda: os._exit(3), "rank 1 of 3 ended with exit code 3"),
        (lambda: os._exit(0), "rank 1 of 3 ended without returning from the program"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "rank 1 of 3 was killed by SIGKILL"),
        (lambda: os.kill(os.getpid(), signal.SIGTERM), "rank 1 of 3 was killed by SIGTERM"),
    ],
)
@pytest.mark.parametrize("others_wait", [True, False])
def test_a_rank_that_leaves_is_named(leave, words, others_wait):
    def program(communicator):
        for step in range(1000):
            if communicator.rank == 1 and step == 10:
                leave()
            if others_wait:
                communicator.barrier()

    assert failure_of(3, program).startswith(words)


@pytest.mark.parametrize(
    ("crash", "words"),
    [
        (
            lambda: ctypes.string_at(0),
            "SIGSEGV; the others were stopped. Fatal Python error: Segmentation fault",
        ),
        (lambda: os.abort(), "SIGABRT; the others were stopped. Fatal Python error: Aborted"),
    ],
)
@pytest.mark.parametrize("framework", [None, "torch"])
def test_a_fatal_signal_is_told_with_the_programs_line(crash, words, framework):
    def program(group):
        print("before")
        if os.environ["RANK"] == "1":
            crash()
        group.barrier()

    line = program.__code__.co_firstlineno + 3
    with pytest.raises(RanksFailed) as failure:
        on_ranks(2, program, framework=framework)
    text = str(failure.value)
    assert text.startswith(f"rank 1 of 2 was killed by {words}, at test_on_ranks.py, line ")
    assert f"  program (test_on_ranks.py, line {line})\nIts last lines:\n  before" in text
    assert failure.value.results[1].lines == ("before",)


def test_a_rank_that_leaves_after_an_error_elsewhere_is_not_blamed():
    def program(communicator):
        if communicator.rank == 1:
            raise ValueError("the cause")
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so it is killed in the end
        time.sleep(60)

    assert failure_of(2, program).startswith("rank 1 of 2 raised ValueError: the cause")


def test_a_rank_killed_in_a_collective_of_pytorch_is_named():
    def program(dist):
        import torch

        for step in range(1000):
            if dist.get_rank() == 1 and step == 10:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.all_reduce(torch.ones(1000))

    assert failure_of(4, program, framework="torch").startswith("rank 1 of 4 was killed by SIGKILL")


def test_at_the_time_limit_stacks_are_grouped_and_say_who_waits_for_whom():
    def program(communicator):
        if communicator.rank == 2:
            time.sleep(60)
        ring_all_reduce(communicator, np.zeros(100))

    with pytest.raises(RanksFailed) as failure:
        on_ranks(4, program, timeout="6s")
    text = str(failure.value)
    assert text.startswith("the program did not end within 6 s. rank 2 waits at test_on_ranks.py, line ")
    assert "rank 0, rank 1, rank 3 wait at test_on_ranks.py, line " in text
    assert text.count("innermost call first") == 2
    for rank, peer in ((0, 3), (1, 0), (3, 2)):
        assert f"\nrank {rank} waits for rank {peer}, in ring_all_reduce" in text
    assert not any(each.lines for each in failure.value.results)


def test_ranks_that_have_all_returned_and_do_not_end_show_where_they_stand():
    def program(communicator):
        os._exit = lambda code: time.sleep(60)

    text = failure_of(2, program, timeout="8s")
    assert " ranks 0, 1 of 2 had returned from the program. rank 0, rank 1 wait at test_on_ranks.py, " in text


# What programs do beside


def test_much_output_and_a_large_value_come_back_whole():
    def program(communicator):
        for number in range(100_000):
            print(number)
        sys.stdout.write("no end")
        return np.arange(6_250_000.0)

    (result,) = on_ranks(1, program)
    assert result.lines == (*map(str, range(100_000)), "no end")
    assert (result.value.nbytes, result.value[-1]) == (50_000_000, 6_249_999)


@pytest.mark.parametrize(
    "start",
    [
        lambda: threading.Thread(target=time.sleep, args=(600,)).start(),
        lambda: subprocess.Popen(["sleep", "600"], start_new_session=True) and None,
        lambda: os.fork() == 0 and time.sleep(600),
        lambda: os.fork() and None,
    ],
)
def test_what_a_program_leaves_running_ends_with_it(start):
    began = time.monotonic()
    assert on_ranks(2, lambda communicator: start() or communicator.rank).values == [0, 1]
    assert time.monotonic() - began < 300  # half of what it would sleep


# Interrupts and kills of the process that calls

OWNER = """
import sys, time
from workshop_utils import on_ranks

def program(communicator):
    while True:
        communicator.barrier()

def rank_of(communicator):
    return communicator.rank

try:
    print("ready", flush=True)  # here, since the interrupt may come as soon as this line is read
    on_ranks(3, program, network=sys.argv[1] or None)
except KeyboardInterrupt:
    print("interrupted", flush=True)
print(on_ranks(2, rank_of).values, flush=True)
"""


@contextlib.contextmanager
def owner(tmp_path, network):
    """A process that calls `on_ranks`, and its first ranks do not end."""
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    process = subprocess.Popen([sys.executable, str(script), network], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("seconds", "network"), [(0.0, ""), (0.1, "100Mbit"), (0.2, ""), (0.3, "100Mbit"), (1.0, "")]
)
def test_an_interrupt_leaves_nothing_and_the_next_call_works(seconds, network, tmp_path):
    with owner(tmp_path, network) as process:
        time.sleep(seconds)
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=30)[0] == "interrupted\n[0, 1]\n"


DEAF = """
import os, signal, time
from pathlib import Path
from workshop_utils import on_ranks

def program(communicator):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # so that to end them takes longer than the interrupts
    Path("rank", str(os.getpid())).touch()
    time.sleep(1000)

try:
    on_ranks(2, program)
except KeyboardInterrupt:
    print([Path("/proc", rank.name).exists() for rank in Path("rank").iterdir()], flush=True)
"""


def test_three_interrupts_in_a_moment_are_one_and_come_when_no_rank_is_left(tmp_path):
    ready = tmp_path / "rank"
    ready.mkdir()
    process = subprocess.Popen([sys.executable, "-c", DEAF], cwd=tmp_path, stdout=subprocess.PIPE, text=True)
    assert eventually(lambda: len(list(ready.iterdir())) == 2)
    for _ in range(3):
        process.send_signal(signal.SIGINT)
        time.sleep(0.06)
    assert process.communicate(timeout=60)[0] == "[False, False]\n"


@pytest.mark.parametrize(("seconds", "network"), [(0.05, ""), (0.15, "100Mbit"), (0.2, ""), (1.0, "100Mbit")])
def test_a_killed_kernel_leaves_nothing(seconds, network, tmp_path):
    with owner(tmp_path, network) as process:
        time.sleep(seconds)
        process.kill()
        process.wait()
    assert eventually(lambda: not marked_processes()), marked_processes()


@pytest.mark.parametrize("seconds", [0.001, 0.003, 0.01, 0.3])
def test_an_interrupt_while_the_framework_is_imported_leaves_no_server(seconds):
    from workshop_utils.launchers.local import warm

    before = marked_processes()
    alarm = threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt) as interrupt:
        assert [alarm.start(), warm.WarmServer(("time", "tensorflow"))]
    assert eventually(lambda: marked_processes().keys() <= before.keys())
    assert interrupt.tb, "as a notebook keeps what led to the last error"


def test_a_rank_that_has_returned_is_not_said_to_have_died():
    def program(communicator):
        if communicator.rank == 1:
            return
        ring_all_reduce(communicator, np.ones(9))

    text = failure_of(3, program)
    assert text.startswith("rank 1 has already left; others still waited for it in ring_all_reduce: rank")


@pytest.mark.parametrize(
    ("prepare", "program", "words"),
    [
        (
            "mount -t tmpfs -o size=64k none /mnt && head -c 60k /dev/zero > /mnt/others",
            "None",
            ["No space left on device", "if it is that of /mnt, where runs have their folders"],
        ),
        (
            "mount -t tmpfs -o ro none /dev/shm",
            "__import__('multiprocessing').Lock()",
            ["raised OSError", "in /dev/shm, which is full or cannot be written here: mount a tmpfs there"],
        ),
    ],
)
def test_a_full_disk_is_named_and_so_is_memory_that_cannot_be_shared(prepare, program, words):
    script = f"""
from workshop_utils import on_ranks
try:
    on_ranks(2, lambda communicator: {program})
except RuntimeError as error:
    print(error)
"""
    said = on_another_machine(prepare, script, TMPDIR="/mnt" if "/mnt" in prepare else "/tmp")
    assert [word for word in words if word not in said] == [], said


# Ranks that stay


def test_a_rank_that_stays_holds_nothing_of_the_others_which_a_garbage_collection_would_close():
    def program(communicator):
        gc.collect()
        return ring(communicator, 1000)[0]

    with rank_group(4) as group:
        assert group.run(program).values == group.run(program).values == [6.0] * 4


def test_what_a_rank_returned_before_it_ended_is_not_taken_for_what_the_next_call_returns():
    def program(communicator, number):
        signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
        return number, os.getpid(), os.getppid()

    with rank_group(2) as group:
        (_, _, watch), (_, pid, _) = group.run(program, {"number": 1}).values
        os.kill(watch, signal.SIGSTOP)  # so that it hears of the end and of the next call at the same time
        os.kill(pid, signal.SIGUSR2)
        threading.Timer(0.5, os.kill, (watch, signal.SIGCONT)).start()
        with pytest.raises(RanksFailed, match=r"^rank 1 of 2 ended without returning from the program"):
            group.run(program, {"number": 2})
        assert [number for number, *_ in group.run(program, {"number": 3}).values] == [3, 3]


def test_forks_of_ranks_end_when_what_watches_over_them_is_killed():
    def program(communicator):
        if os.fork() == 0:
            time.sleep(1000)
        return os.getppid()

    with rank_group(2) as group:
        os.kill(group.run(program).values[0], signal.SIGKILL)
        with pytest.raises(RanksFailed, match="the process that watches over it was killed"):
            group.run(program)
        assert not marked_processes(), "before the run says that it has ended"


def test_a_watch_that_is_told_to_end_leaves_no_results():
    with pytest.raises(RanksFailed, match=r"^the ranks were stopped$"):
        on_ranks(2, lambda _: [os.kill(os.getppid(), signal.SIGTERM), time.sleep(1000)])


def test_a_group_whose_block_has_ended_is_not_called_any_more():
    with rank_group(2) as group:
        assert group.run(rank_of).values == [0, 1]
    with pytest.raises(JobError, match="the block of rank_group has ended"):
        group.run(rank_of)
