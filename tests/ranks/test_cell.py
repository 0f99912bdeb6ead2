"""The cell magic %%ranks, in IPython's shell and in a notebook's kernel."""

import atexit
import io
import logging
import os
import random
import re
import signal
import sys
from pathlib import Path
from textwrap import dedent

import nbformat
import psutil
import pytest
import yaml
from conftest import eventually
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbclient import NotebookClient
from traitlets.config import Config

from workshop_utils.ranks.results import Results

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]


@pytest.fixture(scope="module")
def shell(tmp_path_factory):
    settings = {
        "InteractiveShell": {"ipython_dir": str(tmp_path_factory.mktemp("ipython")), "colors": "nocolor"},
        "HistoryManager": {"hist_file": ":memory:"},
    }
    before = sys.modules["__main__"]  # a shell puts its own in its place
    shell = InteractiveShell.instance(config=Config(settings))
    shell.run_cell("%load_ext workshop_utils", store_history=True)
    yield shell
    atexit.unregister(shell.atexit_operations)
    shell.atexit_operations()
    InteractiveShell.clear_instance()
    sys.modules["__main__"] = before


@pytest.fixture
def run(shell):
    """`run(cell)` is the cell's value, and what it has printed."""

    def run(text):
        with capture_output() as captured:
            result = shell.run_cell(dedent(text).lstrip("\n"), store_history=True)
        return result.result, captured.stdout + captured.stderr

    return run


def values(result):
    assert isinstance(result[0], Results), result[1]
    return result[0].values


def test_each_rank_executes_the_cell_and_the_value_of_its_last_expression_is_shown(run):
    results, printed = run("""
        %%ranks 3
        import numpy as np
        from workshop_utils.comm.ring import ring_all_reduce
        array = np.full(9, float(rank))
        ring_all_reduce(communicator, array)
        print("of", size)
        array[0]
    """)
    assert results.values == [3.0] * 3
    assert {each.bytes_sent for each in results} == {96}
    assert sorted(printed.splitlines()[:3]) == ["[0] of 3", "[1] of 3", "[2] of 3"]
    assert "ranks 0 to 2 returned: 3.0" in printed
    assert printed.count("of 3") == 3, "lines that were shown are not shown again"


def test_the_notebooks_variables_travel_and_what_the_cell_assigns_stays_on_the_ranks(run, shell):
    run("numbers = [1, 2]\nrank = 'mine'\ndef add(x):\n    return x + len(numbers)")
    cell = "%%ranks 2\nnumbers.append(rank)\nown = 1\nadd(rank), numbers, own"
    assert values(run(cell)) == [(3, [1, 2, 0], 1), (4, [1, 2, 1], 1)]
    assert shell.user_ns["numbers"] == [1, 2]
    assert shell.user_ns["rank"] == "mine"
    assert "own" not in shell.user_ns


def test_variables_that_the_cell_does_not_name_or_assigns_itself_stay_where_they_are(run):
    run("import threading\nlock = threading.Lock()")
    assert values(run("%%ranks 2\nrank")) == [0, 1]
    assert values(run("%%ranks 2\nlock = rank + 1\nlock")) == [1, 2]
    _, printed = run("%%ranks 2\nlock")
    assert "`lock` (lock) cannot be sent to the ranks" in printed
    assert "Traceback" not in printed


def test_functions_and_classes_of_the_cell_may_call_each_other_and_be_pickled(run):
    results = run("""
        %%ranks 2
        import dataclasses, pickle
        def first(x):
            return second(x) + 1
        def second(x):
            return 10 * x
        @dataclasses.dataclass
        class Thing:
            x: int
            def value(self):
                return first(self.x)
        [pickle.loads(pickle.dumps(Thing(rank))).value() for _ in range(size) if rank >= 0]
    """)
    assert values(results) == [[1, 1], [11, 11]]


def test_the_line_in_the_magic_may_name_variables_and_all_options(run):
    run("count = 2")
    results, _ = run("""
        %%ranks {count} --framework torch --network 100Mbit --timeout 60s
        import torch
        ones = torch.ones(2) * rank
        dist.all_reduce(ones)
        ones.tolist()
    """)
    assert results.values == [[1.0, 1.0]] * 2
    assert results.network.startswith("100Mbit")


def test_a_cell_without_a_value_or_with_a_semicolon_shows_none(run):
    results, printed = run("%%ranks 2\nx = rank")
    assert results.values == [None, None]
    assert "returned" not in printed
    assert run("%%ranks 2\nrank;") == (None, "")


def test_open_and_exit_are_pythons_own(run, shell, tmp_path):
    (tmp_path / "file").write_text("42")
    assert "open" in shell.user_ns
    assert values(run(f"%%ranks 2\nopen({str(tmp_path / 'file')!r}).read()")) == ["42", "42"]
    run("def read(name):\n    return open(name).read()")
    assert values(run(f"%%ranks 2\nread({str(tmp_path / 'file')!r})")) == ["42", "42"]
    assert values(run("%%ranks 2\nexit()")) == [None, None]


@pytest.mark.parametrize(
    ("cell", "message"),
    [
        (
            "%%ranks 2\nx = 1\nfor",
            r"JobError: .*Cell In\[N\], line 3\n    for\n +\^\nSyntaxError: invalid syntax",
        ),
        (
            "%%ranks 2\n\n\nreturn 1",
            r"JobError: .*Cell In\[N\], line 4\n[^T]*SyntaxError: 'return' outside function",
        ),
        ("%%ranks 2\n!ls", "JobError: .*cannot hold % or ! commands"),
        ("%%ranks 2\n%time 1", "JobError: .*cannot hold % or ! commands"),
        ("%%ranks 2 --framework jax\n1", "UsageError: argument --framework: invalid choice: 'jax' .*torch.*"),
        ("%%ranks 2 --network '100\n1", "UsageError: No closing quotation"),
        ("%%ranks 0\n1", "JobError: ranks is 0; .*"),
        (
            "%%ranks 1\nbreakpoint()",
            r"RanksFailed: rank 0 of 1 raised RuntimeError: nobody can answer break(.|\n)*",
        ),
    ],
)
def test_a_mistake_is_shown_once_and_in_one_sentence(cell, message, run, shell):
    number = shell.execution_count
    _, printed = run(cell)
    assert re.fullmatch(message.replace("[N", rf"[{number}"), printed.strip()), printed


def test_an_error_shows_the_cells_own_lines(run, shell):
    run("def fails(rank):\n    if rank == 1:\n        raise ValueError('bad luck')")
    number = shell.execution_count
    _, printed = run("%%ranks 2\n\n# comment\nfails(rank)\ncommunicator.barrier()")
    assert printed.startswith(
        "RanksFailed: rank 1 of 2 raised ValueError: bad luck; the others were stopped.\n"
    )
    assert f"  Cell In[{number}], line 4, in <module>\n    fails(rank)\n" in printed
    assert f"  Cell In[{number - 1}], line 3, in fails\n    raise ValueError('bad luck')\n" in printed
    assert "workshop_utils" not in printed


def test_a_fatal_signal_is_told_with_the_cells_own_lines(run, shell):
    run("import ctypes\ndef fails(rank):\n    if rank == 1:\n        ctypes.string_at(0)")
    number = shell.execution_count
    _, printed = run("%%ranks 2\nfails(rank)\ncommunicator.barrier()")
    at = f"Fatal Python error: Segmentation fault, at Cell In[{number - 1}], line 4 (in string_at). "
    assert printed.startswith(
        f"RanksFailed: rank 1 of 2 was killed by SIGSEGV; the others were stopped. {at}"
    )
    assert f"  fails (Cell In[{number - 1}], line 4)\n  <module> (Cell In[{number}], line 2)\n" in printed
    assert printed.count("Fatal Python error") == 1, "what Python printed is not shown as it came"


SHOWS = """
import matplotlib.pyplot as plt, pandas as pd
from tqdm.notebook import tqdm
for step in tqdm(range(3), desc="bar"):
    print("step", end=" ")
plt.plot([1, 2])
plt.show()
plt.figure(figsize=(1, 1))
display(pd.DataFrame({"a": [rank + 5]}), "text")
"""


def test_figures_displays_and_bars_are_shown_below_the_cell_with_their_rank(shell):
    with capture_output() as captured:
        shell.run_cell(f"%%ranks 2\n{SHOWS}", store_history=True)
    shown = [output.data for output in captured.outputs]
    kinds = sorted(kind for data in shown for kind in data if kind != "text/plain")
    assert kinds == ["image/png"] * 4 + ["text/html"] * 2
    assert all(data["image/png"].startswith("iVBOR") for data in shown if "image/png" in data)
    for rank in (0, 1):
        assert sum(f"<td>{rank + 5}</td>" in data.get("text/html", "") for data in shown) == 1
        assert captured.stdout.count(f"[{rank}]\n") == 3
        assert f"[{rank}] 'text'\n" in captured.stdout
        assert re.search(rf"^\[{rank}\] bar: 100%\|.* 3/3 ", captured.stdout, re.MULTILINE)


def test_the_display_and_the_bars_that_a_notebook_has_imported_need_no_notebook_on_a_rank(run):
    run("from IPython.display import display\nfrom tqdm.notebook import trange")
    results, printed = run("%%ranks 1\nimport sys\ndisplay(5)\n'IPython' in sys.modules")
    assert results.values == [False], "whose import takes a second"
    assert "[0] 5\n" in printed
    _, printed = run("%%ranks 1\nfor _ in trange(2):\n    pass")
    assert re.search(r"^\[0\] 100%\|.* 2/2 ", printed, re.MULTILINE), printed


def test_logs_and_warnings_are_as_in_the_notebook(run):
    run("""
        import logging, warnings
        logging.basicConfig(level=logging.INFO, format="%(levelname)s of the notebook: %(message)s", force=True)
        own_log = logging.getLogger("own")
        own_log.setLevel(logging.ERROR)
        warnings.filterwarnings("ignore", "not that")
    """)
    _, printed = run("""
        %%ranks 1
        logging.info("hello")
        logging.debug("nothing")
        own_log.warning("nothing")
        own_log.error("bad")
        for _ in range(3):
            warnings.warn("this")
        warnings.warn("not that")
    """)
    run("logging.root.handlers.clear(), logging.root.setLevel('WARNING'), warnings.filters.pop(0)")
    lines = [line for line in printed.splitlines() if line.startswith("[0] ")]
    assert lines[:2] == ["[0] INFO of the notebook: hello", "[0] ERROR of the notebook: bad"]
    assert [line.partition("UserWarning: ")[2] for line in lines[2:] if "UserWarning" in line] == ["this"]


TELLS = """
import numpy as np, pandas as pd, torch
def told():
    tensor = torch.ones(2) / 3
    return [
        str(tensor.dtype), str(tensor), torch.is_grad_enabled(), torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(), str(np.ones(2) / 3), np.geterr()["over"],
        str(pd.DataFrame({"a": [1 / 3]})),
    ]
"""
SETS = """
torch.set_default_dtype(torch.float64)
torch.set_printoptions(precision=7)
torch.set_grad_enabled(False)
torch.use_deterministic_algorithms(True)
torch.set_float32_matmul_precision("high")
np.set_printoptions(precision=3)
np.seterr(over="raise")
pd.set_option("display.precision", 2)
"""
RESETS = """
torch.set_default_device(None)
torch.set_default_dtype(torch.float32)
torch.set_printoptions(profile="default")
torch.set_grad_enabled(True)
torch.use_deterministic_algorithms(False)
torch.set_float32_matmul_precision("highest")
np.set_printoptions(precision=8)
np.seterr(over="warn")
pd.reset_option("display.precision")
"""


def test_settings_of_libraries_travel(run):
    run(TELLS)
    at_first = run("told()")[0]
    try:
        run(SETS)
        told = run("told()")[0]
        assert all(now != before for now, before in zip(told, at_first, strict=True))
        assert values(run("%%ranks 1\ntold()")) == [told]
        assert values(run("%%ranks 1\nimport torch as own\nstr(own.ones(1).dtype)")) == ["torch.float64"]
        run("torch.set_default_device('cuda:0')")
        _, printed = run("%%ranks 1\n1")
        assert "JobError: PyTorch's default device is 'cuda:0', where ranks may not find it" in printed
    finally:
        run(RESETS)
    assert values(run("%%ranks 1\ntold()")) == [at_first]


def test_where_ipython_has_no_names_for_cells_a_failure_shows_their_files(shell, run, monkeypatch):
    monkeypatch.delattr(type(shell.compile), "format_code_name")  # IPython 7, which Colab and Kaggle have
    _, printed = run("""
        def fails(communicator):
            return 1 / 0

        from workshop_utils import on_ranks
        try:
            on_ranks(2, fails)
        except Exception as error:
            print(error)
    """)
    assert re.search(r'File ".+", line 2, in fails\n +return 1 / 0\n', printed)
    assert "ZeroDivisionError" in printed


NOTEBOOK = [
    "%load_ext workshop_utils\nimport os, signal\nfrom workshop_utils import on_ranks\n"
    "number, kernel = 20, os.getpid()",
    "%%ranks 2\nprint('rank', rank)\nnumber + rank",
    "def program(communicator):\n    if communicator.rank == 1:\n        1 / 0\n    communicator.barrier()",
    "on_ranks(2, program)",
    "%%ranks 2 --timeout 10s\nif rank == 1:\n    signal.pause()\ncommunicator.barrier()",
    "%%ranks 2\nif rank == 0:\n    os.kill(kernel, signal.SIGINT)\nwhile True:\n    communicator.barrier()",
    "on_ranks(2, lambda communicator: communicator.rank).values",
]


def test_a_notebook_shows_lines_a_table_and_its_own_cells_in_errors_and_may_be_interrupted(tmp_path):
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in NOTEBOOK])
    client = NotebookClient(notebook, kernel_name="python3", allow_errors=True, timeout=300)
    with client.setup_kernel(cwd=str(tmp_path)):
        for index, cell in enumerate(notebook.cells):
            client.execute_cell(cell, index)
    outputs = [cell.outputs for cell in notebook.cells]
    assert outputs[0] == outputs[2] == []
    assert sorted(outputs[1][0].text.splitlines()) == ["[0] rank 0", "[1] rank 1"]
    assert "<pre" in outputs[1][1].data["text/html"]
    assert "rank 0 returned: 20" in outputs[1][1].data["text/plain"]
    (error,) = outputs[3]
    assert error.traceback[0].startswith(
        "RanksFailed: rank 1 of 2 raised ZeroDivisionError: division by zero"
    )
    assert "  Cell In[3], line 3, in program\n    1 / 0\n" in error.traceback[0]
    assert "rank 1 waits at Cell In[5], line 3 (in <module>)." in outputs[4][0].traceback[0]
    assert outputs[5][-1].ename == "KeyboardInterrupt"
    assert outputs[6][0].data["text/plain"] == "[0, 1]"


# Functions of the notebook


def test_functions_of_the_notebook_use_the_names_of_the_cell(run):
    run(
        "rate = 0.1\ndef step(w):\n    return w - 2 * rate\ndef place():\n    return rank, size, communicator.rank"
    )
    assert values(run("%%ranks 2\nrate = 0.5\nstep(1.0), place()")) == [(0.0, (0, 2, 0)), (0.0, (1, 2, 1))]
    run("class Model:\n    def rate(self):\n        return rate\nmodel, handlers = Model(), {'step': [step]}")
    assert values(run("%%ranks 1\nrate = 2\nmodel.rate(), handlers['step'][0](1.0)")) == [(2, -3.0)]
    assert values(run("%%ranks 1\nmodel.rate(), handlers['step'][0](1.0)")) == [(0.1, 0.8)]


def test_pools_of_processes_find_functions_and_classes_of_the_notebook(run):
    run("class Item:\n    def __init__(self, x):\n        self.x = x")
    run("scale = 2\ndef double(x):\n    return Item(scale * x)")
    cell = """
        %%ranks 2
        import multiprocessing
        scale = 10
        with multiprocessing.get_context("fork").Pool(2) as pool:
            items = pool.map(double, [1, 2])
        [item.x + rank for item in items]
    """
    assert values(run(cell)) == [[10, 20], [11, 21]]


def test_the_notebooks_future_statements_and_top_level_await_hold_on_ranks(run):
    cell = "%%ranks 1\nimport asyncio\ndef f(x: Later): pass\nawait asyncio.sleep(0, f.__annotations__['x'])"
    assert "NameError: name 'Later' is not defined" in run(cell)[1]
    run("from __future__ import annotations")
    assert values(run(cell)) == ["Later"]


def test_what_the_notebook_changed_in_its_own_modules_holds_on_ranks(run, tmp_path, monkeypatch):
    (tmp_path / "settings.py").write_text("RATE, TOKEN = 0.1, object()\n")
    (tmp_path / "helper.py").write_text(
        "import settings\nCONFIG = {'lr': 0.1}\nUNSET = settings.TOKEN\n"
        "def values(): return CONFIG['lr'], settings.RATE, UNSET is settings.TOKEN, name()\ndef name(): return 'own'\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    run("import helper, settings\nfrom helper import values")
    assert values(run("%%ranks 1\nvalues()")) == [(0.1, 0.1, True, "own")]
    run("helper.CONFIG['lr'], settings.RATE = 0.5, 0.7\nhelper.name = lambda: 'mine'")
    assert values(run("%%ranks 1\nvalues()")) == [(0.5, 0.7, True, "mine")]
    assert values(run("%%ranks 1\nhelper.values()")) == [(0.5, 0.7, True, "mine")]


# Ranks that stay


@pytest.fixture
def kept(run):
    yield run
    run("%ranks stop")


def test_ranks_that_stay_keep_their_names_processes_and_random_states(kept):
    first = values(kept("%%ranks 2 --keep\nimport os, random\nrandom.seed(rank)\nown = [rank]\nos.getpid()"))
    cell = "%%ranks 2 --keep\nown.append(size)\nos.getpid(), own, random.random()"
    second, third = values(kept(cell)), values(kept(cell))
    assert [value[:2] for value in second] == [(first[0], [0, 2]), (first[1], [1, 2])]
    numbers = [[each.random() for _ in range(2)] for each in map(random.Random, range(2))]
    assert [[value[2] for value in values] for values in zip(second, third, strict=True)] == numbers
    assert "name 'own' is not defined" in kept("%%ranks 2\nown")[1], "other cells have ranks of their own"
    assert values(kept("%%ranks 2 --keep\nlen(own)")) == [3, 3]


def test_ranks_that_stay_keep_their_folder_and_variables_of_the_environment(kept, tmp_path, monkeypatch):
    kept("%%ranks 1 --keep\nimport os, sys\nos.chdir('/')\nsys.path.append('own')\nos.environ['OWN'] = '1'")
    cell = "%%ranks 1 --keep\nos.getcwd(), sys.path[-1], os.environ['OWN']"
    assert values(kept(cell)) == [("/", "own", "1")]
    monkeypatch.chdir(tmp_path)
    assert values(kept(cell)) == [(str(tmp_path), "own", "1")]


def test_ranks_that_stay_have_the_settings_that_either_side_made_last(kept):
    import numpy as np

    cell = "%%ranks 1 --keep\nimport numpy as np\nnp.geterr()['over'], str(np.ones(1) / 3)"
    with np.errstate(over="ignore"):
        assert values(kept(cell)) == [("ignore", "[0.33333333]")]
        kept("%%ranks 1 --keep\nnp.seterr(over='raise');")
        with np.printoptions(precision=2):
            assert values(kept(cell)) == [("raise", "[0.33]")]
        np.seterr(over="print")
        assert values(kept(cell)) == [("print", "[0.33333333]")]


def test_what_a_kept_cell_assigns_counts_until_the_notebook_assigns_it(kept):
    kept("rate, other = 1, [1]\ndef rates():\n    return rate, other")
    assert values(kept("%%ranks 2 --keep\nrate = 2\nrates()")) == [(2, [1])] * 2
    result = kept("%%ranks 2 --keep\nrates()")
    assert values(result) == [(2, [1])] * 2
    assert "Sent" not in result[1]
    kept("rate = 1")  # the very object that it was
    result = kept("%%ranks 2 --keep\nrates()")
    assert values(result) == [(1, [1])] * 2
    assert "Sent to the ranks again, as the notebook has it now: rate\n" in result[1]
    kept("other.append(2)")
    result = kept("%%ranks 2 --keep\nrates()")
    assert values(result) == [(1, [1])] * 2
    assert "The ranks still have the old value, until the notebook assigns it again: other\n" in result[1]
    kept("other = [*other]\ndef rates():\n    return other")
    result = kept("%%ranks 2 --keep\nrates()")
    assert values(result) == [[1, 2]] * 2
    assert "it now: other, rates\n" in result[1]


def test_what_shares_objects_with_what_is_sent_comes_with_it(kept):
    kept("weights = [0]\nsteps = {'weights': weights}\nother = [0]")
    cell = "%%ranks 2 --keep\nsteps['weights'][0] += 1\nother[0] += 1\nweights, other"
    assert values(kept(cell)) == [([1], [1])] * 2
    kept("steps = {'weights': weights}")
    result = kept(cell)
    assert values(result) == [([1], [2])] * 2
    assert "as the notebook has it now: steps\n" in result[1]
    assert "Sent to the ranks again, since steps shares objects with it: weights\n" in result[1]
    kept("%%ranks 2 --keep\nweights = [7]\nweights")
    kept("steps = {'weights': weights}")
    result = kept(cell)
    assert values(result) == [([7], [3])] * 2
    assert "On the ranks, weights is a different object, and shares nothing with steps\n" in result[1]


def test_what_shares_objects_and_is_not_in_the_cell_comes_as_well(kept):
    kept("first = [0]\nsecond = [first]")
    assert values(kept("%%ranks 1 --keep\nfirst[0] = 1\nsecond")) == [[[1]]]
    kept("first = first")
    result = kept("%%ranks 1 --keep\nfirst")
    assert values(result) == [[0]]
    assert "Sent to the ranks again, since first shares objects with it: second\n" in result[1]
    assert values(kept("%%ranks 1 --keep\nfirst is second[0]")) == [True]


def test_what_shares_nothing_that_can_change_leaves_the_ranks_as_they_are(kept):
    kept("""
        import dataclasses
        import numpy as np, torch
        device, weights, rate = torch.device("cpu"), np.zeros(2), np.float64(0.1)
        @dataclasses.dataclass
        class Config:
            rate: float = 0.1
        class Net(torch.nn.Linear):
            def __init__(self):
                super().__init__(1, 1)
                self.device, self.config, self.steps = device, Config(), 0
        net = Net()
    """)
    assert values(kept("%%ranks 1 --keep\nnet.steps += 3\nweights += 1\nweights.tolist()")) == [[1, 1]]
    kept("""
        batch, rates = np.ones(3), [np.float64(0.2)]
        @dataclasses.dataclass
        class Point:
            x: int = 1
        def accuracy(net, device=device):
            return net.steps
        class Meter:
            def __init__(self):
                self.device = device
        meter = Meter()
    """)
    result = kept("%%ranks 1 --keep\nmeter, batch, rates, Point()\nweights.tolist(), accuracy(net)")
    assert values(result) == [([1, 1], 3)]
    assert "Sent" not in result[1]


def test_what_new_values_name_of_the_ranks_is_theirs(kept):
    kept("import random\nfrom typing import List\nclass Box:\n    n = 0\ndef f(): return 1")
    kept("first = Box()\ncounts = {'type': List[int], 'draw': random.random, 'n': 0}")
    assert values(kept("%%ranks 1 --keep\nBox.n, counts['n'] = 7, 5\nfirst.n, f()")) == [(7, 1)]
    kept("second, table, others = Box(), {f: 1}, {'type': List[int], 'draw': random.random}")
    result = kept(
        "%%ranks 1 --keep\nothers, first.n, second.n, Box.n, type(second) is Box, table[f], counts['n']"
    )
    assert values(result)[0][1:] == (7, 7, 7, True, 1, 5)
    assert "Sent" not in result[1]


def test_what_a_kept_cell_assigns_counts_more_than_what_the_notebook_did_before(kept):
    kept("%%ranks 1 --keep\n1")
    kept("x = 0")
    kept("%%ranks 1 --keep\nx = 7")
    assert values(kept("%%ranks 1 --keep\nx")) == [7]
    kept("%timeit -n 1 -r 1 x = 0")  # a variable of its own
    assert values(kept("%%ranks 1 --keep\nx")) == [7]
    kept("x = 0")
    assert values(kept("%%ranks 1 --keep\nx")) == [0]
    kept("del x")
    result = kept("%%ranks 1 --keep\nx")
    assert values(result) == [0]
    assert "The ranks still have what the notebook has deleted: x\n" in result[1]


def test_sparse_tensors_are_held_and_gradients_with_a_graph_refused(kept):
    kept("import torch\nsparse, y = torch.eye(3).to_sparse(), [1]")
    assert values(kept("%%ranks 1 --keep\nsparse.sum().item(), y")) == [(3, [1])]
    kept("y = [2]")
    assert values(kept("%%ranks 1 --keep\nsparse.sum().item(), y")) == [(3, [2])]
    kept("w = torch.ones(1, requires_grad=True)\n(w.grad,) = torch.autograd.grad(w**3, w, create_graph=True)")
    assert "its gradient has a graph, which a rank has not" in kept("%%ranks 1 --keep\nw")[1]


def test_nothing_is_said_to_be_sent_where_it_is_too_large(kept):
    kept("import numpy as np\nx = 1")
    kept("%%ranks 1 --keep\nx")
    kept("x, p, q = 2, np.zeros(1_500_000), np.ones(1_500_000)")
    result = kept("%%ranks 1 --keep\nx, p, q")[1]
    assert "more than 16 MiB" in result
    assert "Sent" not in result
    assert "it now: x\n" in kept("%%ranks 1 --keep\nx")[1]


def test_an_interrupt_before_anything_is_sent_changes_nothing(kept):
    kept("""
        import os, signal
        x, is_interrupting = 0, False
        class Slow:
            def __reduce__(self):
                if is_interrupting:
                    os.kill(os.getpid(), signal.SIGINT)
                return Slow, ()
    """)
    assert values(kept("%%ranks 1 --keep\nx = 5\nx")) == [5]
    kept("x, is_interrupting, slow = 0, True, Slow()")
    assert (
        "KeyboardInterrupt: interrupted before anything was sent to the ranks"
        in kept("%%ranks 1 --keep\nslow, x")[1]
    )
    kept("is_interrupting = False")
    assert values(kept("%%ranks 1 --keep\nx")) == [0]


def test_a_group_is_called_by_one_thread_at_a_time(run):
    run("""
        import threading, time
        from workshop_utils import rank_group
        def program(group):
            time.sleep(0.5)
            return 1
        def call():
            try:
                found.append(group.run(program).values)
            except Exception as error:
                found.append(str(error))
        found = []
        with rank_group(1) as group:
            group.run(program)
            threads = [threading.Thread(target=call) for _ in range(2)]
            for each in threads: each.start()
            for each in threads: each.join()
    """)
    found = run("found")[0]
    assert [1] in found
    assert any("called by another thread" in each for each in found if each != [1])


def test_an_edited_module_is_told_of_where_it_is_used_and_refused_where_it_is_no_python(
    kept, tmp_path, monkeypatch
):
    file = tmp_path / "edited_again.py"
    file.write_text("state = {}\ndef f(): return 1\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kept("import importlib, edited_again")
    cell = "%%ranks 1 --keep\nedited_again.f(), edited_again.state"
    assert values(kept(cell)) == [(1, {})]
    kept("edited_again.state['a'] = 1")
    result = kept(cell)
    assert values(result) == [(1, {"a": 1})]
    assert "as the notebook has it now: edited_again.state\n" in result[1]
    file.write_text("state = {}\ndef f(): return 'two'\n")
    kept("importlib.reload(edited_again)")
    assert "edited" not in kept("%%ranks 1 --keep\n1")[1], "this cell does not use it"
    result = kept(cell)
    assert values(result) == [("two", {})]
    assert "edited_again was edited: ranks import it anew" in result[1]
    assert "was edited" not in kept(cell)[1]
    file.write_text("def f() return\n")
    assert "edited_again was edited, and ranks cannot import it" in kept(cell)[1]
    assert values(kept("%%ranks 1 --keep\n1")) == [1]
    file.unlink()
    assert "No such file" in kept(cell)[1]


def test_functions_and_classes_that_were_changed_in_place_travel(kept):
    kept("class Trainer:\n    def __init__(self, rate):\n        self.rate = rate\ntrainer = Trainer(1)")
    assert values(kept("%%ranks 1 --keep\nseen = [rank]\ntrainer.rate")) == [1]
    kept("def fit(self):\n    return 2 * self.rate\nTrainer.fit = fit\ntrainer = Trainer(2)")
    assert values(kept("%%ranks 1 --keep\ntrainer.fit(), seen")) == [(4, [0])]
    kept("class Faster(Trainer):\n    pass\nfaster = Faster(3)")
    assert values(kept("%%ranks 1 --keep\nfaster.fit()")) == [6]
    kept("Trainer.new = lambda self: 7\nfaster = Faster(4)")
    assert values(kept("%%ranks 1 --keep\nfaster.new()")) == [7]
    kept("""
        from workshop_utils import rank_group
        class Config:
            rate = 1
        def rate(group, config):
            return config.rate
        with rank_group(1) as group:
            found = [group.run(rate, {"config": Config}).values]
            Config.rate = 2
            found += [group.run(rate, {"config": Config()}).values]
    """)
    assert kept("found")[0] == [[1], [2]]


def test_an_edited_module_is_new_on_ranks_that_stay(kept, tmp_path, monkeypatch):
    (tmp_path / "edited.py").write_text("RATE = 1\ndef rate(): return 'old', RATE\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    kept("import edited, importlib\nfrom edited import rate")
    cell = "%%ranks 1 --keep\nrate(), edited.rate()"
    assert values(kept(cell)) == [(("old", 1), ("old", 1))]
    (tmp_path / "edited.py").write_text("RATE = 22\ndef rate(): return 'edited', RATE\n")
    kept("importlib.reload(edited)\nfrom edited import rate\nedited.RATE = 3")
    assert values(kept(cell)) == [(("edited", 3), ("edited", 3))]


def test_an_assignment_counts_whatever_it_assigns_and_below_whatever_magic(kept):
    kept("flag, found = True, [1]")
    kept("%%ranks 1 --keep\nflag = False\nfound.append(2)")
    cell = "%%ranks 1 --keep\nflag, found"
    assert values(kept(cell)) == [(False, [1, 2])]
    kept("%%time\nflag = True\nfound += [5]")
    assert values(kept(cell)) == [(True, [1, 5])]
    kept("class Model:\n    flag = 1")  # another's
    assert "Sent" not in kept(cell)[1]


def test_only_what_changed_is_said_to_have_changed(kept):
    kept(
        "import abc, enum, os\nclass Kind(enum.Enum):\n    A = 1\nclass Base(abc.ABC):\n    lr = 1\nbase = Base()"
    )
    cell = "%%ranks 1 --keep\nKind.A, base.lr, Base; os.environ.get('NEW')"
    kept(cell)
    assert "old value" not in kept(cell)[1]
    kept("Base.lr, os.environ['NEW'] = 2, 'new'")
    result = kept(cell)
    assert "The ranks still have the old value, until the notebook assigns it again: Base\n" in result[1]
    assert values(result) == ["new"]
    kept("del os.environ['NEW']")
    assert values(kept(cell)) == [None]


def test_a_child_that_a_cell_forks_answers_nothing(kept):
    cell = "%%ranks 1 --keep\nimport os\nif child := os.fork():\n    os.waitpid(child, 0)\nbool(child)"
    assert values(kept(cell)) == [True]
    assert values(kept("%%ranks 1 --keep\nimport time\ntime.sleep(0.2)\n'next'")) == ["next"]


def test_a_child_that_a_cell_forks_does_not_speak_for_its_rank(kept):
    cell = (
        "import os\nif not (child := os.fork()):\n    raise ValueError('mine')\nos.waitpid(child, 0)[1] > 0"
    )
    result = kept(f"%%ranks 1 --keep\n{cell}")
    assert values(result) == [True]
    assert "[0] ValueError: mine\n" in result[1]
    assert values(kept("%%ranks 1 --keep\n'next'")) == ["next"]


def test_a_child_that_a_cell_forks_ends_as_python_ends(kept):
    result = kept("""
        %%ranks 1 --keep
        import os, sys
        def code_of(leave):
            if not (child := os.fork()):
                leave()
            return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        codes = [code_of(lambda: sys.exit(code)) for code in (None, False, 3, -1, "", "words")]
        [*codes, code_of(lambda: 1 / 0), code_of(lambda: sys.stderr.close() or sys.exit(3))]
    """)
    assert values(result) == [[0, 0, 3, 255, 1, 1, 1, 3]]
    assert "[0] words\n" in result[1]
    assert "SystemExit" not in result[1]
    assert "[0] ZeroDivisionError: division by zero\n" in result[1]
    assert "rank.py" not in result[1]


def test_a_reloaded_extension_knows_the_ranks_that_stay(kept):
    (pid,) = values(kept("%%ranks 1 --keep\nimport os\nos.getpid()"))
    kept("%reload_ext workshop_utils")
    assert values(kept("%%ranks 1 --keep\nos.getpid()")) == [pid]


def test_what_is_otherwise_on_ranks_is_told(run):
    run(
        "import torch\nsize = 28\ndef area():\n    return size * size\ndef names():\n    return len(globals())"
    )
    result = run("%%ranks 2\narea()")
    assert values(result) == [4, 4]
    assert "Also in functions of the notebook, these are the rank's: size\n" in result[1]
    assert (
        "`names` finds only names that the cell, or functions, use by themselves.\n"
        in run("%%ranks 1\nnames();")[1]
    )
    run(
        "weight = torch.nn.Parameter(torch.ones(2))\nweight.sum().backward()\nplain = torch.ones(1, requires_grad=True)"
    )
    run("(3 * plain).sum().backward()")
    assert values(run("%%ranks 1\nweight.grad.tolist(), plain.grad.item()")) == [([1.0, 1.0], 3.0)]


def test_a_class_that_comes_back_is_not_told_to_its_bases_again(run, shell):
    run(
        "class Base:\n    kinds = []\n    def __init_subclass__(cls):\n        Base.kinds.append(cls.__name__)"
    )
    run("class Kind(Base):\n    pass")
    assert type(values(run("%%ranks 2\nKind()"))[1]) is shell.user_ns["Kind"]
    assert shell.user_ns["Base"].kinds == ["Kind"]
    shell.displayhook.flush()  # what `Out` has kept of it


def test_hints_help_with_what_tutorials_write(run):
    cell = "{}\nimport torch.distributed as dist\ndist.init_process_group('gloo')"
    assert "\nRanks have joined it already: leave" in run(cell.format("%%ranks 2 --framework torch"))[1]
    run("class Unnamed:\n    pass\nimport pickle\npickled = pickle.dumps(Unnamed())")
    assert "\nA rank has what its cell names: name it" in run("%%ranks 1\npickle.loads(pickled)")[1]


def test_what_kept_cells_assign_themselves_is_not_the_notebooks(kept):
    kept("total, other = 0, 1")
    for number in (1, 2, 3):
        result = kept("%%ranks 2 --keep\ntotal += 1\ntotal")
        assert values(result) == [number] * 2
        assert "Sent" not in result[1]
    kept("%%ranks 1\ntotal = 7")
    kept("%%capture\nother = 2")
    kept("get_ipython().run_cell('1' + '')")
    result = kept("%%ranks 2 --keep\ntotal, other")
    assert values(result) == [(3, 2)] * 2
    _, printed = kept("file = open('/dev/null')\ntotal = 0"), kept("%%ranks 2 --keep\ntotal, file")[1]
    assert "`file` (TextIOWrapper) cannot be sent" in printed
    assert values(kept("%%ranks 2 --keep\ntotal")) == [0] * 2


def test_instances_of_a_class_and_users_of_a_logger_share_nothing(kept):
    kept("import logging\nimport numpy as np\nlog = logging.getLogger('app')\nclass Box:\n    n = 0")
    kept("one, two = Box(), Box()\nfirst, second = {'log': log, 'n': 0}, {'log': log}\narray = np.zeros(4)")
    kept("%%ranks 1 --keep\none.n += 5\nfirst['n'] += 1\nown = 1\narray.sum()")
    result = kept("%%ranks 1 --keep\ntwo.n, second\none.n, first['n']")
    assert values(result) == [(5, 1)]
    assert result[1].startswith("Out[") or "Sent" not in result[1]
    kept("view = array[1:3]")
    result = kept("%%ranks 1 --keep\nview[:] = 5\narray.sum()")
    assert values(result) == [10.0]
    assert "since view shares objects with it: array\n" in result[1]


GONE = "The ranks have ended, and what was in them is gone: run again what made it.\n"
ENDS = {
    "raised ZeroDivisionError: division by zero": "1 / 0",
    "rank 1 of 2 was killed by SIGKILL": """
        if rank:
            os.kill(os.getpid(), signal.SIGKILL)
        communicator.barrier()
    """,
    "rank 1 of 2 ended without returning from the program": """
        if rank:
            os._exit(0)
        communicator.barrier()
    """,
    "the program did not end within 3 s. rank": "while rank:\n    pass\ncommunicator.barrier()",
    "KeyboardInterrupt: interrupted. rank": """
        os.kill(owner, signal.SIGINT)
        while True:
            communicator.barrier()
    """,
}


@pytest.mark.parametrize(("words", "cell"), ENDS.items(), ids=[*ENDS])
def test_whatever_ends_ranks_that_stay_is_told_and_the_next_cell_has_others(cell, words, kept):
    kept("import os, signal\nowner = os.getpid()")
    assert values(kept("%%ranks 2 --keep\nown = rank")) == [None, None]
    _, printed = kept(f"%%ranks 2 --keep --timeout 3s\n{dedent(cell).strip()}")
    assert printed.startswith(("RanksFailed: ", "KeyboardInterrupt: "))
    assert words in printed
    assert printed.endswith(GONE)
    _, printed = kept("%%ranks 2 --keep\nown")
    assert printed.startswith("These ranks are new; what earlier ones had is gone.\n")
    assert "name 'own' is not defined" in printed


@pytest.mark.parametrize(  # what starts the ranks counts too, and importing PyTorch takes long on a busy machine
    ("options", "limit"), [("", 8), ("--keep", 8), ("--framework torch", 25)]
)
def test_at_the_time_limit_only_ranks_that_have_not_returned_are_said_to_wait(options, limit, kept, shell):
    at = f"Cell In[{shell.execution_count}], line 3"
    _, printed = kept(f"%%ranks 2 --timeout {limit}s {options}\nimport time\nif rank: time.sleep(99)")
    assert printed.removesuffix(GONE) == (
        f"RanksFailed: the program did not end within {limit} s. rank 0 of 2 had returned from the program. "
        f"rank 1 waits at {at} (in <module>).\n"
        f"The stack of rank 1, the innermost call first:\n  <module> ({at})\n"
    )


def test_a_rank_that_dies_between_cells_is_told_by_the_next(kept):
    pids = values(kept("%%ranks 2 --keep\nimport os\nos.getpid()"))
    os.kill(pids[1], signal.SIGKILL)
    _, printed = kept("%%ranks 2 --keep\nrank")
    assert printed.startswith("RanksFailed: rank 1 of 2 was killed by SIGKILL")
    assert values(kept("%%ranks 2 --keep\nrank")) == [0, 1]


def test_ranks_that_stay_are_ended_after_an_idle_hour(kept, monkeypatch):
    monkeypatch.setattr("workshop_utils.ranks.IDLE_SECONDS", 0.2)
    (pid,) = values(kept("%%ranks 1 --keep\nimport os\nos.getpid()"))
    eventually(lambda: not psutil.pid_exists(pid))
    _, printed = kept("%%ranks 1 --keep\nrank")
    assert printed.startswith("RanksFailed: the ranks had nothing to do for")


def test_ranks_that_stay_are_only_called_as_they_were_begun(kept):
    kept("%%ranks 2 --keep --network 1Gbit\n1")
    _, printed = kept("%%ranks 3 --keep\n1")
    assert printed.startswith(
        "JobError: %%ranks 3 --keep: the 2 ranks that stay have network 1Gbit, framework None and"
    )
    assert kept("%%ranks 2 --keep\n1")[0].network.startswith("1Gbit")
    kept("%ranks stop")
    assert kept("%%ranks 2 --keep --network 1Gbit\n1;") == (None, "")
    assert "UsageError: %ranks knows `%ranks stop`" in kept("%ranks start")[1]


CELLS = yaml.safe_load(Path(__file__).with_name("cells.yaml").read_text(encoding="utf-8"))


def outcome(shell, cell, shown):
    """What a cell gives: the text of its value, its lines, and its error, as far as it has them."""
    shown.seek(0), shown.truncate()
    result = shell.run_cell(cell, store_history=True)
    value, error = result.result, result.error_before_exec or result.error_in_exec
    if isinstance(value, Results):
        value = value.values if len(value) > 1 else value.values[0]
    lines = shown.getvalue().partition(f"Out[{shell.execution_count - 1}]: ")[0].splitlines()
    text = f"{type(error).__name__}: {error}".removesuffix(": ") if error else ""
    raised = re.match(r"RanksFailed: rank \d of 1 raised (.*)\.\n", text)
    whole = {
        "value": repr(value) if value is not None else "",
        "lines": [re.sub(r"^\[\d\] ", "", line) for line in lines],
        "error": raised[1] if raised else text,
    }
    return {name: each for name, each in whole.items() if each}


@pytest.mark.parametrize("situation", CELLS)
def test_a_cell_on_ranks_does_what_a_plain_cell_does(situation, shell, tmp_path, monkeypatch):
    entry, shown = CELLS[situation], io.StringIO()
    for name in ("stdout", "stderr"):  # for all cells, since a handler of logging keeps its stream
        monkeypatch.setattr(sys, name, shown)
    monkeypatch.setattr(logging.root, "handlers", [])  # pytest's
    monkeypatch.setattr(shell, "_showtraceback", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    variables = shell.user_ns.keys() - shell.user_ns_hidden
    shell.drop_by_id({name: shell.user_ns[name] for name in variables if name[0] != "_"})
    # IPython sets neither `_` nor `__` where something else has assigned it, as Python's own display of values does.
    monkeypatch.delattr("builtins._", raising=False)
    shell.push({name: getattr(shell.displayhook, name) for name in ("_", "__", "___")}, interactive=False)
    shell.compile.reset_compiler_flags()
    assert "error" not in (made := outcome(shell, entry["notebook"], shown)), made
    on_ranks = outcome(shell, f"%%ranks {entry.get('ranks', 1)}\n{entry['cell']}", shown)
    # Only now, since a cell on ranks leaves the notebook as it was.
    plain = None if "ranks" in entry else outcome(shell, entry["cell"], shown)
    shell.run_cell(entry.get("after", ""))
    if plain is not None:
        assert ("error" in plain) == entry.get("raises", False), plain
        assert ("differs" in entry) == (plain != entry.get("instead", plain)), plain
    assert on_ranks == entry.get("instead", plain)
