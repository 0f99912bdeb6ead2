"""The FSDP2 job trains as one process does, on any number of ranks, and goes on from what a killed run has saved."""

import argparse
import importlib.util
import inspect
import math
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from launching import JOBS, job_of, killed, launched
from torch import nn

from workshop_utils.parallel.gpt import GPT, GPTSizes, batch_of, cross_entropy, manual
from workshop_utils.runs import RunFailed

pytestmark = [pytest.mark.processes, pytest.mark.usefixtures("nothing_is_left")]

MODEL = {"layers": 2, "width": 24, "heads": 4, "sequence": 20}
SIZES = GPTSizes(**MODEL)
STEPS, BATCH, WARM_UP = 10, 24, 4
WINDOWS = 61  # three ranks, in passes of 4, validate 21, 20 and 20 of them: two have none for the last pass


def fields(workers, **arguments):
    """What `launched` takes for a run on `workers` ranks of one node."""
    arguments = {**MODEL, "batch_size": BATCH, **arguments}
    return {"nodes": 1, "processes_per_node": workers, "arguments": arguments}


def weights(folder):
    """The parameters that a run has saved in `folder`, by name."""
    return torch.load(folder / "model.pt", weights_only=True)


def assert_equal_up_to_rounding(found, expected):
    """Except for keys' biases: they change no attention, and Adam makes whole steps of a gradient of rounding."""
    assert found.keys() == expected.keys()
    for name in expected:
        pair = [tensor.detach().clone() for tensor in (found[name], expected[name])]
        if name.endswith("qkv.bias"):
            for tensor in pair:
                tensor.view(SIZES.heads, 3, SIZES.head_width)[:, 1] = 0
        torch.testing.assert_close(*pair, rtol=0, atol=2e-5)


@pytest.fixture(scope="module")
def by_one_process():
    """The parameters after plain training, and their loss on what the last tenth of the text begins with."""
    text = manual()
    end = len(text) - len(text) // 10
    model = GPT(SIZES, seed=0)
    groups = [[p for p in model.parameters() if (p.dim() == 1) == is_vector] for is_vector in (False, True)]
    optimizer = torch.optim.AdamW(
        [{"params": groups[0], "weight_decay": 0.1}, {"params": groups[1], "weight_decay": 0}],
        betas=(0.9, 0.95),
    )
    for step in range(1, STEPS + 1):
        tokens, targets = batch_of(text[:end], step, BATCH, SIZES.sequence)
        cross_entropy(model(tokens), targets).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        part = (step - WARM_UP) / (STEPS - WARM_UP + 1)
        rate = step / WARM_UP if step <= WARM_UP else (1 + math.cos(math.pi * part)) / 2
        for group in optimizer.param_groups:
            group["lr"] = 0.003 * rate
        optimizer.step()
        optimizer.zero_grad()
    held_out = torch.tensor(list(text[end:]))
    with torch.no_grad():
        tokens, targets = (
            part[: WINDOWS * SIZES.sequence].view(WINDOWS, -1) for part in (held_out, held_out[1:])
        )
        loss = cross_entropy(model(tokens), targets).item()
    return dict(model.named_parameters()), loss


@pytest.mark.parametrize(
    ("workers", "more"),
    [(1, {}), (3, {"accumulate": 2, "recompute": 1}), (4, {"replicas": 2, "accumulate": 3})],
    ids=["one rank", "three, accumulating and recomputing", "HSDP, accumulating"],
)
def test_ranks_train_and_validate_as_one_process(workers, more, by_one_process, tmp_path):
    arguments = {"steps": STEPS, "warmup_steps": WARM_UP, "validation_windows": WINDOWS, **more}
    run = launched("gpt_fsdp", tmp_path, **fields(workers, **arguments))
    assert_equal_up_to_rounding(weights(tmp_path), by_one_process[0])
    (loss,) = run.metrics["validation_loss"].dropna()
    assert loss == pytest.approx(by_one_process[1], abs=1e-5)  # a window counted twice would change more
    assert set(run.metrics["rank"]) == {0}  # all ranks' metrics are the same
    assert any(line.text.startswith("no checkpoints: ") for line in run.logs(worker="worker-0"))


def test_bfloat16_halves_what_is_gathered_and_trains(tmp_path):
    sent = {}
    for dtype in ("float32", "bfloat16"):
        run = launched("gpt_fsdp", **fields(2, steps=STEPS, dtype=dtype))
        losses, nbytes = (run.metrics[name].dropna().tolist() for name in ("loss", "bytes_sent"))
        sent[dtype] = nbytes[-1]
        assert losses[-1] < losses[0] - 0.2
    parameters = sum(parameter.numel() for parameter in GPT(SIZES).parameters())
    blocks = sum(parameter.numel() for parameter in GPT(SIZES).layers[1:-1].parameters())
    # A rank of two sends the half that it keeps: blocks' twice a step, what is around them once.
    gathered = STEPS * (parameters + blocks) / 2
    assert sent["float32"] - sent["bfloat16"] == pytest.approx(gathered * (4 - 2), rel=0.1)


@pytest.fixture
def train():
    """The job's script as a module, in a process group of one."""
    spec = importlib.util.spec_from_file_location("gpt_fsdp_train", JOBS / "gpt_fsdp" / "train.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield module
    dist.destroy_process_group()


def built(train, monkeypatch, model):
    """What `build` makes of `model` in the place of the GPT."""
    monkeypatch.setattr(train, "GPT", model)
    given = argparse.Namespace(**MODEL, replicas=1, dtype="float32", recompute=0, compile=0, seed=0)
    return train.build(given, torch.device("cpu"))


class Buffered(GPT):
    """With buffers, one of them registered twice, and the head tied to the embedding."""

    device = "cpu"

    def __init__(self, sizes):
        super().__init__(sizes)
        rates = torch.arange(1.0, 6.0, device=self.device)
        self.layers[1].register_buffer("rates", rates, persistent=False)
        self.register_buffer("rates", rates)
        self.layers[-1].vocabulary.weight = self.layers[0].token.weight


def test_buffers_keep_their_values_and_tied_parameters_stay_tied(train, monkeypatch):
    model = built(train, monkeypatch, Buffered)
    for module in (model, model.layers[1]):
        assert module.rates.tolist() == [1, 2, 3, 4, 5]
    assert model.layers[-1].vocabulary.weight is model.layers[0].token.weight
    torch.testing.assert_close(model.layers[0].token.weight.full_tensor(), GPT(SIZES).layers[0].token.weight)


def test_a_buffer_or_parameter_that_would_have_no_value_is_named(train, monkeypatch):
    class OnMeta(Buffered):
        device = "meta"

    with pytest.raises(
        SystemExit, match=r"^rates, layers\.1\.rates: buffers on the meta device have no values"
    ):
        built(train, monkeypatch, OnMeta)

    class Forgetful(GPT):
        def initial_values(self, seed):
            return list(super().initial_values(seed))[:-1]

    with pytest.raises(
        SystemExit, match=r"^layers\.3\.vocabulary\.weight: parameters without initial values"
    ):
        built(train, monkeypatch, Forgetful)


class Pretrained(Buffered):
    """With no initial values, and the tied weights where a Llama has them."""

    def __init__(self, sizes):
        super().__init__(sizes)
        self.lm_head, self.model = nn.Linear(sizes.width, sizes.vocabulary, bias=False), nn.Module()
        self.model.embed_tokens = nn.Embedding(sizes.vocabulary, sizes.width)
        self.lm_head.weight = self.model.embed_tokens.weight = self.layers[0].token.weight

    def initial_values(self, _seed):
        return ()


def test_the_recipe_in_its_docstring_builds_a_pretrained_model_with_tied_weights(train, monkeypatch):
    torch.manual_seed(1)
    expected = Pretrained(SIZES)
    in_file = {name: value for name, value in expected.state_dict().items() if name != "lm_head.weight"}
    before, _ = inspect.getsource(train.build).split("    missing = ")
    recipe = [line for line in inspect.getdoc(train.build).splitlines() if line.startswith("    ")]
    exec(before + "\n".join(recipe), vars(train))
    train.safetensors, train.path = SimpleNamespace(torch=SimpleNamespace(load_file=dict)), in_file
    model = built(train, monkeypatch, Pretrained)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    for (name, parameter), value in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(parameter.full_tensor(), value), name


def test_a_step_whose_gradient_is_not_finite_is_not_saved(train, monkeypatch, tmp_path):
    words = [f"--{name}={value}" for name, value in MODEL.items()]
    words += ["--steps=4", "--checkpoint-steps=1", f"--checkpoints={tmp_path}", "--dtype=float32"]
    monkeypatch.setattr(sys, "argv", ["train.py", *words])
    losses = []

    def spoilt(logits, targets):
        losses.append(cross_entropy(logits, targets))
        if len(losses) == 3:
            logits.register_hook(lambda gradient: gradient * math.inf)
        return losses[-1]

    monkeypatch.setattr(train, "cross_entropy", spoilt)
    with pytest.raises(SystemExit) as ended:
        train.train(train.options(), torch.device("cpu"))
    remedy = f"; if a restart fails here again, remove {tmp_path / 'step-00000002'}"
    assert ended.value.code == f"the loss or the gradient's norm is NaN or infinite at step 3{remedy}"
    assert losses[-1].isfinite()
    assert whole(tmp_path) == ["step-00000001", "step-00000002"]
    model = train.train(train.options(), torch.device("cpu"))
    assert all(parameter.full_tensor().isfinite().all() for parameter in model.parameters())
    assert whole(tmp_path) == ["step-00000003", "step-00000004"]


def whole(folder):
    return sorted(path.parent.name for path in folder.glob("*/.metadata"))


def test_a_killed_run_goes_on_from_a_whole_checkpoint_to_the_bits_and_on_other_numbers_of_ranks(tmp_path):
    steps = {"steps": 60, "checkpoint_steps": 5}
    launched("gpt_fsdp", tmp_path / "whole", **fields(2, **steps))
    expected = weights(tmp_path / "whole")

    def kill_at(step, workers, saved):
        job = job_of("gpt_fsdp", checkpoints=str(saved), **fields(workers, **steps))
        killed(job, f"worker-{workers - 1}", lambda run: any(each["step"] >= step for each in run.records))

    def resumed(name, workers, saved):
        run = launched("gpt_fsdp", tmp_path / name, checkpoints=str(saved), **fields(workers, **steps))
        lines = [line.text for line in run.logs(worker="worker-0")]
        (step,) = [int(line.split()[-1]) for line in lines if line.startswith("resumed after step ")]
        return step

    two, four = tmp_path / "two", tmp_path / "four"
    kill_at(20, 2, two)
    names = whole(two)
    assert len(names) in (2, 3)  # the third before the first was removed
    (two / names[-1] / ".metadata").unlink()  # as if killed in the middle of this save
    shutil.copytree(two, four)

    assert resumed("again", 2, two) == int(names[-2].removeprefix("step-"))
    for name, parameter in weights(tmp_path / "again").items():
        assert torch.equal(parameter, expected[name])
    assert sorted(path.name for path in two.iterdir()) == ["step-00000055", "step-00000060"]

    kill_at(40, 4, four)
    assert resumed("one", 1, four) >= 30
    assert_equal_up_to_rounding(weights(tmp_path / "one"), expected)


def test_checkpoints_of_another_run_are_refused(tmp_path):
    saved = {"checkpoints": str(tmp_path)}
    launched("gpt_fsdp", **fields(1, steps=1, export=0, checkpoints=str(tmp_path)))
    assert whole(tmp_path) == ["step-00000001"]
    with pytest.raises(RunFailed) as other:
        launched("gpt_fsdp", **fields(1, steps=1, learning_rate=0.1), **saved)
    assert "are of another run: learning_rate is 0.1 and was 0.003; give another folder" in str(other.value)


def test_a_folder_that_ranks_do_not_share_is_refused(tmp_path):
    script = f"{sys.executable} {JOBS / 'gpt_fsdp' / 'train.py'} --steps 1"
    torchrun = [
        str(Path(sys.prefix) / "bin" / "torchrun"),
        "--standalone",
        "--nproc-per-node",
        "2",
        "--no-python",
    ]
    command = [*torchrun, "sh", "-c", f"WORKSHOP_CHECKPOINTS={tmp_path}/$RANK exec {script}"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert ended.returncode
    assert "rank 1 does not see what rank 0 writes into" in ended.stderr
