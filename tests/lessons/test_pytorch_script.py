"""The PyTorch script equals one process on every mesh, but for one line: norms' gradients over tensor ranks."""

import inspect
import sys

import pytest

from workshop_utils import on_ranks
from workshop_utils.network.ports import PortReservation

pytestmark = pytest.mark.processes

SHAPES = [(4, 1), (2, 2)]  # data × tensor
LINE, RIGHT_LINE = "self.weight.to_local()", "self.weight.to_local(grad_placements=[Partial()])"


@pytest.fixture(scope="module")
def script():
    from workshop_utils.lessons.gauntlet import pytorch_script

    return pytorch_script


def differences(dist, sources):
    """What differs from one process, by source and shape; a gradient's is relative to the norm of all gradients."""
    import copy
    import types

    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.nn.functional import cross_entropy

    def mean_loss(model, batches):
        logits = [model(tokens).flatten(0, 1) for tokens, _ in batches]
        return cross_entropy(torch.cat(logits), torch.cat([targets.flatten() for _, targets in batches]))

    def of(source, mesh):
        script = types.ModuleType("script")
        exec(source, vars(script))
        # Shares of 3 or 6 paragraphs, of unequal lengths.
        batches = [script.batch_of(script.paragraphs(), 12, step) for step in range(2)]
        model = script.build().double()
        loss = mean_loss(model, batches[:1])
        loss.backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        norm = torch.nn.utils.get_total_norm(gradients.values()).item()
        training = script.make(script.build().double(), mesh)
        with torch.no_grad():
            values = {"evaluate": training.evaluate(batches) - mean_loss(model, batches).item()}
        values["loss"] = training.step(batches[0]) - loss.item()
        for name, parameter in training.module.named_parameters():
            difference = parameter.grad.full_tensor() - gradients[name]
            values[name] = difference.norm().item() / norm
        values["norm"] = training.update() / norm - 1
        # Go on with a restarted training, and without.
        restarted = script.make(script.build(seed=1).double(), mesh)
        # A copy: the optimizer takes the very tensors that it is given.
        restarted.load_state_dict(copy.deepcopy(training.state_dict()))
        losses = [
            [each.step(batches[1]), each.update(), each.evaluate(batches)] for each in (training, restarted)
        ]
        values["restart"] = max(abs(one - other) for one, other in zip(*losses, strict=True))
        return {name: abs(value) for name, value in values.items()}

    names = "data", "tensor"
    meshes = {shape: init_device_mesh("cpu", shape, mesh_dim_names=names) for shape in SHAPES}
    return [{shape: of(source, mesh) for shape, mesh in meshes.items()} for source in sources]


@pytest.fixture(scope="module")
def outcomes(script):
    """Of each rank: the differences of the script as it is, and of the script with the right line."""
    source = inspect.getsource(script)
    assert source.count(LINE) == 1
    right = source.replace(LINE, RIGHT_LINE).replace("import DTensor,", "import DTensor, Partial,")
    return on_ranks(4, differences, {"sources": [source, right]}, framework="torch").values


def test_with_the_right_line_every_mesh_equals_one_process(outcomes):
    for _, right in outcomes:
        for shape in SHAPES:
            assert max(right[shape].values()) < 1e-12, shape


def test_as_it_is_the_norms_alone_are_wrong_and_only_over_tensor_ranks(outcomes):
    for shipped, _ in outcomes:
        assert max(shipped[4, 1].values()) < 1e-12
        norms = {name for name in shipped[2, 2] if name.endswith("norm.weight")}
        assert all(shipped[2, 2][name] > 1e-4 for name in norms)
        assert {name for name, value in shipped[2, 2].items() if value > 1e-12} == norms | {"norm"}


def test_a_run_goes_on_from_its_checkpoint(script, monkeypatch, tmp_path, capsys):
    def last_line(*options):
        with PortReservation(1) as port:
            here = {"MASTER_PORT": port.ports[0], "MASTER_ADDR": "127.0.0.1", "RANK": 0, "WORLD_SIZE": 1}
            for name, value in here.items():
                monkeypatch.setenv(name, str(value))
            monkeypatch.setattr(sys, "argv", ["pytorch_script.py", "--batch-size", "4", *options])
            script.main()
        return capsys.readouterr().out.splitlines()[-1]

    whole = last_line("--steps", "4")
    last_line("--steps", "2", "--checkpoint", str(tmp_path / "saved"))
    assert last_line("--steps", "4", "--checkpoint", str(tmp_path / "saved")) == whole
