"""Without Horovod a lesson shows what was recorded with it, and its names work over PyTorch's process group."""

from types import SimpleNamespace

import nbformat
import numpy as np
import pytest
from IPython.core.inputtransformer2 import TransformerManager

from workshop_utils.lessons import selection, without_horovod
from workshop_utils.ranks import on_ranks

CELL = f"{without_horovod.MARK}\nprint('run')"


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """`run(cell, has_horovod)` is what a cell shows, where a lesson has CELL with outputs."""
    outputs = [
        nbformat.v4.new_output("stream", text="recorded\n"),
        nbformat.v4.new_output("display_data", {"text/plain": "a figure"}),
    ]
    cells = [nbformat.v4.new_markdown_cell(CELL), nbformat.v4.new_code_cell(CELL, outputs=outputs)]
    (tmp_path / "notebooks").mkdir()
    nbformat.write(nbformat.v4.new_notebook(cells=cells), str(tmp_path / "notebooks" / "05_lesson.ipynb"))
    monkeypatch.setattr(selection, "lessons_folder", lambda: tmp_path)

    def run(cell, has_horovod):
        monkeypatch.setattr(without_horovod, "has_horovod", lambda: has_horovod)
        manager = TransformerManager()
        shell = SimpleNamespace(input_transformers_cleanup=manager.cleanup_transforms)
        without_horovod.register(shell)
        without_horovod.register(shell)  # as by two imports of checks
        exec(manager.transform_cell(cell), {})
        return capsys.readouterr().out

    return run


def test_a_marked_cell_runs_with_horovod_and_shows_its_recorded_outputs_without(run):
    assert run(CELL, has_horovod=True) == "run\n"
    said, text, figure = run(f"{CELL}\n", has_horovod=False).splitlines()
    assert "`workshop install horovod`" in said
    assert text == "recorded"
    assert "a figure" in figure


def test_a_marked_cell_that_was_changed_says_what_it_needs_and_others_run(run):
    said = run(f"{CELL}\nprint('changed')", has_horovod=False)
    assert said.startswith("This cell needs Horovod, which is not installed: `workshop install horovod`")
    assert said.count("\n") == 1
    assert run("print('run')", has_horovod=False) == "run\n"


@pytest.mark.processes
@pytest.mark.parametrize("size", [1, 3])
def test_horovods_names_over_pytorch_train_as_one_process_on_all_batches(size):
    def train(hvd, images, rate, compression):
        import torch

        torch.manual_seed(hvd.rank())
        model = torch.nn.Linear(5, 1)
        plain = torch.optim.SGD(model.parameters(), rate, momentum=0.5)
        options = {"compression": getattr(hvd.Compression, compression)}
        optimizer = hvd.DistributedOptimizer(plain, model.named_parameters(), **options)
        if hvd.rank() == 0:  # as from a checkpoint, with another rate
            optimizer.param_groups[0]["lr"] = 2 * rate
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        hvd.broadcast_optimizer_state(optimizer, root_rank=0)
        for _ in range(4):
            optimizer.zero_grad()
            model(torch.tensor(images[hvd.rank() :: hvd.size()])).square().mean().backward()
            optimizer.step()
        total = hvd.allreduce(torch.tensor([1.0, hvd.rank()]), op=hvd.Sum)
        return model.weight.detach().numpy(), total.tolist()

    images = np.random.default_rng(0).standard_normal((6, 5)).astype(np.float32)

    def trained(ranks, compression):
        arguments = {"program": train, "images": images, "rate": 0.1, "compression": compression}
        return on_ranks(ranks, without_horovod.over_torch, arguments, framework="torch").values

    ((expected, _),) = trained(1, "none")
    for compression, tolerance in (("none", 1e-6), ("fp16", 1e-3)):
        for weights, total in trained(size, compression):
            np.testing.assert_allclose(weights, expected, rtol=0, atol=tolerance)
            assert total == [size, sum(range(size))]


@pytest.mark.processes
def test_what_only_horovod_has_says_so():
    import torch

    nobody = SimpleNamespace(barrier=None, get_rank=None, get_world_size=None)
    hvd, weight = without_horovod.HorovodOverTorch(nobody), torch.nn.Parameter(torch.zeros(1))
    plain = torch.optim.SGD([weight], 0.1)
    for call in (
        lambda: hvd.allgather(weight),
        lambda: hvd.DistributedOptimizer(plain, groups=1),
        lambda: hvd.DistributedOptimizer(plain).synchronize(),
    ):
        with pytest.raises(AttributeError, match=without_horovod.MISSING):
            call()
