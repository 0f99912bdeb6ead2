"""PyTorch's jobs: any number of workers trains, and a run that was killed ends with the weights of one that was not."""

import os
import signal
import time

import pytest
import torch
from launching import job_of, launched

from workshop_utils.launchers.local import Local
from workshop_utils.runs import RunFailed

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("nothing_is_left")]

# Checkpoints fall into the middle of an epoch.
SIZES = {"epochs": 6, "batch_size": 24, "hidden": 16, "checkpoint_steps": 7}


def weights(folder):
    model = torch.load(folder / "model.pt")
    return torch.cat([tensor.reshape(-1) for tensor in model.values()])


def killed(name, saved, after, rank, **changes):
    """Launch the job, and kill a rank once it has reported so many steps."""
    with Local(warm=True).launch(job_of(name, checkpoints=str(saved), **changes)) as run:
        while not any(record["rank"] == rank and record["step"] >= after for record in run.records):
            assert run.state == "running", run.reason
            time.sleep(0.01)
        (pid,) = [start["pid"] for start in run.starts if start["rank"] == rank]
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(RunFailed, match=f"worker-{rank} .*was killed by SIGKILL"):
            run.wait(100)
    return run


@pytest.mark.parametrize(
    ("name", "workers", "changed"),
    [
        (
            "mnist_single",
            1,
            {
                "accumulate": 2,
                "clip_norm": 0.5,
                "dropout": 0.2,
                "batch_size": 4,
                "epochs": 3,
                "checkpoint_steps": 40,
            },
        ),
        ("mnist_torch_ddp", 2, {"accumulate": 2, "clip_norm": 0.5, "dropout": 0.2}),
        ("mnist_torch_ddp", 4, {"epochs": 10, "dropout": 0.2}),
        (
            "mnist_fsdp",
            2,
            {"accumulate": 2, "clip_norm": 0.5, "dropout": 0.2, "epochs": 1, "checkpoint_steps": 11},
        ),
    ],
)
def test_a_killed_run_goes_on_and_ends_with_the_same_bits_as_an_uninterrupted_one(
    name, workers, changed, tmp_path
):
    arguments = {**SIZES, **changed}
    changes = {"workers": workers, "arguments": arguments}
    # What FSDP writes while it trains may not be whole yet, and is lost as well.
    every = arguments["checkpoint_steps"]
    lost = 2 * every if name == "mnist_fsdp" else every

    whole = launched(name, tmp_path / "whole", **changes)
    assert set(whole.metrics["device"].dropna()) == {"cpu"}
    assert whole.metrics["device"].count() == workers

    saved = tmp_path / "saved"
    first = killed(name, saved, after=3 * every, rank=workers - 1, **changes)
    again = launched(name, tmp_path / "again", checkpoints=str(saved), **changes)
    (line,) = [line.text for line in again.logs() if "resumed" in line.text]
    step = int(line.rpartition(" ")[2])
    assert step % every == 0
    assert 3 * every - lost <= step == again.metrics["step"].min() - 1
    assert first.metrics["step"].max() <= step + lost
    assert torch.equal(weights(tmp_path / "again"), weights(tmp_path / "whole"))


def test_a_run_that_is_over_has_nothing_to_train_and_writes_its_model_again(tmp_path):
    changes = {"checkpoints": str(tmp_path / "saved"), "arguments": {**SIZES, "epochs": 1, "batch_size": 100}}
    for folder in ("first", "second"):
        run = launched("mnist_single", tmp_path / folder, **changes)
    assert run.metrics.empty
    assert torch.equal(weights(tmp_path / "first"), weights(tmp_path / "second"))


def test_sharded_weights_and_moments_are_taken_over_by_another_number_of_workers(tmp_path):
    arguments = {**SIZES, "batch_size": 48, "epochs": 1, "checkpoint_steps": 11}
    launched("mnist_fsdp", tmp_path / "whole", workers=1, arguments=arguments)
    killed("mnist_fsdp", tmp_path / "saved", after=12, rank=1, workers=2, arguments=arguments)
    launched(
        "mnist_fsdp", tmp_path / "more", checkpoints=str(tmp_path / "saved"), workers=4, arguments=arguments
    )
    torch.testing.assert_close(weights(tmp_path / "more"), weights(tmp_path / "whole"), rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "workers"), [("mnist_single", 1), ("mnist_torch_ddp", 2), ("mnist_fsdp", 2)]
)
def test_what_does_not_belong_together_is_refused_in_a_sentence(name, workers, tmp_path):
    arguments = {**SIZES, "epochs": 1, "batch_size": 100}
    launched(name, workers=workers, checkpoints=str(tmp_path), arguments=arguments)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    refused = r"cannot resume: the checkpoints in .* are of another run: hidden is 8 and was 16; give another folder"
    with pytest.raises(RunFailed, match=refused):
        launched(name, workers=workers, checkpoints=str(tmp_path), arguments={**arguments, "hidden": 8})
    if name == "mnist_torch_ddp":
        with pytest.raises(RunFailed, match="of another run: steps is 5 and was 7, workers is 3 and was 2; "):
            launched(name, workers=3, checkpoints=str(tmp_path), arguments=arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before
    for wrong, message in (
        ({"batch_size": 10, "accumulate": 4}, r"batch-size is 10; it must be a multiple of .*accumulate, 4"),
        ({"batch_size": 5000}, "batch-size is 5000; "),
        ({"dropout": 1}, "dropout is 1.0; it must be at least 0 and less than 1"),
    ):
        with pytest.raises(RunFailed, match=message):
            launched(name, workers=workers, arguments={**arguments, **wrong})


def test_a_checkpoint_that_was_not_finished_or_is_cut_short_costs_the_steps_since_the_one_before(tmp_path):
    changes = {
        "workers": 2,
        "checkpoints": str(tmp_path),
        "arguments": {**SIZES, "epochs": 1, "batch_size": 100},
    }
    launched("mnist_fsdp", **changes)
    (tmp_path / "step-00000015" / ".metadata").unlink()
    lines = [line.text for line in launched("mnist_fsdp", **changes).logs(worker="worker-0")]
    assert lines == [
        "step-00000015 was not written to its end; going back to the one before",
        "resumed after step 14",
    ]
    part = tmp_path / "step-00000015" / "__1_0.distcp"
    part.write_bytes(part.read_bytes()[:1000])
    with pytest.raises(
        RunFailed, match=r"step-00000015 cannot be read; remove it to go on from the one before"
    ):
        launched("mnist_fsdp", **changes)
