"""What a run that failed says: the cause in what its processes printed, and where all of it is."""

import textwrap
from pathlib import Path

import pytest
from conftest import RunByHand, failure_of, with_horovod

from workshop_utils.launchers import output
from workshop_utils.launchers.kubernetes import EmulatedKubernetes
from workshop_utils.launchers.local import Local
from workshop_utils.launchers.sagemaker import EmulatedSageMaker

HEADING = "Traceback (most recent call last):"
REASON = f"""\
{HEADING}
  File "/job/train.py", line 3, in <module>
    raise RuntimeError("the reason")
RuntimeError: the reason
"""
AGENT = f"""\
E1129 03:36:04.413000 12861 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 0
{HEADING}
  File "/bin/torchrun", line 10, in <module>
    sys.exit(main())
             ^^^^^^
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
train.py FAILED
============================================================
"""
DRIVER = f"""\
Command failed with exit code 1. Traceback: {HEADING}
  File "/opt/ml/input/data/sm_drivers/common/utils.py", line 193, in execute_commands
    raise subprocess.CalledProcessError(exitcode, commands)
subprocess.CalledProcessError: Command '['torchrun', 'train.py']' returned non-zero exit status 1.

"""
MPIRUN = f"{'-' * 74}\nprterun detected that one or more processes exited\n{'-' * 74}\n"
IGNORED = f"""\
Exception ignored in: <function Pool.__del__>
{HEADING}
  File "pool.py", line 1, in __del__
OSError: x
"""
CHAIN = f"""\
{REASON}
The above exception was the direct cause of the following exception:

{HEADING}
  File "a.py", line 1, in f
ValueError: it
"""
IN_LOADER = f"""\
{HEADING}
  File "/job/train.py", line 9, in <module>
    for x in loader:
KeyError: Caught KeyError in worker 0.
Original {HEADING}
  File "data.py", line 2, in __getitem__
    row
KeyError: 7
"""
OF_RANK = textwrap.indent(REASON, "[rank1]: ")
STRIPPED = "".join(f"{line.strip()}\n" for line in REASON.splitlines())
USAGE = "usage: train.py [-h] [--amp]\ntrain.py: error: unrecognized arguments: True\n"


def explanation(printed):
    run = RunByHand("worker-0")
    for line in printed.splitlines():
        run.print("worker-0", line)
    explained, _, log = output.explained(run, ["worker-0"]).rpartition("\nThe whole log is in ")
    assert log == str(run.log_folder / "worker-0.log")
    heading, _, quoted = explained.partition(":\n")
    return heading, textwrap.dedent(f"{quoted}\n")


@pytest.mark.parametrize(
    ("printed", "quoted"),
    [
        (f"hello\n{REASON}", REASON),
        (CHAIN, CHAIN),
        (IN_LOADER, IN_LOADER),
        (f"{REASON.replace('the reason', 'caught')}going on\n{REASON}{IGNORED}", REASON),
        (f"{REASON}more of it\n", f"{REASON}more of it\n"),
        (REASON + MPIRUN, REASON),
        (f"{REASON}{CHAIN}{AGENT}", REASON),
        (f"{OF_RANK}{AGENT}{DRIVER}", OF_RANK),
        # SageMaker's drivers take indents away, and lines of two ranks mix.
        (f"{HEADING}\nFile \"train.py\", line 3, in <module>\n{STRIPPED}{AGENT}{DRIVER}", STRIPPED),
        (REASON.replace("  File", '  File "<frozen runpy>", line 88, in _run_code\n  File'), REASON),
    ],
)  # fmt: skip
def test_a_traceback_is_quoted_with_its_chain_and_without_what_launchers_add(printed, quoted):
    assert explanation(printed) == ("Its traceback", quoted)


def test_long_tracebacks_and_what_follows_them_lose_their_middle():
    deep = "".join(f'  File "a.py", line {line}, in f\n    f()\n' for line in range(100))
    _, quoted = explanation(f"{HEADING}\n{deep}RecursionError: too deep\n" + "bye\n" * 1000)
    assert "\n... (172 lines)\n" in quoted
    assert "RecursionError: too deep\nbye\n" in quoted
    assert len(quoted.splitlines()) < 50


def test_without_a_traceback_the_usage_of_the_script_or_its_last_lines_are_quoted_and_a_hint_helps():
    heading, quoted = explanation(f"hello\n{USAGE}{AGENT.partition(HEADING)[0]}")
    assert heading == "It said"
    assert quoted.startswith(textwrap.indent(USAGE, "  "))
    assert "a bare flag is written `name:`" in quoted
    lines = [str(number) for number in range(100)]
    assert explanation("\n".join([*lines, MPIRUN])) == ("Its last lines", "\n".join(lines[-12:]) + "\n")


CRASH = """\
a line that ends hereFatal Python error: Segmentation fault

Thread 0x00007f0000000001 (most recent call first):
  File "/usr/lib/python3.14/threading.py", line 327 in wait
  File "/home/me/watch.py", line 5 in watch

Current thread 0x00007f0000000002 [python] (most recent call first):
  File "/usr/lib/python3.14/ctypes/__init__.py", line 519 in string_at
  File "/home/me/train.py", line 2 in inner
  File "/home/me/train.py", line 7 in <module>
  File "/opt/workshop_utils/launchers/local/job_script.py", line 48 in run

Current thread's C stack trace (most recent call first):
  Binary file "/usr/bin/python3", at _Py_DumpStack+0x31 [0x5]
  <truncated rest of calls>

Extension modules: numpy._core._multiarray_umath (total: 1)
"""


def test_a_fatal_signal_is_told_with_the_users_lines_and_what_was_printed_before():
    heading, quoted = explanation(f"hello\n{CRASH}")
    assert heading == (
        "Fatal Python error: Segmentation fault, at train.py, line 2 (in string_at). "
        "Its stack, the innermost call first"
    )
    assert quoted == (
        "  string_at (ctypes/__init__.py, line 519)\n  inner (train.py, line 2)\n  <module> (train.py, line 7)\n"
        "Its last lines:\n  hello\n  a line that ends here\n"
    )


def test_an_abort_while_python_ends_hides_no_traceback():
    ending = CRASH.replace("/home/me/", "/usr/lib/python3.14/")
    assert explanation(f"{REASON}{ending}") == ("Its traceback", f"{REASON}a line that ends here\n")


@pytest.mark.parametrize(
    ("error", "hint"),
    [
        ("ValueError: environment variable RANK expected, but not set", "--strategy torch_ddp starts"),
        ("mpi4py.MPI.Exception: MPI_ERR_RANK: invalid rank", "Without --strategy mpi"),
        (
            "torch.distributed.DistNetworkError: port: 12355 EADDRINUSE, address in use",
            "leave --strategy out",
        ),
    ],
)
def test_a_script_under_another_strategy_is_told_its_own(error, hint):
    _, quoted = explanation(f'{HEADING}\n  File "a.py", line 1, in f\n    f()\n{error}\n')
    assert hint in quoted


# Ends of what scripts for Keras 2 say under Keras 3, by the file of the last frame.
KERAS = "keras/src/utils/traceback_utils.py"
HVD = f'{KERAS}", line 2, in g\n    g()\n  File "/packages/horovod/_keras/callbacks.py'
BY_KERAS_2 = (
    (KERAS, "ValueError: Attempt to convert a value (PerReplica:{\n}) with an unsupported type"),
    (KERAS, "ValueError: pass this dataset to ClusterCoordinator.create_per_worker_dataset."),
    (KERAS, "TypeError: Trainer.compile() got an unexpected keyword argument 'experimental_run_tf_function'"),
    (KERAS, "ValueError: Argument(s) not recognized: {'lr': 0.1}"),
    (KERAS, "ValueError: The `save_format` argument is deprecated in Keras 3."),
    ("train.py", "AttributeError: module 'keras.utils' has no attribute 'experimental'"),
    (HVD, "AttributeError: module 'keras.backend' has no attribute 'get_value'"),
    ("horovod/tensorflow/__init__.py", "AttributeError: 'Variable' object has no attribute 'ref'"),
)
OTHERS = (
    (KERAS, 'ValueError: Input 0 of layer "dense" is incompatible with the layer'),
    (f"tf_{KERAS}", "ValueError: Attempt to convert a value (PerReplica:{\n}) with an unsupported type"),
    (f"tf_{HVD}", "AttributeError: 'float' object has no attribute 'dtype'"),
    ("train.py", "ValueError: pass this dataset to ClusterCoordinator.create_per_worker_dataset."),
    ("train.py", "AttributeError: 'SGD' object has no attribute 'lr'"),
    ("train.py", "TypeError: Trainer.fit() got an unexpected keyword argument 'workers'"),
    ("train.py", "AttributeError: module 'keras.layers' has no attribute 'Dens'"),
)


@pytest.mark.parametrize(("file", "error"), [*BY_KERAS_2, *OTHERS])
def test_what_only_a_script_for_keras_2_says_is_answered_with_keras_2(file, error):
    _, quoted = explanation(f'{HEADING}\n  File "/packages/{file}", line 9, in f\n    f()\n{error}\n')
    assert ("`workshop install tf-keras`" in quoted) == ((file, error) in BY_KERAS_2)


ONE_FAILS = """
    import os, time
    print("hello", flush=True)
    names = ("RANK", "OMPI_COMM_WORLD_RANK", "HOROVOD_RANK")
    if "1" in (os.environ.get(name) for name in names):
        raise RuntimeError("the reason")
    time.sleep(600)
"""
NODES = {"nodes": 2, "processes_per_node": 2}
HERE = {"workers": 2}


@pytest.mark.processes
@pytest.mark.usefixtures("nothing_is_left")
@pytest.mark.parametrize(
    ("strategy", "target", "layout"),
    [
        ("torch_ddp", Local(), HERE),
        ("mpi", Local(), HERE),
        with_horovod("horovod", Local(), HERE),
        ("torch_ddp", EmulatedSageMaker(), NODES),
        ("mpi", EmulatedSageMaker(), NODES),
        with_horovod("horovod", EmulatedSageMaker(), {**NODES, "image": "horovod"}),
        ("torch_ddp", EmulatedKubernetes(kind="PyTorchJob"), HERE),
        ("torch_ddp", EmulatedKubernetes(kind="PyTorchJob"), NODES),
        ("torch_ddp", EmulatedKubernetes(kind="TrainJob"), NODES),
        ("mpi", EmulatedKubernetes(), HERE),
    ],
)
def test_the_error_of_a_rank_is_quoted_wherever_it_fails(strategy, target, layout, make_job):
    said = failure_of(target.launch(make_job(ONE_FAILS, strategy=strategy, **layout)), 120)
    traceback, _, log = said.partition("Its traceback:\n  ")[2].rpartition("\nThe whole log is in ")
    assert traceback.startswith(HEADING)
    assert "RuntimeError: the reason" in traceback
    assert len(traceback.splitlines()) < 10, said
    assert "RuntimeError: the reason\n" in Path(log).read_text()


@pytest.mark.parametrize(
    ("name", "secret"),
    [(name, True) for name in ("ADMIN_TOKEN", "SPLUNK_TOKEN", "VIDEO_KEY", "ACCESS_TOKEN_TYPE", "api_key")]
    + [(name, False) for name in ("max_token_len", "pad-token", "image_key", "mask_token_id", "tokenizer")],
)
def test_a_secret_is_known_by_its_name(name, secret):
    assert output.is_secret(name, "abc") == secret
